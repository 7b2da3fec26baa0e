"""Parts of a sleeping engine: weights in a file, and vLLM's own sleep mode on a double of its executor. No vLLM needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu_doubles import doubles
from rose.backends.device_codec import keys
from rose.backends.paging import HugeBuffer, give_back, reclaim_ms_per_gib, resident_bytes
from rose.backends.step_settings import read_settings
from rose.backends.vllm import device_sleep, gpu_process, parking, utilities
from rose.backends.vllm.parking import ParkedWeights
from rose.backends.wire import unwrap
from rose.errors import BackendUnavailableError, ConfigError, EngineError, EngineFencedError
from rose.transfer import kernels
from rose.transfer.kernels import Rows


@pytest.fixture
def model() -> Any:
    """A tied weight, a transposed view, a small bias and a buffer."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(64, 512, bias=False))
    model[1].weight = model[0].weight
    model.transposed = torch.nn.Parameter(torch.randn(300, 200).t())
    model.register_buffer("table", torch.arange(5000))
    return model


def state(model: Any) -> list[Any]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def is_same(model: Any, before: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))


def test_parked_weights_come_back_bit_by_bit(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_PART_BYTES", 1000)
    before = state(model)
    parked = ParkedWeights(model, str(tmp_path))
    assert parked.park(keeps=True) > 100_000
    assert not is_same(model, before), "the memory was not given back"
    assert torch.equal(model.table, before[-1]), "another engine of the process may use the same table"
    assert parked.park(keeps=True) == 0, "parked already: what is there now must not be kept"
    assert not list(tmp_path.iterdir()), "the file has no name that could be left behind"
    assert parked.restore() == sum(t.untyped_storage().nbytes() for t in model.parameters())
    assert is_same(model, before)
    assert parked.restore() == 0


def test_damaged_or_dropped_weights_are_said_to_be_lost(model: Any, tmp_path: Path) -> None:
    parked = ParkedWeights(model, str(tmp_path))
    parked.park(keeps=True)
    assert parked._file is not None
    parked._file.truncate(1000)
    assert parked.restore() is None
    parked.park(keeps=False)
    assert parked.restore() is None
    assert parked.restore() == 0


def test_nothing_is_given_back_when_the_file_cannot_be_written(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = state(model)
    with pytest.raises(EngineError, match=r"no-such.*park_directory"):
        ParkedWeights(model, str(tmp_path / "no-such")).park(keeps=True)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parking, "_write_all", full)
    with pytest.raises(EngineError, match="No space left"):
        ParkedWeights(model, str(tmp_path)).park(keeps=True)
    assert is_same(model, before)


def test_a_buffer_takes_large_pages_and_gives_only_whole_ones() -> None:
    buffer = HugeBuffer(3 << 20)
    assert (buffer.address % (2 << 20), buffer.num_bytes) == (0, 4 << 20)
    with buffer.view() as view:
        view[:] = b"\x01" * len(view)
    before = resident_bytes()
    assert give_back(buffer.address + 1, (4 << 20) - 1, page_bytes=2 << 20) == 2 << 20
    assert before - resident_bytes() > 1 << 20
    with buffer.view() as view:
        assert (view[0], view[(2 << 20) - 1], view[2 << 20], view[-1]) == (1, 1, 0, 0)


def test_memory_that_does_not_leave_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(100))
    assert reclaim_ms_per_gib(8 << 20, num_rounds=3, clock=lambda: float(next(times))) == pytest.approx(128_000)
    monkeypatch.setattr("rose.backends.paging.give_back", lambda *_, **__: 0)
    with pytest.raises(EngineError, match="resident memory fell by"):
        reclaim_ms_per_gib(8 << 20, num_rounds=1)


KEEPS = (True, None)  # the weights, in the system's folder
TAGS = {"weights", "kv_cache"}


class Core:
    """An EngineCore of a GPU engine over a double of vLLM's executor: what it was asked, in order."""

    def __init__(self, *, has_sleep_mode: bool = True, num_held: int = 0) -> None:
        self.log: list[Any] = []
        self.sums: list[Any] = [{"w": [1, 2]}]
        self.fails = self.is_lost = False
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cuda"),
            model_config=SimpleNamespace(enable_sleep_mode=has_sleep_mode),
        )
        executor = doubles.make_class(
            "vllm",
            "Executor",
            {
                "sleep": self._sleep,
                "wake_up": self._wake_up,
                "discard": self._discard,
                "is_sleeping": lambda executor: bool(executor.sleeping_tags),
            },
        )
        self.model_executor = executor()
        self.model_executor.sleeping_tags = set()
        self.scheduler = SimpleNamespace(
            fall_asleep=lambda: self.log.append("requests end") or 3,
            wake=lambda: self.log.append("scheduler wakes"),
            rose_snapshot=lambda: {"kv_given_bytes": 0},
        )

    def _sleep(self, executor: Any, level: int = 1) -> None:
        if self.fails:
            message = "out of pinned memory"
            raise RuntimeError(message)
        self.log.append(f"sleep {level}")
        executor.sleeping_tags |= TAGS

    def _wake_up(self, executor: Any, tags: list[str] | None = None) -> None:
        if self.fails:
            message = "out of memory"
            raise RuntimeError(message)
        assert set(tags or TAGS) <= executor.sleeping_tags, "vLLM warns and does nothing"
        self.log.append(f"wake {tags}")
        executor.sleeping_tags -= set(tags or TAGS)

    def _discard(self, executor: Any, tags: tuple[str, ...]) -> None:
        assert not set(tags) & executor.sleeping_tags, "vLLM warns and does nothing"
        self.log.append(f"discard {tags}")
        executor.sleeping_tags |= set(tags)

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        if method == "rose_resident_sums":
            return [{"value": one} for one in self.sums]
        self.log.append(method)
        if method == "wake_up" and self.is_lost:
            message = "out of memory"
            raise RuntimeError(message)
        return [100, 100] if method == "rose_weight_bytes" else [{"value": None}]


def test_on_a_gpu_vllm_s_own_sleep_keeps_the_weights() -> None:
    core = Core()
    assert unwrap(utilities.rose_sleep(core, *KEEPS)) == {"num_evicted": 3, "released_bytes": 200}
    assert core.log == ["requests end", "sleep 1", "rose_weight_bytes"]
    core.log.clear()
    assert unwrap(utilities.rose_wake(core)) == {"restored_bytes": 200, "is_stale": False}
    assert core.log == ["wake None", "rose_weight_bytes", "scheduler wakes"]
    assert unwrap(utilities.rose_wake(core)) == {"restored_bytes": 0, "is_stale": False}


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_on_a_gpu_other_weights_than_before_are_fenced(keeps_weights: Any) -> None:
    core = Core()
    utilities.rose_sleep(core, keeps_weights, None)
    assert ("sleep 1" if keeps_weights else "sleep 2") in core.log
    if keeps_weights:
        core.sums = [{"w": [1, 3]}]
    assert unwrap(utilities.rose_wake(core)) == {"restored_bytes": 0, "is_stale": True}
    assert "rose_fence" in core.log


def test_on_a_gpu_sleep_is_refused_before_a_request_ends() -> None:
    core = Core(has_sleep_mode=False)
    with pytest.raises(BackendUnavailableError, match="enable_sleep_mode"):
        unwrap(utilities.rose_sleep(core, *KEEPS))
    core.model_executor = SimpleNamespace(wake_up=None, is_sleeping=False, sleeping_tags=set())
    with pytest.raises(BackendUnavailableError, match=r"no sleep, discard.*vllm 0\.32"):
        device_sleep.check(core)
    assert core.log == []


def test_on_a_gpu_a_failed_sleep_leaves_the_engine_awake() -> None:
    """The workers may have unmapped everything by then; the executor does not know of it."""
    core = Core()
    core.fails = True
    with pytest.raises(EngineError, match=r"out of pinned memory$"):
        unwrap(utilities.rose_sleep(core, *KEEPS))
    assert core.log == ["requests end", "wake_up", "scheduler wakes"]


def test_on_a_gpu_a_sleep_that_failed_half_way_may_cost_the_weights() -> None:
    core = Core()
    core.fails = True
    with pytest.raises(EngineError, match="the weights are lost, and fenced"):
        unwrap(utilities.rose_sleep(core, False, None))  # noqa: FBT003 - called so
    assert core.log == ["requests end", "wake_up", "rose_fence", "scheduler wakes"]


def test_on_a_gpu_memory_that_does_not_come_back_is_not_computed_on() -> None:
    core = Core()
    core.fails = core.is_lost = True
    with pytest.raises(EngineFencedError, match="restart the engine"):
        unwrap(utilities.rose_sleep(core, *KEEPS))
    assert core.log == ["requests end", "wake_up"]


def test_on_a_gpu_without_room_for_sums_it_sleeps_all_the_same() -> None:
    core = Core()
    core.sums = [{"w": [1, 2]}, None]
    unwrap(utilities.rose_sleep(core, *KEEPS))
    assert "sleep 1" in core.log
    assert unwrap(utilities.rose_wake(core)) == {"restored_bytes": 0, "is_stale": True}


def test_the_sums_of_a_model_are_those_of_its_bits(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = keys.sums_of(model)
    assert sums is not None
    assert set(sums) == {"0.weight", "0.bias", "transposed"}
    bits = model.transposed.detach().numpy().view(np.uint32)
    rows = Rows(num_rows=1, row_len=bits.size, start=0, stride=bits.size)
    assert tuple(sums["transposed"]) == kernels.load().state_sum(bits.reshape(1, -1), rows)
    with torch.no_grad():
        model[0].bias[3] = -model[0].bias[3]
    assert [name for name, one in (keys.sums_of(model) or {}).items() if one != sums[name]] == ["0.bias"]

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(keys.Keys, "state_sum", full)
    assert keys.sums_of(model) is None


class KvCore(Core):
    """Its scheduler holds blocks of a pool of 10 back, the null block aside."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(num_gpu_blocks=11))
        self.scheduler.kv_cache_config = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=4000)])
        self.scheduler.holds_blocks_itself = True
        self.scheduler.attach_kv_pages = self._attach
        self.hold: Any = None

    def _attach(self, hold_pages: Any, *, group_blocks: int) -> None:
        assert group_blocks == 1
        self.hold = hold_pages


def test_the_kv_pool_of_a_gpu_leaves_while_its_budget_is_nothing() -> None:
    core = KvCore()
    utilities._attach_pages(core)
    assert core.hold([(1, 9)]) == 0, "a part of it cannot leave"
    assert core.log == []
    assert core.hold([(1, 10)]) == 4000
    assert core.hold([(0, 11)]) == 4000
    assert core.log == ["discard ('kv_cache',)"]
    assert core.hold([(4, 7)]) == 0
    assert core.hold([]) == 0
    assert core.log[1:] == ["wake ['kv_cache']"]


def test_a_woken_engine_s_kv_pool_comes_back_with_its_budget() -> None:
    core = KvCore()
    utilities._attach_pages(core)
    core.hold([(1, 10)])
    utilities.rose_sleep(core, *KEEPS)
    core.log.clear()
    assert unwrap(utilities.rose_wake(core)) == {"restored_bytes": 200, "is_stale": False}
    assert core.log == ["wake ['weights']", "rose_weight_bytes", "scheduler wakes"]
    assert core.model_executor.is_sleeping, "the pool is away until the scheduler wants a block"
    assert core.hold([(1, 3)]) == 0
    assert not core.model_executor.is_sleeping


def test_a_kv_pool_that_vllm_cannot_map_is_our_error() -> None:
    core = KvCore()
    utilities._attach_pages(core)
    core.hold([(1, 10)])
    core.fails = True
    with pytest.raises(EngineError, match="could not map the KV pool: out of memory"):
        core.hold([])


@pytest.mark.parametrize("what", ["no sleep mode", "kvcached"])
def test_a_kv_pool_is_left_alone_where_it_is_not_ours_to_move(what: str) -> None:
    core = KvCore()
    core.vllm_config.model_config.enable_sleep_mode = what != "no sleep mode"
    core.scheduler.holds_blocks_itself = what != "kvcached"
    utilities._attach_pages(core)
    assert core.hold is None


def test_a_process_with_an_engine_on_a_gpu_takes_no_second_one() -> None:
    class Engine:
        pass

    first = Engine()
    gpu_process.claim(first)
    gpu_process.claim(first)
    with pytest.raises(BackendUnavailableError, match="a process of its own"):
        gpu_process.claim(Engine())
    del first
    gpu_process.claim(second := Engine())
    del second


@pytest.mark.parametrize(
    ("size", "backend", "is_fine"), [(1, "uni", True), (1, None, True), (1, "mp", False), (2, "mp", False)]
)
def test_a_cuda_device_needs_the_worker_in_the_scheduler_s_process(
    tmp_path: Path, size: int, backend: str | None, is_fine: Any
) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=size, distributed_executor_backend=backend))
    settings = read_settings({"device": {"kind": "cuda", "path": str(tmp_path / "gpu")}})
    gpu_process.check(read_settings({}), config)
    if is_fine:
        gpu_process.check(settings, config)
    else:
        with pytest.raises(ConfigError, match="distributed_executor_backend='uni'"):
            gpu_process.check(settings, config)

"""The CUDA device on stand-ins of torch and kvcached; no GPU is asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rose.backends.cuda import CudaDevice, KvLimiter, LimitedBlocks, kv_limit
from rose.errors import BackendUnavailableError, ConfigError, EngineError
from rose.interfaces.device import Device, StepWork
from rose.testing.contracts.device import DeviceContract


class Cuda:
    """torch.cuda with one device, and a log of what is waited for."""

    def __init__(self, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.log: list[str] = []

    def is_available(self) -> bool:
        return self.num_devices > 0

    def device_count(self) -> int:
        return self.num_devices

    def get_device_name(self, index: int) -> str:
        return "Stand-in GPU"

    def current_stream(self, index: int) -> str:
        return f"stream of {index}"

    def synchronize(self, index: int) -> None:
        self.log.append(f"synchronize {index}")

    def Event(self) -> Any:  # noqa: N802 - torch's name
        return SimpleNamespace(
            record=lambda stream: self.log.append(f"record on {stream}"), synchronize=lambda: self.log.append("event")
        )


class Limits:
    """kvcached.control: a pool of 100 bytes of which some are in use."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []
        self.used_bytes = 0
        self.status: str | None = None

    def set_instance_memory_limit(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        self.calls.append((limit_bytes, revision))
        over = max(0, self.used_bytes - limit_bytes)
        return {"status": self.status or ("deferred" if over else "applied"), "overage_bytes": over, "reason": "why"}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    torch: Any = ModuleType("torch")
    torch.cuda, torch.__version__ = cuda, "9.9"
    monkeypatch.setitem(sys.modules, "torch", torch)
    return cuda


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    limits = Limits()
    monkeypatch.setitem(sys.modules, "kvcached", ModuleType("kvcached"))
    monkeypatch.setitem(sys.modules, "kvcached.control", limits)  # type: ignore[arg-type]
    monkeypatch.setattr(kv_limit.importlib.metadata, "version", lambda name: "0.1.6")
    return limits


class TestCudaDevice(DeviceContract):
    is_paced = False

    @pytest.fixture(autouse=True)
    def _stand_ins(self, cuda: Cuda, limits: Limits, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_device(self) -> Device:
        return CudaDevice(self.folder / "gpu0")

    def make_contender(self, device: Device) -> Device:
        return CudaDevice(self.folder / "gpu0", profile="h100:qwen2.5-7b")

    def release_device(self, device: Any) -> None:
        device.close()

    def test_given_pages_are_lost_and_usable_again(self, device: Device) -> None:
        assert device.give_pages(4096, 8192) == 0


def test_a_step_is_over_when_the_gpu_is_idle(cuda: Cuda, tmp_path: Path) -> None:
    device = CudaDevice(tmp_path / "gpu0", memory="sleep")
    with pytest.raises(RuntimeError, match=r"acquire"):
        device.begin_step(StepWork(), 0.0)
    device.acquire(is_blocking=True)
    end_s = device.begin_step(StepWork(num_decodes=1), 0.0)
    assert device.finish_step(end_s - 100) >= 99
    assert cuda.log == ["record on stream of 0", "event", "synchronize 0"]
    assert device.description == "cuda:0 Stand-in GPU"
    device.close()


def test_a_missing_gpu_is_named(cuda: Cuda, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"no GPU 3: torch 9.9 sees 1"):
        CudaDevice(tmp_path / "gpu", index=3)
    cuda.num_devices = 0
    with pytest.raises(BackendUnavailableError, match=r"sees 0.*host or paced"):
        CudaDevice(tmp_path / "gpu")
    assert not list(tmp_path.iterdir()), "a device that is refused leaves no file"


def test_memory_needs_a_kvcached_that_can_move_limits(
    cuda: Cuda, limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"'vmm'"):
        CudaDevice(tmp_path / "gpu", memory="vmm")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "kvcached.control", ModuleType("kvcached.control"))
    with pytest.raises(BackendUnavailableError, match=r"kvcached 0.1.6 cannot change a limit"):
        CudaDevice(tmp_path / "gpu")
    monkeypatch.setitem(sys.modules, "kvcached.control", None)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'kvcached>=0.1.6'.*memory='sleep'"):
        CudaDevice(tmp_path / "gpu")
    assert CudaDevice(tmp_path / "gpu", memory="sleep").kv_limiter is None


def test_a_cut_says_how_many_blocks_must_go_first(limits: Limits) -> None:
    pool = SimpleNamespace(num_gpu_blocks=11, get_num_free_blocks=lambda: 3)
    held = LimitedBlocks(pool, KvLimiter.open(), 10)
    limits.used_bytes = 45
    assert held.resize(4) == 0
    assert (held.num_held, held.num_used, held.num_bytes_given) == (4, 3, 40)
    assert held.resize(7) == 2, "15 bytes too many are two blocks of 10"
    limits.used_bytes = 0
    held.hold_every_page()
    assert held.num_held == 10
    assert limits.calls == [(60, 1), (30, 2), (0, 3)]


@pytest.mark.parametrize("status", ["stale", "conflict", "rejected", "unavailable"])
def test_a_refused_limit_is_an_error(limits: Limits, status: str) -> None:
    limits.status = status
    with pytest.raises(EngineError, match=f"'{status}'.*why.*ENABLE_KVCACHED"):
        KvLimiter.open().limit(50)

"""The CUDA device over a double of torch that has its signatures; no GPU is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_doubles.kvcached_model import Kvcached, install
from gpu_doubles.torch_model import Gpu
from rose.backends.cuda import CudaDevice
from rose.backends.step_settings import DeviceSettings, open_device, read_settings
from rose.coserving.governor import SupportsMeasuredSteps
from rose.errors import BackendUnavailableError, ConfigError
from rose.interfaces.device import Device, StepWork
from rose.testing.contracts.device import DeviceContract


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    gpu.install(monkeypatch)
    return gpu


@pytest.fixture
def device(gpu: Gpu, tmp_path: Path) -> Any:
    """A device whose turn is held and whose clock is the double's."""
    device = CudaDevice(tmp_path / "gpu0")
    device.clock.now = gpu.now  # type: ignore[method-assign] # the double's time
    device.acquire(is_blocking=True)
    yield device
    device.close()


class TestCudaDevice(DeviceContract):
    is_paced = False

    @pytest.fixture(autouse=True)
    def _doubles(self, gpu: Gpu, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_device(self) -> Device:
        return CudaDevice(self.folder / "gpu0")

    def make_contender(self, device: Device) -> Device:
        return CudaDevice(self.folder / "gpu0", profile="h100:qwen2.5-7b")

    def release_device(self, device: Any) -> None:
        device.close()

    def test_given_pages_are_lost_and_usable_again(self, device: Device) -> None:
        assert device.give_pages(4096, 8192) == 0


def test_a_step_needs_the_turn(gpu: Gpu, tmp_path: Path) -> None:
    device = CudaDevice(tmp_path / "gpu0")
    with pytest.raises(RuntimeError, match=r"acquire"):
        device.begin_step(StepWork(), 0.0)
    assert device.description == "cuda:0 Double GPU"
    device.close()


def test_a_step_is_measured_from_its_first_kernel_to_its_last(gpu: Gpu, device: Any) -> None:
    end_s = device.begin_step(StepWork(num_decodes=1), 0.0)
    gpu.queue(0.040)
    gpu.side_until_s = gpu.now_s + 0.050
    late_s = device.finish_step(end_s)
    assert device.measured_s == pytest.approx(0.040)
    assert gpu.now_s == pytest.approx(100.050), "copies on other streams are over too"
    assert late_s == pytest.approx(gpu.now_s - end_s)
    assert gpu.log == ["synchronize 0"]
    assert isinstance(device, SupportsMeasuredSteps)


def test_two_steps_in_flight_are_measured_apart(gpu: Gpu, device: Any) -> None:
    """The second one waits for the first on the stream; only after the last one the whole device is waited for."""
    first_s = device.begin_step(StepWork(num_decodes=1), 0.0)
    gpu.queue(0.030)
    gpu.now_s += 0.002  # the host schedules on
    second_s = device.begin_step(StepWork(num_decodes=1), 0.0)
    gpu.queue(0.020)
    assert second_s == pytest.approx(first_s + device.predict_s(StepWork(num_decodes=1)))
    device.finish_step(first_s)
    assert device.measured_s == pytest.approx(0.030)
    assert gpu.now_s == pytest.approx(100.030)
    assert gpu.log == [], "what is behind is not waited for"
    device.finish_step(second_s)
    assert device.measured_s == pytest.approx(0.020)
    assert gpu.log == ["synchronize 0"]


def test_a_step_that_nobody_ended_spoils_no_other(gpu: Gpu, device: Any) -> None:
    device.begin_step(StepWork(), 0.0)
    device.release()
    gpu.now_s += 60
    device.acquire(is_blocking=True)
    end_s = device.begin_step(StepWork(), 0.0)
    gpu.queue(0.010)
    device.finish_step(end_s)
    assert device.measured_s == pytest.approx(0.010)
    device.finish_step(end_s)
    assert device.measured_s is None


def test_a_missing_gpu_is_named(gpu: Gpu, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailableError, match=r"no GPU 3: torch 9.9 sees 1"):
        CudaDevice(tmp_path / "gpu", index=3)
    gpu.num_devices = 0
    with pytest.raises(BackendUnavailableError, match=r"sees 0.*host or paced"):
        CudaDevice(tmp_path / "gpu")
    assert not list(tmp_path.iterdir()), "a device that is refused leaves no file"


def test_memory_is_vllm_s_sleep_unless_kvcached_is_asked_for(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CudaDevice(tmp_path / "gpu").kv_limiter is None
    with pytest.raises(BackendUnavailableError, match="kvcached"):
        CudaDevice(tmp_path / "gpu", memory="kvcached")
    install(Kvcached(), monkeypatch)
    assert CudaDevice(tmp_path / "gpu", memory="kvcached").kv_limiter is not None
    with pytest.raises(ConfigError, match=r"'vmm'"):
        CudaDevice(tmp_path / "gpu", memory="vmm")  # type: ignore[arg-type]


def test_a_share_of_mps_is_looked_up_and_a_priority_only_set_when_given(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CudaDevice(tmp_path / "gpu").close()
    assert (gpu.log, gpu.priorities) == ([], [])
    settings = DeviceSettings(kind="cuda", path=str(tmp_path / "gpu"), mps_percentage=40, stream_priority=-1)
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    with pytest.raises(ConfigError, match=r"mps_percentage is 40.*=nothing; set CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40"):
        open_device(settings)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40")
    open_device(settings).close()  # type: ignore[union-attr] # not a gang
    assert (gpu.log, gpu.priorities) == (["synchronize 0", "set stream"], [-1])


@pytest.mark.parametrize("option", [{"mps_percentage": 0}, {"mps_percentage": 101}, {"stream_priority": 1}])
def test_options_out_of_range_are_refused(tmp_path: Path, option: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        read_settings({"device": {"kind": "cuda", "path": str(tmp_path / "gpu"), **option}})

"""One GPU that two engines share, each in a process of its own.

Invariants:

* One engine computes at a time, by the turn's lock. Its last step in flight is over when the device has done everything that was queued,
  copies and side streams too, so that the next holder starts on an idle device. A step with another one behind it is over when the
  device has reached that one.
* Steps are measured by events on the stream of the thread that calls, which must be the one that queues the engine's kernels:
  the worker is in the scheduler's process.
* Times are the machine's. What is not known beforehand is a guess, and said to be one.

Life cycle of a step: [ENGINE] ``begin_step`` sets a mark before the first kernel; the kernels are queued; for an engine that schedules ahead
the next ``begin_step`` sets the mark behind them; ``finish_step`` waits for the mark behind, or sets one, and reads the time between.
"""

from __future__ import annotations

import importlib
import os
from collections import deque
from pathlib import Path
from typing import Any, Literal

from rose.backends.cuda.kv_limit import KvLimiter
from rose.backends.host import HostClock
from rose.backends.paced.profiles import profile_named
from rose.backends.turn_lock import TurnLock
from rose.errors import BackendUnavailableError, ConfigError
from rose.interfaces.device import Device, StepWork
from rose.types import DeviceId

# A first guess at an 8 B model's step on a present GPU; the caller's predictor learns the true ratio from its own steps.
_STEP_S = 8e-3
_PREFILL_TOKEN_S = 3e-5
_DECODE_S = 2e-5


class CudaDevice(Device):
    """One engine's handle on a GPU.

    Args:
        path: The device's file, whose lock is the turn; engines on the same GPU name the same one.
        index: Which GPU of this process, as torch counts.
        memory: ``kvcached``: KV budgets move pages of the device (the engine must run under kvcached). ``sleep``: they only bound
            what requests may use, and memory leaves the device when the engine sleeps.
        profile: Whose step times are the first guess, as of ``rose.backends.paced``; ``None`` is a rough one.
        mps_percentage: The share of the GPU's threads that this process was started with under CUDA MPS. It is looked up, not set: a
            process takes it from ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` when it first touches the GPU.
        stream_priority: Queue this engine's kernels on a stream of this priority, 0 or below (a lower number goes first). Turns are
            exclusive, so it matters only while another engine takes none.
    """

    clock: HostClock
    measured_s: float | None

    def __init__(
        self,
        path: Path | str,
        *,
        index: int = 0,
        memory: Literal["kvcached", "sleep"] = "sleep",
        profile: str | None = None,
        mps_percentage: int | None = None,
        stream_priority: int | None = None,
    ) -> None:
        """Open the device.

        Raises:
            BackendUnavailableError: torch sees no such GPU, or kvcached is missing, too old or too new; says what to do.
            ConfigError: Unknown profile or kind of memory, or the process has another share of MPS.
            LedgerError: The file cannot be opened.
        """
        if memory not in {"kvcached", "sleep"}:
            message = f"memory of a CUDA device is 'kvcached' or 'sleep', not {memory!r}"
            raise ConfigError(message)
        _check_mps(mps_percentage)
        self._cuda = _cuda(index)
        self._index = index
        self._profile = None if profile is None else profile_named(profile)
        self.kv_limiter = KvLimiter.open() if memory == "kvcached" else None
        self.device_id = DeviceId(Path(path).name)
        self.clock = HostClock()
        self._turn = TurnLock(path)
        self.measured_s = None
        self._marks: deque[Any] = deque()  # before each step in flight, oldest first
        self._until_s = 0.0
        self._use_stream(stream_priority)

    @property
    def description(self) -> str:
        """What to print beside figures taken on this device."""
        return f"cuda:{self._index} {self._cuda.get_device_name(self._index)}"

    def acquire(self, *, is_blocking: bool) -> bool:
        """Take the turn; returns whether it is held now."""
        if not self._turn.is_held:
            self._marks.clear()  # of a step whose end nobody told
        return self._turn.acquire(is_blocking=is_blocking)

    def release(self) -> None:
        """Give the turn back; a no-op when not held."""
        self._turn.release()

    def predict_s(self, work: StepWork) -> float:
        """Return the profile's guess in seconds, or a rough linear one."""
        if self._profile is not None:
            return self._profile.step_s(work)
        return _STEP_S + _PREFILL_TOKEN_S * work.num_prefill_tokens + _DECODE_S * work.num_decodes

    def begin_step(self, work: StepWork, ready_at_s: float) -> float:  # noqa: ARG002 - a real step starts when it starts
        """Set the mark before a step; return when it should end if the guess is right.

        Raises:
            RuntimeError: The turn is not held.
        """
        if not self._turn.is_held:
            message = f"a step on {self.device_id} needs the turn; call acquire first"
            raise RuntimeError(message)
        start_s = max(self.clock.now(), self._until_s) if self._marks else self.clock.now()
        self._marks.append(self._mark())
        self._until_s = start_s + self.predict_s(work)
        return self._until_s

    def finish_step(self, end_s: float) -> float:
        """Wait until the oldest step in flight is done and measure it (``measured_s``); return how much later than guessed that is."""
        start = self._marks.popleft() if self._marks else None
        is_last = not self._marks
        end = self._mark() if is_last else self._marks[0]
        end.synchronize()
        if is_last:
            self._cuda.synchronize(self._index)  # streams beside this one: copies, side kernels
        self.measured_s = None if start is None else start.elapsed_time(end) / 1e3
        return max(0.0, self.clock.now() - end_s)

    def _mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._index))
        return event

    def _use_stream(self, priority: int | None) -> None:
        if priority is not None:
            self._cuda.synchronize(self._index)  # nothing of the old stream is left when the new one begins
            self._cuda.set_stream(self._cuda.Stream(device=self._index, priority=priority))

    def give_pages(self, address: int, num_bytes: int) -> int:  # noqa: ARG002 - the role's signature
        """Return 0: memory of a GPU is not given by address but by a limit on the pool (``kv_limiter``) or by sleep."""
        return 0

    def close(self) -> None:
        """Close the device, giving the turn back. Idempotent."""
        self._turn.close()


_MPS = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def _check_mps(percentage: int | None) -> None:
    found = os.environ.get(_MPS)
    if percentage is not None and found != str(percentage):
        message = (
            f"mps_percentage is {percentage}, but this process was started with {_MPS}={found or 'nothing'}; "
            f"set {_MPS}={percentage} in the engine's environment before it starts, or leave mps_percentage out"
        )
        raise ConfigError(message)


def _cuda(index: int) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        message = f"a CUDA device needs torch, which does not import here ({error}); pip install 'rose-rl[vllm]'"
        raise BackendUnavailableError(message) from error
    cuda = torch.cuda
    num_devices = cuda.device_count() if cuda.is_available() else 0
    if index >= num_devices:
        message = (
            f"there is no GPU {index}: torch {torch.__version__} sees {num_devices}; check nvidia-smi and CUDA_VISIBLE_DEVICES, "
            "or use the device kinds host or paced"
        )
        raise BackendUnavailableError(message)
    return cuda

"""One GPU that two engines share, each in a process of its own.

Invariants: one engine computes at a time, by the turn's lock; a step is over when the device has done everything that was
queued for it, so that the next holder starts on an idle device. Times are the machine's.
"""

from __future__ import annotations

import importlib
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
    """

    clock: HostClock

    def __init__(
        self,
        path: Path | str,
        *,
        index: int = 0,
        memory: Literal["kvcached", "sleep"] = "kvcached",
        profile: str | None = None,
    ) -> None:
        """Open the device.

        Raises:
            BackendUnavailableError: torch sees no such GPU, or kvcached is missing or too old; says what to do.
            ConfigError: Unknown profile or kind of memory.
            LedgerError: The file cannot be opened.
        """
        if memory not in {"kvcached", "sleep"}:
            message = f"memory of a CUDA device is 'kvcached' or 'sleep', not {memory!r}"
            raise ConfigError(message)
        self._cuda = _cuda(index)
        self._index = index
        self._profile = None if profile is None else profile_named(profile)
        self.kv_limiter = KvLimiter.open() if memory == "kvcached" else None
        self.device_id = DeviceId(Path(path).name)
        self.clock = HostClock()
        self._turn = TurnLock(path)

    @property
    def description(self) -> str:
        """What to print beside figures taken on this device."""
        return f"cuda:{self._index} {self._cuda.get_device_name(self._index)}"

    def acquire(self, *, is_blocking: bool) -> bool:
        """Take the turn; returns whether it is held now."""
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
        """Return when the step should end if the guess is right.

        Raises:
            RuntimeError: The turn is not held.
        """
        if not self._turn.is_held:
            message = f"a step on {self.device_id} needs the turn; call acquire first"
            raise RuntimeError(message)
        return self.clock.now() + self.predict_s(work)

    def finish_step(self, end_s: float) -> float:
        """Wait until the device has done what was queued; return how much later than guessed that was."""
        done = self._cuda.Event()
        done.record(self._cuda.current_stream(self._index))
        done.synchronize()
        self._cuda.synchronize(self._index)  # streams beside the current one: copies, side kernels
        return max(0.0, self.clock.now() - end_s)

    def give_pages(self, address: int, num_bytes: int) -> int:  # noqa: ARG002 - the role's signature
        """Return 0: memory of a GPU is not given by address but by a limit on the pool (``kv_limiter``) or by sleep."""
        return 0

    def close(self) -> None:
        """Close the device, giving the turn back. Idempotent."""
        self._turn.close()


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

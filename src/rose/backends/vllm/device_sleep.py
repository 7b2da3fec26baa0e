"""Sleep of an engine on a GPU: vLLM's own sleep mode, levels 1 (weights to host memory) and 2 (weights dropped).

It has been written from vLLM 0.32's source and tested against a stand-in of its executor; it has not run on a GPU. vLLM's
allocator is one a process, so an engine that sleeps has a process of its own.
"""

from __future__ import annotations

from typing import Any

from rose.errors import BackendUnavailableError, EngineError

_NEEDED = ("sleep", "wake_up", "is_sleeping")


def check(core: Any) -> None:
    """Look whether this engine can sleep.

    Raises:
        BackendUnavailableError: This vLLM has no sleep mode, or the engine was started without it.
    """
    missing = [name for name in _NEEDED if not hasattr(core.model_executor, name)]
    if missing:
        message = (
            f"this vLLM's executor has no {', '.join(missing)}, so the engine cannot be deactivated; install vllm 0.32"
        )
        raise BackendUnavailableError(message)
    if not getattr(core.vllm_config.model_config, "enable_sleep_mode", False):
        message = (
            "the engine was started without vLLM's sleep mode, so its memory cannot leave the device; "
            "start it with engine_args={'enable_sleep_mode': True}"
        )
        raise BackendUnavailableError(message)


def sleep(core: Any, *, keeps_weights: bool) -> int:
    """Put the executor to sleep; its requests must have ended. Returns the bytes of weights that left the device.

    Raises:
        EngineError: vLLM failed.
    """
    try:
        core.rose_sums = core.compute_weight_checksums() if keeps_weights else None
        core.model_executor.sleep(level=1 if keeps_weights else 2)
    except (RuntimeError, ValueError, AssertionError) as error:
        message = f"vLLM's sleep failed: {error}"
        raise EngineError(message) from error
    return _weight_bytes(core)


def wake(core: Any) -> int | None:
    """Wake the executor; returns the bytes of weights that are what they were, ``None`` when they are not.

    Raises:
        EngineError: vLLM failed.
    """
    sums, core.rose_sums = getattr(core, "rose_sums", None), None
    if not core.model_executor.is_sleeping:
        return 0
    try:
        core.model_executor.wake_up(None)
        is_same = sums is not None and core.compute_weight_checksums() == sums
    except (RuntimeError, ValueError, AssertionError) as error:
        message = f"vLLM's wake-up failed: {error}"
        raise EngineError(message) from error
    return _weight_bytes(core) if is_same else None


def _weight_bytes(core: Any) -> int:
    return sum(int(size) for size in core.collective_rpc("rose_weight_bytes"))

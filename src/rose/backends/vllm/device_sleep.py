"""Sleep of an engine on a GPU: vLLM's own sleep mode, levels 1 (weights to host memory) and 2 (weights dropped), and its KV pool alone.

Written from vLLM 0.32's source and tested against doubles with its signatures; it has not run on a GPU. What that source says, and what
is relied on here:

* ``Executor.sleep`` waits for the device in every worker before it unmaps anything, and so does ``discard``: no batch in flight can
  touch memory that is gone. Their outputs come afterwards; of requests that have ended they are dropped.
* ``discard(("kv_cache",))`` drops the whole KV pool and nothing else; a part of it cannot leave. ``wake_up(["kv_cache"])`` maps it anew,
  with whatever is there, so no cached prefix may outlive it (``HeldBlocks`` has dropped them).
* Its allocator is one a process: two engines in one would sleep together.
* ``Worker.sleep`` fails after it has unmapped everything when the card has less free memory than before, as it may while a neighbour
  takes some; the executor then knows of no sleep, so the workers are woken without it.
* ``compute_weight_checksums`` brings every weight to the host and hashes it there, some ten seconds for 16 GB; what is compared here
  are sums that the device makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.backends.wire import unwrap
from rose.errors import BackendUnavailableError, EngineError, EngineFencedError

_NEEDED = ("sleep", "wake_up", "is_sleeping", "discard", "sleeping_tags")
_KV = "kv_cache"
_FAILURES = (RuntimeError, ValueError, AssertionError)


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
    if not has_sleep_mode(core):
        message = (
            "the engine was started without vLLM's sleep mode, so its memory cannot leave the device; "
            "start it with engine_args={'enable_sleep_mode': True}"
        )
        raise BackendUnavailableError(message)


def has_sleep_mode(core: Any) -> bool:
    """Return whether the engine was started with vLLM's sleep mode."""
    return bool(getattr(core.vllm_config.model_config, "enable_sleep_mode", False))


def sleep(core: Any, *, keeps_weights: bool) -> int:
    """Put the executor to sleep; its requests must have ended. Returns the bytes of weights that left the device.

    Raises:
        EngineError: vLLM failed; the weights are on the device again, fenced where they are not what they were.
        EngineFencedError: They are not on the device, so that it must not compute.
    """
    core.rose_sums = _sums(core) if keeps_weights else None
    try:
        core.model_executor.sleep(level=1 if keeps_weights else 2)
    except _FAILURES as error:
        is_same = _undo(core, error)
        if not is_same:
            _fence(core)
        message = f"vLLM's sleep failed: {error}{'' if is_same else '; the weights are lost, and fenced'}"
        raise EngineError(message) from error
    return _weight_bytes(core)


def wake(core: Any) -> int | None:
    """Bring the weights back; returns the bytes of those that are what they were, ``None`` when they are not.

    A KV pool that follows the budget (``attach_kv``) comes back when the scheduler wants a block of it.

    Raises:
        EngineError: vLLM failed.
    """
    if "weights" not in core.model_executor.sleeping_tags:
        return 0
    try:
        core.model_executor.wake_up(_waking(core))
    except _FAILURES as error:
        message = f"vLLM's wake-up failed: {error}"
        raise EngineError(message) from error
    return _weight_bytes(core) if _are_same(core) else None


def _undo(core: Any, cause: BaseException) -> bool:
    """Map again what a sleep that failed has unmapped; return whether the weights are what they were."""
    try:
        core.collective_rpc("wake_up", args=(_waking(core),))
    except _FAILURES as error:
        message = f"vLLM's sleep failed: {cause}; its memory could not be mapped again ({error}): restart the engine"
        raise EngineFencedError(message) from cause
    return _are_same(core)


def _waking(core: Any) -> list[str] | None:
    """Return what comes back with the weights: everything, but for a KV pool that follows the budget."""
    return ["weights"] if hasattr(core, "rose_kv_pool") else None


def _are_same(core: Any) -> bool:
    """Return whether the weights have the sums that were taken before they left."""
    sums, core.rose_sums = getattr(core, "rose_sums", None), None
    return sums is not None and _sums(core) == sums


def _sums(core: Any) -> list[Any] | None:
    """Return the sums of every worker's weights; ``None`` where a device has no room to compute them, so that sleep is not refused for it."""
    answers = [unwrap(answer) for answer in core.collective_rpc("rose_resident_sums")]
    return None if None in answers else answers


def _fence(core: Any) -> None:
    for answer in core.collective_rpc("rose_fence"):
        unwrap(answer)


def attach_kv(core: Any) -> None:
    """Let the KV pool of an engine with sleep mode leave the device while its budget is nothing."""
    scheduler = core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    num_bytes = sum(int(tensor.size) for tensor in scheduler.kv_cache_config.kv_cache_tensors)
    core.rose_kv_pool = KvPool(core, int(pool.num_gpu_blocks), num_bytes)
    scheduler.attach_kv_pages(core.rose_kv_pool.hold, group_blocks=1)


class KvPool:
    """The whole KV pool as one page: it leaves the device while every block is held back. For ``HeldBlocks.attach``."""

    def __init__(self, core: Any, num_blocks: int, num_bytes: int) -> None:
        """Take an engine that was started with sleep mode.

        Args:
            core: vLLM's engine core.
            num_blocks: Blocks of the pool, the null block too.
            num_bytes: Bytes of the pool on one worker.
        """
        self._executor = core.model_executor
        self._num_blocks = num_blocks
        self._num_bytes = num_bytes

    def hold(self, runs: Sequence[Sequence[int]]) -> int:
        """Let the pool leave when all blocks but the null block are held, and come back otherwise.

        Args:
            runs: All held blocks, as ``(first, length)`` of each run. No batch in flight may use one of them.

        Returns:
            Bytes that are not on the device now.

        Raises:
            EngineError: vLLM failed.
        """
        is_wanted = sum(length for _, length in runs) < self._num_blocks - 1
        is_there = _KV not in self._executor.sleeping_tags
        try:
            if is_wanted and not is_there:
                self._executor.wake_up([_KV])
            elif is_there and not is_wanted:
                self._executor.discard((_KV,))
        except _FAILURES as error:
            message = f"vLLM could not {'map' if is_wanted else 'drop'} the KV pool: {error}"
            raise EngineError(message) from error
        return 0 if is_wanted else self._num_bytes


def _weight_bytes(core: Any) -> int:
    return sum(int(size) for size in core.collective_rpc("rose_weight_bytes"))

"""Sleep and wake of an SGLang engine, and its memory calls made safe.

SGLang ends the engine when memory is released while requests run, or resumed although it was not released. Here the first is
refused and the second does nothing. What leaves the device is SGLang's own matter: with ``--enable-memory-saver`` on a GPU the
bytes do; without it the calls only keep the books.

Invariants: asleep, there is no request, every KV slot is held back, and both tags are released; awake, neither is by us.
"""

from __future__ import annotations

import logging
from typing import Any

from rose.backends.sglang_server.stepping import Stepping
from rose.errors import EngineError

TAGS = ("weights", "kv_cache")
"""What sleep releases, in the order in which waking brings it back."""

_logger = logging.getLogger(__name__)


def fall_asleep(stepping: Stepping, *, keeps_weights: bool) -> dict[str, Any]:
    """End all requests as evicted and release KV memory and weights. Call between steps.

    Args:
        stepping: The engine's steps.
        keeps_weights: Note sums of the weights, so that waking can tell whether they are what they were.

    Returns:
        How many requests ended, and the bytes of weights on this rank.
    """
    scheduler = stepping.scheduler
    stepping.is_asleep = True
    num_requests = stepping.end_all()
    if scheduler.last_batch is not None:
        scheduler.last_batch.filter_batch()
    stepping.reserve.resize(stepping.num_kv_tokens)
    if keeps_weights and "weights" not in released(scheduler):
        stepping.weight_sums = _sums(scheduler)
    _call(scheduler, "release", [tag for tag in reversed(TAGS) if tag not in released(scheduler)])
    return {"num_requests": num_requests, "weight_bytes": _weight_bytes(scheduler)}


def wake(stepping: Stepping) -> dict[str, Any]:
    """Bring weights and KV memory back and take requests again, with the budget of before.

    Returns:
        The bytes of weights on this rank that are what they were, ``None`` when they are not or nobody noted their sums.
    """
    scheduler = stepping.scheduler
    _call(scheduler, "resume", [tag for tag in TAGS if tag in released(scheduler)])
    sums, stepping.weight_sums = stepping.weight_sums, None
    is_same = sums is not None and _sums(scheduler) == sums
    stepping.is_asleep = False
    stepping.set_kv_budget(stepping.budget_tokens)
    return {"weight_bytes": _weight_bytes(scheduler) if is_same else None}


def released(scheduler: Any) -> set[str]:
    """Return the tags whose memory is released now."""
    return set(scheduler.weight_updater.offload_tags)


def contained_release(original: Any, manager: Any, recv_req: Any) -> Any:
    """[HOOK] Release only what is there, and only while no request runs."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES  # noqa: PLC0415 - only inside SGLang
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput  # noqa: PLC0415 - only inside SGLang

    tags = [tag for tag in recv_req.tags or GPU_MEMORY_ALL_TYPES if tag not in manager.offload_tags]
    is_paused = manager.scheduler is not None and manager.scheduler._engine_paused  # noqa: SLF001 - SGLang's own state
    if not manager.is_fully_idle(ignore_waiting=is_paused):
        _logger.warning("memory was not released: requests run; pause with mode 'retract' first")
        return ReleaseMemoryOccupationReqOutput()
    if not tags:
        return ReleaseMemoryOccupationReqOutput()
    recv_req.tags = tags
    return original(manager, recv_req)


def contained_resume(original: Any, manager: Any, recv_req: Any) -> Any:
    """[HOOK] Resume only what is released."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES  # noqa: PLC0415 - only inside SGLang
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput  # noqa: PLC0415 - only inside SGLang

    tags = [tag for tag in recv_req.tags or GPU_MEMORY_ALL_TYPES if tag in manager.offload_tags]
    if not tags:
        return ResumeMemoryOccupationReqOutput()
    recv_req.tags = tags
    return original(manager, recv_req)


def _call(scheduler: Any, verb: str, tags: list[str]) -> None:
    from sglang.srt.managers import io_struct  # noqa: PLC0415 - only inside SGLang

    if not tags:
        return
    request = getattr(io_struct, f"{verb.capitalize()}MemoryOccupationReqInput")(tags=tags)
    getattr(scheduler.weight_updater, f"{verb}_memory_occupation")(request)
    is_done = all((tag in released(scheduler)) == (verb == "release") for tag in tags)
    if not is_done:
        message = f"SGLang did not {verb} {', '.join(tags)}: a request still runs; see the server's log"
        raise EngineError(message)


def _sums(scheduler: Any) -> Any:
    from sglang.srt.managers.io_struct import CheckWeightsReqInput  # noqa: PLC0415 - only inside SGLang

    answer = scheduler.weight_updater.check_weights(CheckWeightsReqInput(action="checksum"))
    if not answer.success:
        message = f"SGLang's weights could not be summed: {answer.message}"
        raise EngineError(message)
    return [rank.per_gpu_checksum for rank in answer.payload]


def _weight_bytes(scheduler: Any) -> int:
    model = scheduler.tp_worker.model_runner.model
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())

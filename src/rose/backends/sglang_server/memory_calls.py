"""Sleep and wake of an SGLang engine.

What leaves the device is SGLang's own matter: with ``--enable-memory-saver`` on a GPU the
bytes do; without it the calls only keep the books.

Invariants: asleep, there is no request, every KV slot is held back, and both tags are released; awake, neither is by us.
"""

from __future__ import annotations

from typing import Any

from rose.backends.sglang_server.stepping import Stepping
from rose.errors import EngineError

TAGS = ("weights", "kv_cache")
"""What sleep releases, in the order in which waking brings it back."""


def fall_asleep(stepping: Stepping, *, keeps_weights: bool) -> dict[str, Any]:
    """End all requests as evicted and release KV memory and weights. Call between steps.

    Args:
        stepping: The engine's steps.
        keeps_weights: Note sums of the weights, so that waking can tell whether they are what they were.

    Returns:
        ``num_requests`` that ended, and ``released_bytes``: weights and KV memory of this rank that left the device, which SGLang does with
        its memory saver only.
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
    num_bytes = _weight_bytes(scheduler) + _kv_bytes(scheduler) if scheduler.server_args.enable_memory_saver else 0
    return {"num_requests": num_requests, "released_bytes": num_bytes}


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


def _kv_bytes(scheduler: Any) -> int:
    return int(sum(scheduler.token_to_kv_pool_allocator.get_kvcache().get_kv_size_bytes()))

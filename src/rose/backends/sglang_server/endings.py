"""Ends requests from inside SGLang's scheduler, between steps, with the tokens that they have.

Invariants: a request ends once; what it has is delivered with its end, no token twice; its KV is free afterwards (what it
computed may stay cached); nothing of it is left in a batch or a queue.

Every rank of an engine does this in the same iteration, on the same requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class SglangCalls:
    """What is needed of SGLang's own functions.

    Attributes:
        abort_reason: Makes the reason of an end from its message.
        release_kv: ``(req, tree_cache, checkpoint=...)`` frees what a request holds; with a checkpoint it stays cached.
        make_room: ``(tree_cache, num_tokens)`` drops cached prefixes until so many slots are free.
    """

    abort_reason: Callable[[str], Any]
    release_kv: Callable[..., None]
    make_room: Callable[[Any, int], Any]


def aborts(recv_req: Any, req: Any) -> bool:
    """Return whether an abort is meant for a request, by SGLang's own rule: ids are prefixes."""
    return bool(recv_req.abort_all) or str(req.rid).startswith(recv_req.rid)


def end_requests(scheduler: Any, reqs: list[Any], message: str | None, calls: SglangCalls) -> None:
    """End live requests; ``message`` is that of their ``abort``, ``None`` where each has been given its own reason already."""
    for req in reqs:
        _end(scheduler, req, req.to_finish if message is None else calls.abort_reason(message), calls)
    if reqs:
        scheduler.running_batch.filter_batch()
        scheduler.running_batch.batch_is_full = False


def end_aborted(scheduler: Any, calls: SglangCalls) -> list[str]:
    """End requests that a client gave up while no step is made, instead of with the next step.

    Returns:
        Their ids.
    """
    chunked = scheduler.chunked_req
    if scheduler._pending_chunked_abort_req is not None and scheduler._pending_chunked_abort_req is chunked:  # noqa: SLF001 - SGLang's own mark
        scheduler.process_pending_chunked_abort()
        ended = [chunked.rid]
    else:
        ended = []
    given_up = [req for req in scheduler.collect_inflight_reqs() if req.to_finish is not None and not req.finished()]
    end_requests(scheduler, sorted(given_up, key=lambda req: str(req.rid)), None, calls)
    return [*ended, *(req.rid for req in given_up)]


def _end(scheduler: Any, req: Any, reason: Any, calls: SglangCalls) -> None:
    is_chunked = req is scheduler.chunked_req
    if not is_chunked and not req.kv.holds_kv:
        scheduler._release_aborted_request(req)  # noqa: SLF001 - what SGLang does with one that never ran
    scheduler.waiting_queue = [other for other in scheduler.waiting_queue if other is not req]
    queue = scheduler.grammar_manager.grammar_queue
    scheduler.grammar_manager.grammar_queue = [other for other in queue if other is not req]
    req.to_finish, req.finished_reason = None, reason
    _close_logprobs(req)
    if req.kv.holds_kv:
        calls.release_kv(req, scheduler.tree_cache, checkpoint=not is_chunked)
    if is_chunked:
        scheduler.chunked_req = None
    if scheduler._pending_chunked_abort_req is req:  # noqa: SLF001 - as above
        scheduler._pending_chunked_abort_req = None  # noqa: SLF001 - as above
    scheduler.beam_coordinator.retire_group(req)
    req.time_stats.set_completion_time()
    scheduler.output_streamer.stream_output([req], req.return_logprob)


def _close_logprobs(req: Any) -> None:
    """Give a request that never had its prompt computed the empty log-probs that its last message must have."""
    if not req.return_logprob or req.logprob.input_token_logprobs_val is not None:
        return
    for name in ("token_logprobs", "top_logprobs", "token_ids_logprobs"):
        setattr(req.logprob, f"input_{name}_val", [])
        setattr(req.logprob, f"input_{name}_idx", [])

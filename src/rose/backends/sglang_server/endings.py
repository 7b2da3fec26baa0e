"""Ends requests from inside SGLang's scheduler, between steps, with the tokens that they have.

Invariants: a request ends once; what it has is delivered with its end, no token twice; its KV is free afterwards (what it
computed may stay cached); nothing of it is left in a batch or a queue.

Every rank of an engine does this in the same iteration, on the same requests.
"""

from __future__ import annotations

from typing import Any

EVICTED = "rose:evicted"
"""The message of the ``abort`` under which a request ends whose KV memory was taken back."""

REFUSED = "rose:refused"
"""The message of the ``abort`` under which a request ends that the device's memory can never hold."""


def end_requests(scheduler: Any, reqs: list[Any], message: str | None) -> None:
    """End live requests; ``message`` is that of their ``abort``, ``None`` where each has been given its own reason already."""
    for req in reqs:
        _end(scheduler, req, message)
    if reqs:
        scheduler.running_batch.filter_batch()
        scheduler.running_batch.batch_is_full = False


def end_aborted(scheduler: Any) -> list[str]:
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
    end_requests(scheduler, sorted(given_up, key=lambda req: str(req.rid)), None)
    return [*ended, *(req.rid for req in given_up)]


def _end(scheduler: Any, req: Any, message: str | None) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415 - only inside SGLang
    from sglang.srt.mem_cache.common import release_kv_cache  # noqa: PLC0415 - only inside SGLang

    reason = req.to_finish if message is None else FINISH_ABORT(message)
    is_chunked = req is scheduler.chunked_req
    if not is_chunked and not req.kv.holds_kv:
        scheduler._release_aborted_request(req)  # noqa: SLF001 - what SGLang does with one that never ran
    scheduler.waiting_queue = [other for other in scheduler.waiting_queue if other is not req]
    queue = scheduler.grammar_manager.grammar_queue
    scheduler.grammar_manager.grammar_queue = [other for other in queue if other is not req]
    req.to_finish, req.finished_reason = None, reason
    _close_logprobs(req)
    if req.kv.holds_kv:
        release_kv_cache(req, scheduler.tree_cache, checkpoint=not is_chunked)
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

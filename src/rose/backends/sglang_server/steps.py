"""SGLang's scheduler as ``rose.backends.step_control`` sees it. Imports no SGLang: the scheduler is taken as it is used.

A request that runs is in the running batch, in the last prefill batch (which the next step merges), or it is the one whose
prompt is computed in chunks. One step is a prefill batch or a decode batch; with SGLang's mixed chunks it is both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rose.backends.step_control import Outlook, StepView
from rose.coserving.executor import ServingLoad
from rose.policies.compute import StepShape


def context_tokens(req: Any) -> int:
    """Return the length of a request: its prompt and its answer so far."""
    return len(req.origin_input_ids) + len(req.output_ids)


def longest_tokens(req: Any) -> int:
    """Return how long a request can get."""
    return len(req.origin_input_ids) + int(req.sampling_params.max_new_tokens)


def decoding(scheduler: Any) -> list[Any]:
    """Return the requests that have all their prompt computed and go on."""
    batches = [scheduler.running_batch]
    last = scheduler.last_batch
    if last is not None and last is not scheduler.running_batch and last.forward_mode.is_extend():
        batches.append(last)
    chunked = scheduler.chunked_req
    return [req for batch in batches for req in batch.reqs if req is not chunked and not req.finished()]


def running(scheduler: Any) -> list[Any]:
    """Return every request that holds a place in the batch."""
    chunked = scheduler.chunked_req
    return [*decoding(scheduler), *([] if chunked is None or chunked.finished() else [chunked])]


def waiting(scheduler: Any) -> list[Any]:
    """Return the requests without a place, those whose grammar is compiled included."""
    return [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]


def slo_class(req: Any) -> str | None:
    """Return the request class that a client named in ``sampling_params.custom_params["slo_class"]``."""
    name = (getattr(req.sampling_params, "custom_params", None) or {}).get("slo_class")
    return name if isinstance(name, str) else None


def _prefilled(batch: Any) -> Iterator[Any]:
    decodes = {id(req) for req in getattr(batch, "decoding_reqs", None) or ()}
    return (req for req in batch.reqs if id(req) not in decodes)


class SglangSteps(StepView):
    """The steps of an engine; what is passed as ``scheduler`` has SGLang's own one as ``scheduler``."""

    def measure(self, scheduler: Any, batch: Any) -> StepShape:
        """Return the shape of a batch that is about to run."""
        chunked = scheduler.scheduler.chunked_req
        is_prefill = batch.forward_mode.is_extend()
        prompts = list(_prefilled(batch)) if is_prefill else []
        decodes = list(getattr(batch, "decoding_reqs", None) or ()) if is_prefill else batch.reqs
        completed = [req for req in prompts if req is not chunked]
        return StepShape(
            num_prefill_tokens=sum(req.extend_len for req in prompts),
            prefill_positions=sum(req.extend_len * (req.extend_end - req.extend_len / 2) for req in prompts),
            num_decodes=len(decodes),
            decode_context_tokens=sum(context_tokens(req) for req in decodes),
            num_completed=len(completed),
            completed_context_tokens=sum(req.extend_end for req in completed),
        )

    def outlook(self, scheduler: Any) -> Outlook:
        """Return what the next step may be about. A prompt that waits may turn out to find no room."""
        own = scheduler.scheduler
        chunked = own.chunked_req
        return Outlook(
            decode_contexts=[context_tokens(req) for req in decoding(own)],
            prefill_contexts=[] if chunked is None else [chunked.extend_end or 0],
            has_prompts=chunked is not None or bool(waiting(own)),
            is_mixed=bool(own.is_mixed_chunk),
        )

    def chunk_tokens(self, scheduler: Any) -> int:
        """Return the most prompt tokens of a step."""
        own = scheduler.scheduler
        return int(min(own.chunked_prefill_size or own.max_prefill_tokens, own.max_prefill_tokens))

    def cap_prompts(self, scheduler: Any, num_tokens: int, *, num_decodes: int) -> None:
        """Bound the next step; with mixed chunks its decodes count as well. Never below what SGLang aligns chunks to."""
        own = scheduler.scheduler
        own.chunked_prefill_size = max(num_tokens + num_decodes, own.truncation_align_size or 0, own.page_size)

    def token_bytes(self, scheduler: Any) -> float:
        """Return the KV bytes of one token on one rank."""
        own = scheduler.scheduler
        return float(sum(own.token_to_kv_pool_allocator.get_kvcache().get_kv_size_bytes()) / own.max_total_num_tokens)

    def look(self, scheduler: Any) -> None:
        """Read what is there now: the step loop is the only reader of SGLang's messages."""
        scheduler.inputs.look()

    def prompt(self, request: Any) -> tuple[str, int, str | None]:
        """Return a request's id, the length of its prompt and its SLO class."""
        return request.rid, len(request.origin_input_ids), slo_class(request)

    def wants_device(self, scheduler: Any) -> bool:
        """Return whether the next step computes something; a disaggregated SGLang is not co-served."""
        return bool(scheduler.has_unfinished_requests())

    def serving_load(self, scheduler: Any, bytes_per_token: float, *, is_decode: bool) -> ServingLoad:  # noqa: ARG002 - the view's face
        """Return serving's requests as the ledger wants them. Retracted ones wait, and keep the tokens that they have."""
        own = scheduler.scheduler
        decodes = [req for req in decoding(own) if req.to_finish is None]  # one that was given up has its last step
        chunked = own.chunked_req
        prompts = [*waiting(own), *([] if chunked is None or chunked.finished() else [chunked])]
        return ServingLoad(
            num_running=len(decodes) + (chunked is not None),
            waiting_ids=tuple(req.rid for req in prompts),
            decoding=[(req.rid, len(req.output_ids)) for req in decodes],
            decode_context_tokens=sum(context_tokens(req) for req in decodes),
            kv_used_bytes=scheduler.num_kv_tokens_used * bytes_per_token,
        )

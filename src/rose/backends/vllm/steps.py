"""A vLLM scheduler as ``rose.backends.step_control`` sees it. Imports no vLLM: the scheduler is taken as it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rose.backends import step_control
from rose.backends.step_control import Outlook, StepControl, StepView
from rose.backends.step_settings import RoseSettings
from rose.coserving.executor import ServingLoad
from rose.policies.compute import StepShape


class VllmSteps(StepView):
    """vLLM's steps: one batch has the decodes of all running requests and chunks of prompts beside them."""

    def measure(self, scheduler: Any, batch: Mapping[str, int]) -> StepShape:
        """Return the shape of a step; ``batch`` has the scheduled tokens of each request."""
        return measure(scheduler.requests, batch)

    def outlook(self, scheduler: Any) -> Outlook:
        """Return what the next step is about."""
        decoding = [request.num_computed_tokens for request in scheduler.running if not request.is_prefill_chunk]
        prefilling = [request.num_computed_tokens for request in scheduler.running if request.is_prefill_chunk]
        has_prompts = len(decoding) != len(scheduler.running) or bool(scheduler.get_request_counts()[1])
        return Outlook(decode_contexts=decoding, prefill_contexts=prefilling, has_prompts=has_prompts)

    def chunk_tokens(self, scheduler: Any) -> int:
        """Return the most prompt tokens of a step, as configured or capped."""
        return int(scheduler.max_num_scheduled_tokens)

    def cap_prompts(self, scheduler: Any, num_tokens: int, *, num_decodes: int) -> None:
        """Bound the next step: its decodes count as well."""
        scheduler.max_num_scheduled_tokens = num_decodes + num_tokens

    def token_bytes(self, scheduler: Any) -> float:
        """Return the KV bytes of one token on one rank."""
        plan = scheduler.kv_cache_config
        num_tokens = plan.num_blocks * int(scheduler.block_size)
        return float(sum(tensor.size for tensor in plan.kv_cache_tensors) / num_tokens)

    def look(self, scheduler: Any) -> None:
        """Do nothing: the input thread notes prompts."""

    def prompt(self, request: Any) -> tuple[str, int, str | None]:
        """Return a request's id, the length of its prompt and its SLO class."""
        return request.request_id, request.num_prompt_tokens, slo_class(request)

    def wants_device(self, scheduler: Any) -> bool:
        """Return whether a decode engine's next step computes something."""
        return _wants_device(scheduler)

    def serving_load(self, scheduler: Any, bytes_per_token: float, *, is_decode: bool) -> ServingLoad:
        """Return serving's requests as the ledger wants them."""
        return serving_load(scheduler, bytes_per_token, is_decode=is_decode)


def open_control(settings: RoseSettings, scheduler: Any) -> StepControl:
    """Return the control of a vLLM scheduler; see ``rose.backends.step_control.open_control``."""
    return step_control.open_control(settings, scheduler, VllmSteps())


def measure(requests: Mapping[str, Any], num_scheduled_tokens: Mapping[str, int]) -> StepShape:
    """Return the shape of a step that vLLM has scheduled (its requests' computed tokens are advanced already)."""
    prefill = decodes = decode_context = completed = completed_context = 0
    positions = 0.0
    for request_id, num_tokens in num_scheduled_tokens.items():
        request = requests[request_id]
        end = request.num_computed_tokens
        if num_tokens == 1 and end > request.num_prompt_tokens:
            decodes += 1
            decode_context += end
            continue
        prefill += num_tokens
        positions += num_tokens * (end - num_tokens / 2)
        if not request.is_prefill_chunk:
            completed += 1
            completed_context += end
    return StepShape(
        num_prefill_tokens=prefill,
        prefill_positions=positions,
        num_decodes=decodes,
        decode_context_tokens=decode_context,
        num_completed=completed,
        completed_context_tokens=completed_context,
    )


def slo_class(request: Any) -> str | None:
    """Return the request class that a client named by the sampling parameter ``extra_args["slo_class"]`` (``vllm_xargs`` over HTTP)."""
    parameters = getattr(request, "sampling_params", None)
    name = (getattr(parameters, "extra_args", None) or {}).get("slo_class")
    return name if isinstance(name, str) else None


def _is_kv_awaited(scheduler: Any, request: Any) -> bool:
    """Return whether a waiting request of a decode engine asked for its prompt's KV and still lacks it."""
    is_asking = request.status.name == "WAITING_FOR_REMOTE_KVS"
    return is_asking and request.request_id not in scheduler.finished_recving_kv_req_ids


def _wants_device(scheduler: Any) -> bool:
    """Return whether a decode engine's next step computes something; asking for a prompt's KV does not."""
    waiting = (*scheduler.waiting, *scheduler.kv_holding_waiting)
    asks = (request.status.name == "WAITING" and request.num_computed_tokens == 0 for request in waiting)
    idle = (asks_now or _is_kv_awaited(scheduler, request) for asks_now, request in zip(asks, waiting, strict=True))
    return bool(scheduler.running) or not all(idle)


def serving_load(scheduler: Any, bytes_per_token: float, *, is_decode: bool = False) -> ServingLoad:
    """Return serving's requests as the ledger wants them.

    Args:
        scheduler: vLLM's.
        bytes_per_token: KV bytes of a token, modelled.
        is_decode: Prompts are computed elsewhere: those whose KV is on its way do not need the device.
    """
    waiting = [*scheduler.waiting, *scheduler.kv_holding_waiting]
    decoding, decode_context_tokens = [], 0
    for request in scheduler.running:
        num_computed_tokens = request.num_computed_tokens
        if num_computed_tokens >= request.num_prompt_tokens:
            decoding.append((request.request_id, request.num_output_tokens))
            decode_context_tokens += num_computed_tokens
        else:
            waiting.append(request)
    awaited = [request for request in waiting if _is_kv_awaited(scheduler, request)] if is_decode else []
    return ServingLoad(
        num_running=len(scheduler.running),
        waiting_ids=tuple(request.request_id for request in waiting),
        awaited_ids=tuple(request.request_id for request in awaited),
        decoding=decoding,
        decode_context_tokens=decode_context_tokens,
        kv_used_bytes=scheduler.num_kv_tokens_used * bytes_per_token,
    )

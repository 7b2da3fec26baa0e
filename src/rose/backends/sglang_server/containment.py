"""Errors of SGLang's own weight and memory calls, contained: a clean refusal on all ranks alike instead of the engine's end.

In SGLang an exception in one of these calls ends the engine, and one on a single rank leaves the others in a barrier for ever.

Invariants:

* A payload that a rank cannot read is refused on every rank before any of them writes.
* A rank that fails within a call still meets the others in the barrier that ends the call; then all of them report the failure.
* Weights that SGLang itself wrote, whole or in part, are no version of ROSE's: they count as fenced until an anchor comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import attrs

from rose.backends.sglang_server import hooks
from rose.backends.sglang_server.wire import REFUSAL_QUESTION, Answer, attempt
from rose.errors import EngineError

_TAGS = ("kv_cache", "weights", "cuda_graph")
_logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Contained:
    """A call of SGLang's weight updater.

    Attributes:
        output: Name of its reply.
        has_barrier: Ranks meet in a barrier at its end.
        is_write: It writes live weights.
    """

    output: str
    has_barrier: bool
    is_write: bool


CONTAINED = {
    "begin_weight_update": Contained(output="BeginWeightUpdateReqOutput", has_barrier=True, is_write=False),
    "end_weight_update": Contained(output="EndWeightUpdateReqOutput", has_barrier=True, is_write=False),
    "update_weights_from_tensor": Contained(output="UpdateWeightsFromTensorReqOutput", has_barrier=True, is_write=True),
    "update_weights_from_ipc": Contained(output="UpdateWeightsFromIPCReqOutput", has_barrier=True, is_write=True),
    "update_weights_from_distributed": Contained(
        output="UpdateWeightsFromDistributedReqOutput", has_barrier=False, is_write=True
    ),
    "update_weights_from_disk": Contained(output="UpdateWeightFromDiskReqOutput", has_barrier=False, is_write=True),
}
"""The calls of ``SchedulerWeightUpdaterManager`` that ``contain`` is put around, by name."""


class UnreadPayloadError(EngineError):
    """A rank could not read its payload, so none writes."""


def contain(name: str) -> Callable[..., Any]:
    """Return the hook around one of the ``CONTAINED`` calls."""
    call = CONTAINED[name]

    def contained(original: Callable[..., Any], manager: Any, request: Any) -> Any:
        was_open = manager._session is not None or not call.has_barrier or name == "begin_weight_update"  # noqa: SLF001
        own, reply = _run(original, manager, request, call)
        found = hooks.gather_over(manager.tp_cpu_group)(own)
        if call.is_write and was_open and not all(one.get("is_unread") for one in found):
            hooks.lose_weights(manager)
        problems = list(dict.fromkeys(one["error"][1] for one in found if "error" in one))
        if not problems:
            return reply
        return _failed(call, f"{name} failed, the engine goes on: {'; '.join(problems)}")

    return contained


def _run(original: Callable[..., Any], manager: Any, request: Any, call: Contained) -> tuple[Answer, Any]:
    """Return how the call ended on this rank, and its reply."""
    try:
        reply = original(manager, request)
    except UnreadPayloadError as error:  # on all ranks alike
        return {"error": ["EngineError", str(error)], "is_unread": True}, None
    except Exception as error:
        _logger.exception("%s failed", call.output)
        _meet(manager, call)
        return {"error": ["EngineError", f"{type(error).__name__}: {error}"]}, None
    return {"value": bool(reply.success)}, reply


def _meet(manager: Any, call: Contained) -> None:
    """Meet the ranks that did not fail, in the barrier at the end of the call."""
    import torch.distributed as dist  # noqa: PLC0415 - heavy

    if call.has_barrier and dist.get_world_size(group=manager.tp_cpu_group) > 1:
        dist.barrier(group=manager.tp_cpu_group)


def _failed(call: Contained, message: str) -> Any:
    from sglang.srt.managers import io_struct  # noqa: PLC0415 - only in SGLang's processes

    extra = {"num_paused_requests": 0} if call.output == "UpdateWeightFromDiskReqOutput" else {}
    return getattr(io_struct, call.output)(success=False, message=message, **extra)


def read_payload(original: Callable[..., Any], worker: Any, payloads: Any) -> Any:
    """Around ``deserialize_own_rank``: read this rank's payload, or refuse on all ranks.

    Raises:
        UnreadPayloadError: Some rank could not read its own.
    """
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - only in SGLang's processes

    read = attempt(lambda: original(worker, payloads))
    own: Answer = {"error": read["error"]} if "error" in read else {"value": None}
    found = hooks.gather_over(get_parallel().tp_group.cpu_group)(own)
    problems = [f"rank {rank}: {one['error'][1]}" for rank, one in enumerate(found) if "error" in one]
    if problems:
        message = f"the weights that came cannot be read, nothing was written: {'; '.join(problems)}"
        raise UnreadPayloadError(message)
    return read["value"]


def release_memory(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``release_memory_occupation``: refuse while requests run, and what is released already."""
    is_idle = manager.is_fully_idle(ignore_waiting=manager.scheduler._engine_paused)  # noqa: SLF001 - no public one
    problem = release_problem(request.tags, released=manager.offload_tags, is_idle=is_idle)
    reply = _memory_call(original, manager, request, problem)
    if "weights" in (request.tags or _TAGS) and _loses_weights(manager):
        hooks.lose_weights(manager)
    return reply


def resume_memory(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``resume_memory_occupation``: refuse what is not released."""
    return _memory_call(original, manager, request, resume_problem(request.tags, released=manager.offload_tags))


def release_problem(tags: Collection[str] | None, *, released: Collection[str], is_idle: bool) -> str | None:
    """Say why memory cannot be released, or return ``None``.

    Args:
        tags: What shall be released; ``None`` or nothing: everything.
        released: What is.
        is_idle: No request runs.
    """
    if not is_idle:
        return "memory can be released only while no request runs; pause the engine (mode retract) first"
    return _unknown(tags) or _listed("released already", set(tags or _TAGS) & set(released))


def resume_problem(tags: Collection[str] | None, *, released: Collection[str]) -> str | None:
    """Say why memory cannot be resumed, or return ``None``. The arguments are those of ``release_problem``."""
    return _unknown(tags) or _listed("not released", set(tags or _TAGS) - set(released))


async def tell_refusal(original: Callable[..., Any], tokenizer: Any, request: Any, *args: Any) -> None:
    """Around the memory calls of SGLang's front: their replies cannot tell a failure, so it is asked for.

    Raises:
        ValueError: The scheduler refused; SGLang answers 400 with the text.
    """
    from sglang.srt.managers.io_struct import CheckWeightsReqInput  # noqa: PLC0415 - only in SGLang's processes

    await original(tokenizer, request, *args)
    _, refusal, _, _ = await tokenizer.check_weights(CheckWeightsReqInput(action=REFUSAL_QUESTION))
    if refusal:
        raise ValueError(refusal)


def _unknown(tags: Collection[str] | None) -> str | None:
    return _listed(f"no kind of memory ({', '.join(_TAGS)} are)", set(tags or ()) - set(_TAGS))


def _listed(what: str, tags: Collection[str]) -> str | None:
    return f"{', '.join(sorted(tags))}: {what}" if tags else None


def _memory_call(original: Callable[..., Any], manager: Any, request: Any, problem: str | None) -> Any:
    from sglang.srt.managers import io_struct  # noqa: PLC0415 - only in SGLang's processes

    gather = hooks.gather_over(manager.tp_cpu_group)
    problems = [one["value"] for one in gather({"value": problem}) if one["value"]]
    setattr(manager.scheduler, hooks.REFUSAL_ATTRIBUTE, problems[0] if problems else "")
    if not problems:
        return original(manager, request)
    _logger.warning("refused: %s", problems[0])
    output = type(request).__name__.replace("Input", "Output")
    return getattr(io_struct, output)()


def _loses_weights(manager: Any) -> bool:
    arguments = manager.tp_worker.model_runner.server_args
    return bool(arguments.enable_memory_saver) and not arguments.enable_weights_cpu_backup

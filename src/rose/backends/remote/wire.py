"""The JSON that crosses between an executor and its clients. Nothing is pickled.

Errors are ``{"error": {"type": name, "message": text}}``, the name being the class's in snake case; an engine that is asked under
a lease that is over, or with an outdated fencing token, is ``fenced``. A stream is one JSON object a line; its last line has
``finish_reason`` or ``error``.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose import errors
from rose.errors import EngineBusyError, EngineError, EngineLeaseError, EngineLostError, RequestRefusedError, RoseError
from rose.types import EngineRequest, EngineSnapshot, FinishReason, RequestId, Sampling, TokenChunk, WeightVersion

FENCING_HEADER = "X-Rose-Fencing-Token"
"""The lease's fencing token; those of several devices with commas between them, in the order of the executor's ledgers."""

ENGINE_HEADER = "X-Rose-Engine"
"""Which start of the rollout engine is meant, as the executor's answers name it. Optional."""

FENCED = "fenced"
_STATUS_OF = (
    (EngineLeaseError, 403),
    (errors.LeaseError, 403),
    (EngineBusyError, 503),
    (EngineLostError, 502),
    (RequestRefusedError, 422),
    (errors.ConfigError, 400),
    (errors.VersionConflictError, 409),
    (errors.EngineFencedError, 409),
    (errors.VersionUnavailableError, 409),
    (errors.StaleTrajectoryError, 409),
    (errors.GroupDroppedError, 422),
    (errors.NoEngineError, 503),
    (errors.EngineUnsupportedError, 501),
    (errors.LedgerError, 503),
    (errors.DeadlineExceededError, 504),
)
_BY_STATUS: Mapping[int, type[RoseError]] = {
    400: errors.ConfigError,
    401: errors.ConfigError,
    403: errors.ConfigError,
    422: RequestRefusedError,
    429: EngineBusyError,
    501: errors.EngineUnsupportedError,
    502: EngineLostError,
    503: EngineBusyError,
    504: EngineLostError,
}


compact = json.JSONEncoder(separators=(",", ":")).encode
"""Plain data as JSON text without spaces."""


def bearer(token: str | None) -> dict[str, str]:
    """Return the header that shows a token; none for ``None``.

    Raises:
        ConfigError: The token has a character that no header may have, a line's end for instance.
    """
    if token is None:
        return {}
    if not token or not token.isascii() or not token.isprintable() or token != token.strip():
        message = "a bearer token is printable ASCII without spaces around it, and this one is not; was it read with its line's end?"
        raise errors.ConfigError(message)
    return {"Authorization": f"Bearer {token}"}


def error_name(kind: type[RoseError]) -> str:
    """Return the name of an error class on the wire: ``engine_busy_error``."""
    if issubclass(kind, EngineLeaseError):
        return FENCED
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


_KINDS: Mapping[str, type[RoseError]] = {
    error_name(kind): kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RoseError) and kind.__module__ == errors.__name__
}


def status_of(error: RoseError) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 500)


def error_to_wire(error: RoseError) -> dict[str, Any]:
    """Return an error as plain data."""
    return {"error": {"type": error_name(type(error)), "message": str(error)}}


def error_from_wire(data: Any, status: int = 500) -> RoseError:
    """Return the error that an answer stands for, in its own type.

    Args:
        data: The decoded body; anything at all, since another program may have answered.
        status: The HTTP status, which decides where the body does not.
    """
    found = data.get("error") if isinstance(data, Mapping) else None
    name, message = (found.get("type"), found.get("message")) if isinstance(found, Mapping) else (None, None)
    kind = _KINDS.get(str(name)) or _BY_STATUS.get(status, EngineError)
    return kind(str(message) if message else f"the server answered with status {status}")


def request_to_wire(request: EngineRequest) -> dict[str, Any]:
    """Return a request as plain data."""
    return {**_without_prompt(request), "prompt_ids": list(request.prompt_ids)}


class PreparedIds:
    """JSON text of prompts that are about to be sent, so that it can be made while something else is waited for.

    A text belongs to one tuple, not to what is equal to it, and is used once; the oldest go.
    """

    def __init__(self, max_prompts: int) -> None:
        self._max_prompts = max_prompts
        self._texts: OrderedDict[int, tuple[Sequence[int], str]] = OrderedDict()

    def prepare(self, ids: Sequence[int]) -> None:
        """Make the text."""
        self._texts[id(ids)] = (ids, compact(ids))
        if len(self._texts) > self._max_prompts:
            self._texts.popitem(last=False)

    def take(self, ids: Sequence[int]) -> str:
        """Return the text, the prepared one if there is one."""
        known = self._texts.pop(id(ids), None)
        return known[1] if known is not None and known[0] is ids else compact(ids)


PREPARED = PreparedIds(256)


def request_to_json(request: EngineRequest) -> bytes:
    """Return a request as JSON text; its prompt as prepared, if it was."""
    rest = compact(_without_prompt(request))
    return f'{rest[:-1]},"prompt_ids":{PREPARED.take(request.prompt_ids)}}}'.encode()


def _without_prompt(request: EngineRequest) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "sampling": _fields_of(request.sampling),
        "priority": request.priority,
    }


def request_from_wire(data: Any) -> EngineRequest:
    """Return the request that ``request_to_wire`` rendered; ``sampling`` needs ``max_tokens`` alone.

    Raises:
        RequestRefusedError: A field is unknown, missing or of the wrong kind.
    """
    try:
        fields = dict(data)
        request_id = RequestId(fields.pop("request_id"))
        sampling = Sampling(**fields.pop("sampling"))
        return EngineRequest(request_id=request_id, sampling=sampling, **fields)
    except (TypeError, ValueError, KeyError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else error
        message = f"this is no request for tokens: {reason}; it needs request_id, prompt_ids and sampling"
        raise RequestRefusedError(message) from error


def chunk_to_wire(chunk: TokenChunk, at: int | None = None) -> dict[str, Any]:
    """Return a chunk as plain data, without what is empty; ``at`` is how many tokens of the stream came before it, where that is told."""
    data: dict[str, Any] = {"token_ids": chunk.token_ids}
    if at is not None:
        data["at"] = at
    if chunk.logprobs:
        data["logprobs"] = chunk.logprobs
    if chunk.version is not None:
        data["version"] = str(chunk.version)
    if chunk.finish_reason is not None:
        data["finish_reason"] = chunk.finish_reason.value
    return data


def chunk_from_wire(data: Mapping[str, Any]) -> TokenChunk:
    """Return the chunk that ``chunk_to_wire`` rendered."""
    reason = data.get("finish_reason")
    return TokenChunk(
        token_ids=tuple(data["token_ids"]),
        logprobs=tuple(data.get("logprobs", ())),
        version=version_from_wire(data.get("version")),
        finish_reason=None if reason is None else FinishReason(reason),
    )


def chunk_after(data: Mapping[str, Any], num_seen: int) -> TokenChunk:
    """Return a chunk without the tokens that were in earlier ones, of which ``num_seen`` came.

    Raises:
        ValueError: Tokens between those and the chunk are missing.
    """
    chunk, at = chunk_from_wire(data), int(data.get("at", num_seen))
    if at > num_seen:
        message = f"the stream goes on at token {at} after {num_seen} tokens"
        raise ValueError(message)
    known = num_seen - at
    return (
        chunk if not known else attrs.evolve(chunk, token_ids=chunk.token_ids[known:], logprobs=chunk.logprobs[known:])
    )


def version_from_wire(text: str | None) -> WeightVersion | None:
    """Return the version that a text names; ``None`` for none."""
    return None if text is None else WeightVersion.parse(text)


def snapshot_to_wire(snapshot: EngineSnapshot) -> dict[str, Any]:
    """Return a reading as plain data, without its time: that is the reader's."""
    version = snapshot.weight_version
    data = attrs.asdict(snapshot, filter=attrs.filters.exclude("read_at_s", "weight_version"))
    return data | {"weight_version": None if version is None else str(version)}


def snapshot_from_wire(data: Mapping[str, Any], read_at_s: float) -> EngineSnapshot:
    """Return the reading that ``snapshot_to_wire`` rendered, as of the reader's own time."""
    names = ("num_running", "num_waiting", "kv_used_tokens", "kv_total_tokens")
    context = data.get("max_context_tokens")
    return EngineSnapshot(
        **{name: int(data[name]) for name in names},
        weight_version=version_from_wire(data["weight_version"]),
        is_paused=bool(data["is_paused"]),
        read_at_s=read_at_s,
        max_context_tokens=None if context is None else int(context),
    )


_SAMPLING = tuple(field.name for field in attrs.fields(Sampling))


def _fields_of(sampling: Sampling) -> dict[str, Any]:
    fields = {name: getattr(sampling, name) for name in _SAMPLING}
    return fields | {"stop_token_ids": list(sampling.stop_token_ids)}


def name_in(line: Mapping[str, Any]) -> str:
    """Return the name of the error that a line holds; empty for none."""
    return str(line.get("error", {}).get("type", ""))


def record_to_wire(record: attrs.AttrsInstance) -> dict[str, Any]:
    """Return a flat record as plain data; weight versions become text."""
    return {name: str(value) if isinstance(value, WeightVersion) else value for name, value in _fields(record)}


def _fields(record: attrs.AttrsInstance) -> list[tuple[str, Any]]:
    return [(field.name, getattr(record, field.name)) for field in attrs.fields(type(record))]

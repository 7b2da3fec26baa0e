"""The direct path: the pool decides where a turn runs, its caller streams from the engine itself.

One WebSocket carries all turns of a client process, as JSON arrays whose first item says what they are. Tokens of prompts do not
cross. Life cycle of a turn:

0. [POOL] ``session``, once a connection: what the ids of requests begin with that the client makes itself.
1. [CLIENT] ``submit``: its own id for the turn, and what routing needs to know of it. If it has begun the turn already where the trajectory
   was last (a head start), it says where, and of which weights it knows there.
2. [POOL] ``start``: an attempt, the engine and its address, the request's id, how many tokens are kept. It ends an earlier attempt. One with
   the id of the head start takes it over; ``stop`` ends it where no engine was chosen at once.
3. [CLIENT] streams from the engine; ``report`` brings the tokens, at most every ``REPORT_S``, and at once how the stream ended.
4. [CLIENT] gives its caller the result as soon as the engine ended the turn, before it reports.
5. [POOL] moves the turn (again 2), or ``settled``: what the turn came to. Only then the client forgets it.
6. [CLIENT] ``cancel``, or it is gone: [POOL] aborts at the engine, once.

Invariants:

* Reports are cumulative: each says from which token of the turn on it has news, so what is sent twice counts once.
* A client that connects again says which ``turns`` it has and submits them again. The pool knows them by their ids: it says where they
  are, or what they came to, and cancels the others.
* The pool chooses as if there were no head starts. Of what one has made nobody hears before the pool has taken it over.
* What a client says of its own path to an engine does not take that engine from others: a lost connection counts as a failure only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.backends.remote.wire import chunk_from_wire, chunk_to_wire, version_from_wire
from rose.pool.wire import constraint_from_plain, constraint_to_plain, from_plain, other_fields, to_plain
from rose.types import (
    EngineAddress,
    EngineId,
    FinishReason,
    Hop,
    RequestId,
    RouteReason,
    Sampling,
    TokenChunk,
    Turn,
    TurnResult,
    UnseenIds,
    VersionConstraint,
    VersionSpan,
    WeightVersion,
)

SUBMIT, START, REPORT, SETTLED, CANCEL, STOP = "submit", "start", "report", "settled", "cancel", "stop"
ALIVE, TURNS, SESSION = "alive", "turns", "session"
AHEAD = -1
"""The number of an attempt that is a head start."""
SESSION_HEADER = "X-Rose-Session"
PATH = "/v1/direct"
REPORT_S = 0.5
"""Longest time without a word of a client that has turns."""

_SENT = ("max_tokens", "stop_token_ids", "logprobs")
_OTHERS = tuple(field.name for field in attrs.fields(Turn) if field.name not in {"prompt_ids", "sampling", "versions"})


@attrs.frozen(kw_only=True)
class Start:
    """An attempt that a client is to make.

    Attributes:
        turn_id: The client's id of the turn.
        attempt: Its number; larger ones replace smaller ones.
        request_id: What the engine is to know the request by.
        engine_id: The engine, for the result's hops.
        reason: Why there.
        address: How to reach it; ``None``: through the pool.
        max_tokens: Most tokens to ask for.
        num_kept: Tokens of the turn that the pool has; the client drops what it has beyond.
        hops: Attempts before this one.
        run: Of the pool's weights.
        version: That the engine is believed to have.
        versions: Which ones the attempt may run on.
    """

    turn_id: str
    attempt: int
    request_id: RequestId
    engine_id: str
    reason: RouteReason
    address: EngineAddress | None
    max_tokens: int
    num_kept: int
    hops: tuple[Hop, ...]
    run: str | None
    version: WeightVersion | None
    versions: VersionConstraint


@attrs.frozen(kw_only=True)
class Report:
    """What a client says of an attempt.

    Attributes:
        turn_id: The client's id of the turn.
        attempt: Which attempt.
        start: How many tokens of the turn come before ``chunks``.
        chunks: Tokens.
        end: How the stream ended, if it did: an error as it crosses elsewhere.
    """

    turn_id: str
    attempt: int
    start: int
    chunks: Sequence[TokenChunk] = ()
    end: FinishReason | Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True)
class Ahead:
    """A head start, as a client submits it: where, and the last version that it heard of the engine's weights, which had no older ones then."""

    engine_id: EngineId
    version: WeightVersion | None


def ahead_id(prefix: str, turn_id: str) -> RequestId:
    """Return the id of the request of a turn's head start; both sides make it, so that a client names no request but its own."""
    return RequestId(f"{prefix}-{turn_id}")


def submit_to_wire(turn_id: str, turn: Turn, ahead: Ahead | None = None) -> list[Any]:
    """Return ``submit``: all of a turn that routing and accounts need, and its head start."""
    begun = None if ahead is None else [ahead.engine_id, None if ahead.version is None else str(ahead.version)]
    given = [(name, getattr(turn, name)) for name in _OTHERS]
    rest = {name: value if type(value) is str else to_plain(value) for name, value in given if value is not None}
    sampling = {name: getattr(turn.sampling, name) for name in _SENT}
    return [SUBMIT, turn_id, len(turn.prompt_ids), sampling, constraint_to_plain(turn.versions), rest, begun]


def submit_from_wire(message: list[Any]) -> tuple[str, Turn, Ahead | None]:
    """Return the client's id, the turn, its prompt unseen, and its head start.

    Raises:
        TypeError, ValueError, KeyError: It is none.
    """
    _, turn_id, num_prompt_tokens, sampling, versions, rest, begun = message
    if type(turn_id) is not str or type(num_prompt_tokens) is not int:
        reason = "an id and a number of tokens are needed"
        raise ValueError(reason)
    ahead = None if begun is None else Ahead(engine_id=begun[0], version=version_from_wire(begun[1]))
    unseen: Any = UnseenIds(num_prompt_tokens)
    constraint = constraint_from_plain(versions)
    turn = Turn(prompt_ids=unseen, sampling=Sampling(**sampling), versions=constraint, **other_fields(rest))
    return turn_id, turn, ahead


def start_to_wire(start: Start) -> list[Any]:
    """Return ``start``."""
    address: Any = None if start.address is None else [start.address.name, dict(start.address.options)]
    return [
        START,
        start.turn_id,
        start.attempt,
        start.request_id,
        start.engine_id,
        start.reason.value,
        address,
        start.max_tokens,
        start.num_kept,
        [to_plain(hop) for hop in start.hops],
        start.run,
        None if start.version is None else str(start.version),
        constraint_to_plain(start.versions),
    ]


def start_from_wire(message: list[Any]) -> Start:
    """Return what ``start_to_wire`` rendered."""
    _, turn_id, attempt, request_id, engine_id, reason, address, *asked, hops, run, version, versions = message
    max_tokens, num_kept = asked
    return Start(
        turn_id=turn_id,
        attempt=attempt,
        request_id=request_id,
        engine_id=engine_id,
        reason=RouteReason(reason),
        address=None if address is None else EngineAddress(name=address[0], options=tuple(address[1].items())),
        max_tokens=max_tokens,
        num_kept=num_kept,
        hops=tuple(from_plain(Hop, hop) for hop in hops),
        run=run,
        version=version_from_wire(version),
        versions=constraint_from_plain(versions),
    )


def report_to_wire(report: Report) -> list[Any]:
    """Return ``report``."""
    ended = report.end.value if isinstance(report.end, FinishReason) else report.end
    chunks = [chunk_to_wire(chunk) for chunk in report.chunks]
    return [REPORT, report.turn_id, report.attempt, report.start, chunks, ended]


def report_from_wire(message: list[Any]) -> Report:
    """Return what ``report_to_wire`` was given.

    Raises:
        TypeError, ValueError, KeyError: It is none.
    """
    _, turn_id, attempt, start, chunks, ended = message
    return Report(
        turn_id=turn_id,
        attempt=attempt,
        start=start,
        chunks=[chunk_from_wire(chunk) for chunk in chunks],
        end=FinishReason(ended) if isinstance(ended, str) else ended,
    )


def settled_to_wire(turn_id: str, outcome: TurnResult | Mapping[str, Any]) -> list[Any]:
    """Return ``settled``: a result without its tokens, which the client has, or an error as it crosses elsewhere."""
    if not isinstance(outcome, TurnResult):
        return [SETTLED, turn_id, dict(outcome)]
    summary = {
        "num_tokens": len(outcome.token_ids),
        "finish_reason": outcome.finish_reason.value,
        "versions": to_plain(outcome.versions),
        "hops": to_plain(outcome.hops),
    }
    return [SETTLED, turn_id, summary]


def result_from(summary: Mapping[str, Any], token_ids: list[int], logprobs: list[float]) -> TurnResult:
    """Return the result that a ``settled`` tells of, with the tokens that the client has."""
    num_tokens = int(summary["num_tokens"])
    return TurnResult(
        token_ids=tuple(token_ids[:num_tokens]),
        logprobs=tuple(logprobs[:num_tokens]),
        finish_reason=FinishReason(summary["finish_reason"]),
        versions=from_plain(tuple[VersionSpan, ...], summary["versions"]),
        hops=from_plain(tuple[Hop, ...], summary["hops"]),
    )

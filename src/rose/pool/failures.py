"""The errors that end turns, in words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rose.errors import (
    DeadlineExceededError,
    NoEngineError,
    StaleTrajectoryError,
    TurnFailedError,
    VersionUnavailableError,
)
from rose.policies.routing import WaitReason
from rose.pool.membership import Member
from rose.pool.turns import TurnRecord
from rose.types import WeightVersion

_MAX_NAMED = 8

WAITED_FOR = {
    WaitReason.NO_READY_ENGINE: "a ready engine",
    WaitReason.VERSION: "an engine with the weight version that it asks for",
    WaitReason.CIRCUIT: "an engine that was left alone after it failed or was busy",
    WaitReason.SLOTS: "a free slot on an engine (cap_per_engine)",
    WaitReason.KV: "room in an engine's KV memory",
}


def too_many_hops(record: TurnRecord) -> TurnFailedError:
    """Return the error of a turn that used up its attempts."""
    ends = Counter(hop.ended.value for hop in record.hops)
    last_error = f"; the last error: {record.last_error}" if record.last_error else ""
    message = (
        f"{_name(record)} was given up after {len(record.hops)} attempts "
        f"({', '.join(f'{count} {end}' for end, count in ends.items())}); see its hops{last_error}"
    )
    return TurnFailedError(message, tuple(record.hops))


def too_late(record: TurnRecord, doing: str) -> DeadlineExceededError:
    """Return the error of a turn whose deadline passed; ``doing`` says where it was."""
    message = (
        f"{_name(record)} was not done after {record.turn.deadline_s} s: "
        f"{len(record.token_ids)} of {record.turn.sampling.max_tokens} tokens after {len(record.hops)} attempts; {doing}"
    )
    return DeadlineExceededError(message)


def version_gone(record: TurnRecord, version: WeightVersion | None) -> VersionUnavailableError:
    """Return the error of a turn that asks for a version which every engine is past."""
    message = (
        f"{_name(record)} asks for {record.turn.versions}, but every engine is past that: the pool is at {version}; "
        "ask for a current version"
    )
    return VersionUnavailableError(message, tuple(record.hops))


def version_not_there(record: TurnRecord, version: WeightVersion | None) -> VersionUnavailableError:
    """Return the error of a turn that does not wait for its version."""
    message = (
        f"{_name(record)} asks for {record.versions} and does not wait for it, but no engine holds that: the pool is at {version}; "
        "ask again after the next sync"
    )
    error = VersionUnavailableError(message, tuple(record.hops))
    error.is_retryable = True
    return error


def too_stale(record: TurnRecord, version: WeightVersion | None, ahead: float) -> StaleTrajectoryError:
    """Return the error of a turn whose trajectory is further behind than it allows; ``ahead`` counts versions."""
    message = (
        f"{_name(record)} may be {record.turn.max_staleness} versions behind its oldest token (max_staleness), but the pool is at "
        f"{version}, {ahead:g} ahead of it; drop the trajectory"
    )
    return StaleTrajectoryError(message, tuple(record.hops))


def no_engine(record: TurnRecord, members: Iterable[Member], timeout_s: float | None) -> NoEngineError:
    """Return the error of a turn that waited through an outage of the engines."""
    states = [f"{m.engine_id} is {m.state.value}" + (f" ({m.why})" if m.why else "") for m in members]
    more = f" and {len(states) - _MAX_NAMED} more" if len(states) > _MAX_NAMED else ""
    named = "; ".join(states[:_MAX_NAMED]) + more if states else "the pool has none"
    kind = "dedicated engine" if record.is_dedicated_only else "engine"
    message = f"{_name(record)}: no {kind} took turns for {timeout_s} s (no_engine_timeout_s): {named}"
    return NoEngineError(message, tuple(record.hops))


def _name(record: TurnRecord) -> str:
    return f"turn of trajectory {record.turn.trajectory_id!r}"

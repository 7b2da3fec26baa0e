"""What became of each turn, on disk: which weights made which of its tokens, and where it was tried. One JSON object a line.

Give a ``TurnLog`` to a pool as ``on_event``, or call ``write`` from a loop; ``rose lineage`` reads the file. Prompts and tokens
are not in it. Invariant: a line is written whole, once, when its turn was delivered.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import attrs

from rose.errors import ConfigError
from rose.types import EngineId, FinishReason, Hop, HopEnd, RouteReason, Turn, TurnResult, VersionSpan, WeightVersion


@attrs.frozen(kw_only=True)
class RecordedTurn:
    """One turn of a file.

    Attributes:
        trajectory_id: Its trajectory; empty where the file does not say.
        turn: Its number within the trajectory, by the order of the file, from 0.
        group_id: Its group.
        num_tokens: Tokens that were made.
        finish_reason: Why it ended.
        versions: Which weights made which tokens.
        hops: Where it was tried.
    """

    trajectory_id: str
    turn: int
    group_id: str
    num_tokens: int
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    hops: tuple[Hop, ...]

    def version_of(self, token: int) -> WeightVersion | None:
        """Return what made a token (counted from 0 within the turn); ``None`` for weights of no published version.

        Raises:
            ConfigError: The turn has no such token.
        """
        if not 0 <= token < self.num_tokens:
            message = f"turn {self.turn} of trajectory {self.trajectory_id!r} has {self.num_tokens} tokens; there is no token {token}"
            raise ConfigError(message)
        return next((span.version for span in self.versions if span.start <= token < span.end), None)


@runtime_checkable
class DeliveredTurn(Protocol):
    """What a pool's event of a delivered turn has (``rose.pool.events.TurnFinished``)."""

    trajectory_id: str
    group_id: str
    num_tokens: int
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    hops: tuple[Hop, ...]


class TurnLog:
    """Appends turns to a file. A context manager; not for several threads at once.

    Args:
        path: The file; made where it is missing.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115 - kept open until close()
        except OSError as error:
            message = f"cannot write turns to {path}: {error.strerror}; give a file in a folder that can be written"
            raise ConfigError(message) from error

    def __call__(self, event: object) -> None:
        """Write an event of a pool if it is that of a delivered turn; as ``on_event``."""
        if isinstance(event, DeliveredTurn):
            self._write(event.trajectory_id, event.group_id, event.num_tokens, event)

    def write(self, turn: Turn, result: TurnResult) -> None:
        """Write a turn's result, where a loop records its turns itself."""
        self._write(turn.trajectory_id, turn.group_id, len(result.token_ids), result)

    def _write(self, trajectory_id: str, group_id: str, num_tokens: int, end: DeliveredTurn | TurnResult) -> None:
        record = {
            "trajectory_id": trajectory_id,
            "group_id": group_id,
            "num_tokens": num_tokens,
            "finish_reason": end.finish_reason.value,
            "versions": [[str(span.version), span.start, span.end] for span in end.versions],
            "hops": [[hop.engine_id, hop.reason.value, hop.num_tokens, hop.ended.value] for hop in end.hops],
        }
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the log."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


def read_turns(path: str | Path) -> Iterator[RecordedTurn]:
    """Yield the turns of a file: what ``TurnLog`` wrote, or results as JSON (``attrs.asdict`` of a ``TurnResult``), one or a list or a line each.

    A last line that was cut off is left out, as after a crash.

    Raises:
        ConfigError: The file cannot be read, or a line is no turn; names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read turns from {path}: {error}"
        raise ConfigError(message) from error
    numbers: defaultdict[str, int] = defaultdict(int)
    for line, data in _objects(path, text):
        try:
            turn = _turn(data, numbers[str(data.get("trajectory_id", ""))])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            message = f"{path}, line {line}: this is no turn with versions ({error!r}); TurnLog writes what is needed"
            raise ConfigError(message) from error
        numbers[turn.trajectory_id] += 1
        yield turn


def _objects(path: str | Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if whole is not None:
        yield from ((1, each) for each in (whole if isinstance(whole, list) else [whole]))
        return
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            message = f"{path}, line {number} is no JSON: {error}"
            raise ConfigError(message) from error


def _turn(data: Mapping[str, Any], number: int) -> RecordedTurn:
    spans = tuple(_span(each) for each in data["versions"])
    num_tokens = data["num_tokens"] if "num_tokens" in data else len(data["token_ids"])
    return RecordedTurn(
        trajectory_id=str(data.get("trajectory_id", "")),
        turn=number,
        group_id=str(data.get("group_id", "")),
        num_tokens=int(num_tokens),
        finish_reason=FinishReason(data["finish_reason"]),
        versions=spans,
        hops=tuple(_hop(each) for each in data.get("hops", ())),
    )


def _span(data: Sequence[Any] | Mapping[str, Any]) -> VersionSpan:
    version, start, end = (data["version"], data["start"], data["end"]) if isinstance(data, Mapping) else data
    named = WeightVersion(**version) if isinstance(version, Mapping) else WeightVersion.parse(version)
    return VersionSpan(version=named, start=int(start), end=int(end))


def _hop(data: Sequence[Any] | Mapping[str, Any]) -> Hop:
    names = ("engine_id", "reason", "num_tokens", "ended")
    engine_id, reason, num_tokens, ended = (data[name] for name in names) if isinstance(data, Mapping) else data
    return Hop(
        engine_id=EngineId(engine_id), reason=RouteReason(reason), num_tokens=int(num_tokens), ended=HopEnd(ended)
    )

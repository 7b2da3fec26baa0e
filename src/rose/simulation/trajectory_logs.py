"""Reader of one's own trajectories, and how groups are drawn from them.

JSON lines, one trajectory a line::

    {"turns": [{"prompt_tokens": 812, "output_tokens": 95, "env_s": 0.4}, ...], "group": "task-17"}

``prompt_tokens`` is the *whole* prompt of the turn, as engines report it (``usage.prompt_tokens``); what a turn adds is the
difference to the prompt and answer before it, at least one token (a chat template may drop old thoughts). Who has only the
added tokens writes ``new_tokens`` in its place. ``env_s`` is how long the environment took after the
turn; the last turn may leave it out. ``group`` is optional, but then on all lines or none. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rose.errors import ConfigError

LoggedTurn = tuple[int, int, float]
"""Prompt tokens added, output tokens, seconds of the environment after it."""

LoggedTrajectory = tuple[LoggedTurn, ...]

_PROMPT_FIELDS = ("prompt_tokens", "new_tokens")
_LONGEST_S = 1e6


@attrs.frozen(kw_only=True)
class TrajectoryLog:
    """Logged trajectories in groups, in the order of the file.

    Attributes:
        groups: None is empty, and no trajectory is without turns; one group of all when the file names none.
        has_groups: Whether the file names groups.
    """

    groups: tuple[tuple[LoggedTrajectory, ...], ...]
    has_groups: bool

    def draw_group(self, rng: np.random.Generator, size: int) -> list[LoggedTrajectory]:
        """Draw ``size`` trajectories; where the file names groups, all of one group.

        A larger group gives a choice without repetition; a smaller one is used whole and filled up by repetition.
        """
        if not self.has_groups:
            (pool,) = self.groups
            return [pool[i] for i in rng.integers(len(pool), size=size).tolist()]
        members = self.groups[int(rng.integers(len(self.groups)))]
        order = rng.permutation(len(members))[:size].tolist()
        order += rng.integers(len(members), size=size - len(order)).tolist()
        return [members[i] for i in order]


def read_log(path: str | Path) -> TrajectoryLog:
    """Read a file of logged trajectories.

    Raises:
        ConfigError: The file cannot be read, has no trajectory or a malformed line; one line that names the file, the line, the
            field and what to do.
    """
    path = Path(path)
    groups: dict[str | int | None, list[LoggedTrajectory]] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            group, turns = _parse(line)
            if groups and (group is None) != (None in groups):
                message = "group is on some lines only; give it on all or on none"
                raise ValueError(message)  # noqa: TRY301 - every fault of a line gets the same frame
        except ValueError as error:
            message = f"trajectory log {path}, line {number}: {error}"
            raise ConfigError(message) from error
        groups.setdefault(group, []).append(turns)
    if not groups:
        message = f"trajectory log {path}: no trajectories in it; one JSON object a line is expected"
        raise ConfigError(message)
    return TrajectoryLog(groups=tuple(map(tuple, groups.values())), has_groups=None not in groups)


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except UnicodeDecodeError as error:
        message = f"trajectory log {path}: not a text file ({error.reason}); JSON lines are expected"
        raise ConfigError(message) from error
    except OSError as error:
        message = (
            f"trajectory log {path}: cannot be read ({error.strerror or error}); check the path and its permissions"
        )
        raise ConfigError(message) from error


def _parse(line: str) -> tuple[str | int | None, LoggedTrajectory]:
    row = _json_object(line)
    group = row.get("group")
    if group is not None and (isinstance(group, bool) or not isinstance(group, str | int)):
        message = f"group is {group!r:.60}; give a string or an integer"
        raise ValueError(message)
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns:
        what = f"turns is {turns!r:.60}" if "turns" in row else "no turns"
        message = f"{what}; give a list with at least one turn, or remove the line"
        raise ValueError(message)
    return group, tuple(_added(_turn(turn, f"turns[{i}]", is_last=i == len(turns) - 1) for i, turn in enumerate(turns)))


def _json_object(line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        message = f"not JSON ({error.msg}, column {error.colno}); correct or remove the line"
        raise ValueError(message) from error
    except RecursionError as error:
        message = "nested too deeply; correct or remove the line"
        raise ValueError(message) from error
    if not isinstance(row, Mapping):
        message = "not a JSON object; correct or remove the line"
        raise ValueError(message)  # noqa: TRY004 - a malformed line is a value problem of the file
    return row


@attrs.frozen
class _Turn:
    where: str
    prompt: int
    is_whole: bool
    output: int
    env_s: float


def _turn(turn: object, where: str, *, is_last: bool) -> _Turn:
    if not isinstance(turn, Mapping):
        message = f"{where} is {turn!r:.60}; give an object with prompt_tokens, output_tokens and env_s"
        raise ValueError(message)  # noqa: TRY004 - a malformed line is a value problem of the file
    given = [name for name in _PROMPT_FIELDS if name in turn]
    if len(given) != 1:
        message = f"{where} has {' and '.join(given) or 'neither'}; give exactly one of {' and '.join(_PROMPT_FIELDS)}"
        raise ValueError(message)
    is_whole = given[0] == _PROMPT_FIELDS[0]
    return _Turn(
        where,
        _count(turn, given[0], where, at_least=int(is_whole)),
        is_whole,
        _count(turn, "output_tokens", where, at_least=1),
        _seconds(turn, "env_s", where, default=0.0 if is_last else None),
    )


def _count(turn: Mapping[str, Any], name: str, where: str, *, at_least: int) -> int:
    value = turn.get(name)
    if type(value) is not int or value < at_least:
        what = f"{where}.{name} is {value!r:.60}" if name in turn else f"{where} has no {name}"
        message = f"{what}; give a whole number of tokens, at least {at_least}, or remove the turn"
        raise ValueError(message)
    return value


def _seconds(turn: Mapping[str, Any], name: str, where: str, *, default: float | None) -> float:
    value = turn.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 <= value <= _LONGEST_S):
        what = f"{where}.{name} is {value!r:.60}" if name in turn else f"{where} has no {name}"
        message = f"{what}; give the seconds that the environment took, a number from 0 to {_LONGEST_S:g}"
        raise ValueError(message)
    return float(value)


def _added(turns: Iterable[_Turn]) -> Iterator[LoggedTurn]:
    """Turn whole prompts into what each turn adds."""
    before: _Turn | None = None
    for turn in turns:
        if before is not None and turn.is_whole != before.is_whole:
            message = f"{turn.where} mixes {' with '.join(_PROMPT_FIELDS)}; use one of them in all turns"
            raise ValueError(message)
        new = turn.prompt
        if before is not None and turn.is_whole:
            if turn.prompt < before.prompt:
                message = (
                    f"{turn.where}.prompt_tokens is {turn.prompt} after a turn of {before.prompt}, but whole prompts only "
                    "grow; if these are the tokens that each turn adds, name them new_tokens; if the history was "
                    "compacted, begin a new trajectory there"
                )
                raise ValueError(message)
            new = turn.prompt - before.prompt - before.output
        yield max(1, new), turn.output, turn.env_s
        before = turn

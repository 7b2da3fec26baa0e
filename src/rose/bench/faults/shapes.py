"""Trajectories with the shape of recorded ones: how many tokens come in before each answer, and how long that is. Pure.

The file is a list of ``{"turns": [["s", 1538], ["u", 17], ["a", 22], ...]}``: system prompt, user and tool messages and answers
with their numbers of tokens. What follows the last answer was never read and is left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import attrs

from rose.errors import ConfigError

_ROLES = "suta"
_ANSWER = "a"
_FIRST_TOKEN = 3


@attrs.frozen
class TurnShape:
    """New tokens that come in, then tokens of the answer."""

    num_new: int
    num_answer: int


TrajectoryShape = tuple[TurnShape, ...]


def read_shapes(path: str | Path, *, scale: float, longest: int) -> list[TrajectoryShape]:
    """Read a file of recorded turns.

    Args:
        path: The file.
        scale: Every number of tokens is multiplied by this; at least one token stays.
        longest: Most tokens of a trajectory; the turns that would go beyond are left out.

    Raises:
        ConfigError: The file cannot be read, or a trajectory in it is of another form or leaves no turn.
    """
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"recorded turns {path}: cannot be read ({error}); name a JSON file of trajectories"
        raise ConfigError(message) from error
    shapes = []
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        shape = _cut(_turns(row, f"recorded turns {path}, trajectory {number}", scale), longest)
        if not shape:
            message = f"recorded turns {path}, trajectory {number}: no turn fits into {longest} tokens; scale them down further"
            raise ConfigError(message)
        shapes.append(shape)
    return shapes


def _turns(row: object, where: str, scale: float) -> TrajectoryShape:
    turns, num_new = [], 0
    messages = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        message = f'{where}: expected {{"turns": [["u", 17], ["a", 22], ...]}} with roles s, u, t and a'
        raise ConfigError(message)
    for role, num_tokens in messages:
        scaled = max(1, round(scale * num_tokens))
        if role != _ANSWER:
            num_new += scaled
            continue
        turns.append(TurnShape(max(1, num_new), scaled))
        num_new = 0
    return tuple(turns)


def _is_message(message: object) -> bool:
    if not isinstance(message, list) or len(message) != 2:  # noqa: PLR2004 - role and number
        return False
    role, num_tokens = message
    return isinstance(role, str) and role in _ROLES and type(num_tokens) is int and num_tokens >= 0


def _cut(turns: TrajectoryShape, longest: int) -> TrajectoryShape:
    kept, num_tokens = [], 0
    for turn in turns:
        num_tokens += turn.num_new + turn.num_answer
        if num_tokens > longest:
            break
        kept.append(turn)
    return tuple(kept)


def new_tokens(trajectory: int, turn: int, number: int, *, vocab: int, seed: int) -> Sequence[int]:
    """Return what comes in before a turn: the same for the same trajectory, turn and seed, whatever was answered before."""
    rng = random.Random(f"{seed} {trajectory} {turn}")
    return [rng.randrange(_FIRST_TOKEN, vocab) for _ in range(number)]

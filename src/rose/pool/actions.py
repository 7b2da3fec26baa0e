"""What the sync core asks its shell to do, and what it is asked to do when its time comes."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable
from typing import Any

import attrs

from rose.errors import RoseError
from rose.pool.turns import Attempt, TurnRecord
from rose.types import TurnResult

TIME_EPSILON_S = 1e-9
"""Two times closer than this are the same; sums of floats do not end on the dot."""


@attrs.frozen(eq=False)
class StartAttempt:
    """Send the attempt's request and feed its chunks back."""

    attempt: Attempt


@attrs.frozen(eq=False)
class StopAttempt:
    """Abort the attempt's request if it was started, then report it as released."""

    attempt: Attempt


@attrs.frozen(eq=False)
class SettleTurn:
    """Give the caller of the turn its outcome."""

    record: TurnRecord
    outcome: TurnResult | RoseError


Action = StartAttempt | StopAttempt | SettleTurn


class TimerKind(enum.Enum):
    """What a timer is for; its subject is an attempt's number, a turn's number, a member, a turn's number, nothing."""

    STALL = "stall"
    DEADLINE = "deadline"
    CIRCUIT = "circuit"
    REST = "rest"
    OUTAGE = "outage"


class Timers:
    """A heap of due times. Entries name turns by number, so that none keeps a finished turn alive."""

    def __init__(self, is_needed: Callable[[TimerKind, Any], bool]) -> None:
        """Ask ``is_needed`` whether an entry still matters before it is shown or handed out."""
        self._is_needed = is_needed
        self._heap: list[tuple[float, int, TimerKind, Any]] = []
        self._order = itertools.count()

    def set(self, due_s: float, kind: TimerKind, subject: Any) -> None:
        """Add an entry."""
        heapq.heappush(self._heap, (due_s, next(self._order), kind, subject))

    def next_due_s(self) -> float | None:
        """Return when the earliest entry that matters is due."""
        while self._heap and not self._is_needed(self._heap[0][2], self._heap[0][3]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> tuple[TimerKind, Any] | None:
        """Take out the earliest entry if it is due."""
        due_s = self.next_due_s()
        if due_s is None or due_s > now_s + TIME_EPSILON_S:
            return None
        _, _, kind, subject = heapq.heappop(self._heap)
        return kind, subject

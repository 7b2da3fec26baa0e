"""How many borrowed engines a job wants now: what its turns need, ahead of the peaks that it announced or had before. Pure.

A *phase* is a time in which the job has trajectories under way; it is over once there was none for ``idle_giveback_s``. So a loop whose
steps follow each other closely has one long phase, and one that trains for longer between them a phase a step.

Invariants:

* More is wanted at once, less slowly: what was needed at any look of the last ``idle_giveback_s`` is wanted still.
* As long as no phase was ever seen to its end nothing is known, and a phase that begins wants every engine there is; later ones want what
  the last few needed at their peaks. So do those that are about to begin, by announcement or by a regular pause, as long before as an
  engine takes to be ready.
* Who has to ask for more asks at once for what it has used before: trajectories that a loop starts only once there are slots are not seen.
* A number here is a wish. Which engines are in use, and so are not given back whatever is wanted, the borrower knows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import attrs

from rose import checks

_MOST_ANNOUNCED = 64
_MOST_UNLIKE = 2.0
_EPSILON = 1e-9


@attrs.frozen(kw_only=True)
class DemandConfig:
    """How a job's demand for borrowed engines is followed.

    Attributes:
        idle_giveback_s: An engine that was not used for this long, and is not needed, is given back.
        fill_fraction: Share of all slots that is to be taken; an engine that is less full is faster for each turn.
        num_phases: Of how many of the last phases the peaks and pauses are remembered.
        look_s: Between two looks at the pool.
        env_s: A trajectory that had no turn for this long is taken to be over; until then its environment is at work.
    """

    idle_giveback_s: float = attrs.field(default=30.0, validator=checks.number(above=0))
    fill_fraction: float = attrs.field(default=0.6, validator=checks.number(above=0, at_most=1))
    num_phases: int = attrs.field(default=4, validator=checks.integer(1))
    look_s: float = attrs.field(default=1.0, validator=checks.number(above=0))
    env_s: float = attrs.field(default=10.0, validator=checks.number(at_least=0))


@attrs.frozen(kw_only=True)
class Load:
    """A pool's load at one look.

    Attributes:
        num_trajectories: Trajectories under way; each has one turn at a time, waits with it, or for its environment.
        num_own_slots: How many turns the job's own engines take at a time.
        num_slots: And one borrowed engine.
        num_used: Borrowed engines that have turns.
        num_held: Borrowed engines whose devices the job holds.
    """

    num_trajectories: int
    num_own_slots: float
    num_slots: float
    num_used: int = 0
    num_held: int = 0

    def needed(self, num_trajectories: float, fill_fraction: float) -> float:
        """Return how many borrowed engines ``num_trajectories`` at a time need."""
        lacking = num_trajectories / fill_fraction - self.num_own_slots
        return math.inf if math.isinf(lacking) else float(max(0, math.ceil(lacking / self.num_slots - _EPSILON)))


@attrs.frozen
class Announcement:
    """About ``num_trajectories`` trajectories begin at ``at_s``."""

    num_trajectories: int
    at_s: float


@attrs.define
class Announcements:
    """What a job said of its demand. What it says for a time replaces what it said for that time and later."""

    _entries: list[Announcement] = attrs.field(factory=list)

    def add(self, announcement: Announcement) -> None:
        """Take one more in."""
        kept = [entry for entry in self._entries if entry.at_s < announcement.at_s]
        self._entries = [*kept, announcement][-_MOST_ANNOUNCED:]

    def peak(self, from_s: float, to_s: float) -> int:
        """Return the largest number announced for a time in between, 0 when there is none."""
        return max((entry.num_trajectories for entry in self._entries if from_s <= entry.at_s <= to_s), default=0)


@attrs.define(kw_only=True)
class _Phase:
    """A phase: when it was last seen at work, the most engines that it needed or used."""

    last_s: float
    peak: float = 0.0


class DemandTracker:
    """Follows one job's demand from look to look. Looks come in the order of time, at any distance."""

    def __init__(self, config: DemandConfig | None = None) -> None:
        """Begin with nothing known."""
        self.config = config or DemandConfig()
        self._recent: deque[tuple[float, float]] = deque()  # (when, needed), the needs falling
        self._phase: _Phase | None = None
        self._begun_s = -math.inf
        self._ended_s: float | None = None
        self._peaks: deque[float] = deque(maxlen=self.config.num_phases)
        self._pauses_s: deque[float] = deque(maxlen=self.config.num_phases)

    def begin(self, now_s: float) -> None:
        """Note that the job is about to have trajectories, as it does when it begins to borrow."""
        self._begun_s = now_s

    def note(self, load: Load, now_s: float) -> None:
        """Take in a look."""
        phase, hold_s = self._phase, self.config.idle_giveback_s
        if phase is not None and now_s - phase.last_s >= hold_s:
            self._peaks.append(phase.peak)
            self._ended_s = phase.last_s
            phase = self._phase = None
        needed = load.needed(load.num_trajectories, self.config.fill_fraction)
        while self._recent and self._recent[-1][1] <= needed:
            self._recent.pop()
        self._recent.append((now_s, needed))
        while self._recent[0][0] < now_s - hold_s:
            self._recent.popleft()
        if not load.num_trajectories:
            return
        if phase is None:
            if self._ended_s is not None:
                self._pauses_s.append(now_s - self._ended_s)
            phase = self._phase = _Phase(last_s=now_s)
            self.begin(now_s)
        phase.last_s = now_s
        phase.peak = max(phase.peak, needed, load.num_used)

    def wanted(
        self, load: Load, now_s: float, *, ready_s: float = 0.0, announced: Announcements | None = None
    ) -> float:
        """Return how many borrowed engines the job wants now; infinite: all there are.

        Args:
            load: The look that was noted last.
            now_s: The time.
            ready_s: From asking for a device until its engine takes turns: activation, and catching up with the weights.
            announced: What the job said of its demand.
        """
        config, hold_s = self.config, self.config.idle_giveback_s
        needed = max((each for _, each in self._recent), default=0.0)
        if needed > load.num_held:
            needed = max(needed, self._learned(0.0))
        starts_s = [self._begun_s] + ([] if (next_s := self.next_phase_s()) is None else [next_s])
        if any(start_s - ready_s <= now_s < start_s + hold_s for start_s in starts_s):
            needed = max(needed, self._learned(math.inf))
        told = Announcements() if announced is None else announced
        return max(needed, load.needed(told.peak(now_s - hold_s, now_s + ready_s), config.fill_fraction))

    def next_phase_s(self) -> float | None:
        """Return when the next phase begins, if there is none now and the pauses before were alike; the shortest of them counts."""
        if self._phase is not None or self._ended_s is None or not self._pauses_s:
            return None
        shortest_s = min(self._pauses_s)
        return self._ended_s + shortest_s if max(self._pauses_s) <= _MOST_UNLIKE * shortest_s else None

    def _learned(self, unknown: float) -> float:
        """Return the largest peak of the last phases; ``unknown`` before the first was over, unless this one knows more."""
        ended = max(self._peaks, default=unknown)
        return ended if self._phase is None else max(ended, self._phase.peak)


@attrs.frozen(kw_only=True)
class LoanYield:
    """What came of one loan: attempts of turns, how many of them stalled, tokens, seconds with turns in hand."""

    num_attempts: int = 0
    num_stalled: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second in which it had turns; 0 where it had none."""
        return self.num_tokens / self.busy_s if self.busy_s > 0 else 0.0


_STALLED_OFTEN = 0.25
_SLOW = 0.5
_FAIR_TRIAL_S = 5.0


def poor_loans(yields: Sequence[LoanYield | None]) -> list[bool]:
    """Tell which engines to ask for last, by what came of the last loan of each (``None``: it had none).

    Those that had turns for some seconds and made no token, those whose turns stalled often (twice or more, and a quarter of all), and
    those that were less than half as fast as the median of all.
    """
    rates = sorted(each.tokens_per_s for each in yields if each is not None and each.num_tokens)
    typical = rates[len(rates) // 2] if rates else 0.0

    def is_poor(loan: LoanYield | None) -> bool:
        if loan is None or not loan.num_attempts:
            return False
        is_stalling = loan.num_stalled > 1 and loan.num_stalled >= _STALLED_OFTEN * loan.num_attempts
        is_slow = loan.busy_s >= _FAIR_TRIAL_S and loan.tokens_per_s < _SLOW * typical
        is_useless = loan.busy_s >= _FAIR_TRIAL_S and not loan.num_tokens
        return is_useless or is_slow or is_stalling

    return [is_poor(loan) for loan in yields]

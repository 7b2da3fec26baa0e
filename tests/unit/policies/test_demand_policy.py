"""How many borrowed engines a job wants: at once more, slowly less, ahead of peaks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.policies.demand import (
    Announcement,
    Announcements,
    DemandConfig,
    DemandTracker,
    Load,
    LoanYield,
    poor_loans,
)

HOLD_S, READY_S = 30.0, 6.0
CONFIG = DemandConfig(idle_giveback_s=HOLD_S, fill_fraction=0.8)
SLOTS = 16


def load(num_turns: int, *, num_used: int = 0, num_held: int = 0, num_own: int = 4) -> Load:
    return Load(
        num_trajectories=num_turns, num_own_slots=num_own * SLOTS, num_slots=SLOTS, num_used=num_used, num_held=num_held
    )


@attrs.define
class Job:
    """A job that is looked at every second."""

    tracker: DemandTracker = attrs.field(factory=lambda: DemandTracker(CONFIG))
    announced: Announcements = attrs.field(factory=Announcements)
    now_s: float = 0.0
    wants: list[float] = attrs.field(factory=list)

    def run(self, duration_s: float, num_turns: int, *, num_used: int = 0, num_held: int = 0) -> list[float]:
        """Let time pass at a constant load; returns what was wanted at each look."""
        wants = []
        for _ in range(round(duration_s)):
            self.now_s += 1.0
            now = load(num_turns, num_used=num_used, num_held=num_held)
            self.tracker.note(now, self.now_s)
            wants.append(self.tracker.wanted(now, self.now_s, ready_s=READY_S, announced=self.announced))
        self.wants += wants
        return wants


def seen(*steps: tuple[float, int]) -> Job:
    """Return a job that had these phases: seconds, turns."""
    job = Job()
    for duration_s, num_turns in steps:
        job.run(duration_s, num_turns)
    return job


def test_needs_are_whole_engines_beyond_the_jobs_own_before_these_are_full() -> None:
    assert [load(turns).needed(turns, 0.8) for turns in (0, 51, 52, 64, 65, 128)] == [0, 0, 1, 1, 2, 6]
    assert load(0, num_own=0).needed(1, 1.0) == 1
    assert load(0).needed(math.inf, 0.8) == math.inf


def test_a_job_of_which_nothing_is_known_wants_all_at_first_and_then_what_it_needs() -> None:
    wants = Job().run(40, 60)
    assert wants[:30] == [math.inf] * 30
    assert wants[31:] == [1] * 9


def test_more_is_wanted_at_once_and_less_only_after_the_time_of_idleness() -> None:
    job = seen((60, 40))
    assert job.run(1, 128) == [6]
    wants = job.run(40, 40)
    assert wants[:30] == [6] * 30
    assert wants[31:] == [0] * 9


def test_short_lulls_change_nothing() -> None:
    job = seen((60, 128))
    for _ in range(5):
        assert set(job.run(20, 30)) == {6}
        assert set(job.run(5, 128)) == {6}


def test_a_phase_that_begins_wants_what_the_last_ones_needed_or_used() -> None:
    job = seen((60, 128), (100, 0))
    assert job.run(1, 3) == [6]
    job = Job()
    job.run(60, 60, num_used=9)
    job.run(200, 0)
    assert job.run(1, 60) == [9], "it used more than slots alone said"
    job.run(200, 30)
    for _ in range(CONFIG.num_phases):
        job.run(100, 0)
        job.run(60, 10)
    job.run(100, 0)
    assert job.run(1, 10) == [0], "what was long ago is forgotten"


def test_a_regular_pause_is_foreseen_by_the_time_that_an_engine_takes() -> None:
    job = seen((60, 128), (100, 0), (60, 128))
    wants = job.run(200, 0)
    asked = [i + 1 for i, wanted in enumerate(wants) if wanted and i > HOLD_S]
    assert asked[0] == 101 - READY_S, "the pause before was 101 looks long"
    assert len(asked) == READY_S + HOLD_S, "and once it did not come, no more"


def test_pauses_that_are_unlike_foretell_nothing() -> None:
    job = seen((60, 128), (100, 0), (60, 128), (300, 0), (60, 128))
    assert set(job.run(400, 0)[31:]) == {0}


def test_close_steps_are_one_phase() -> None:
    job = seen(*[(60, 128), (20, 0)] * 3)
    assert set(job.wants[31:]) == {6}
    assert job.tracker.next_phase_s() is None


def test_who_needs_more_than_it_holds_asks_for_what_it_used_before() -> None:
    job = Job()
    job.run(60, 256, num_used=12, num_held=12)
    job.run(60, 20, num_held=2)
    assert job.run(1, 64, num_held=0) == [16], "256 turns needed that much"
    job = Job()
    job.run(60, 100, num_used=12, num_held=12)
    job.run(60, 20, num_held=2)
    assert job.run(1, 64, num_held=1) == [1], "it needs no more than it has"


def test_announced_demand_is_asked_for_ahead_and_given_up_if_it_does_not_come() -> None:
    job = seen((60, 10), (100, 0))
    job.announced.add(Announcement(128, job.now_s + 50))
    wants = job.run(120, 0)
    asked = [i + 1 for i, wanted in enumerate(wants) if wanted]
    assert (asked[0], asked[-1]) == (50 - READY_S, 50 + HOLD_S)
    assert {wants[i - 1] for i in asked} == {6}


def test_what_is_announced_replaces_what_was_said_for_later() -> None:
    told = Announcements()
    for number, at_s in ((10, 5.0), (20, 9.0), (7, 8.0)):
        told.add(Announcement(number, at_s))
    assert [told.peak(0, 5), told.peak(6, 20), told.peak(0, 20), told.peak(10, 20)] == [10, 7, 10, 0]
    for i in range(1000):
        told.add(Announcement(1, 10.0 + i))
    assert len(told._entries) <= 64


def test_a_begin_wants_what_was_needed_before() -> None:
    job = seen((60, 128), (100, 0))
    job.tracker.begin(job.now_s)
    assert job.run(1, 0) == [6]


def looks(draw_turns: Iterable[int]) -> Job:
    job = Job()
    for num_turns in draw_turns:
        job.run(1, num_turns)
    return job


@given(st.lists(st.integers(0, 300), min_size=1, max_size=120))
def test_never_less_than_the_need_of_the_last_while_nor_more_than_was_ever_needed(turns: list[int]) -> None:
    job = looks(turns)
    needs = [load(n).needed(n, CONFIG.fill_fraction) for n in turns]
    for i, wanted in enumerate(job.wants):
        assert wanted >= max(needs[max(0, i - 29) : i + 1])
        assert wanted == math.inf or wanted <= max(needs[: i + 1])


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_a_job_that_ends_wants_nothing_in_the_end(turns: list[int]) -> None:
    job = looks(turns)
    job.run(400, 0)
    assert job.wants[-1] == 0


YIELD = LoanYield(num_attempts=20, num_tokens=1000, busy_s=10.0)


@pytest.mark.parametrize(
    ("loan", "is_poor"),
    [
        (None, False),
        (LoanYield(), False),
        (YIELD, False),
        (attrs.evolve(YIELD, num_tokens=0), True),
        (attrs.evolve(YIELD, num_tokens=0, busy_s=1.0), False),
        (attrs.evolve(YIELD, num_stalled=5), True),
        (attrs.evolve(YIELD, num_stalled=4), False),
        (attrs.evolve(YIELD, num_attempts=1, num_stalled=1), False),
        (attrs.evolve(YIELD, num_tokens=499), True),
        (attrs.evolve(YIELD, num_tokens=501), False),
    ],
)
def test_engines_that_were_useless_stalling_or_slow_are_asked_for_last(
    loan: LoanYield | None, *, is_poor: bool
) -> None:
    assert poor_loans([YIELD, loan, YIELD])[1] is is_poor

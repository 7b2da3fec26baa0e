"""Which turns of a client begin before the pool has answered."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from rose.pool import direct
from rose.pool.head_starts import HeadStarts
from rose.types import (
    AnyVersion,
    AtLeast,
    EngineAddress,
    Exactly,
    RequestId,
    RouteReason,
    Sampling,
    Turn,
    VersionConstraint,
    WeightVersion,
)

V3 = WeightVersion("r", 3)
LAST = direct.Start(
    turn_id="1",
    attempt=9,
    request_id=RequestId("p-9"),
    engine_id="e1",
    reason=RouteReason.BORROWED,
    address=EngineAddress(name="remote", options=(("url", "http://one"),)),
    max_tokens=4,
    num_kept=2,
    hops=(),
    run="r",
    version=V3,
    versions=AnyVersion(),
)


def turn(trajectory_id: str = "t", **options: Any) -> Turn:
    return Turn(
        trajectory_id=trajectory_id, group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=6), **options
    )


def after(*names: str, max_trajectories: int = 8, **changes: Any) -> HeadStarts:
    known = HeadStarts(max_trajectories=max_trajectories)
    known.prefix = "s"
    known.hear(attrs.evolve(LAST, **changes))
    for name in names:
        known.note(name, LAST.engine_id)
    return known


def test_a_trajectory_begins_where_it_was() -> None:
    known = after("t")
    start = known.guess("7", turn(versions=AtLeast(3)))
    assert start is not None
    assert (start.engine_id, start.address, start.version) == ("e1", LAST.address, V3)
    assert (start.turn_id, start.request_id, start.attempt) == ("7", "s-7", direct.AHEAD)
    assert (start.max_tokens, start.num_kept, start.versions) == (6, 0, AtLeast(3))


def test_what_the_pool_said_last_of_an_engine_counts_for_all_its_trajectories() -> None:
    known, again = after("t"), EngineAddress(name="remote", options=(("url", "http://two"),))
    known.hear(attrs.evolve(LAST, engine_id="e2", version=WeightVersion("r", 5)))
    known.hear(attrs.evolve(LAST, address=again, version=WeightVersion("r", 4)))
    start = known.guess("7", turn(versions=AtLeast(4)))
    assert start is not None
    assert (start.address, start.version) == (again, WeightVersion("r", 4))


@pytest.mark.parametrize("versions", [AtLeast(4), Exactly(2)])
def test_weights_that_the_turn_may_not_have_are_not_asked(versions: VersionConstraint) -> None:
    assert after("t").guess("7", turn(versions=versions)) is None


def test_it_is_not_guessed_what_is_not_known() -> None:
    assert after("t").guess("7", turn("other")) is None
    assert after("t", address=None).guess("7", turn()) is None
    strangers = after("t")
    strangers.prefix = None
    assert strangers.guess("7", turn()) is None
    twice = after("t")
    assert twice.guess("7", turn()) is not None
    assert twice.guess("8", turn()) is None  # its last turn is the seventh now, and did not end


def test_only_the_last_trajectories_are_remembered() -> None:
    known = after("a", "b", "a", "c", max_trajectories=2)
    assert [name for name in "abc" if known.guess("7", turn(name))] == ["a", "c"]
    assert after("a", max_trajectories=0).guess("7", turn("a")) is None


def test_who_is_mostly_wrong_guesses_rarely_until_right_again() -> None:
    known = after()

    def share(num: int, *, is_hit: bool) -> float:
        num_guesses = 0
        for _ in range(num):
            known.note("t", LAST.engine_id)
            if known.guess("7", turn()) is not None:
                num_guesses += 1
                known.judge(is_hit=is_hit)
        return num_guesses / num

    assert share(50, is_hit=True) == 1
    assert share(320, is_hit=False) < 0.1
    assert 0 < share(32, is_hit=False) < 0.1
    share(200, is_hit=True)
    assert share(50, is_hit=True) == 1

"""Moves at turn boundaries: by what is left, what a token takes, and the prompt to compute anew."""

from __future__ import annotations

import attrs
import pytest

from rose.policies.migration import gain_s, remaining_tokens
from rose.policies.routing import (
    Assign,
    Circuit,
    EngineState,
    EngineView,
    RoutingConfig,
    RoutingIndex,
    RoutingRule,
    TurnView,
    Wait,
)
from rose.types import AnyVersion, EngineId, EngineKind, HopEnd, RouteReason

CONFIG = RoutingConfig()
HERE = EngineView(
    engine_id=EngineId("here"),
    kind=EngineKind.BORROWED,
    state=EngineState.READY,
    pace_s=0.02,
    idle_s=0.02,
    prefill_s=0.0001,
)


def at_pace(view: EngineView, pace_s: float) -> EngineView:
    """Return a view of an engine as fast as that, with whatever turns."""
    return attrs.evolve(view, pace_s=pace_s, idle_s=pace_s)


THERE = at_pace(attrs.evolve(HERE, engine_id=EngineId("there"), kind=EngineKind.DEDICATED), 0.01)
TURN = TurnView(
    versions=AnyVersion(),
    num_prompt_tokens=10_000,
    num_new_tokens=100,
    num_left_tokens=1000.0,
    affinity=EngineId("here"),
)
STAY = Assign(EngineId("here"), RouteReason.AFFINITY)
MOVE = Assign(EngineId("there"), RouteReason.MIGRATED)


def choose(*views: EngineView, turn: TurnView = TURN, config: RoutingConfig = CONFIG) -> Assign | Wait:
    index = RoutingIndex(config)
    for view in views:
        index.put(view)
    return index.choose(turn)


def test_a_trajectory_moves_when_what_is_left_and_its_prompt_take_clearly_less_elsewhere() -> None:
    assert gain_s(CONFIG, TURN, HERE.load, THERE.load) == pytest.approx(20.0 - (10.0 + 1.0))
    assert choose(HERE, THERE) == MOVE


def test_what_would_be_gained_by_less_than_the_hysteresis_is_left() -> None:
    little = at_pace(THERE, 0.0175)  # 20 s here; 17.5 + 1 s there is 7.5 % less
    assert choose(HERE, little, config=attrs.evolve(CONFIG, hysteresis_fraction=0.1)) == STAY
    assert choose(HERE, little) == MOVE


def test_a_prompt_that_many_would_wait_for_is_not_computed_elsewhere() -> None:
    """The move gains 9 s, and holds up everyone there for 1 s, those included that will soon be back."""
    assert choose(HERE, attrs.evolve(THERE, num_in_flight=8)) == MOVE
    assert choose(HERE, attrs.evolve(THERE, num_in_flight=8, num_seats=2)) == STAY


def test_a_young_trajectory_stays_because_its_prompt_costs_more_than_it_has_left() -> None:
    assert choose(HERE, THERE, turn=attrs.evolve(TURN, num_left_tokens=100.0)) == STAY
    trifles = attrs.evolve(CONFIG, min_gain_s=0.0)
    assert (
        choose(HERE, THERE, turn=attrs.evolve(TURN, num_left_tokens=100.0, num_prompt_tokens=1000), config=trifles)
        == MOVE
    )


def test_nobody_moves_for_a_moment() -> None:
    assert choose(HERE, THERE, turn=attrs.evolve(TURN, num_left_tokens=100.0, num_prompt_tokens=1000)) == STAY


def test_a_fast_engine_is_left_to_the_trajectory_that_has_the_most_left() -> None:
    """Joining would slow the one that the step waits for."""
    busy = attrs.evolve(THERE, most_left_tokens=5000.0, slope_s=2e-7)
    assert choose(HERE, busy) == STAY
    assert choose(HERE, busy, turn=attrs.evolve(TURN, num_left_tokens=20_000.0)) == MOVE


def test_a_trajectory_makes_room_for_one_with_much_more_left() -> None:
    """It is slower itself where it goes, but the one that the step waits for is faster."""
    shared = at_pace(attrs.evolve(HERE, kind=EngineKind.DEDICATED, slope_s=1e-6, most_left_tokens=5000.0), 0.01)
    slower = at_pace(attrs.evolve(THERE, kind=EngineKind.BORROWED, slope_s=1e-6), 0.015)
    assert choose(shared, slower) == MOVE
    assert choose(attrs.evolve(shared, most_left_tokens=0.0), slower) == STAY


def test_a_trajectory_joins_one_that_will_soon_be_done_and_has_the_engine_to_itself_from_then_on() -> None:
    slower, shared = at_pace(HERE, 0.015), attrs.evolve(THERE, pace_s=0.014, idle_s=0.008)
    soon = attrs.evolve(shared, most_left_tokens=200.0)
    assert gain_s(CONFIG, TURN, slower, soon) == pytest.approx(15.0 - (0.014 * 200 + 0.008 * 800 + 1.0))
    assert choose(slower, soon) == MOVE
    assert choose(slower, attrs.evolve(shared, most_left_tokens=1000.0)) == STAY


def test_a_short_turn_does_not_queue_behind_a_long_prompt() -> None:
    blocked = at_pace(attrs.evolve(HERE, num_waiting_prompt_tokens=60_000), 0.01)
    turn = attrs.evolve(TURN, num_prompt_tokens=500, num_left_tokens=50.0)
    assert choose(blocked, THERE, turn=turn) == MOVE
    assert choose(blocked, attrs.evolve(THERE, num_waiting_prompt_tokens=60_000), turn=turn) == STAY


def test_the_better_of_the_first_dedicated_and_the_first_borrowed_engine_is_taken() -> None:
    lent = at_pace(attrs.evolve(THERE, engine_id=EngineId("lent"), kind=EngineKind.BORROWED), 0.005)
    assert choose(HERE, THERE, lent) == Assign(EngineId("lent"), RouteReason.MIGRATED)
    assert choose(HERE, THERE, at_pace(lent, 0.012)) == MOVE


def test_a_turn_that_an_engine_gave_up_goes_back_to_its_own_without_a_comparison() -> None:
    turn = attrs.evolve(TURN, moved_by=HopEnd.EVICTED, avoid=frozenset({EngineId("x")}))
    assert choose(HERE, THERE, turn=turn) == Assign(EngineId("here"), RouteReason.REROUTED_EVICTED)


def test_the_published_rule_never_leaves_an_engine_that_takes_the_turn() -> None:
    assert choose(HERE, THERE, config=attrs.evolve(CONFIG, rule=RoutingRule.PAPER)) == STAY


def test_no_trajectory_begins_on_a_slow_engine_while_there_is_a_dedicated_one() -> None:
    slow = attrs.evolve(HERE, is_slow=True)
    full = attrs.evolve(THERE, num_in_flight=CONFIG.cap_per_engine)
    new = attrs.evolve(TURN, affinity=None)
    assert not isinstance(choose(slow, full, turn=new), Assign)
    assert choose(slow, turn=new) == Assign(EngineId("here"), RouteReason.BORROWED)
    broken = attrs.evolve(full, circuit=Circuit.OPEN)
    assert choose(slow, broken, turn=new) == Assign(EngineId("here"), RouteReason.BORROWED)
    assert choose(slow, full) == STAY  # one that is there goes on
    assert choose(attrs.evolve(slow, is_slow=False), full, turn=new) == Assign(EngineId("here"), RouteReason.BORROWED)


def test_what_is_left_follows_progress_and_ends_with_the_context() -> None:
    config = attrs.evolve(CONFIG, progress_factor=1.0)
    assert remaining_tokens(config, num_made=0, num_context=500) == 0
    assert remaining_tokens(config, num_made=800, num_context=2000) == 800
    limited = attrs.evolve(config, max_context_tokens=3000)
    assert remaining_tokens(limited, num_made=800, num_context=2000) == pytest.approx(400)
    assert remaining_tokens(limited, num_made=800, num_context=1000) == 800
    assert remaining_tokens(limited, num_made=800, num_context=4000) == 0


# Case S01: sessions pile up on one engine; before any pace is known the load gap decides.


def place_sessions(loads: dict[str, int], num_sessions: int, margin: int) -> tuple[dict[str, int], int]:
    """Send one turn of 60k tokens for each session of engine ``e0``; returns loads and re-computed prompt tokens."""
    index = RoutingIndex(RoutingConfig(cap_per_engine=64, load_margin=margin))
    views = {
        name: EngineView(
            engine_id=EngineId(name), kind=EngineKind.DEDICATED, state=EngineState.READY, num_in_flight=load
        )
        for name, load in loads.items()
    }
    for view in views.values():
        index.put(view)
    num_moved_tokens = 0
    for _ in range(num_sessions):
        turn = attrs.evolve(TURN, affinity=EngineId("e0"), num_prompt_tokens=60_000)
        decision = index.choose(turn)
        assert isinstance(decision, Assign)
        if decision.engine_id != "e0":
            assert decision.reason is RouteReason.REBALANCED
            num_moved_tokens += turn.num_prompt_tokens
        view = views[decision.engine_id]
        views[decision.engine_id] = attrs.evolve(view, num_in_flight=view.num_in_flight + 1)
        index.put(views[decision.engine_id])
    return {name: view.num_in_flight for name, view in views.items()}, num_moved_tokens


def test_s01_sessions_move_until_the_load_gap_is_within_the_margin() -> None:
    loads, num_moved_tokens = place_sessions(dict.fromkeys(("e0", "e1", "e2", "e3"), 0), num_sessions=8, margin=2)
    assert sum(loads.values()) == 8
    assert max(loads.values()) - min(loads.values()) <= 2
    assert num_moved_tokens == 60_000 * (8 - loads["e0"])
    assert num_moved_tokens > 0


def test_s01_a_gap_of_one_moves_nothing() -> None:
    loads, num_moved_tokens = place_sessions({"e0": 1, "e1": 0, "e2": 0, "e3": 0}, num_sessions=1, margin=2)
    assert loads["e0"] == 2
    assert num_moved_tokens == 0

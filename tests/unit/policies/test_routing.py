from __future__ import annotations

import math

import attrs
import pytest

from rose.policies.routing import (
    Assign,
    Circuit,
    EngineLoad,
    EngineState,
    EngineView,
    RoutingConfig,
    RoutingIndex,
    TurnView,
    Wait,
    WaitReason,
)
from rose.types import AnyVersion, AtLeast, EngineId, EngineKind, Exactly, HopEnd, RouteReason, WeightVersion

TURN = TurnView(versions=AnyVersion(), num_prompt_tokens=100, num_new_tokens=50)


def engine(name: str, **changes) -> EngineView:
    view = EngineView(engine_id=EngineId(name), kind=EngineKind.DEDICATED, state=EngineState.READY)
    return attrs.evolve(view, **changes)


def borrowed(name: str, **changes) -> EngineView:
    return engine(name, kind=EngineKind.BORROWED, **changes)


def choose(*views: EngineView, turn: TurnView = TURN, cap: int = 4, run: str | None = None):
    index = RoutingIndex(RoutingConfig(cap_per_engine=cap))
    index.run = run
    for view in views:
        index.put(view)
    return index.choose(turn)


def test_dedicated_engines_come_before_borrowed_ones():
    views = (borrowed("b"), engine("d", num_in_flight=3))
    assert choose(*views) == Assign(EngineId("d"), RouteReason.DEDICATED)


def test_borrowed_engines_are_used_when_the_dedicated_ones_are_full():
    views = (engine("d", num_in_flight=4), borrowed("b"))
    assert choose(*views) == Assign(EngineId("b"), RouteReason.BORROWED)


def test_the_engine_of_the_last_turn_comes_before_load_and_kind():
    turn = attrs.evolve(TURN, affinity=EngineId("b"))
    assert choose(engine("d"), borrowed("b", num_in_flight=3), turn=turn) == Assign(EngineId("b"), RouteReason.AFFINITY)


def test_a_full_affinity_engine_is_left_for_a_free_one():
    turn = attrs.evolve(TURN, affinity=EngineId("a"))
    assert choose(engine("a", num_in_flight=4), engine("d"), turn=turn) == Assign(EngineId("d"), RouteReason.DEDICATED)


def test_among_like_engines_the_least_loaded_one_is_taken_then_the_lowest_kv_use():
    assert choose(engine("x", num_in_flight=2), engine("y", num_in_flight=1)).engine_id == "y"
    assert choose(borrowed("x", kv_used_fraction=0.5), borrowed("y", kv_used_fraction=0.1)).engine_id == "y"


@pytest.mark.parametrize("state", [state for state in EngineState if state is not EngineState.READY])
def test_only_ready_engines_take_turns(state):
    assert choose(engine("d", state=state)) == Wait(WaitReason.NO_READY_ENGINE)


def test_the_reason_to_wait_is_the_last_test_that_an_engine_failed():
    turn = attrs.evolve(TURN, versions=AtLeast(3))
    old = engine("old", version=WeightVersion("r", 2))
    full = engine("full", version=WeightVersion("r", 3), num_in_flight=4)
    small = engine("small", version=WeightVersion("r", 3), num_in_flight=1, kv_total_tokens=200, kv_reserved_tokens=51)
    stale = engine("stale", state=EngineState.STALE)
    assert choose(turn=turn) == Wait(WaitReason.NO_READY_ENGINE)
    assert choose(stale, old, turn=turn, run="r") == Wait(WaitReason.VERSION)
    assert choose(old, engine("shut", version=WeightVersion("r", 3), circuit=Circuit.OPEN), turn=turn, run="r") == Wait(
        WaitReason.CIRCUIT
    )
    assert choose(old, full, turn=turn, run="r") == Wait(WaitReason.SLOTS)
    assert choose(old, full, small, turn=turn, run="r") == Wait(WaitReason.KV)


def test_kv_room_counts_what_the_turns_in_flight_may_grow_to():
    view = engine("d", num_in_flight=1, kv_total_tokens=300, kv_reserved_tokens=150)
    assert isinstance(choose(view), Assign)
    assert isinstance(choose(attrs.evolve(view, kv_reserved_tokens=151)), Wait)


def test_an_idle_engine_is_tried_with_a_turn_that_may_not_fit():
    """A turn bigger than every KV memory must end somewhere: refused by a dedicated engine, or short of its maximum."""
    assert isinstance(choose(engine("d", kv_total_tokens=10)), Assign)
    assert isinstance(choose(borrowed("b", kv_total_tokens=101)), Assign)
    assert choose(borrowed("b", kv_total_tokens=100)) == Wait(WaitReason.KV)
    assert choose(borrowed("b", kv_total_tokens=0)) == Wait(WaitReason.KV)


def test_a_half_open_engine_takes_one_turn():
    assert isinstance(choose(engine("d", circuit=Circuit.HALF_OPEN, num_in_flight=2)), Assign)
    assert choose(engine("d", circuit=Circuit.HALF_OPEN, num_in_flight=2, num_probing=1)) == Wait(WaitReason.CIRCUIT)


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (HopEnd.EVICTED, RouteReason.REROUTED_EVICTED),
        (HopEnd.STALLED, RouteReason.REROUTED_STALLED),
        (HopEnd.LOST, RouteReason.REROUTED_LOST),
        (HopEnd.BUSY, RouteReason.REROUTED_BUSY),
        (HopEnd.ABORTED, RouteReason.REROUTED_ABORTED),
    ],
)
def test_an_avoided_engine_is_the_last_choice_and_still_a_choice(ended, reason):
    turn = attrs.evolve(TURN, affinity=EngineId("bad"), avoid={EngineId("bad")}, moved_by=ended)
    assert choose(engine("bad"), borrowed("b", num_in_flight=3), turn=turn) == Assign(EngineId("b"), reason)
    assert choose(engine("bad"), borrowed("b", num_in_flight=4), turn=turn) == Assign(EngineId("bad"), reason)


def test_an_avoided_engine_of_the_last_turn_comes_before_other_avoided_ones():
    turn = attrs.evolve(TURN, affinity=EngineId("b"), avoid={EngineId("a"), EngineId("b")})
    assert choose(engine("a"), borrowed("b", num_in_flight=3), turn=turn).engine_id == "b"
    assert choose(engine("a"), borrowed("b", num_in_flight=4), turn=turn).engine_id == "a"


def test_the_index_forgets_dropped_engines_and_replaces_known_ones():
    index = RoutingIndex(RoutingConfig(cap_per_engine=1))
    index.put(engine("d"))
    assert index.has_open_engine()
    index.put(engine("d", num_in_flight=1))
    assert not index.has_open_engine()
    assert len(list(index)) == 1
    index.drop(EngineId("d"))
    index.drop(EngineId("d"))
    assert index.choose(TURN) == Wait(WaitReason.NO_READY_ENGINE)


def test_a_version_is_out_of_reach_once_every_engine_that_lives_is_past_it():
    index = RoutingIndex(RoutingConfig())
    index.run = "r"
    index.put(engine("d", version=WeightVersion("r", 4)))
    index.put(engine("e", version=WeightVersion("r", 3), state=EngineState.LOST))
    assert index.is_out_of_reach(Exactly(3))
    assert not index.is_out_of_reach(Exactly(4))
    index.put(engine("f", version=WeightVersion("r", 3)))
    assert not index.is_out_of_reach(Exactly(3))
    for state in (EngineState.DRAINING, EngineState.FENCED):
        index.put(engine("f", version=WeightVersion("r", 3), state=state))
        assert index.is_out_of_reach(Exactly(3)), "it takes no more turns at the version that it had"
        assert not index.is_held(Exactly(3))
    assert index.is_held(AtLeast(4))
    index.put(engine("f", version=WeightVersion("r", 3), state=EngineState.LOST))
    assert index.is_out_of_reach(Exactly(3)), "it was lost meanwhile"
    index.put(engine("f", version=WeightVersion("r", 3), state=EngineState.STALE))
    assert not index.is_out_of_reach(Exactly(3))
    index.put(engine("f", version=WeightVersion("r", 4), state=EngineState.STALE))
    assert index.is_out_of_reach(Exactly(3)), "it was updated"
    index.put(engine("g", version=WeightVersion("r", 3)))
    index.drop(EngineId("g"))
    assert index.is_out_of_reach(Exactly(3)), "it left"


def test_room_is_that_of_the_roomiest_open_engine_of_the_right_version():
    index = RoutingIndex(RoutingConfig(cap_per_engine=4))
    index.run = "r"
    new, old = WeightVersion("r", 2), WeightVersion("r", 1)
    index.put(engine("a", version=new, num_in_flight=1, kv_total_tokens=300, kv_reserved_tokens=150))
    index.put(engine("b", version=new, num_in_flight=1, kv_total_tokens=300, kv_reserved_tokens=100))
    index.put(engine("full", version=new, num_in_flight=4, kv_total_tokens=300))
    index.put(borrowed("idle", version=new, kv_total_tokens=100))
    index.put(engine("unread", version=old))
    assert index.room(AtLeast(2), is_dedicated_only=True) == (200, -math.inf)
    assert index.room(AtLeast(2), is_dedicated_only=False) == (200, 99)
    assert index.room(AnyVersion(), is_dedicated_only=True) == (math.inf, math.inf)
    assert index.room(AtLeast(3), is_dedicated_only=False) == (-math.inf, -math.inf)


def test_a_cap_below_one_is_refused():
    with pytest.raises(ValueError, match="cap_per_engine"):
        RoutingConfig(cap_per_engine=0)


def test_what_was_asked_before_is_answered_anew_when_a_version_comes_or_goes_or_the_run_changes():
    index = RoutingIndex(RoutingConfig())
    turn = attrs.evolve(TURN, versions=Exactly(2))
    index.put(engine("a", version=WeightVersion("r", 1)))
    index.run = "r"
    assert index.choose(turn) == Wait(WaitReason.VERSION)
    index.put(engine("b", version=WeightVersion("r", 2)))
    assert index.choose(turn) == Assign(EngineId("b"), RouteReason.DEDICATED)
    index.run = "q"
    assert index.choose(turn) == Wait(WaitReason.VERSION)
    index.run = "r"
    index.put(engine("b", version=WeightVersion("r", 3)))
    assert index.choose(turn) == Wait(WaitReason.VERSION)


def test_a_load_replaces_what_an_engine_has_to_do_and_nothing_else():
    index = RoutingIndex(RoutingConfig(cap_per_engine=4))
    for name in ("x", "y"):
        index.put(engine(name, version=WeightVersion("r", 1)))
    index.put_load(EngineId("x"), EngineLoad(num_in_flight=1, most_left_tokens=5.0))
    assert index.choose(TURN) == Assign(EngineId("y"), RouteReason.DEDICATED)
    assert next(iter(index)) == engine("x", version=WeightVersion("r", 1), num_in_flight=1, most_left_tokens=5.0)
    index.put_load(EngineId("y"), EngineLoad(num_in_flight=4))
    assert index.choose(TURN) == Assign(EngineId("x"), RouteReason.DEDICATED)
    index.put_load(EngineId("x"), EngineLoad(num_in_flight=4))
    assert index.choose(TURN) == Wait(WaitReason.SLOTS)
    index.put_load(EngineId("y"), EngineLoad())
    assert index.choose(TURN) == Assign(EngineId("y"), RouteReason.DEDICATED)


def test_a_load_tells_that_an_engine_became_slow():
    index = RoutingIndex(RoutingConfig())
    index.put(borrowed("lent"))
    index.put(engine("own", num_in_flight=16))
    assert index.choose(TURN) == Assign(EngineId("lent"), RouteReason.BORROWED)
    index.put_load(EngineId("lent"), EngineLoad(is_slow=True))
    assert index.choose(TURN) == Wait(WaitReason.SLOTS)
    index.put_load(EngineId("lent"), EngineLoad())
    assert index.choose(TURN) == Assign(EngineId("lent"), RouteReason.BORROWED)


def test_an_engine_that_was_not_put_has_no_load():
    with pytest.raises(KeyError, match="x"):
        RoutingIndex(RoutingConfig()).put_load(EngineId("x"), EngineLoad())


def kept(*views: EngineView, turn: TurnView = TURN, newcomer_tokens: float = 0.0):
    index = RoutingIndex(RoutingConfig(cap_per_engine=4))
    for view in views:
        index.put(view)
    before = index.choose(turn)
    index.keep_seats(newcomer_tokens)
    decision = index.choose(turn)
    index.keep_seats(None)
    assert index.choose(turn) == before
    return decision


def test_kept_slots_are_for_turns_whose_last_one_was_there():
    views = (engine("a", num_in_flight=2, num_seats=2), borrowed("b", num_in_flight=3, num_seats=1))
    assert kept(*views) == Wait(WaitReason.SLOTS)
    assert kept(*views, turn=attrs.evolve(TURN, affinity=EngineId("c"))) == Wait(WaitReason.SLOTS)
    assert kept(*views, turn=attrs.evolve(TURN, affinity=EngineId("b"))) == Assign(EngineId("b"), RouteReason.AFFINITY)
    assert kept(*views, borrowed("c", num_in_flight=3)) == Assign(EngineId("c"), RouteReason.BORROWED)


def test_kept_kv_room_is_for_turns_whose_last_one_was_there():
    full = {"num_in_flight": 1, "num_seats": 1, "kv_total_tokens": 1000, "kv_reserved_tokens": 500}
    view = engine("a", **full, kv_seat_tokens=351)
    assert kept(view) == Wait(WaitReason.KV)
    assert kept(engine("a", **full, kv_seat_tokens=350)) == Assign(EngineId("a"), RouteReason.DEDICATED)
    assert kept(view, turn=attrs.evolve(TURN, affinity=EngineId("a"))) == Assign(EngineId("a"), RouteReason.AFFINITY)


def test_an_engine_without_turns_in_flight_is_not_empty_while_it_keeps_room():
    view = engine("a", num_seats=1, kv_total_tokens=200, kv_seat_tokens=100)
    assert kept(view) == Wait(WaitReason.KV)
    assert kept(attrs.evolve(view, num_seats=0, kv_seat_tokens=0)) == Assign(EngineId("a"), RouteReason.DEDICATED)


def test_a_trajectory_that_begins_needs_room_to_grow_and_a_later_turn_does_not():
    view = engine("a", num_in_flight=1, kv_total_tokens=1000, kv_reserved_tokens=500)
    assert kept(view, newcomer_tokens=500) == Assign(EngineId("a"), RouteReason.DEDICATED)
    assert kept(view, newcomer_tokens=501) == Wait(WaitReason.KV)
    later = attrs.evolve(TURN, affinity=EngineId("c"))
    assert kept(view, newcomer_tokens=501, turn=later) == Assign(EngineId("a"), RouteReason.DEDICATED)
    assert kept(attrs.evolve(view, num_in_flight=0, kv_reserved_tokens=0), newcomer_tokens=5000) == Assign(
        EngineId("a"), RouteReason.DEDICATED
    )


def test_an_engine_that_is_kept_free_goes_on_with_its_own_only_while_seats_are_kept():
    view, own = engine("a", is_kept_free=True), attrs.evolve(TURN, affinity=EngineId("a"))
    assert choose(view, turn=own) == Wait(WaitReason.SLOTS)
    assert kept(view, turn=own) == Assign(EngineId("a"), RouteReason.AFFINITY)
    assert kept(view) == Wait(WaitReason.SLOTS)

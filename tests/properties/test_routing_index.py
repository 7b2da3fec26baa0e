"""The index decides as a plain scan over all engines would, whatever was put, dropped and asked before."""

from __future__ import annotations

from unittest.mock import patch

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.policies import ordered, routing, staleness
from rose.policies.routing import (
    Assign,
    Circuit,
    EngineLoad,
    EngineState,
    EngineView,
    RoutingConfig,
    RoutingIndex,
    RoutingRule,
    TurnView,
    Wait,
    WaitReason,
)
from rose.types import AnyVersion, AtLeast, EngineId, EngineKind, Exactly, HopEnd, RouteReason, WeightVersion

CAP = 3
CONFIGS = st.builds(
    RoutingConfig,
    cap_per_engine=st.just(CAP),
    rule=st.sampled_from([RoutingRule.VALUE, RoutingRule.VALUE, RoutingRule.PAPER]),
    load_margin=st.sampled_from([1, 2]),
)
MOVED_REASON = {ended: RouteReason(f"rerouted_{ended.value}") for ended in HopEnd if ended is not HopEnd.FINISHED}


class Scan:
    """The rule as it is stated in ``rose.policies.routing``: every engine is tested and ranked for every turn."""

    def __init__(self, config):
        self.config = config
        self.run = None
        self.newcomer_tokens = None
        self.views: dict[EngineId, EngineView] = {}

    def put(self, view):
        self.views[view.engine_id] = view

    def drop(self, engine_id):
        self.views.pop(engine_id, None)

    @property
    def keeps_seats(self):
        return self.newcomer_tokens is not None and self.config.rule is RoutingRule.VALUE

    def has_open_engine(self):
        return any(view.state is EngineState.READY and self.has_slot(view) for view in self.views.values())

    def is_out_of_reach(self, versions):
        gone = {EngineState.DRAINING, EngineState.FENCED, EngineState.LOST}
        held = [view.version for view in self.views.values() if view.state not in gone]
        return staleness.is_out_of_reach(versions, held, self.run)

    def choose(self, turn):
        obstacles = {view.engine_id: self.obstacle(view, turn) for view in self.views.values()}
        takers = [view for view in self.views.values() if obstacles[view.engine_id] is None]
        if not takers:
            return Wait(max(obstacles.values(), default=WaitReason.NO_READY_ENGINE))
        best = min(takers, key=lambda view: self.rank(view, turn))
        if best.engine_id == turn.affinity and best.engine_id not in turn.avoid and turn.moved_by is None:
            better = self.better(best, takers, turn)
            if better is not None:
                return better
        return Assign(best.engine_id, self.reason(best, turn))

    def better(self, here, takers, turn):
        if self.config.rule is RoutingRule.PAPER:
            return None
        most_s, found = 0.0, None
        for kind in EngineKind:
            of_kind = [view for view in takers if view.kind is kind and view.engine_id not in turn.avoid]
            there = min(of_kind, key=self.load, default=here)
            if there is here or not self.has_seat(there):
                continue
            if here.pace_s is None:
                if kind is here.kind and self.gap(here, there) > self.config.load_margin:
                    return Assign(there.engine_id, RouteReason.REBALANCED)
            elif there.pace_s is not None and (gain := self.gain_s(here, there, turn)) > most_s:
                most_s, found = gain, Assign(there.engine_id, RouteReason.MIGRATED)
        return found

    def gap(self, here, there):
        return here.num_in_flight + here.num_seats + 1 - there.num_in_flight - there.num_seats

    def gain_s(self, here, there, turn):
        left, prompt = turn.num_left_tokens, turn.num_prompt_tokens
        ends_s = {
            "stay": self.last_end_s(here, left, prompt) + here.prefill_s * here.num_waiting_prompt_tokens,
            "there without": there.pace_s * there.most_left_tokens,
            "go": self.last_end_s(there, left, prompt) + there.prefill_s * (there.num_waiting_prompt_tokens + prompt),
            "here without": here.pace_s * here.most_left_tokens,
        }
        before_s = max(ends_s["stay"], ends_s["there without"])
        gain = before_s - max(ends_s["go"], ends_s["here without"])
        crowd_s = there.prefill_s * prompt * (there.num_in_flight + there.num_seats)
        least_s = max(self.config.min_gain_s, self.config.hysteresis_fraction * before_s, crowd_s)
        return gain if gain > least_s else 0.0

    def last_end_s(self, view, left, prompt):
        own_s = view.slope_s * prompt
        num_shared = min(left, view.most_left_tokens)
        alone_s = (view.idle_s + own_s) * (left - num_shared) + view.pace_s * (view.most_left_tokens - num_shared)
        return (view.pace_s + own_s) * num_shared + alone_s

    def obstacle(self, view, turn):
        is_barred = turn.is_dedicated_only and view.kind is EngineKind.BORROWED
        if view.state is not EngineState.READY or is_barred:
            return WaitReason.NO_READY_ENGINE
        if not staleness.is_admissible(turn.versions, view.version, self.run):
            return WaitReason.VERSION
        if view.is_slow and view.kind is EngineKind.BORROWED and turn.affinity is None and self.has_dedicated_for(turn):
            return WaitReason.NO_READY_ENGINE
        if not self.has_slot(view):
            return WaitReason.SLOTS if view.circuit is Circuit.CLOSED else WaitReason.CIRCUIT
        if self.keeps_seats and not self.comes_back(view, turn) and not self.has_seat(view):
            return WaitReason.SLOTS
        return None if self.has_kv_room(view, turn) else WaitReason.KV

    def has_dedicated_for(self, turn):
        return any(
            view.kind is EngineKind.DEDICATED
            and view.state is EngineState.READY
            and staleness.is_admissible(turn.versions, view.version, self.run)
            and (self.has_slot(view) or view.circuit is Circuit.CLOSED)
            for view in self.views.values()
        )

    def has_slot(self, view):
        if view.circuit is Circuit.OPEN or (view.circuit is Circuit.HALF_OPEN and view.num_probing > 0):
            return False
        return view.num_in_flight < self.cap(view)

    def comes_back(self, view, turn):
        return view.engine_id == turn.affinity and turn.affinity not in turn.avoid

    def cap(self, view):
        if view.is_kept_free and not self.keeps_seats:
            return 0
        cap = CAP if view.num_slots is None else min(CAP, view.num_slots)
        is_spared = view.num_shown is not None and self.config.rule is RoutingRule.VALUE
        return min(cap, self.config.untried_slots + view.num_shown) if is_spared else cap

    def has_kv_room(self, view, turn):
        if view.kv_total_tokens is None:
            return True
        kept = view.kv_seat_tokens if self.keeps_seats and not self.comes_back(view, turn) else 0
        if view.num_in_flight == 0 and not kept:
            return view.kind is EngineKind.DEDICATED or turn.num_prompt_tokens < view.kv_total_tokens
        need = turn.num_prompt_tokens + turn.num_new_tokens
        if self.keeps_seats and turn.affinity is None:
            need = max(need, self.newcomer_tokens)
        return view.kv_reserved_tokens + kept + need <= view.kv_total_tokens

    def rank(self, view, turn):
        is_borrowed = view.kind is EngineKind.BORROWED
        return (view.engine_id in turn.avoid, view.engine_id != turn.affinity, is_borrowed, *self.load(view))

    def has_seat(self, view):
        return view.num_in_flight + view.num_seats < self.cap(view) and not view.is_kept_free

    def load(self, view):
        is_by_value = self.config.rule is RoutingRule.VALUE and view.pace_s is not None
        ends_s = view.pace_s * (view.most_left_tokens + 1) if is_by_value else 0.0
        is_full = self.config.rule is RoutingRule.VALUE and not self.has_seat(view)
        return (is_full, ends_s, view.num_in_flight, view.kv_used_fraction, view.engine_id)

    def reason(self, view, turn):
        if turn.moved_by is not None:
            return MOVED_REASON[turn.moved_by]
        if view.engine_id == turn.affinity:
            return RouteReason.AFFINITY
        return RouteReason.DEDICATED if view.kind is EngineKind.DEDICATED else RouteReason.BORROWED


ENGINE_IDS = st.integers(0, 29).map(lambda i: EngineId(f"e{i}"))
VERSIONS = st.one_of(st.none(), st.builds(WeightVersion, st.sampled_from(["r", "r", "q"]), st.integers(0, 3)))
CONSTRAINTS = st.one_of(
    st.just(AnyVersion()), st.builds(AtLeast, st.integers(0, 3)), st.builds(Exactly, st.integers(0, 3))
)
VIEWS = st.builds(
    EngineView,
    engine_id=ENGINE_IDS,
    kind=st.sampled_from(EngineKind),
    state=st.sampled_from([*[EngineState.READY] * 12, *EngineState]),
    version=VERSIONS,
    circuit=st.sampled_from([*[Circuit.CLOSED] * 4, *Circuit]),
    num_in_flight=st.integers(0, CAP),
    num_probing=st.integers(0, 1),
    kv_total_tokens=st.sampled_from([None, 0, 10, 20, 30]),
    kv_reserved_tokens=st.integers(0, 30),
    kv_used_fraction=st.sampled_from([0.0, 0.25, 0.5]),
    pace_s=st.sampled_from([None, 0.5, 1.0, 2.0]),
    slope_s=st.sampled_from([0.0, 0.01]),
    idle_s=st.sampled_from([0.25, 0.5]),
    prefill_s=st.sampled_from([0.0, 0.1]),
    num_waiting_prompt_tokens=st.integers(0, 30),
    most_left_tokens=st.sampled_from([0.0, 0.0, 5.0, 20.0]),
    num_seats=st.sampled_from([0, 0, 1, 2]),
    kv_seat_tokens=st.sampled_from([0, 0, 5, 15]),
    is_kept_free=st.sampled_from([False, False, False, True]),
    num_slots=st.sampled_from([None, None, 0, 1, 2]),
    is_slow=st.booleans(),
    num_shown=st.sampled_from([None, None, 0, 1]),
)
LOADS = st.tuples(ENGINE_IDS, VIEWS.map(lambda view: view.load))
TURNS = st.builds(
    TurnView,
    versions=CONSTRAINTS,
    num_prompt_tokens=st.integers(1, 30),
    num_new_tokens=st.integers(1, 15),
    num_left_tokens=st.sampled_from([0.0, 5.0, 20.0, 100.0]),
    affinity=st.one_of(st.none(), ENGINE_IDS),
    avoid=st.frozensets(ENGINE_IDS, max_size=8),
    moved_by=st.sampled_from([None, *MOVED_REASON]),
    is_dedicated_only=st.booleans(),
)
CHANGES = st.one_of(
    VIEWS,
    VIEWS,
    VIEWS,
    LOADS,
    LOADS,
    LOADS,
    ENGINE_IDS,
    st.sampled_from([None, "r", "q"]).map(lambda run: ("run", run)),
    st.sampled_from([None, 0.0, 12.0]).map(lambda newcomer_tokens: ("keep", newcomer_tokens)),
)


@attrs.define
class Both:
    """The index and the scan, told the same."""

    config: RoutingConfig
    index: RoutingIndex = attrs.field(init=False)
    scan: Scan = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.index, self.scan = RoutingIndex(self.config), Scan(self.config)

    def change(self, change):
        match change:
            case EngineView():
                self.index.put(change)
                self.scan.put(change)
            case ("run", run):
                self.index.run = self.scan.run = run
            case ("keep", newcomer_tokens):
                self.index.keep_seats(newcomer_tokens)
                self.scan.newcomer_tokens = newcomer_tokens
            case (engine_id, EngineLoad() as load):
                if engine_id in self.scan.views:
                    self.index.put_load(engine_id, load)
                    self.scan.put(attrs.evolve(self.scan.views[engine_id], **load._asdict()))
            case engine_id:
                self.index.drop(engine_id)
                self.scan.drop(engine_id)

    def check(self, turn):
        decision = self.scan.choose(turn)
        assert self.index.choose(turn) == decision
        assert self.index.has_open_engine() == self.scan.has_open_engine()
        assert self.index.is_out_of_reach(turn.versions) == self.scan.is_out_of_reach(turn.versions)
        assert list(self.index) == list(self.scan.views.values())
        room, prompt_room = self.index.room(
            turn.versions, is_dedicated_only=turn.is_dedicated_only, is_new=turn.affinity is None
        )
        need = turn.num_prompt_tokens + turn.num_new_tokens
        fits = need <= room or turn.num_prompt_tokens <= prompt_room
        is_at_home = isinstance(decision, Assign) and self.scan.keeps_seats and turn.affinity not in turn.avoid
        assert isinstance(decision, Assign) == fits or (is_at_home and turn.affinity in self.scan.views)


@given(CONFIGS, st.lists(st.tuples(CHANGES, TURNS), min_size=30, max_size=100))
@settings(max_examples=60, deadline=None)
def test_the_index_decides_as_a_scan(config, history):
    """Chunks of eight at most, so that they are cut and joined even with few engines; and little is remembered of what was asked."""
    both = Both(config)
    with patch.object(ordered, "_MAX_CHUNK", 8), patch.object(routing, "_MOST_ASKED", 5):
        for change, turn in history:
            both.change(change)
            both.check(turn)


@given(
    CONFIGS,
    st.lists(VIEWS, min_size=10, max_size=30, unique_by=lambda view: view.engine_id).map(
        lambda views: [attrs.evolve(view, state=EngineState.READY, version=WeightVersion("r", 1)) for view in views]
    ),
    st.lists(TURNS, min_size=40, max_size=40),
    st.sampled_from([None, 0.0, 12.0]),
)
@settings(max_examples=40, deadline=None)
def test_a_turn_after_the_other_goes_where_the_scan_sends_it(config, views, turns, newcomer_tokens):
    """Like a pool: what a turn takes is put back into the index, until nothing fits."""
    both = Both(config)
    both.change(("run", "r"))
    both.change(("keep", newcomer_tokens))
    with patch.object(ordered, "_MAX_CHUNK", 8):
        for view in views:
            both.change(view)
        for turn in turns:
            both.check(turn)
            decision = both.scan.choose(turn)
            if isinstance(decision, Assign):
                view = both.scan.views[decision.engine_id]
                load = view.load._replace(
                    num_in_flight=view.num_in_flight + 1,
                    kv_reserved_tokens=view.kv_reserved_tokens + turn.num_prompt_tokens + turn.num_new_tokens,
                )
                both.change((view.engine_id, load))

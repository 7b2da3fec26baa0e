from __future__ import annotations

import math

import attrs
import pytest

from rose.bench.scheduler.decisions import (
    Costs,
    by_engines,
    by_trajectories,
    measure_affinity,
    measure_costs,
    percentile,
)
from rose.bench.scheduler.drive import CAP, RUN, Drive, DriveLoad, can_take
from rose.bench.scheduler.report import growth
from rose.errors import RoseError
from rose.policies.staleness import is_admissible
from rose.types import EngineKind


@pytest.fixture
def drive():
    drive = Drive(DriveLoad(num_engines=8, num_trajectories=96))
    drive.fill()
    return drive


def test_every_trajectory_stays_live(drive):
    drive.run(300)

    assert drive.num_settled == 300
    assert len(drive.state.live) == 96


def test_more_trajectories_than_slots_wait():
    drive = Drive(DriveLoad(num_engines=2, num_trajectories=80))
    drive.fill()
    drive.run(100)

    assert len(drive.state.live) == 80
    assert 0 < len(drive.open_attempts()) <= 2 * CAP


def test_the_load_has_what_makes_routing_hard(drive):
    members = list(drive.state.engines.members.values())
    assert {member.kind for member in members} == set(EngineKind)
    assert {member.version.n for member in members} == {4, 5}

    drive.run(300)

    attempts = drive.open_attempts()
    assert len({attempt.record.versions for attempt in attempts}) == 3
    assert all(is_admissible(attempt.record.versions, attempt.member.version, RUN) for attempt in attempts)
    assert (
        len({can_take(drive.state.engines, member, attempt.record) for member in members for attempt in attempts[:5]})
        == 2
    )


def test_virtual_time_passes_and_nothing_stalls(drive):
    drive.run(500)

    assert drive.now_s > 1.0
    assert all(len(record.hops) == 0 for record in drive.state.live.values())


def test_the_clockwork_counts_each_routed_turn_once(drive):
    drive.clockwork.reset()
    before = len(drive.open_attempts()) + drive.num_settled
    drive.run(200)

    assert drive.clockwork.num_assigned == len(drive.open_attempts()) + drive.num_settled - before
    assert len(drive.clockwork.samples_s) >= 400


def test_a_full_engine_cannot_take_a_turn(drive):
    engines = drive.state.engines
    record = next(iter(drive.state.live.values()))
    member = next(member for member in engines.members.values() if can_take(engines, member, record))

    member.kv_reserved_tokens += 10**6
    engines.refresh(member)

    assert not can_take(engines, member, record)


def test_kept_turns_are_of_those_that_could_be_kept():
    drive = Drive(DriveLoad(num_engines=8, num_trajectories=150, environment_s=0.5))
    drive.fill()
    drive.run(800)

    assert 0 < drive.num_kept <= drive.could_keep.total() < 800


def test_a_turn_sent_elsewhere_for_nothing_is_counted(monkeypatch):
    drive = Drive(DriveLoad(num_engines=8, num_trajectories=24, environment_s=0.5))
    index = drive.state.engines.index
    choose = index.choose
    monkeypatch.setattr(index, "choose", lambda turn: choose(attrs.evolve(turn, affinity=None)))
    drive.fill()
    drive.run(300)

    assert drive.num_kept < drive.could_keep.total()


def test_affinity_is_a_fraction_over_all_loads():
    found = measure_affinity(4, 150)

    assert 0.0 <= found["fraction"] <= 1.0
    assert set(found["by_load"]) == {"0.5", "0.9", "1.2"}
    assert all(sum(row["by_reason"].values()) == row["could_keep"] for row in found["by_load"].values())


def test_costs_have_all_figures():
    told = []
    (row,) = by_engines([4], 100, told.append)
    (live,) = by_trajectories([200], 4, 50, told.append)

    assert all(value > 0 for name, value in attrs.asdict(row).items() if name != "num_waiting")
    assert (row.num_engines, row.num_trajectories, row.num_waiting) == (4, 48, 0)
    assert live.num_waiting > 100
    assert len(told) == 2


def test_a_core_that_stands_still_is_an_error(monkeypatch):
    monkeypatch.setattr(Drive, "_expect", lambda self, attempt: None)

    with pytest.raises(RoseError, match="stopped after 0 turns"):
        measure_costs(DriveLoad(num_engines=2, num_trajectories=4), 10)


def test_percentiles_are_values_that_occurred():
    values = [float(i) for i in range(1, 101)]

    assert percentile(values, 0.5) == 51.0
    assert percentile(values, 0.99) == 100.0
    assert percentile([3.0], 0.99) == 3.0


def _costs(num_engines, decisions_per_s):
    fields = dict.fromkeys((field.name for field in attrs.fields(Costs)), 1.0)
    return Costs(**{**fields, "num_engines": num_engines, "decisions_per_s": decisions_per_s})


def test_growth_is_cost_over_that_with_64_engines():
    assert growth([_costs(8, 9.0), _costs(64, 100.0), _costs(4096, 80.0)]) == pytest.approx(1.25)
    assert growth([_costs(8, 9.0), _costs(4096, 80.0)]) is None
    assert not math.isnan(growth([_costs(64, 1.0)]))


def test_the_index_knows_what_is_left_of_the_turns_on_each_engine():
    drive = Drive(DriveLoad(num_engines=4, num_trajectories=50))
    drive.fill()
    found = set()
    for _ in range(40):
        drive.run(5)
        for view in drive.state.engines.index:
            member = drive.state.engines.members[view.engine_id]
            left = [each.record.progress.left_tokens for each in member.held.values()]
            left += [seat.left_tokens for seat in member.seats.values()]
            assert view.most_left_tokens == max(left, default=0.0)
            found.add(view.most_left_tokens)
    assert len(found) > 3

from __future__ import annotations

import pytest

from rose.policies.concurrency import ConcurrencyConfig, KvReading, SlotLimit


def limit(**changes) -> SlotLimit:
    return SlotLimit(ConcurrencyConfig(**({"cut_fraction": 0.5} | changes)), 16)


def reading(fraction: float, num_in_flight: int = 16, *, age_s: float = 0.1, has_progress: bool = True) -> KvReading:
    return KvReading(kv_used_fraction=fraction, age_s=age_s, num_in_flight=num_in_flight, has_progress=has_progress)


def test_without_pressure_the_cap_alone_counts():
    slots = limit()
    for now_s in range(10):
        assert not slots.read(reading(0.9), float(now_s))
    assert slots.num_slots == 16


def test_an_eviction_leaves_a_share_of_what_was_in_flight_not_of_the_limit():
    slots = limit()
    assert slots.evicted(8, 0.0)
    assert slots.num_slots == 4


def test_full_memory_cuts_as_well_and_one_moment_of_pressure_cuts_once():
    slots = limit()
    assert slots.read(reading(0.99), 0.0)
    for late_s in (0.1, 0.5, 0.9):
        assert not slots.evicted(8, late_s)
    assert slots.num_slots == 8
    assert slots.evicted(8, 1.0)
    assert slots.num_slots == 4


def test_the_limit_grows_by_one_while_it_binds_and_the_engine_gets_on():
    slots = limit()
    slots.evicted(8, 0.0)
    seen = []
    for step in range(1, 13):
        slots.read(reading(0.5, slots.num_slots), float(step))
        seen.append(slots.num_slots)
    assert seen == [*range(5, 17)]


@pytest.mark.parametrize(
    "idle", [reading(0.5, 2), reading(0.9, 4), reading(0.5, 4, has_progress=False)], ids=["unused", "full", "stalled"]
)
def test_it_does_not_grow_for_nothing(idle):
    slots = limit()
    slots.evicted(8, 0.0)
    assert not slots.read(idle, 5.0)
    assert slots.num_slots == 4


@pytest.mark.parametrize("age_s", [5.1, -1.0])
@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_a_stale_reading_moves_nothing(age_s, fraction):
    slots = limit()
    slots.evicted(8, 0.0)
    assert not slots.read(reading(fraction, 4, age_s=age_s), 5.0)
    assert slots.num_slots == 4


def test_old_pressure_is_forgotten_even_without_a_fresh_reading():
    slots = limit(forget_s=60.0)
    slots.evicted(8, 0.0)
    assert not slots.read(reading(0.0, 0, age_s=99.0), 59.0)
    assert slots.read(reading(0.0, 0, age_s=99.0), 60.0)
    assert slots.num_slots == 16


def test_one_turn_may_always_run():
    slots = limit()
    for now_s in range(10):
        slots.evicted(1, float(now_s) * 2)
        slots.read(reading(1.0, 1), float(now_s) * 2 + 1)
    assert slots.num_slots == 1
    assert SlotLimit(ConcurrencyConfig(min_slots=9), 4).num_slots == 4


def test_min_slots_above_the_cap_does_not_lift_it():
    slots = SlotLimit(ConcurrencyConfig(min_slots=9, cut_fraction=0.5), 4)
    assert not slots.evicted(4, 0.0)
    assert slots.num_slots == 4


def test_it_can_be_turned_off():
    slots = limit(is_adaptive=False)
    assert not slots.evicted(16, 0.0)
    assert not slots.read(reading(1.0), 2.0)
    assert slots.num_slots == 16


@pytest.mark.parametrize(
    "bad",
    [{"min_slots": 0}, {"cut_fraction": 0.0}, {"low_kv_fraction": 0.99}, {"is_adaptive": 1}, {"forget_s": -1}],
)
def test_settings_that_make_no_sense_are_refused_by_name(bad):
    with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be "):
        ConcurrencyConfig(**bad)

"""Batches in flight: their order, and what a mark waits for."""

from __future__ import annotations

from rose.backends.in_flight import InFlight


def test_outputs_come_in_the_order_of_the_batches() -> None:
    flying = InFlight()
    first, empty, last = object(), object(), object()
    for batch, is_charged in ((first, True), (empty, False), (last, True)):
        flying.launch(batch, is_charged=is_charged)
    assert len(flying) == 3
    assert flying.land(first)
    assert not flying.land(empty)
    assert flying.land(last)
    assert not flying


def test_a_stranger_s_batch_changes_nothing() -> None:
    flying = InFlight()
    flying.launch(batch := ["equal"], is_charged=True)
    assert not flying.land(["equal"])
    assert len(flying) == 1
    assert flying.land(batch)


def test_a_mark_waits_for_what_was_launched_before_it_only() -> None:
    flying = InFlight()
    assert flying.has_passed(flying.mark())
    flying.launch(first := object(), is_charged=True)
    mark = flying.mark()
    assert not flying.has_passed(mark)
    flying.launch(object(), is_charged=True)
    flying.land(first)
    assert flying.has_passed(mark)
    assert not flying.has_passed(flying.mark())

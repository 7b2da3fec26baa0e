"""Pointers read through a link by many pollers.

Invariants: at most one read of a pointer is on its way at a time, except beside one that began before this side set the pointer;
a value is returned that was read at most ``age_s`` before the call, or by a read that was on its way; never one from before a
``note_set`` that came before the call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs

from rose.transfer.cluster_flights import Flight


@attrs.define(eq=False)
class _View:
    value: str | None = None
    read_at_s: float = float("-inf")
    num_sets: int = 0
    flight: Flight[str | None] | None = None


class PointerCache:
    """What was last read of each pointer.

    Args:
        read: Reads one through the link.
        age_s: How old a value may be.
    """

    def __init__(self, read: Callable[[str], str | None], age_s: float) -> None:
        self._read, self._age_s = read, age_s
        self._lock = threading.Lock()
        self._views: dict[str, _View] = {}

    def get(self, name: str) -> str | None:
        """Return a pointer's value. Blocking. Raises what reading raises."""
        with self._lock:
            view = self._views.setdefault(name, _View())
            if time.monotonic() - view.read_at_s <= self._age_s:
                return view.value
            flight = view.flight
            is_leader = flight is None or flight.num_sets != view.num_sets
            if flight is None or is_leader:
                flight = view.flight = Flight(view.num_sets)
        return self._lead(name, view, flight) if is_leader else flight.result()

    def note_set(self, name: str) -> None:
        """Forget what was read before now: the pointer was, or may have been, set by this side."""
        with self._lock:
            view = self._views.setdefault(name, _View())
            view.num_sets += 1
            view.read_at_s = float("-inf")

    def _lead(self, name: str, view: _View, flight: Flight[str | None]) -> str | None:
        started_s = time.monotonic()
        try:
            value = self._read(name)
        except BaseException as error:
            self._end(view, flight)
            flight.fail(error)
            raise
        with self._lock:
            if view.num_sets == flight.num_sets:
                view.value, view.read_at_s = value, started_s
        self._end(view, flight)
        flight.land(value)
        return value

    def _end(self, view: _View, flight: Flight[str | None]) -> None:
        with self._lock:
            if view.flight is flight:
                view.flight = None

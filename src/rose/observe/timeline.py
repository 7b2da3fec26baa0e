"""A run as a timeline: spans and instants, written as a trace that Perfetto and ``chrome://tracing`` open.

Invariants:

* One process a device, one thread a lane; within a lane spans come in order of their start.
* A span that continues the one before it in its lane (same name, kind and args, a gap of at most ``merge_gap_s``)
  lengthens it and takes no room.
* At most ``max_events`` spans and instants are kept, however long the run. When the room is used up, spans of one kind
  and lane that lie within ``resolution_s`` become one, which doubles until there is room again (to ``_COARSEST_S``);
  only then is what comes after left out. The file says both.
* ``Span.busy_s`` is the time that really was busy, whatever was joined.

Used from one thread. Times are seconds on one clock; the file has microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

_FINEST_S = 0.01
_COARSEST_S = 1.28

LANES = ("serving", "rollout", "sync", "train")


@attrs.define(kw_only=True)
class Span:
    """Something that took time on one lane of one device; ``busy_s`` of its length it really ran."""

    device: str
    lane: str
    name: str
    kind: str
    start_s: float
    end_s: float
    busy_s: float
    args: dict[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Instant:
    """Something that happened at one moment."""

    device: str
    lane: str
    name: str
    kind: str
    at_s: float
    args: dict[str, Any] = attrs.field(factory=dict)


@attrs.define
class Timeline:
    """Collects a run's spans and instants.

    Attributes:
        max_events: Most spans and instants that are kept.
        merge_gap_s: Longest gap that still joins two equal spans.
        spans: What was kept, in the order of the calls.
        instants: The same for instants.
        resolution_s: Spans of one kind within this time are kept as one; 0 while every span has room.
        num_dropped: Spans and instants that found no room.
    """

    max_events: int = 200_000
    merge_gap_s: float = 1e-4
    spans: list[Span] = attrs.field(factory=list, init=False)
    instants: list[Instant] = attrs.field(factory=list, init=False)
    resolution_s: float = attrs.field(default=0.0, init=False)
    num_dropped: int = attrs.field(default=0, init=False)
    _last: dict[tuple[str, str], Span] = attrs.field(factory=dict, init=False)

    def span(
        self,
        device: str,
        lane: str,
        name: str,
        *,
        kind: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Add a span.

        Args:
            device: Device (process of the trace); ``job`` or the like for what belongs to none.
            lane: Thread of the trace, one of ``LANES`` or a name of its own.
            name: Label on the bar.
            kind: Category, by which a viewer filters.
            start_s: Start.
            end_s: End, not before the start.
            args: Details of plain JSON data.

        Raises:
            ValueError: The span ends before it starts.
        """
        if end_s < start_s:
            message = f"span {name!r} on {device} ends at {end_s} s, before its start at {start_s} s"
            raise ValueError(message)
        span = Span(
            device=device,
            lane=lane,
            name=name,
            kind=kind,
            start_s=start_s,
            end_s=end_s,
            busy_s=end_s - start_s,
            args=dict(args or {}),
        )
        if not self._join(span) and self._has_room() and not self._join(span):
            self._keep(span)

    def instant(
        self, device: str, lane: str, name: str, *, kind: str, at_s: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Add a moment; arguments as for ``span``."""
        if self._has_room():
            self.instants.append(
                Instant(device=device, lane=lane, name=name, kind=kind, at_s=at_s, args=dict(args or {}))
            )

    def write(self, path: Path) -> None:
        """Write the trace-event JSON; open it at https://ui.perfetto.dev or in ``chrome://tracing``."""
        lanes = _ordered_lanes([*self.spans, *self.instants])
        ids = {lane: (process, thread) for process, thread, lane in _numbered(lanes)}
        events = [event for process, thread, lane in _numbered(lanes) for event in _names(process, thread, *lane)]
        events += [_complete(span, *ids[span.device, span.lane]) for span in self.spans]
        events += [_instant(instant, *ids[instant.device, instant.lane]) for instant in self.instants]
        trace = {"displayTimeUnit": "ms", "otherData": self._notes(), "traceEvents": events}
        path.write_text(json.dumps(trace, separators=(",", ":"), default=str), encoding="utf-8")

    def _join(self, span: Span) -> bool:
        """Lengthen the last span of the lane by this one, where the two may be one."""
        last = self._last.get((span.device, span.lane))
        if last is None or last.kind != span.kind or span.start_s < last.start_s:
            return False
        is_equal = last.name == span.name and last.args == span.args
        is_adjacent = span.start_s <= last.end_s + self.merge_gap_s
        if not (is_equal and is_adjacent) and span.end_s - last.start_s > self.resolution_s:
            return False
        last.end_s = max(last.end_s, span.end_s)
        last.busy_s = min(last.busy_s + span.busy_s, last.end_s - last.start_s)
        if not is_equal:
            last.name, last.args = span.kind, {}
        return True

    def _keep(self, span: Span) -> None:
        self.spans.append(span)
        self._last[span.device, span.lane] = span

    def _has_room(self) -> bool:
        while len(self.spans) + len(self.instants) >= self.max_events:
            if self.resolution_s >= _COARSEST_S:
                self.num_dropped += 1
                return False
            self.resolution_s = max(_FINEST_S, 2 * self.resolution_s)
            kept, self.spans, self._last = self.spans, [], {}
            for span in kept:
                if not self._join(span):
                    self._keep(span)
        return True

    def _notes(self) -> dict[str, str]:
        notes = {"complete": "yes"}
        if self.resolution_s:
            notes["resolution"] = f"spans of one kind within {self.resolution_s:g} s are drawn as one"
        if self.num_dropped:
            left_out = f"{self.num_dropped} later ones were left out"
            notes["complete"] = f"no: room for {self.max_events} events, {left_out}"
        return notes


def busy_shares(
    spans: Iterable[Span], *, device: str, lane: str, start_s: float, end_s: float, bin_s: float
) -> tuple[float, ...]:
    """Return which share of each bin of ``[start_s, end_s)`` one lane of one device was busy, each 0 to 1.

    Args:
        spans: Spans of any device; those of the lane must not overlap each other.
        device: Device to look at.
        lane: Lane to look at.
        start_s: Start of the first bin.
        end_s: End of the window; the last bin may reach beyond it.
        bin_s: Length of a bin.
    """
    num_bins = max(0, round((end_s - start_s) / bin_s))
    busy_s = [0.0] * num_bins
    for span in spans:
        if span.device != device or span.lane != lane:
            continue
        first = max(0, int((span.start_s - start_s) // bin_s))
        last = min(num_bins - 1, int((span.end_s - start_s) // bin_s))
        density = span.busy_s / (span.end_s - span.start_s) if span.end_s > span.start_s else 0.0
        for index in range(first, last + 1):
            bin_start_s = start_s + index * bin_s
            overlap_s = min(span.end_s, bin_start_s + bin_s) - max(span.start_s, bin_start_s)
            busy_s[index] += density * max(0.0, overlap_s)
    return tuple(min(1.0, busy / bin_s) for busy in busy_s)


def _ordered_lanes(events: Sequence[Span | Instant]) -> list[tuple[str, str]]:
    devices = list(dict.fromkeys(event.device for event in events))
    rank = {lane: number for number, lane in enumerate(LANES)}
    seen = dict.fromkeys((event.device, event.lane) for event in events)
    return sorted(seen, key=lambda lane: (devices.index(lane[0]), rank.get(lane[1], len(LANES)), lane[1]))


def _numbered(lanes: Sequence[tuple[str, str]]) -> list[tuple[int, int, tuple[str, str]]]:
    processes = {device: number for number, device in enumerate(dict.fromkeys(device for device, _ in lanes), start=1)}
    return [(processes[lane[0]], thread, lane) for thread, lane in enumerate(lanes, start=1)]


def _names(process: int, thread: int, device: str, lane: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": device}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}},
        {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}},
        {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}},
    ]


def _complete(span: Span, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": process,
        "tid": thread,
        "ts": round(span.start_s * 1e6, 1),
        "dur": round((span.end_s - span.start_s) * 1e6, 1),
        "args": span.args,
    }


def _instant(instant: Instant, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "s": "t",
        "name": instant.name,
        "cat": instant.kind,
        "pid": process,
        "tid": thread,
        "ts": round(instant.at_s * 1e6, 1),
        "args": instant.args,
    }

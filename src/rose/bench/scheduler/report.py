"""The report of ``rose bench scheduler``.

Every key of the report is always there; what was not measured is ``null``, and ``skipped`` or ``failed`` says why.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rose.bench import machine
from rose.bench.scheduler.arrivals import Arrivals
from rose.bench.scheduler.dead_http import measure_dead_http
from rose.bench.scheduler.dead_server import measure_dead_server
from rose.bench.scheduler.decisions import Costs, by_engines, by_trajectories, measure_affinity
from rose.bench.scheduler.gateway import measure_gateway
from rose.bench.scheduler.inprocess import measure_inprocess
from rose.bench.scheduler.memory import bytes_per_trajectory
from rose.bench.scheduler.peers import router_versions
from rose.bench.scheduler.settings import SECTIONS, SchedulerSettings
from rose.errors import RoseError

SCHEMA = "rose.bench.scheduler/1"
KEYS = {
    "decisions_per_s": "decisions",
    "p99_us": "decisions",
    "growth": "decisions",
    "turns_per_s": "decisions",
    "by_engines": "decisions",
    "by_trajectories": "decisions",
    "bytes_per_trajectory": "memory",
    "affinity_kept_fraction": "affinity",
    "affinity": "affinity",
    "inprocess_added_p99_ms": "in-process",
    "inprocess": "in-process",
    "dead_server": "dead-server",
    "gateway": "gateway",
    "gateway_setting": "gateway",
    "ahead_of_routers": "gateway",
}
"""Figures of the report, and the section that takes each."""

_PACKAGES = ("rose-rl", "attrs", "aiohttp")
_GROWTH_FROM = 64

Tell = Callable[[str], None]
Section = Callable[[], dict[str, Any]]


def run(settings: SchedulerSettings, tell: Tell) -> dict[str, Any]:
    """Measure what was asked for; returns the report. A section that fails is noted, and the others are kept."""
    begun_s = time.monotonic()
    sections: Mapping[str, Section] = {
        "decisions": lambda: _decisions(settings, tell),
        "memory": lambda: {"bytes_per_trajectory": bytes_per_trajectory(settings.num_memory_trajectories)},
        "affinity": lambda: _affinity(settings),
        "in-process": lambda: _inprocess(settings),
        "dead-server": lambda: _dead_server(settings, tell),
        "gateway": lambda: _gateway(settings, tell),
    }
    before = machine.machine()
    found: dict[str, Any] = {"section_s": {}, "skipped": {}, "failed": {}}
    for name in SECTIONS:
        if name in settings.only:
            tell(name)
            section_s = time.monotonic()
            try:
                found |= sections[name]()
            except RoseError as error:
                found["failed"][name] = str(error)
            found["section_s"][name] = time.monotonic() - section_s
    skipped = {key: "not asked for" for key, name in KEYS.items() if name not in settings.only}
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **dict.fromkeys(KEYS),
        **found,
        "skipped": skipped | found["skipped"],
        "wall_s": time.monotonic() - begun_s,
        "machine": before,
        "versions": {**machine.versions(_PACKAGES), **router_versions(settings.peers)},
        "commit": machine.commit(),
    }


def _decisions(settings: SchedulerSettings, tell: Tell) -> dict[str, Any]:
    rows = by_engines(settings.engine_counts, settings.num_turns, tell)
    live = by_trajectories(settings.trajectory_counts, settings.engine_counts[-1], settings.num_turns, tell)
    return {
        "decisions_per_s": {str(row.num_engines): row.decisions_per_s for row in rows},
        "p99_us": {str(row.num_engines): row.decision_p99_us for row in rows},
        "turns_per_s": {str(row.num_engines): row.turns_per_s for row in rows},
        "growth": growth(rows),
        "by_engines": [attrs.asdict(row) for row in rows],
        "by_trajectories": [attrs.asdict(row) for row in live],
    }


def growth(rows: Sequence[Costs]) -> float | None:
    """Return the cost of a decision with the most engines over that with 64, ``None`` where there is no such row."""
    base = next((row for row in rows if row.num_engines == _GROWTH_FROM), None)
    return None if base is None else base.decisions_per_s / rows[-1].decisions_per_s


def _affinity(settings: SchedulerSettings) -> dict[str, Any]:
    found = measure_affinity(settings.num_affinity_engines, settings.num_affinity_turns)
    return {"affinity_kept_fraction": found.pop("fraction"), "affinity": found["by_load"]}


def _inprocess(settings: SchedulerSettings) -> dict[str, Any]:
    found = measure_inprocess(
        Arrivals(rate_per_s=settings.rate_per_s, duration_s=settings.duration_s, seed=settings.seed)
    )
    return {"inprocess_added_p99_ms": found["added_p99_ms"], "inprocess": found}


def _dead_server(settings: SchedulerSettings, tell: Tell) -> dict[str, Any]:
    over_http = {name: attrs.asdict(hole) for name, hole in measure_dead_http(settings, tell).items()}
    return {"dead_server": {**measure_dead_server(), "http": over_http}}


def _gateway(settings: SchedulerSettings, tell: Tell) -> dict[str, Any]:
    found = measure_gateway(settings, tell)
    return {**found, "ahead_of_routers": ahead_of_routers(found["gateway"])}


def ahead_of_routers(gateway: Mapping[str, Any]) -> dict[str, dict[str, float]] | None:
    """Return what each router adds minus what ROSE's direct path adds, in ms; ``None`` where either is absent."""
    if "rose" not in gateway:
        return None
    routers = {name: row for name, row in gateway.items() if name.partition(" ")[0] in {"vllm-router", "smg"}}
    keys = ("added_p50_ms", "added_p99_ms")
    return {name: {key: row[key] - gateway["rose"][key] for key in keys} for name, row in routers.items()} or None

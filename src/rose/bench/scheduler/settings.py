"""What ``rose bench scheduler`` is asked to measure."""

from __future__ import annotations

from typing import Self

import attrs
from attrs import validators as v

from rose import checks

SECTIONS = ("decisions", "memory", "affinity", "in-process", "dead-server", "gateway")
"""The parts of the benchmark, in the order in which they run."""


@attrs.frozen(kw_only=True)
class SchedulerSettings:
    """One run.

    Attributes:
        only: Sections to run.
        peers: Folder of the other routers' programs; the search path if ``None``.
        engine_counts: Pools whose decisions are timed.
        trajectory_counts: Live trajectories at the largest of those pools.
        num_turns: Turns, and decisions, that are timed for each.
        num_memory_trajectories: Live trajectories whose memory is counted.
        num_affinity_engines: Engines of the pool in which affinity is counted.
        num_affinity_turns: Turns for each of its loads.
        rate_per_s: Turns a second of the open loops.
        duration_s: Length of an open loop.
        closed_s: Length of a closed loop.
        num_callers: Callers in a closed loop.
        num_rounds: In each, every way to the engines has its open and its closed loop.
        num_dead_requests: Turns, on average, that meet a dead server over HTTP.
        seed: Of everything.
    """

    only: tuple[str, ...] = attrs.field(default=SECTIONS, validator=v.deep_iterable(v.in_(SECTIONS)))
    peers: str | None = None
    engine_counts: tuple[int, ...] = (8, 64, 256, 1024, 4096)
    trajectory_counts: tuple[int, ...] = (1_000, 10_000, 100_000)
    num_turns: int = attrs.field(default=30_000, validator=checks.integer(1))
    num_memory_trajectories: int = attrs.field(default=100_000, validator=checks.integer(1))
    num_affinity_engines: int = attrs.field(default=64, validator=checks.integer(1))
    num_affinity_turns: int = attrs.field(default=30_000, validator=checks.integer(1))
    rate_per_s: float = attrs.field(default=60.0, validator=checks.number(above=0))
    duration_s: float = attrs.field(default=10.0, validator=checks.number(above=0))
    closed_s: float = attrs.field(default=3.0, validator=checks.number(above=0))
    num_callers: int = attrs.field(default=32, validator=checks.integer(1))
    num_rounds: int = attrs.field(default=5, validator=checks.integer(1))
    num_dead_requests: int = attrs.field(default=400, validator=checks.integer(1))
    seed: int = attrs.field(default=0, validator=checks.integer(0))

    def quick(self) -> Self:
        """Return a run of a few seconds, to see that everything works; its figures are no measurement."""
        return attrs.evolve(
            self,
            engine_counts=(8, 64),
            trajectory_counts=(500,),
            num_turns=300,
            num_memory_trajectories=300,
            num_affinity_engines=8,
            num_affinity_turns=500,
            rate_per_s=50.0,
            duration_s=0.4,
            closed_s=0.2,
            num_callers=8,
            num_rounds=1,
            num_dead_requests=30,
        )

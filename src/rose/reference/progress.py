"""Keeps the live view of a demo up to date while its arms run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import attrs

from rose.interfaces import Clock
from rose.observe.live import EngineRow, LiveState, LiveView
from rose.observe.summary import VersionRecord
from rose.pool import RolloutPool
from rose.reference.serving_site import ServingSite
from rose.types import EngineKind

_INTERVAL_S = 1.0


class Progress:
    """What the arms report, merged with readings of the pool and of serving, once a second of wall time."""

    def __init__(self, view: LiveView, clock: Clock, state: LiveState) -> None:
        self._view = view
        self._clock = clock
        self._state = state
        self._pool: RolloutPool | None = None
        self._began_s = time.monotonic()
        self._arm_began_s = clock.now()

    def begin_arm(self, arm: str, num_steps: int) -> None:
        """Show a new arm."""
        self._arm_began_s = self._clock.now()
        blank = LiveState(
            arm=arm,
            step=0,
            num_steps=num_steps,
            phase="preparing",
            slo_ttft_ms=self._state.slo_ttft_ms,
            slo_tpot_ms=self._state.slo_tpot_ms,
        )
        self._set(blank)

    def phase(self, phase: str) -> None:
        """Show what goes on."""
        self._set(attrs.evolve(self._state, phase=phase))

    def at(self, step: int, phase: str) -> None:
        """Show which step goes on, and its phase."""
        self._set(attrs.evolve(self._state, step=step, phase=phase))

    def step_done(self, reward: float, version: VersionRecord | None) -> None:
        """Show a step's reward and what its sync sent."""
        state = attrs.evolve(self._state, reward=reward)
        if version is not None:
            state = attrs.evolve(state, sync_sent_bytes=version.bytes_sent, sync_dense_bytes=version.bytes_dense)
        self._set(state)

    def evaluated(self, success: float) -> None:
        """Show the success on the held-out maps."""
        self._set(attrs.evolve(self._state, success=success))

    @contextlib.contextmanager
    def watching(self, pool: RolloutPool) -> Iterator[None]:
        """Read the engines of this pool from now on."""
        self._pool = pool
        try:
            yield
        finally:
            self._pool = None

    async def run(self, site: ServingSite) -> None:
        """Refresh until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            ttft_ms, tpot_ms = await site.progress()
            self._set(attrs.evolve(self._state, ttft_p99_ms=ttft_ms, tpot_p99_ms=tpot_ms))

    def _set(self, state: LiveState) -> None:
        self._state = attrs.evolve(
            state,
            modelled_s=self._clock.now() - self._arm_began_s,
            wall_s=time.monotonic() - self._began_s,
        )
        if self._pool is not None:
            self._state = _with_engines(self._state, self._pool)
        self._view.update(self._state)


def _with_engines(state: LiveState, pool: RolloutPool) -> LiveState:
    accounts = pool.accounts()
    views = pool.snapshot().engines
    rows = tuple(
        EngineRow(
            name=view.engine_id,
            kind=view.kind.value,
            state=view.state.value,
            num_running=view.num_in_flight,
            num_tokens=accounts[view.engine_id].num_tokens,
        )
        for view in views
    )
    num_running = sum(row.num_running for row in rows)
    num_borrowed = sum(row.num_running for row in rows if row.kind == EngineKind.BORROWED.value)
    return attrs.evolve(state, engines=rows, borrowed_fraction=num_borrowed / num_running if num_running else 0.0)

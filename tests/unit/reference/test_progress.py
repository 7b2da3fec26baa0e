"""The live view is fed by the arms, the pool and serving."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import attrs
import pytest

from rose.observe.live import LiveState
from rose.observe.summary import VersionRecord
from rose.pool import RolloutPool
from rose.reference import progress as progress_module
from rose.reference.progress import Progress
from rose.testing import FakeEngine, ManualClock
from rose.types import EngineId, EngineKind, Sampling, Turn

BLANK = LiveState(arm="set-up", step=0, num_steps=3, phase="starting", slo_ttft_ms=500, slo_tpot_ms=150)
VERSION = VersionRecord(
    n=1,
    phase="learn",
    lr=1e-3,
    changed_fraction=0.5,
    codec="dense",
    bytes_dense=1000,
    bytes_sent=700,
    stage_s=0.1,
    pause_s=0.01,
)


class View:
    def __init__(self) -> None:
        self.states: list[LiveState] = []

    def update(self, state: LiveState) -> None:
        self.states.append(state)

    @property
    def last(self) -> LiveState:
        return self.states[-1]


@pytest.fixture
def view() -> View:
    return View()


def test_an_arm_is_shown_step_by_step(view):
    clock = ManualClock(start_s=5.0)
    progress = Progress(view, clock, BLANK)
    progress.begin_arm("fixed", 3)
    assert (view.last.arm, view.last.phase, view.last.step, view.last.modelled_s) == ("fixed", "preparing", 0, 0.0)
    progress.evaluated(0.3)
    progress.at(1, "rollout")
    progress.step_done(0.4, VERSION)
    assert (view.last.step, view.last.phase, view.last.reward, view.last.success) == (1, "rollout", 0.4, 0.3)
    assert (view.last.sync_sent_bytes, view.last.sync_dense_bytes) == (700, 1000)
    progress.step_done(0.5, None)
    assert (view.last.reward, view.last.sync_sent_bytes) == (0.5, 700), "the last sync stays"
    progress.begin_arm("rose", 2)
    assert (view.last.reward, view.last.success, view.last.num_steps) == (None, None, 2)
    assert (view.last.slo_ttft_ms, view.last.slo_tpot_ms) == (500, 150)


def test_the_engines_are_read_while_a_pool_is_watched(view):
    clock = ManualClock()
    progress = Progress(view, clock, BLANK)

    async def work():
        own, lent = (FakeEngine(engine_id=EngineId(name), clock=clock, token_s=0.1) for name in ("own", "lent"))
        async with RolloutPool([own], borrowed=[lent], clock=clock) as pool:
            with progress.watching(pool):
                turns = [
                    asyncio.ensure_future(
                        pool.generate(
                            Turn(trajectory_id=f"t{i}", group_id="g", prompt_ids=(1,), sampling=Sampling(max_tokens=4))
                        )
                    )
                    for i in range(20)
                ]
                await clock.sleep(0.05)
                progress.phase("rollout")
                state = view.last
                await asyncio.gather(*turns)
                progress.phase("done")
            progress.phase("after")
            return state

    state = asyncio.run(clock.run(work()))
    rows = {row.name: row for row in state.engines}
    assert (rows["own"].kind, rows["lent"].kind) == (EngineKind.DEDICATED.value, EngineKind.BORROWED.value)
    assert rows["own"].num_running + rows["lent"].num_running == 20
    assert state.borrowed_fraction == rows["lent"].num_running / 20
    done = view.states[-2]
    assert sum(row.num_tokens for row in done.engines) == 80
    assert done.borrowed_fraction == 0.0
    assert view.last.engines == done.engines, "nothing is read of a pool that is closed"


def test_serving_is_read_once_a_second_until_cancelled(view, monkeypatch):
    monkeypatch.setattr(progress_module, "_INTERVAL_S", 0.001)
    progress = Progress(view, ManualClock(), BLANK)
    readings = iter([(None, None), (120.0, 30.0)])

    async def read() -> tuple[float | None, float | None]:
        try:
            return next(readings)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def work():
        with pytest.raises(asyncio.CancelledError):
            await progress.run(SimpleNamespace(progress=read))

    asyncio.run(work())
    assert [(state.ttft_p99_ms, state.tpot_p99_ms) for state in view.states] == [(None, None), (120.0, 30.0)]
    assert attrs.evolve(view.last, ttft_p99_ms=None, tpot_p99_ms=None, wall_s=0.0) == BLANK

from __future__ import annotations

import asyncio

import attrs

from rose import PoolConfig, RolloutPool
from rose.hosts.job.losses import Losses
from rose.policies.routing import EngineState
from rose.pool.events import EngineStateChanged
from rose.testing import FakeEngine, Fault, FaultKind
from rose.types import EngineId, EngineKind, Sampling, Turn

TURN = Turn(trajectory_id="t", group_id="g", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=5))


async def test_an_engine_that_is_lost_is_told_once():
    said: list[str] = []
    dying = FakeEngine(engine_id=EngineId("own0"), faults=(Fault(kind=FaultKind.DIE, after_tokens=2, request_index=0),))
    async with RolloutPool(
        [dying, FakeEngine(engine_id=EngineId("own1"))], config=PoolConfig(rejoin_s=0.01), on_event=Losses(said.append)
    ) as pool:
        turns = [attrs.evolve(TURN, trajectory_id=f"t{i}") for i in range(4)]
        results = await asyncio.gather(*(pool.generate(turn) for turn in turns))
        assert [len(result.token_ids) for result in results] == [5] * 4
        await asyncio.sleep(0.05)  # it is asked whether it is back
    (line,) = said
    assert line.startswith("engine own0 is lost and takes no turns: ")


def test_fenced_engines_are_told_and_those_that_are_back():
    said: list[str] = []
    losses = Losses(said.append)
    ready, fenced, lost = EngineState.READY, EngineState.FENCED, EngineState.LOST
    for old, new in [(None, ready), (ready, fenced), (fenced, ready), (ready, lost), (None, lost), (None, ready)]:
        losses(
            EngineStateChanged(
                at_s=0.0, engine_id=EngineId("e"), kind=EngineKind.DEDICATED, lease_id=None, old=old, new=new, why="so"
            )
        )
    back = "engine e takes turns again"
    assert said == ["engine e is fenced and takes no turns: so", back, "engine e is lost and takes no turns: so", back]

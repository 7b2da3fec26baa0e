"""The order of things in a run, with an engine that only remembers when it was asked."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from rose.backends.paced import PacedClock
from rose.bench.coserve import live
from rose.bench.coserve.settings import LiveSettings
from rose.bench.coserve.world import DeviceSetup, kv_pool
from rose.coserving.ledger import Ledger, RolloutState
from rose.errors import EngineError
from rose.policies.admission import Mode
from rose.types import FinishReason, TokenChunk

SETTINGS = LiveSettings(setup=DeviceSetup(num_slots=2))
STIR, WARM_UP, TURN = "stir", "warm-up", "turn"


@attrs.define
class Engine:
    """Gets a fifth of the pool more with each request, as long as ``grows`` and time goes on."""

    clock: PacedClock
    ledger: Ledger
    grows: bool = True
    budget_bytes: float = 0.0
    asked: list[tuple[str, bool]] = attrs.field(factory=list)

    async def generate(self, request):
        kind = TURN
        if request.sampling.max_tokens == 1:
            kind = STIR if len(request.prompt_ids) == 1 else WARM_UP
        self.asked.append((kind, self.clock.is_frozen))
        if self.grows and not self.clock.is_frozen:
            self.budget_bytes += kv_pool(SETTINGS.setup) / 5
            self.ledger.publish_rollout(RolloutState(kv_budget_bytes=self.budget_bytes))
        await asyncio.sleep(0.001)
        yield TokenChunk(token_ids=(7,) * request.sampling.max_tokens, finish_reason=FinishReason.LENGTH)


class Site:
    def __init__(self, clock):
        self.clock = clock
        self.begun = []

    async def begin(self, label):
        self.begun.append((label, self.clock.is_frozen))


@pytest.fixture
def rig(tmp_path):
    clock = PacedClock.create(tmp_path / "clock", k=0.1)
    clock.freeze()
    ledger = Ledger.create(tmp_path / "ledger")
    return live.LiveRig(
        settings=SETTINGS,
        root=tmp_path,
        clock=clock,
        ledger=ledger,
        rollout_options=None,
        clients=None,
        rollout=Engine(clock, ledger),
    )


async def let_run(rig, mode, label="run"):
    site = Site(rig.clock)
    async with rig.running(mode, label, site) as (_, started_s):
        assert not rig.clock.is_frozen
        await rig.clock.sleep(0.2)
        budget = rig.ledger.budget()
    assert rig.clock.is_frozen
    assert started_s <= rig.clock.now()
    return site, budget


def test_memory_grows_while_time_goes_on_then_contexts_are_free_then_turns_take_time(rig):
    site, budget = asyncio.run(let_run(rig, Mode.SLO))
    asked = rig.rollout.asked
    assert asked[:7] == [(STIR, False)] * 5 + [(WARM_UP, True)] * 2
    assert len(asked) > 8
    assert set(asked[7:]) == {(TURN, False)}
    assert site.begun == [("run", True)]
    assert (budget.mode, budget.is_granted) == (Mode.SLO, True)


def test_a_lease_is_kept_from_run_to_run_so_that_memory_is_there_at_once(rig):
    async def runs():
        _, first = await let_run(rig, Mode.SLO)
        rig.rollout.asked.clear()
        _, second = await let_run(rig, Mode.PAPER, "next")
        return first, second

    first, second = asyncio.run(runs())
    assert rig.rollout.asked[0] == (WARM_UP, True)
    assert first.fencing_token == second.fencing_token
    assert second.mode is Mode.PAPER


def test_alone_nothing_rolls_out_and_the_gate_is_closed(rig):
    _, budget = asyncio.run(let_run(rig, None))
    assert rig.rollout.asked == []
    assert budget.mode is Mode.CLOSED


def test_the_kill_switch_ends_the_lease_and_the_next_one_has_a_new_token(rig):
    rig.lend(Mode.SLO)
    token = rig.ledger.budget().fencing_token
    rig.revoke()
    assert not rig.ledger.budget().is_granted
    assert rig.ledger.budget().fencing_token > token
    rig.lend(Mode.SLO)
    assert rig.ledger.budget().fencing_token > token + 1
    assert rig.ledger.budget().is_granted


def test_memory_that_does_not_grow_is_an_error_and_leaves_the_clock_still(rig, monkeypatch):
    monkeypatch.setattr(live, "_GROW_LIMIT_S", 0.05)
    rig.rollout.grows = False
    with pytest.raises(EngineError, match=r"KV budget did not grow to \d+\.\d GB in 0\.05 s"):
        asyncio.run(let_run(rig, Mode.SLO))
    assert rig.clock.is_frozen

"""A pool in an actor: over engines in other actors, started anew, synced."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from ray_parts import Cable, fake, install_fakes, site, turn, until
from rose.backends.memory import MemoryTransport
from rose.coserving.ledger import Ledger
from rose.errors import EngineLostError, RequestRefusedError, RoseError, TurnFailedError
from rose.hosts.ray.engine_host import EngineHost
from rose.hosts.ray.specs import LenderSpec
from rose.pool import EngineState
from rose.testing import FakeTrainer
from rose.transfer.publisher import Publisher
from rose.types import EngineKind, WeightVersion


@pytest.fixture(autouse=True)
def _fakes(tmp_path, monkeypatch):
    install_fakes(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def store():
    """A store that others can open, and a publisher on it."""
    transport = MemoryTransport()
    transport.serve()
    yield transport, Publisher(FakeTrainer(), transport, run="run")
    transport.close()


async def states(pool) -> dict[str, EngineState]:
    return {view.engine_id: view.state for view in (await pool.status()).snapshot.engines}


async def test_turns_run_on_engines_of_both_kinds_and_places():
    borrowed = fake("far", kind=EngineKind.BORROWED)
    async with site(a=fake("a"), far=borrowed) as here:
        pool = here.pool(engines=(fake("own"),))
        results = await asyncio.gather(*(pool.generate(turn(i)) for i in range(40)))
        assert len({result.token_ids for result in results}) > 1
        status = await pool.status()
        assert status.engine_nodes == {"a": "node-a", "far": "node-far"}
        assert {name: account.kind for name, account in status.accounts.items()} == {
            "own": EngineKind.DEDICATED,
            "a": EngineKind.DEDICATED,
            "far": EngineKind.BORROWED,
        }
        assert sum(account.num_tokens for account in status.accounts.values()) == 40 * 8


async def test_turns_of_a_lost_engine_go_on_elsewhere_and_it_comes_back():
    async with site(a=fake("a"), b=fake("b")) as here:
        pool = here.pool()
        running = [asyncio.create_task(pool.generate(turn(i, num_tokens=60))) for i in range(8)]
        await until(lambda: len(here.cables["a"].host._pumps) == 4 if here.cables["a"].host else False)
        await asyncio.sleep(0.02)
        old = here.cables["a"].host
        here.cables["a"].cut()
        results = [await task for task in running]
        assert all(len(result.token_ids) == 60 for result in results)
        assert sum(len(result.hops) == 2 for result in results) == 4
        assert (await states(pool))["a"] is EngineState.LOST
        here.cables["a"].plug(EngineHost(fake("a"), node_id="elsewhere"))
        async with asyncio.timeout(10):
            while (await states(pool))["a"] is not EngineState.READY:
                await asyncio.sleep(0.01)
        assert (await pool.status()).engine_nodes["a"] == "elsewhere"
        await old.close()


async def test_an_engine_whose_actor_is_gone_leaves_and_a_new_one_joins():
    async with site(a=fake("a"), b=fake("b")) as here:
        pool = here.pool()
        await pool.hello()
        gone = here.cables.pop("b")
        here.cables["c"] = Cable(EngineHost(fake("c")))
        async with asyncio.timeout(10):
            while (await states(pool)).keys() != {"a", "c"}:
                await asyncio.sleep(0.01)
        await gone.host.close()


async def test_an_engine_that_does_not_start_keeps_nobody_waiting_and_is_asked_less_and_less():
    async with site(a=fake("a"), bad=fake("bad", backend="never-starts")) as here:
        pool = here.pool(rejoin_s=0.01)
        assert (await pool.generate(turn())).token_ids
        looks = 0
        find = pool._find

        async def counted():
            nonlocal looks
            looks += 1
            return await find()

        pool._find = counted
        await until(lambda: looks >= 30)
        assert here.cables["bad"].calls.count("describe") <= 10
        assert "bad" not in await states(pool)


async def test_a_pool_that_is_started_anew_takes_up_the_newest_version_and_brings_the_others_to_it(store):
    transport, publisher = store
    async with site(a=fake("a"), b=fake("b")) as here:
        first = here.pool()
        version = publisher.publish_sync().version
        report = await first.sync_weights(transport.address())
        assert set(report.activations) == {"a", "b"}
        first_incarnation = await first.hello()
        await first.close()  # as after the loss of its node; engine "a" was lost with it
        lost = here.cables["a"].host
        here.cables["a"].plug(EngineHost(fake("a")))
        await lost.close()
        second = here.pool()
        assert await second.hello() != first_incarnation
        status = await second.status()
        assert status.snapshot.version == version, "the engine without weights did not decide what is current"
        async with asyncio.timeout(10):
            while (await states(second))["a"] is not EngineState.READY:
                await asyncio.sleep(0.01)
        assert here.engine("a").weight_version == version


async def test_errors_of_a_sync_can_be_read_everywhere(store):
    transport, publisher = store
    publisher.publish_sync()
    async with site(a=fake("a"), b=fake("b")) as here:
        pool = here.pool(rejoin_s=60.0)
        await pool.hello()
        here.engine("b").die()
        report = await pool.sync_weights(transport.address())
        assert set(report.activations) == {"a"}
        assert all(isinstance(error, RoseError) for error in report.errors.values())


async def test_engines_are_added_and_removed_by_hand():
    async with site(a=fake("a")) as here:
        pool = here.pool()
        assert await pool.add_engine(fake("own")) is EngineState.READY
        with pytest.raises(ValueError, match="'own' is in the pool already"):
            await pool.add_engine(fake("own"))
        host = here.cables["a"].host
        assert await pool.remove_engine("a", "not needed")
        assert host._is_closed, "it ends for good, or it would join again"
        assert (await states(pool)).get("a") is not EngineState.READY
        with pytest.raises(EngineLostError):
            await pool.remove_engine("nothing", "not needed")


async def test_an_engine_that_is_out_of_the_pool_for_the_moment_is_removed_and_does_not_join_again():
    async with site(a=fake("a"), b=fake("b")) as here:
        pool = here.pool(rejoin_s=0.01)
        await states(pool)
        inner = await pool._pool()
        host = here.cables["a"].host
        await inner.remove_engine("a", "it is about to join again")
        assert await pool.remove_engine("a", "not needed")
        assert host._is_closed
        assert "a" not in await states(pool)
        await asyncio.sleep(0.1)
        assert "a" not in await states(pool)


async def test_errors_of_a_turn_keep_their_type_and_a_cancelled_call_cancels_the_turn():
    async with site(a=fake("a", vocab_size=50)) as here:
        pool = here.pool()
        with pytest.raises(RequestRefusedError, match="outside 0 to 49"):
            await pool.generate(turn(99))
        call = asyncio.create_task(pool.generate(turn(num_tokens=900)))
        await until(lambda: here.cables["a"].host._pumps)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        await until(lambda: not here.cables["a"].host._pumps, "the engine is free")
        assert (await pool.status()).snapshot.num_live_turns == 0


async def test_a_pool_that_cannot_start_says_why_and_tries_again():
    async with site() as here:
        pool = here.pool(engines=(fake("own", backend="never-starts"),))
        for _ in range(2):
            with pytest.raises(RoseError, match="no such GPU"):
                await pool.hello()


async def test_closing_ends_turns_and_tasks_and_leaves_engines_alone():
    async with site(a=fake("a")) as here:
        pool = here.pool()
        call = asyncio.create_task(pool.generate(turn(num_tokens=2000)))
        await until(lambda: here.cables["a"].host and here.cables["a"].host._pumps)
        await pool.close()
        await pool.close()
        with pytest.raises(TurnFailedError, match="closed"):
            await call
        with pytest.raises(TurnFailedError, match="pool 'p' was closed"):
            await pool.hello()
        assert (await here.cables["a"].host.describe()).version is None
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        assert not rest, rest


async def test_engines_are_borrowed_from_a_lender_and_given_back(tmp_path):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")
    from rose.hosts.http.lender import serve_lender  # noqa: PLC0415 - after the skip
    from rose.hosts.http.lender_config import LenderConfig, LentDeviceConfig  # noqa: PLC0415

    ledger = Ledger.create(tmp_path / "gpu0.ledger")
    ledger.beat(time.monotonic())
    devices = {"gpu0": LentDeviceConfig(ledger=tmp_path / "gpu0.ledger")}
    config = LenderConfig(state=tmp_path / "lender.sqlite", devices=devices, listen="127.0.0.1:0")
    async with serve_lender(config) as url, site(a=fake("a")) as here:
        lender = LenderSpec(url=url, job="job", engines={"gpu0": fake("far", kind=EngineKind.BORROWED)})
        pool = here.pool(lender=lender)
        results = await asyncio.gather(*(pool.generate(turn(i)) for i in range(40)))
        assert {result.hops[-1].engine_id for result in results} == {"a", "far"}
        assert ledger.budget().is_granted
        await pool.close()
        assert not ledger.budget().is_granted


def test_versions_sort_newest_first():
    from rose.hosts.ray.pool_host import _age  # noqa: PLC0415 - one test's

    known = [None, WeightVersion("r", 1), WeightVersion("r", 3)]
    assert sorted(known, key=_age) == [WeightVersion("r", 3), WeightVersion("r", 1), None]

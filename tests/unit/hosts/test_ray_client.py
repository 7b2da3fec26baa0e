"""A client of a pool in an actor: one outcome a call, whatever becomes of the pool."""

from __future__ import annotations

import asyncio

import pytest

from ray_parts import Cable, fake, install_fakes, site, turn, until
from rose import sync
from rose.errors import ConfigError, DeadlineExceededError, RequestRefusedError, TransportError
from rose.hosts.ray.client import ClientConfig, RayPool
from rose.hosts.ray.specs import EngineSpec
from rose.types import FinishReason, TurnResult, WeightVersion

QUICK = ClientConfig(restart_timeout_s=5.0, retry_s=0.01)


@pytest.fixture(autouse=True)
def _fakes(tmp_path, monkeypatch):
    install_fakes(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def client(host: object, config: ClientConfig = QUICK) -> tuple[RayPool, Cable]:
    cable = Cable(host, TransportError)
    return RayPool(cable, name="p", config=config), cable


async def test_many_turns_need_few_calls():
    async with site(a=fake("a"), b=fake("b")) as here:
        pool, cable = client(here.pool())
        async with pool:
            outcomes = await pool.generate_many(turn(i) for i in range(200))
        assert all(isinstance(outcome, TurnResult) and len(outcome.token_ids) == 8 for outcome in outcomes)
        assert cable.calls.count("submit") < 10
        assert cable.calls.count("read") < 200
        assert cable.calls[-1] == "leave"


async def test_bad_turns_are_data_among_many_and_errors_alone():
    async with site(a=fake("a", vocab_size=50)) as here:
        pool, _ = client(here.pool())
        async with pool:
            good, bad = await pool.generate_many([turn(1), turn(99)])
            assert isinstance(good, TurnResult)
            assert isinstance(bad, RequestRefusedError)
            with pytest.raises(RequestRefusedError):
                await pool.generate(turn(99))
            with pytest.raises(TypeError, match="turn must be of type Turn, got 5"):
                await pool.generate(5)


@pytest.mark.parametrize("is_same_pool", [True, False], ids=["connection lost", "pool lost"])
async def test_turns_in_flight_end_once_after_the_pool_was_away(is_same_pool):
    async with site(a=fake("a"), b=fake("b")) as here:
        host = here.pool()
        pool, cable = client(host)
        async with pool:
            running = [asyncio.create_task(pool.generate(turn(i, num_tokens=100))) for i in range(10)]
            await until(lambda: all(each.epoch for each in pool._pending.values()) and len(pool._pending) == 10)
            await until(lambda: sum(len(here.engine(name).requests) for name in ("a", "b")) == 10)
            cable.cut()
            if not is_same_pool:
                await host.close()
            await asyncio.sleep(0.05)
            late = asyncio.create_task(pool.generate(turn(99)))
            cable.plug(host if is_same_pool else here.pool())
            results = [await task for task in [*running, late]]
            assert [len(result.token_ids) for result in results] == [100] * 10 + [8]
            assert not pool._pending
        num_begun = sum(len(here.engine(name).requests) for name in ("a", "b"))
        assert num_begun == 11 if is_same_pool else num_begun == 21, "a pool that is the same runs no turn twice"


async def test_a_turn_that_was_lost_too_often_may_be_sent_again_by_the_caller():
    async with site(a=fake("a")) as here:
        host = here.pool()
        pool, cable = client(host, ClientConfig(restart_timeout_s=5.0, retry_s=0.01, max_resubmits=0))
        async with pool:
            running = asyncio.create_task(pool.generate(turn(num_tokens=2000)))
            await until(lambda: any(each.epoch for each in pool._pending.values()))
            cable.cut()
            await host.close()
            cable.plug(here.pool())
            with pytest.raises(TransportError, match="was started anew and has lost this turn; send it again"):
                await running
            assert len((await pool.generate(turn())).token_ids) == 8


async def test_a_pool_that_does_not_come_back_ends_every_turn_in_time():
    async with site(a=fake("a")) as here:
        pool, cable = client(here.pool(), ClientConfig(restart_timeout_s=0.1, retry_s=0.01))
        async with pool:
            running = [asyncio.create_task(pool.generate(turn(i, num_tokens=2000))) for i in range(3)]
            await until(lambda: all(each.epoch for each in pool._pending.values()) and len(pool._pending) == 3)
            cable.cut()
            for task in running:
                with pytest.raises(TransportError, match=r"pool 'p' did not come back within 0.1 s: the cable was cut"):
                    await task
            with pytest.raises(TransportError, match="did not come back"):
                await pool.status()


async def test_nobody_waits_for_a_pool_that_has_ended():
    async with site(a=fake("a")) as here:
        pool, cable = client(here.pool(), ClientConfig(restart_timeout_s=600.0, retry_s=0.01))
        async with pool:
            running = asyncio.create_task(pool.generate(turn(num_tokens=2000)))
            await until(lambda: any(each.epoch for each in pool._pending.values()))
            cable.cut()
            cable.is_gone = True
            with pytest.raises(TransportError, match="pool 'p' has ended for good: the cable was cut"):
                await running


@pytest.mark.parametrize("after_calls", [0, 1, 2, 5], ids="after {} yields".format)
async def test_a_cancelled_turn_leaves_nothing(after_calls):
    async with site(a=fake("a")) as here:
        host = here.pool()
        pool, _ = client(host)
        async with pool:
            await pool.generate(turn())
            call = asyncio.create_task(pool.generate(turn(1, num_tokens=2000)))
            for _ in range(after_calls):
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await asyncio.sleep(0.05)
            assert not pool._pending
            assert (await pool.snapshot()).num_live_turns == 0
            assert here.engine("a").num_in_flight == 0


async def test_cancelling_many_cancels_each():
    async with site(a=fake("a")) as here:
        pool, _ = client(here.pool())
        async with pool:
            call = asyncio.create_task(pool.generate_many(turn(i, num_tokens=2000) for i in range(5)))
            await until(lambda: all(each.epoch for each in pool._pending.values()) and len(pool._pending) == 5)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            async with asyncio.timeout(10):
                while (await pool.snapshot()).num_live_turns:
                    await asyncio.sleep(0.01)


async def test_leaving_cancels_what_runs_and_later_calls_are_refused():
    async with site(a=fake("a")) as here:
        host = here.pool()
        pool, _ = client(host)
        async with pool:
            call = asyncio.create_task(pool.generate(turn(num_tokens=2000)))
            await until(lambda: any(each.epoch for each in pool._pending.values()))
        with pytest.raises(TransportError, match="this client of pool 'p' was closed"):
            await call
        with pytest.raises(TransportError, match="was closed; connect again"):
            await pool.generate(turn())
        await until(lambda: here.engine("a").num_in_flight == 0)
        await pool.close()


async def test_two_clients_share_the_pools_memory_of_trajectories():
    async with site(a=fake("a"), b=fake("b")) as here:
        host = here.pool()
        (one, _), (two, _) = client(host), client(host)
        async with one, two:
            places = {}
            for i in range(6):
                places[i] = (await one.generate(turn(i))).hops[-1].engine_id
            assert set(places.values()) == {"a", "b"}
            again = {i: (await two.generate(turn(i))).hops[-1].engine_id for i in reversed(range(6))}
            assert again == places
            assert (await one.status()).num_clients == 2


async def test_a_pool_that_cannot_start_says_so_to_every_call():
    async with site() as here:
        pool, _ = client(here.pool(engines=(EngineSpec(engine_id="x", backend="no-such-backend"),)))
        with pytest.raises(ConfigError, match="no serving backend is called 'no-such-backend'"):
            await pool.generate(turn())
        with pytest.raises(ConfigError, match="no serving backend"):
            await pool.wait_until_up()
        await pool.close()


async def test_engines_and_accounts_are_reached_through_the_client():
    async with site(a=fake("a")) as here:
        pool, _ = client(here.pool())
        async with pool:
            await pool.add_engine(fake("own"))
            await pool.generate(turn())
            assert sum(account.num_tokens for account in (await pool.accounts()).values()) == 8
            assert (await pool.statistics()).finished == {FinishReason.LENGTH: 1}
            with pytest.raises(DeadlineExceededError, match="is at None"):
                await pool.barrier(WeightVersion("r", 1), timeout_s=0.05)
            assert await pool.remove_engine("own", "enough")
            with pytest.raises(ConfigError, match="this is no address of a store"):
                await pool.sync_weights({"host": "nowhere"})


async def test_loops_without_asyncio_use_the_same_client():
    async with site(a=fake("a", vocab_size=50)) as here:
        host, loop = here.pool(), asyncio.get_running_loop()

        class Elsewhere:
            """Calls a host on another loop, as the calls of an actor do."""

            is_gone = False

            async def call(self, method, *arguments):
                work = asyncio.run_coroutine_threadsafe(getattr(host, method)(*arguments), loop)
                return await asyncio.wrap_future(work)

        def work():
            with sync.RolloutPool.over(lambda: RayPool(Elsewhere(), name="p", config=QUICK)) as pool:
                results = pool.generate_many([turn(i) for i in range(5)])
                with pytest.raises(RequestRefusedError):
                    pool.generate(turn(99))
                return results, pool.accounts()["a"].num_tokens, pool.call(lambda pool: pool.status()).node_id

        results, num_tokens, node_id = await asyncio.to_thread(work)
        assert [len(result.token_ids) for result in results] == [8] * 5
        assert (num_tokens, node_id) == (40, "node-pool")

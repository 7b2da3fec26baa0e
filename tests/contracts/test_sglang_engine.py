"""SGLang servers keep the serving-engine contract: a real one on one rank and on two, and the fake one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from relay_parts import Relay

from rose.backends.sglang import LaunchedSglang, SglangEngine
from rose.interfaces import ServingEngine
from rose.testing import EngineContract, FakeEngine
from rose.testing.sglang_server import serve_sglang
from rose.types import WeightUpdate, WeightVersion
from sglang_real import MAX_CONTEXT, VOCAB_SIZE, make_model, make_options


class TestSglangEngine(EngineContract):
    """The fake server, with ROSE's package in it."""

    max_model_len = 4096 - 6
    quiet_s = 0.02
    is_incremental = True
    has_package = True

    async def make_engine(self) -> ServingEngine:
        self.stack = contextlib.AsyncExitStack()
        fake = FakeEngine(token_s=0.001, weight_version=WeightVersion("run", 3))
        url, self.server = await self.stack.enter_async_context(
            serve_sglang(fake, is_incremental=self.is_incremental, has_package=self.has_package)
        )
        engine = SglangEngine(url)
        self.stack.push_async_callback(engine.close)
        return engine

    async def release_engine(self, engine: ServingEngine) -> None:
        await self.stack.aclose()
        assert self.server.died is None


class TestPlainSglangEngine(TestSglangEngine):
    """Without the package, and with events that repeat everything: how such a server starts without ROSE's options."""

    is_incremental = False
    has_package = False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'rose-rl[demo]'")
    folder = tmp_path_factory.mktemp("sglang")
    options = make_options(
        folder,
        make_model(folder / "model"),
        tensor_parallel_size=request.param,
        initial_version=WeightVersion("contract", 0),
        is_deterministic=True,
    )
    engine, relay = LaunchedSglang(options), Relay(Path(options.model))
    try:
        await engine.start()
        yield engine, relay
    finally:
        await engine.close()
        relay.transport.close()


class RealContract(EngineContract):
    vocab_size = VOCAB_SIZE
    max_model_len = MAX_CONTEXT
    long_tokens = 300
    quiet_s = 0.05

    @pytest.fixture(autouse=True)
    def _share(self, server: tuple[LaunchedSglang, Relay]) -> None:
        self.shared, self.relay = server

    async def make_engine(self) -> ServingEngine:
        return self.shared

    async def release_engine(self, engine: ServingEngine) -> None:
        await engine.resume()

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        return self.relay.next_update((await engine.snapshot()).weight_version)


@pytest.mark.sglang
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("server", [1], indirect=True, scope="module")
class TestSglang(RealContract):
    """One rank."""


@pytest.mark.sglang
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("server", [2], indirect=True, scope="module")
class TestSglangOverTwoRanks(RealContract):
    """Tensor parallel."""

"""SGLang servers keep the serving-engine contract: a real one on one rank and on two, and the fake one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from sglang_real import MAX_CONTEXT, VOCAB_SIZE, make_model, make_options

from rose.backends.sglang import LaunchedSglang
from rose.interfaces import ServingEngine
from rose.testing import EngineContract
from rose.types import WeightVersion


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'rose-rl[demo]'")
    folder = tmp_path_factory.mktemp("sglang")
    options = make_options(
        folder,
        make_model(folder / "model"),
        tensor_parallel_size=request.param,
        initial_version=WeightVersion("contract", 0),
    )
    engine = LaunchedSglang(options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


class RealContract(EngineContract):
    vocab_size = VOCAB_SIZE
    max_model_len = MAX_CONTEXT
    long_tokens = 300
    quiet_s = 0.05

    @pytest.fixture(autouse=True)
    def _share(self, server: LaunchedSglang) -> None:
        self.shared = server

    async def make_engine(self) -> ServingEngine:
        return self.shared

    async def release_engine(self, engine: ServingEngine) -> None:
        await engine.resume()


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

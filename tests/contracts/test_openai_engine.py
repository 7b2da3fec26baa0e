"""Engines behind an OpenAI-compatible server keep the serving-engine contract, as far as such a server goes."""

from __future__ import annotations

import contextlib

import pytest

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

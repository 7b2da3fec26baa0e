"""Where ROLL comes from: a checkout that ``ROLL_SRC`` names, or else interface doubles; and pools for tests."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROLL_SRC = os.environ.get("ROLL_SRC")
sys.path[:0] = [str(HERE), ROLL_SRC or str(HERE / "doubles")]
if ROLL_SRC:
    import real_tools  # noqa: F401 - completes ROLL's CPU platform before anything imports it
else:
    import behaviours

    behaviours.install()

from rose import RolloutPool
from rose.backends.memory import MemoryTransport
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.pool.store_offer import StoreOffer
from rose.testing import FakeEngine
from rose.types import EngineId


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a checkout where there is none, and what is about doubles where there is one."""
    for item in items:
        if "real" in item.keywords and not ROLL_SRC:
            item.add_marker(pytest.mark.skip(reason="set ROLL_SRC to a checkout of ROLL at 8eb27cc"))
        if "doubles" in item.keywords and ROLL_SRC:
            item.add_marker(pytest.mark.skip(reason="over doubles only: the real class needs a whole job"))


class FakeSite:
    """A pool of scripted engines behind its real service, with a real store, in a thread."""

    def __init__(self, engines: Sequence[FakeEngine], *, listen: str = "127.0.0.1:0", **options: Any) -> None:
        self.engines = list(engines)
        self._listen = listen
        self.store = MemoryTransport()
        self._options = options
        self._opened: Future[str] = Future()
        self._ending: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)
        self._thread.start()
        self.url = self._opened.result(20)

    async def _live(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        try:
            offer = StoreOffer(address=self.store.serve())
            async with (
                RolloutPool(self.engines, **self._options) as self.pool,
                serve_pool(PoolService(self.pool, name="toy", store=offer), self._listen) as url,
            ):
                self._opened.set_result(url)
                await self._ending.wait()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
            raise

    def call(self, work: Callable[[], Any]) -> Any:
        """Run something on the pool's loop."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(20)
        self.store.close()


@pytest.fixture
def make_site() -> Iterator[Callable[..., FakeSite]]:
    sites: list[FakeSite] = []

    def make(*engines: FakeEngine, **options: Any) -> FakeSite:
        made = engines or [FakeEngine(engine_id=EngineId(f"e{number}")) for number in range(2)]
        sites.append(FakeSite(made, **options))
        return sites[-1]

    yield make
    from rose_roll.connection import close_connections

    close_connections()
    for site in sites:
        site.close()


class WordTokenizer:
    """A tokenizer of words that are numbers."""

    eos_token_id, pad_token_id = 1, 0

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        del add_special_tokens
        return {"input_ids": [len(word) + 2 for word in text.split()]}


@pytest.fixture
def tokenizer() -> WordTokenizer:
    return WordTokenizer()

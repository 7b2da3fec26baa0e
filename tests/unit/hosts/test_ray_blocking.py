"""A client for loops without asyncio; the pool has a thread and a loop of its own, as an actor has."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ray_parts import Cable, Site, fake, install_fakes, turn

from rose.errors import ConfigError, RequestRefusedError, TransportError
from rose.hosts.ray.blocking import SyncRayPool
from rose.hosts.ray.client import ClientConfig, RayPool
from rose.types import TurnResult


@pytest.fixture(autouse=True)
def _fakes(tmp_path, monkeypatch):
    install_fakes(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


class Elsewhere:
    """A pool host on an event loop of its own, and connections to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

        async def made() -> None:
            self.site = Site(a=fake("a", vocab_size=50))
            self.host = self.site.pool()

        self.do(made())

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20.0)

    async def call(self, method, *arguments):
        work = asyncio.run_coroutine_threadsafe(getattr(self.host, method)(*arguments), self.loop)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        self.do(self.site.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def elsewhere():
    made = Elsewhere()
    yield made
    made.close()


def test_turns_engines_and_errors_without_a_loop(elsewhere):
    with SyncRayPool(lambda: RayPool(elsewhere, name="p")) as pool:
        assert len(pool.generate(turn(1)).token_ids) == 8
        good, bad = pool.generate_many([turn(2), turn(99)])
        assert isinstance(good, TurnResult)
        assert isinstance(bad, RequestRefusedError)
        with pytest.raises(RequestRefusedError):
            pool.generate(turn(99))
        pool.add_engine(fake("own"))
        assert {view.engine_id for view in pool.snapshot().engines} == {"a", "own"}
        assert pool.remove_engine("own", "enough")
        assert pool.accounts()["a"].num_tokens == 16
        assert pool.status().node_id == "node-pool"
        with pytest.raises(ConfigError, match="address of a store is no JSON"):
            pool.sync_weights("nowhere")
    pool.close()
    assert not pool._thread.is_alive()


def test_several_threads_share_it(elsewhere):
    with SyncRayPool(lambda: RayPool(elsewhere, name="p")) as pool:
        done: list[int] = []
        threads = [
            threading.Thread(target=lambda i=i: done.append(len(pool.generate(turn(i)).token_ids))) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [8] * 8


def test_an_interrupt_cancels_the_turn(elsewhere, monkeypatch):
    with SyncRayPool(lambda: RayPool(elsewhere, name="p")) as pool:
        real = asyncio.run_coroutine_threadsafe

        class Interrupted:
            def __init__(self, future):
                self.future = future

            def result(self):
                while not elsewhere.site.engine("a").requests:
                    pass
                raise KeyboardInterrupt

            def cancel(self):
                self.future.cancel()

        pool.snapshot()
        with monkeypatch.context() as patched:
            patched.setattr(
                asyncio,
                "run_coroutine_threadsafe",
                lambda work, loop: Interrupted(real(work, loop)) if loop is pool._loop else real(work, loop),
            )
            with pytest.raises(KeyboardInterrupt):
                pool.generate(turn(1, num_tokens=3000))
        while pool.snapshot().num_live_turns:
            pass


def test_a_pool_that_is_not_there_leaves_no_thread():
    cable = Cable(None, TransportError)
    cable.cut()
    config = ClientConfig(restart_timeout_s=0.05, retry_s=0.01)
    with (
        pytest.raises(TransportError, match="did not come back"),
        SyncRayPool(lambda: RayPool(cable, name="p", config=config)),
    ):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "rose-ray"]

    def fails():
        message = "no pool 'p' runs in this Ray cluster"
        raise ConfigError(message)

    with pytest.raises(ConfigError, match="no pool"):
        SyncRayPool(fails)
    assert not [thread for thread in threading.enumerate() if thread.name == "rose-ray"]

"""ROLL's suspensions over a stand-in of its router's actor; the actor itself is in test_real_router.py."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from helpers import SETTINGS, make_proxy, prompt

from rose.testing import FakeEngine
from rose.types import EngineId


class Router:
    """The calls of the actor, made in the caller's thread."""

    def __init__(self) -> None:
        self.need_suspend = self.need_shutdown = False
        self.inflight: set[str] = set()
        self.changed = threading.Condition()
        self.on_send_request = SimpleNamespace(remote=self._send)
        self.on_request_routed = SimpleNamespace(remote=self._routed)
        self.__ray_call__ = SimpleNamespace(remote=lambda function: function(self))

    def _send(self, request_id: str) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: not self.need_suspend, timeout=20)
            if not self.need_shutdown:
                self.inflight.add(request_id)
            return not self.need_shutdown

    def _routed(self, request_id: str) -> None:
        with self.changed:
            self.inflight.remove(request_id)
            self.changed.notify_all()

    def suspend(self) -> None:
        with self.changed:
            self.need_suspend = True
            assert self.changed.wait_for(lambda: not self.inflight, timeout=10), "ROLL waits for turns under way"

    def resume(self) -> None:
        with self.changed:
            self.need_suspend = False
            self.changed.notify_all()


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Router:
    monkeypatch.setattr(ray, "get", lambda value, **_: value)
    return Router()


def play(proxy: Any, seen: list[Any]) -> threading.Thread:
    def run() -> None:
        while not seen or seen[-1] is None:
            seen.append(proxy.generate([], prompt([5, 6]), {**SETTINGS, "max_new_tokens": 30}))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_suspension_keeps_the_tokens(make_site: Any, tokenizer: Any, router: Router) -> None:
    engine = FakeEngine(engine_id=EngineId("e0"), token_s=0.02)
    proxy = make_proxy(make_site(engine).url, tokenizer, router=router, poll_s=0.02)
    seen: list[Any] = []
    thread = play(proxy, seen)
    for _ in range(2):
        time.sleep(0.2)
        router.suspend()
        time.sleep(0.1)
        assert seen[-1] is None
        num_asked = len(engine.requests)
        time.sleep(0.2)
        assert len(engine.requests) == num_asked, "nothing is asked while ROLL is suspended"
        router.resume()
    thread.join(20)
    assert [one is None for one in seen] == [True, True, False]
    assert seen[-1].batch["responses"].shape == (1, 30)
    assert {len(one.prompt_ids) + one.sampling.max_tokens for one in engine.requests} == {32}
    assert not router.inflight


def test_another_routers_turns_go_on(make_site: Any, tokenizer: Any, router: Router) -> None:
    """Training and validation have a router each; a suspension of one leaves the other alone."""
    site = make_site(FakeEngine(engine_id=EngineId("e0"), token_s=0.02))
    other = Router()
    seen: list[Any] = []
    thread = play(make_proxy(site.url, tokenizer, router=router, poll_s=0.02), [])
    undisturbed = play(make_proxy(site.url, tokenizer, router=other, poll_s=0.02), seen)
    time.sleep(0.2)
    router.suspend()
    undisturbed.join(10)
    assert len(seen) == 1
    assert seen[0] is not None
    router.resume()
    thread.join(10)


def test_a_shutdown_ends_the_turn(make_site: Any, tokenizer: Any, router: Router) -> None:
    router.need_shutdown = True
    proxy = make_proxy(make_site().url, tokenizer, router=router)
    assert proxy.generate([], prompt([5]), dict(SETTINGS)) is None
    assert not router.inflight


def test_turns_run_through_where_that_is_wanted(make_site: Any, tokenizer: Any, router: Router) -> None:
    router.need_suspend = True
    proxy = make_proxy(make_site().url, tokenizer, router=router, on_suspend="continue")
    assert proxy.generate([], prompt([5]), dict(SETTINGS)) is not None

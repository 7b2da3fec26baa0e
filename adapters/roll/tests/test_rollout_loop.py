"""RLVR's requests over a real service of a pool of scripted engines, behind a router manager of our own writing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import SETTINGS, prompt

from rose.errors import ConfigError
from rose.testing import FakeEngine
from rose.types import EngineId
from rose_roll.rollout_loop import PoolRouter, PoolRouterClient


class Manager:
    """What the loop uses of ROLL's router manager; the names are those of the doubles."""

    def __init__(self) -> None:
        self.need_suspend = self.need_shutdown = False
        self.inflight_requests: set[str] = set()
        self.resumed = asyncio.Event()
        self.router = SimpleNamespace(aborted=[], seen="under")
        self.router.abort_all = self._abort_under
        self.router.abort_requests = self._abort_under

    async def on_send_request(self, request_id: str) -> bool:
        while self.need_suspend:
            await self.resumed.wait()
        if self.need_shutdown:
            return False
        self.inflight_requests.add(request_id)
        return True

    async def on_request_routed(self, request_id: str) -> None:
        self.inflight_requests.remove(request_id)

    async def pause(self) -> None:
        self.need_suspend = True
        self.resumed.clear()
        await self.router.abort_all(list(self.inflight_requests))
        async with asyncio.timeout(5):
            while self.inflight_requests:
                await asyncio.sleep(0.005)

    def resume(self) -> None:
        self.need_suspend = False
        self.resumed.set()

    async def _abort_under(self, request_ids: list[str], uid: Any = None) -> None:
        del uid
        self.router._under.aborted.extend(request_ids)


def make_client(site: Any, tokenizer: Any) -> tuple[PoolRouterClient, Manager, Any]:
    manager = Manager()
    scheduler = SimpleNamespace(
        router_manager=manager,
        tokenizer=tokenizer,
        pipeline_config=SimpleNamespace(system_envs={"ROSE_POOL": site.url}),
        replay_buffer=SimpleNamespace(current_step=4),
    )
    return PoolRouterClient.over(scheduler), manager, scheduler


def sample(max_new_tokens: int = 8) -> Any:
    asked = prompt([5, 6, 7], width=6)
    asked.meta_info["generation_config"] = {**SETTINGS, "max_new_tokens": max_new_tokens}
    return asked


async def test_a_sample_comes_back_as_from_rolls_client(make_site: Any, tokenizer: Any) -> None:
    client, _, _ = make_client(make_site(), tokenizer)
    asked = sample()
    data = await client.generate_request(asked, "r0", 3)
    assert data.meta_info["finish_reasons"] == ["length"]
    assert len(data.meta_info["output_token_ids"][0]) == len(data.meta_info["output_logprobs"][0]) == 8
    assert data.meta_info["eos_token_id"] == [1, 0]
    assert data.meta_info["pad_token_id"] == 0
    assert data.meta_info["routed_experts"] is None
    assert asked.non_tensor_batch["rose_versions"].shape == (1,)
    assert data.meta_info["metrics"] == {"rose/num_hops": 1.0, "rose/num_resumed_tokens": 0.0}
    await client._connection.close()


async def test_a_pause_of_roll_costs_no_token(make_site: Any, tokenizer: Any) -> None:
    site = make_site(FakeEngine(engine_id=EngineId("e0"), token_s=0.03))
    client, manager, _ = make_client(site, tokenizer)
    running = [asyncio.create_task(client.generate_request(sample(20), f"r{n}", n)) for n in range(3)]
    for _ in range(2):
        await asyncio.sleep(0.25)
        await manager.pause()
        assert not manager.inflight_requests
        assert not any(task.done() for task in running)
        manager.resume()
    results = await asyncio.gather(*running)
    assert [len(one.meta_info["output_token_ids"][0]) for one in results] == [20] * 3
    assert all(one.meta_info["metrics"]["rose/num_resumed_tokens"] > 0 for one in results)
    assert all(len(one.prompt_ids) + one.sampling.max_tokens == 23 for one in site.engines[0].requests)
    await client._connection.close()


async def test_an_abort_by_the_users_loop_comes_back(make_site: Any, tokenizer: Any) -> None:
    client, manager, _ = make_client(make_site(FakeEngine(engine_id=EngineId("e0"), token_s=0.03)), tokenizer)
    running = asyncio.create_task(client.generate_request(sample(100), "r0", 0))
    await asyncio.sleep(0.3)
    await manager.router.abort_requests(["r0", "other"], 0)
    data = await running
    assert data.meta_info["finish_reasons"] == ["abort"]
    assert 0 < len(data.meta_info["output_token_ids"][0]) < 100
    assert manager.router.aborted == ["other"], "what is not the pool's goes to the router"
    await client._connection.close()


async def test_an_abort_by_the_users_loop_reaches_a_request_that_waits(make_site: Any, tokenizer: Any) -> None:
    """ROLL's router has never heard of it, and has no worker to ask."""
    client, manager, _ = make_client(make_site(), tokenizer)
    manager.need_suspend = True
    running = asyncio.create_task(client.generate_request(sample(), "r0", 0))
    await asyncio.sleep(0)
    await manager.router.abort_requests(["r0"], 0)
    manager.resume()
    assert (await running).meta_info["finish_reasons"] == ["abort"]
    assert manager.router.aborted == []
    await client._connection.close()


def test_the_pools_token_may_come_from_the_environment(
    make_site: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret-enough")
    token.chmod(0o600)
    monkeypatch.setenv("ROSE_POOL_TOKEN_FILE", str(token))
    monkeypatch.setenv("ROSE_POOL", "http://of-another-job:1")
    site = make_site()
    client, _, _ = make_client(site, tokenizer)
    place = client._connection.options.place(client._connection._environ)
    assert (place.url, place.token) == (site.url, "secret-enough")


async def test_a_prompt_that_roll_gives_up_is_cancelled(make_site: Any, tokenizer: Any) -> None:
    """ROLL cancels the task and aborts the request in one breath; the cancellation must win."""
    site = make_site(FakeEngine(engine_id=EngineId("e0"), token_s=0.03))
    client, manager, _ = make_client(site, tokenizer)
    running = asyncio.create_task(client.generate_request(sample(100), "r0", 0))
    await asyncio.sleep(0.2)
    running.cancel()
    await manager.pause()
    with pytest.raises(asyncio.CancelledError):
        await running
    await client._connection.close()


async def test_a_shutdown_gives_none(make_site: Any, tokenizer: Any) -> None:
    client, manager, _ = make_client(make_site(FakeEngine(engine_id=EngineId("e0"), token_s=0.03)), tokenizer)
    running = asyncio.create_task(client.generate_request(sample(100), "r0", 0))
    await asyncio.sleep(0.2)
    manager.need_shutdown = True
    await manager.pause()
    manager.resume()
    assert await running is None
    await client._connection.close()


async def test_a_suspension_before_the_first_token_is_seen(make_site: Any, tokenizer: Any) -> None:
    """The pause comes while the connection is being opened: its abort finds no request, and yet none begins."""
    site = make_site(FakeEngine(engine_id=EngineId("e0"), token_s=0.05))
    client, manager, _ = make_client(site, tokenizer)
    running = asyncio.create_task(client.generate_request(sample(40), "r0", 0))
    await asyncio.sleep(0)
    assert manager.inflight_requests
    await manager.pause()
    assert not site.engines[0].requests
    manager.resume()
    assert (await running).meta_info["finish_reasons"] == ["length"]
    await client._connection.close()


async def test_what_cannot_be_kept_is_refused(make_site: Any, tokenizer: Any) -> None:
    client, manager, _ = make_client(make_site(), tokenizer)
    asked = sample()
    asked.meta_info["generation_config"]["top_k"] = 50
    with pytest.raises(ConfigError, match="top_k: 50"):
        await client.generate_request(asked, "r0", 0)
    asked.meta_info["generation_config"] |= {"top_k": -1, "num_return_sequences": 4}
    with pytest.raises(ConfigError, match="num_return_sequences: 4"):
        await client.generate_request(asked, "r0", 0)
    assert not manager.inflight_requests
    await client._connection.close()


async def test_a_prompt_that_fills_the_context_makes_no_empty_sample(make_site: Any, tokenizer: Any) -> None:
    client, _, _ = make_client(make_site(FakeEngine(engine_id=EngineId("e0"), max_model_len=3)), tokenizer)
    with pytest.raises(ConfigError, match=r"set prompt_length \+ response_length"):
        await client.generate_request(sample(), "r0", 0)
    await client._connection.close()


def test_the_router_behind_is_still_reachable() -> None:
    assert PoolRouter(SimpleNamespace(size=lambda: 3), None).size() == 3  # type: ignore[arg-type]

"""The same fault with ROLL alone and with a pool: one engine of four, eight environments, three steps.

Engines are scripted on both sides (a worker of ROLL's takes what its vLLM strategy would answer), environments, group queue, router and
proxies are ROLL's own. Run it with ``-s`` to see the table.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from rose import PoolConfig
from rose.errors import EngineLostError
from rose.testing import FakeEngine, Fault, FaultKind
from rose.types import EngineId

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
NUM_ENVS, NUM_STEPS, NUM_TOKENS, TOKEN_S, STEP_S = 8, 3, 12, 0.01, 15.0
TABLE: list[str] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import ray
    from real_tools import make_policy, stand_in_for_vllm, start_ray

    path = make_policy(tmp_path_factory.mktemp("policy"))
    start_ray()
    stand_in_for_vllm()
    yield path
    ray.shutdown()
    print("\n| fault | rollouts by | samples of 24 | steps of 3 | job |\n|---|---|---|---|---|")
    print("\n".join(TABLE))


class Alone:
    """An infer worker of ROLL's, in an actor: what its strategy answers, after as long as its tokens take; or a fault."""

    def __init__(self, fault: str | None) -> None:
        self._fault = fault

    async def generate_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        if self._fault == "fails fast":
            message = "engine core died"
            raise RuntimeError(message)
        await asyncio.sleep(3 * TOKEN_S)
        if self._fault == "dies in mid-turn":
            os._exit(1)
        if self._fault == "hangs":
            await asyncio.Event().wait()
        num = payload["sampling_params"]["max_tokens"]
        await asyncio.sleep(num * TOKEN_S)
        return {"finish_reasons": ["length"], "output_token_ids": [[50] * num], "output_logprobs": [[-1.0] * num]}

    async def abort_requests(self, request_ids: list[str]) -> None:
        """There is nothing that could be aborted in time."""


@attrs.define(eq=False, kw_only=True, slots=False)
class FailsFast(FakeEngine):
    """Every request fails at once; everything else works."""

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        message = f"{self.engine_id}: engine core died"
        raise EngineLostError(message)
        yield


def engines(fault: str | None) -> list[FakeEngine]:
    options: dict[str, Any] = {"vocab_size": 105, "token_s": TOKEN_S}
    faults = {
        "dies in mid-turn": [Fault(kind=FaultKind.DIE, after_tokens=3)],
        "hangs": [Fault(kind=FaultKind.STALL, after_tokens=3)],
    }
    bad = (
        FailsFast(engine_id=EngineId("e0"), **options)
        if fault == "fails fast"
        else FakeEngine(engine_id=EngineId("e0"), faults=faults.get(str(fault), ()), **options)
    )
    return [bad, *(FakeEngine(engine_id=EngineId(f"e{n}"), **options) for n in range(1, 4))]


def play(environments: Any) -> tuple[int, int, bool]:
    """Return samples delivered, steps ended, and whether the job lives."""
    num_samples = num_steps = 0
    try:
        for step in range(NUM_STEPS):
            num_samples += len(environments.batch(step, timeout_s=STEP_S))
            num_steps += 1
    except AssertionError:
        return num_samples, num_steps, False
    return num_samples, num_steps, True


def note(fault: str | None, who: str, found: tuple[int, int, bool], error: str = "") -> None:
    end = "alive" if found[2] else f"dead: {error}" if error else "waits for ever"
    TABLE.append(f"| {fault or 'none'} | {who} | {found[0]} | {found[1]} | {end} |")


@pytest.mark.parametrize("fault", [None, "fails fast", "dies in mid-turn", "hangs"])
def test_one_engine_of_four(make_site: Any, model: Path, fault: str | None) -> None:
    import ray
    from real_environments import Environments
    from test_real_router import make_router

    common = {"max_new_tokens": NUM_TOKENS, "num_envs": NUM_ENVS}
    actor = ray.remote(Alone)
    workers = [actor.options(max_concurrency=64, num_cpus=0).remote(fault if rank == 0 else None) for rank in range(4)]
    router = make_router(model, workers, NUM_ENVS)
    stock = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
    policy = {"proxy_type": "policy", "proxy_config": {}}
    alone = Environments(model, router, stock, policy, **common)
    found = play(alone)
    error = type(alone.errors[0]).__name__ if alone.errors else ""
    note(fault, "ROLL alone", found, error)
    assert found[2] == (fault is None), "if ROLL now survives this, the README's words are to be changed"

    config = PoolConfig(stall_s=1.0, retry_s=0.05)
    site = make_site(*engines(fault), config=config)
    proxy = {"proxy_type": "rose", "proxy_config": {"pool": site.url, "poll_s": 0.1}}
    pooled = Environments(model, make_router(model, [], NUM_ENVS), "rose_roll.RoseTrajEnvManager", proxy, **common)
    found = play(pooled)
    note(fault, "a ROSE pool", found, str(pooled.errors[:1]))
    assert found == (NUM_ENVS * NUM_STEPS, NUM_STEPS, True)
    pooled.close()

"""The same fault with ROLL alone and with a pool: one engine of four, eight environments, three steps.

Engines are scripted on both sides (a worker of ROLL's takes what its vLLM strategy would answer), environments, group queue, router and
proxies are ROLL's own. Run it with ``-s`` to see the table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from ray.exceptions import RayTaskError

from rose import PoolConfig
from rose.errors import EngineError, EngineLostError
from rose.testing import FakeEngine, Fault, FaultKind
from rose.types import EngineId

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
NUM_ENVS, NUM_STEPS, NUM_TOKENS, TOKEN_S, STEP_S = 8, 3, 12, 0.01, 15.0
STOCK = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
POLICY: dict[str, Any] = {"proxy_type": "policy", "proxy_config": {}}
COMMON = {"max_new_tokens": NUM_TOKENS, "num_envs": NUM_ENVS}
TABLE: list[str] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import ray
    from real_tools import make_policy, stand_in_for_vllm, start_ray

    path = make_policy(tmp_path_factory.mktemp("policy"))
    start_ray(num_cpus=16)
    stand_in_for_vllm()
    yield path
    ray.shutdown()
    print("\n| fault | rollouts by | samples of 24 | steps of 3 | job |\n|---|---|---|---|---|")
    print("\n".join(TABLE))


@attrs.define(eq=False, kw_only=True, slots=False)
class FailsFast(FakeEngine):
    """Every request fails at once; everything else works."""

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        message = f"{self.engine_id}: engine core died"
        raise EngineLostError(message)
        yield


@attrs.define(eq=False, kw_only=True, slots=False)
class Refuses(FakeEngine):
    """Takes no update while it is told not to; everything else works."""

    is_refusing: bool = False

    async def activate(self) -> Any:
        if self.is_refusing:
            message = f"{self.engine_id}: no room for the weights"
            raise EngineError(message)
        return await FakeEngine.activate(self)


def engines(fault: str | None) -> list[FakeEngine]:
    options: dict[str, Any] = {"vocab_size": 105, "token_s": TOKEN_S}
    faults = {
        "dies in mid-turn": [Fault(kind=FaultKind.DIE, after_tokens=3)],
        "hangs": [Fault(kind=FaultKind.STALL, after_tokens=3)],
    }
    kinds = {"fails fast": FailsFast, "fails an update": Refuses}
    bad = kinds.get(str(fault), FakeEngine)(engine_id=EngineId("e0"), faults=faults.get(str(fault), ()), **options)
    return [bad, *(FakeEngine(engine_id=EngineId(f"e{n}"), **options) for n in range(1, 4))]


def play(environments: Any, update: Callable[[], object] = lambda: None) -> tuple[int, int, bool]:
    """Return samples delivered, steps ended, and whether the job lives; each step begins with ``update``."""
    num_samples = num_steps = 0
    try:
        for step in range(NUM_STEPS):
            update()
            num_samples += len(environments.batch(step, timeout_s=STEP_S))
            num_steps += 1
    except (AssertionError, RayTaskError) as error:
        if isinstance(error, RayTaskError):
            environments.errors.append(error)
        return num_samples, num_steps, False
    return num_samples, num_steps, True


def note(fault: str | None, who: str, found: tuple[int, int, bool], error: str = "") -> None:
    end = "alive" if found[2] else f"dead: {error}" if error else "waits for ever"
    TABLE.append(f"| {fault or 'none'} | {who} | {found[0]} | {found[1]} | {end} |")


@pytest.mark.parametrize("fault", [None, "fails fast", "dies in mid-turn", "hangs"])
def test_one_engine_of_four(make_site: Any, model: Path, fault: str | None) -> None:
    import ray
    from real_environments import Environments
    from real_stock import Answers
    from test_real_router import make_router

    actor = ray.remote(Answers)
    workers = [actor.options(max_concurrency=64, num_cpus=0).remote(fault if rank == 0 else None) for rank in range(4)]
    router = make_router(model, workers, NUM_ENVS)
    alone = Environments(model, router, STOCK, POLICY, **COMMON)
    found = play(alone)
    error = type(alone.errors[0]).__name__ if alone.errors else ""
    note(fault, "ROLL alone", found, error)
    assert found[2] == (fault is None), "if ROLL now survives this, the README's words are to be changed"

    config = PoolConfig(stall_s=1.0, retry_s=0.05)
    site = make_site(*engines(fault), config=config)
    proxy = {"proxy_type": "rose", "proxy_config": {"pool": site.url, "poll_s": 0.1}}
    pooled = Environments(model, make_router(model, [], NUM_ENVS), "rose_roll.RoseTrajEnvManager", proxy, **COMMON)
    found = play(pooled)
    note(fault, "a ROSE pool", found, str(pooled.errors[:1]))
    assert found == (NUM_ENVS * NUM_STEPS, NUM_STEPS, True)
    pooled.close()


def test_an_update_fails_on_one_engine_of_four(make_site: Any, model: Path) -> None:
    """The second of three updates, of ROLL's own FSDP2 learner on both sides."""
    from real_environments import Environments
    from real_weights import Learner
    from test_real_router import make_router

    fault = "fails an update"
    site = make_site(*engines(fault))
    learner = Learner(site.url, model, num_ranks=1, num_fronts=4, front="real_stock.RefusingWorker")
    alone = Environments(model, make_router(model, learner.fronts, NUM_ENVS), STOCK, POLICY, **COMMON)
    found = play(alone, learner.update)
    note(fault, "ROLL alone", found, type(alone.errors[0]).__name__ if alone.errors else "")
    learner.close()
    assert not found[2], "if ROLL now survives this, the README's words are to be changed"

    learner = Learner(site.url, model, num_ranks=1)
    proxy = {"proxy_type": "rose", "proxy_config": {"pool": site.url, "poll_s": 0.1}}
    pooled = Environments(model, make_router(model, [], NUM_ENVS), "rose_roll.RoseTrajEnvManager", proxy, **COMMON)
    num_failed: list[float] = []

    def update() -> None:
        site.engines[0].is_refusing = len(num_failed) == 1
        num_failed.append(learner.update()["rose/num_engines_failed"])
        learner.change()

    found = play(pooled, update)
    note(fault, "a ROSE pool", found, str(pooled.errors[:1]))
    assert found == (NUM_ENVS * NUM_STEPS, NUM_STEPS, True)
    assert num_failed == [0, 1, 0]
    pooled.close()
    learner.close()

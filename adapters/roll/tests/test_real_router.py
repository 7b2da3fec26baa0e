"""ROLL's own router, in Ray: it suspends and resumes our proxies, and takes our fronts for workers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import SETTINGS, make_proxy, prompt, worker_config

from rose.testing import FakeEngine
from rose.types import EngineId

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import ray
    from real_tools import make_policy, stand_in_for_vllm, start_ray

    model = make_policy(tmp_path_factory.mktemp("policy"))
    start_ray()
    stand_in_for_vllm()
    yield model
    ray.shutdown()


@pytest.fixture
def site(make_site: Any) -> Any:
    return make_site(*(FakeEngine(engine_id=EngineId(f"e{n}"), token_s=0.03) for n in range(2)))


def make_router(model: Path, workers: list[Any], num_envs: int, name: str = "EnvAffinityRouter") -> Any:
    import ray
    from real_tools import stand_in_cluster
    from roll.configs.base_config import RouterArguments
    from roll.distributed.scheduler.router import RouterManager

    manager = (
        ray.remote(RouterManager)
        .options(max_concurrency=num_envs + 1)
        .remote(
            actor_cluster=stand_in_cluster(workers, model),
            router_args=RouterArguments(router_name=name),
            num_gpus_per_node=0,
        )
    )
    ray.get(manager.initialize.remote())
    return manager


def test_rolls_suspension_keeps_every_token(cluster: Path, site: Any, tokenizer: Any) -> None:
    """Four environments, a router with one slot more than that, as ROLL has it; two suspensions in mid-turn."""
    import ray

    router = make_router(cluster, [], 4)
    proxies = [make_proxy(site.url, tokenizer, router=router, poll_s=0.05) for _ in range(4)]
    outputs: dict[int, Any] = {}
    num_none = [0] * 4

    def play(number: int) -> None:
        while number not in outputs:
            output = proxies[number].generate([], prompt([5, 6, number]), {**SETTINGS, "max_new_tokens": 40})
            if output is None:
                num_none[number] += 1
            else:
                outputs[number] = output

    threads = [threading.Thread(target=play, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(0.4)
        started_s = time.monotonic()
        ray.get([router.suspend.remote()])
        ray.get([router.abort_all.remote()])
        ray.get([router.wait_complete.remote()], timeout=10)
        assert time.monotonic() - started_s < 3
        assert ray.get(router.size.remote()) == 0
        time.sleep(0.3)
        assert not outputs, "nothing runs while ROLL is suspended"
        ray.get(router.resume.remote(), timeout=10)
    for thread in threads:
        thread.join(30)
    assert sorted(outputs) == [0, 1, 2, 3]
    assert all(count >= 2 for count in num_none)
    for output in outputs.values():
        assert output.batch["responses"].shape == (1, 40)
        assert output.meta_info["rose"]["num_resumed_tokens"] > 0
    limits = {len(one.prompt_ids) + one.sampling.max_tokens for engine in site.engines for one in engine.requests}
    assert limits == {43}, "one budget a turn, over all its parts"


def test_turns_run_through_a_suspension_where_that_is_wanted(cluster: Path, site: Any, tokenizer: Any) -> None:
    import ray

    router = make_router(cluster, [], 1)
    ray.get(router.suspend.remote())
    proxy = make_proxy(site.url, tokenizer, router=router, on_suspend="continue")
    assert proxy.generate([], prompt([5]), dict(SETTINGS)).batch["responses"].shape == (1, 8)


def test_a_shutdown_ends_the_proxies(cluster: Path, site: Any, tokenizer: Any) -> None:
    import ray

    router = make_router(cluster, [], 1)
    proxy = make_proxy(site.url, tokenizer, router=router, poll_s=0.05)
    seen: list[Any] = []
    thread = threading.Thread(
        target=lambda: seen.extend(
            proxy.generate([], prompt([5]), {**SETTINGS, "max_new_tokens": 500}) for _ in range(2)
        )
    )
    thread.start()
    time.sleep(0.4)
    ray.get(router.shutdown.remote(), timeout=10)
    thread.join(10)
    assert seen == [None, None]


def make_workers(url: str, number: int) -> list[Any]:
    from rose_roll import RoseInferWorker

    variables = {"ROSE_POOL": url, "WORLD_SIZE": "1", "RANK": "0", "CLUSTER_NAME": "actor_infer"}
    return [
        RoseInferWorker.options(
            max_concurrency=1000,
            num_cpus=0.01,
            runtime_env={"env_vars": {**variables, "WORKER_NAME": f"actor_infer-{rank}"}},
        ).remote(worker_config=worker_config(offload_nccl=False))
        for rank in range(number)
    ]


def lm_input(ids: list[int], max_new_tokens: int = 8) -> Any:
    asked = prompt(ids)
    asked.meta_info["generation_config"] = {**SETTINGS, "max_new_tokens": max_new_tokens, "temperature": 0.0}
    return asked


def test_rolls_router_takes_a_front_for_a_worker(cluster: Path, site: Any) -> None:
    """Sticky turns, an abort, a shrink, and a front that is killed: it is back, and no request is lost."""
    import ray
    from roll.distributed.scheduler.router import RouterManager, is_report_data_finished

    workers = make_workers(site.url, 2)
    ray.get([worker.initialize.remote(SimpleNamespace(resume_from_checkpoint=False)) for worker in workers], timeout=60)
    router = make_router(cluster, workers, 8)

    async def run() -> None:
        client = await RouterManager.create_client(router)
        data = await asyncio.gather(*(client.generate_request(lm_input([5, n]), None, n) for n in range(4)))
        assert [one.meta_info["finish_reasons"] for one in data] == [["length"]] * 4
        assert all(len(one.meta_info["output_logprobs"][0]) == 8 for one in data)
        long = [asyncio.create_task(client.generate_request(lm_input([6, n], 400), None, n)) for n in range(4)]
        await asyncio.sleep(0.5)
        await router.abort_all.remote()
        aborted = await asyncio.wait_for(asyncio.gather(*long), 10)
        assert not any(is_report_data_finished(one) for one in aborted)
        assert all(0 < len(one.meta_info["output_token_ids"][0]) < 400 for one in aborted)

        pid = ray.get(workers[0].__ray_call__.remote(_pid))
        turns = [asyncio.create_task(client.generate_request(lm_input([7, n], 60), None, n)) for n in range(4)]
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        data = await asyncio.wait_for(asyncio.gather(*turns), 60)
        assert all(is_report_data_finished(one) for one in data)
        ends = [(one.meta_info["finish_reasons"][0], len(one.meta_info["output_token_ids"][0])) for one in data]
        assert all(length == 60 for reason, length in ends if reason == "length")
        assert ray.get(workers[0].__ray_call__.remote(_pid)) != pid
        again = await asyncio.gather(*(client.generate_request(lm_input([8, n]), None, n) for n in range(4)))
        assert all(is_report_data_finished(one) for one in again)

    asyncio.run(run())
    for worker in workers:
        ray.kill(worker)


def _pid(_: Any) -> int:
    return os.getpid()

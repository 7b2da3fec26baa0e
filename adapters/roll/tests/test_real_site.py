"""ROLL's environments and its FSDP2 learner on a real pool: two vLLM engines of its own, one borrowed.

In the order of the file, over one site: what one test breaks the next one finds mended.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SETTINGS

from rose.testing import PoolSite

pytestmark = [pytest.mark.real, pytest.mark.engine, pytest.mark.timeout(900)]
NUM_ENVS, LENGTH = 4, 896
MEAN_DIFF = 1e-4  # engines and learner are float32
MEAN_DIFF_BF16 = 5e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from real_tools import make_policy

    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def site(model: Path) -> Iterator[PoolSite]:
    with PoolSite.start(model, dedicated=2, borrowed=1, dtype="float32", max_len=LENGTH + 64, stall_s=10.0) as site:
        yield site


@pytest.fixture(scope="module")
def ray_cluster(model: Path) -> Iterator[None]:
    import ray
    from real_tools import start_ray

    start_ray()
    yield
    ray.shutdown()


def check_batch(batch: Any) -> None:
    """Check what ROLL trains on: every response token has a log-prob, nothing else has one."""
    tensors = batch.batch
    assert tensors["input_ids"].shape == tensors["scores"].shape == (NUM_ENVS, LENGTH)
    assert (tensors["input_ids"].dtype, tensors["scores"].dtype) == (torch.int64, torch.float32)
    assert (tensors["response_mask"].dtype, tensors["prompt_mask"].dtype) == (torch.bool, torch.bool)
    assert tensors["infer_logprobs"].shape == (NUM_ENVS, LENGTH - 1)
    assert tensors["infer_logprobs"].dtype == torch.float32
    drawn = tensors["response_mask"][:, 1:]
    assert (tensors["infer_logprobs"][~drawn] == 0).all()
    assert (tensors["infer_logprobs"][drawn] < 0).float().mean() > 0.95
    for row, spans in enumerate(batch.non_tensor_batch["rose_spans"]):
        covered = torch.zeros(LENGTH, dtype=torch.bool)
        for span in spans:
            covered[span["start"] : span["end"]] = True
        assert not spans or torch.equal(covered, tensors["response_mask"][row]), "spans cover what was drawn"


def test_weights_of_two_ranks_reach_every_engine_bit_equal(site: PoolSite, model: Path, ray_cluster: None) -> None:
    """ROLL's own FSDP2 workers over gloo, of two ranks; its fronts are no target of a broadcast."""
    from real_weights import Learner

    learner = Learner(site.url, model, num_ranks=2)
    for step in range(3):
        metrics = learner.update()
        assert metrics["rose/version"] == step
        assert metrics["rose/num_engines_failed"] == 0
        expected = site.expected()
        wait_for(lambda: all(engine["state"] == "ready" for engine in site.status()["engines"].values()))
        for engine in site.engines:
            assert site.sums(engine) == expected, (step, engine)
        assert learner.digest() == expected, "what was published is what the ranks hold"
        learner.change()

    site.fail_updates("own0")
    metrics = learner.update()
    assert metrics["rose/version"] == 3, "training goes on"
    assert metrics["rose/num_engines_failed"] == 1
    assert site.sums("own1") == site.expected() == learner.digest()
    site.fail_updates("own0", on=False)
    learner.change()
    assert learner.update()["rose/version"] == 4
    wait_for(lambda: all(engine["state"] == "ready" for engine in site.status()["engines"].values()))
    assert {site.expected() == site.sums(engine) for engine in site.engines} == {True}
    learner.close()


def test_environments_play_on_real_engines(site: PoolSite, model: Path, ray_cluster: None) -> None:
    """Four threads of ROLL's, one engine killed in mid-turn, the borrowed one taken back and lent again."""
    from real_environments import Environments
    from test_real_router import make_router

    router = make_router(model, [], NUM_ENVS)
    proxy = {"proxy_type": "rose", "proxy_config": {"pool": site.url, "poll_s": 0.1, "deadline_s": 120.0}}
    environments = Environments(model, router, "rose_roll.RoseTrajEnvManager", proxy, max_new_tokens=48)
    import ray

    try:
        check_batch(environments.batch(0))
        check_batch(environments.batch(1, lambda: site.kill("own0")))
        check_batch(environments.batch(2, lambda: site.lend(on=False)))
        check_batch(environments.batch(3, lambda: site.lend(on=True)))
        site.wait("gpu0", "ready", timeout_s=120.0)
        check_batch(environments.batch(4, lambda: site.fail_fast("own1")))
        site.fail_fast("own1", on=False)
        check_batch(environments.batch(5, lambda: site.hang("own1")))
        site.hang("own1", on=False)

        def suspend() -> None:
            ray.get([router.suspend.remote(), router.abort_all.remote()])
            ray.get(router.wait_complete.remote(), timeout=60)
            time.sleep(0.5)
            ray.get(router.resume.remote())

        batch = environments.batch(6, suspend)
        check_batch(batch)
        assert len(batch.non_tensor_batch["rose_versions"]) == NUM_ENVS
        wait_for(lambda: sum(one["state"] == "ready" for one in site.status()["engines"].values()) >= 2)
    finally:
        environments.close()
    assert not environments.errors


def test_greedy_tokens_are_those_of_hugging_face(site: PoolSite, model: Path, ray_cluster: None) -> None:
    """The engines hold what the learner published: their greedy answer is the model's own, their log-probs its log-probs."""
    from helpers import make_proxy, prompt
    from real_weights import Learner
    from transformers import AutoModelForCausalLM, AutoTokenizer

    learner = Learner(site.url, model, num_ranks=1)
    learner.change()
    learner.update()
    weights = learner.weights()
    learner.close()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    reference.load_state_dict(weights, strict=False)
    proxy = make_proxy(site.url, AutoTokenizer.from_pretrained(model))
    proxy.begin_step(0)
    ids = [10, 20, 30, 40]
    output = proxy.generate([], prompt(ids), {**SETTINGS, "temperature": 0.0, "max_new_tokens": 24})
    answer = output.batch["responses"][0].tolist()
    with torch.no_grad():
        logits = reference(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].float()
    assert logits.argmax(-1).tolist() == answer
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    ours = output.batch["infer_logprobs"][0, len(ids) - 1 : len(ids) - 1 + len(answer)]
    assert (ours - logprobs).abs().max() < 1e-3


@pytest.mark.parametrize("ratio", [0, 1])
def test_the_whole_pipeline_trains(site: PoolSite, model: Path, ratio: int) -> None:
    """ROLL's agentic pipeline, sync and async, in a process and a cluster of its own: it ends by itself, and has learned from real tokens."""
    steps = train(site.url, model, "--async-ratio", str(ratio))
    assert steps[1]["rose/version"] == steps[0]["rose/version"] + 1
    assert all(one["rose/num_engines_failed"] == 0 for one in steps)
    assert all(one["actor_train/grad_norm"] > 0 for one in steps)
    differences = [one["actor/train_infer_diff_token_mean"] for one in steps]
    # Rolled out on the trainer's own weights; the second batch of the asynchronous pipeline is drawn while the first one trains.
    on_policy = differences[:1] if ratio else differences
    assert all(abs(one) < MEAN_DIFF for one in on_policy), differences
    print("train - infer:", differences)


def test_the_pipeline_trains_in_bfloat16(model: Path) -> None:
    """Learner and engines round in other places; the mean over the tokens is small, and training moves nothing away."""
    with PoolSite.start(model, dedicated=2, borrowed=0, dtype="bfloat16", max_len=LENGTH + 64) as site:
        steps = train(site.url, model, "--dtype", "bf16")
    differences = [one["actor/train_infer_diff_token_mean"] for one in steps]
    print("train - infer, bfloat16:", differences)
    assert all(0 < abs(one) < MEAN_DIFF_BF16 for one in differences)


def train(url: str, model: Path, *options: str) -> list[dict[str, float]]:
    """Run the pipeline for two steps; returns their metrics."""
    from real_pipeline import read_steps

    script = Path(__file__).with_name("real_pipeline.py")
    command = [sys.executable, str(script), url, str(model), "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ), check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = read_steps(done.stdout)
    assert len(steps) == 2
    return steps


def wait_for(holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < ends_s, "it did not come to that"
        time.sleep(0.5)

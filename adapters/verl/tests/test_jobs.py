"""Stock trainers of veRL over real engines, two of the pool's own and one borrowed, with faults while they train."""

import itertools
import math
import os
import re
import time

import pytest

import evidence
import jobs
import tiny
from rose.testing import PoolSite

pytestmark = [pytest.mark.job, pytest.mark.timeout(600)]
RESPONSE = 24
NUM_FAULTY = 9


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return tiny.make_task(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny.make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def site(policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    with PoolSite.start(
        policy, dedicated=2, borrowed=1, max_len=256, max_seqs=3, stall_s=4.0, log=folder / "site.log"
    ) as found:
        yield found


@pytest.fixture
def run(policy, task, site, tmp_path):
    started = []

    def start(*overrides, num_devices=1, num_steps=3, **env):
        witness = tmp_path / "witness"
        witness.mkdir()
        arguments = [*jobs.toy_job(policy, task, site.url, num_devices=num_devices, num_steps=num_steps), *overrides]
        job = jobs.Job(arguments, jobs.environment(witness, **env), tmp_path)
        started.append(job)
        return job, witness

    yield start
    for job in started:
        job.close()
        (tmp_path / "job.log").write_text("\n".join(job.lines))


def check_training(job, policies, num_steps):
    """Steps were made, figures are figures, and weights move."""
    figures = job.steps()
    assert sorted(step for step in figures if step) == list(range(1, num_steps + 1))
    for step in range(1, num_steps + 1):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/rewards/mean", "training/rollout_probs_diff_mean"):
            assert math.isfinite(figures[step][name]), name
        assert figures[step]["training/rollout_probs_diff_mean"] < 5e-3
    assert len({figures[step]["actor/pg_loss"] for step in range(1, num_steps + 1)}) > 1
    assert len({figures[step]["critic/rewards/mean"] for step in range(1, num_steps + 1)}) > 1
    assert policies.steps() == list(range(num_steps + 1))
    sums = [policies.sums(step) for step in policies.steps()]
    assert all(before != after for before, after in itertools.pairwise(sums))


def check_engines(site, policies, step, engines):
    """Every engine's live weights are the trainer's, told by two ways that share nothing: the store, and what veRL gathers."""
    expected, trained = site.expected(), policies.sums(step)
    for engine in engines:
        live = site.sums(engine)
        assert live == expected, engine
        assert {name: trained[name] for name in live} == live, engine


def wait_for_version(site, engines, timeout_s=60):
    """Wait until engines hold what was published last; borrowed ones come when they have fetched it."""
    end = time.monotonic() + timeout_s
    while True:
        status = site.status()
        behind = [one for one in engines if status["engines"][one]["version"] != status["version"]]
        if not behind:
            return
        assert time.monotonic() < end, status
        time.sleep(0.2)


def next_step(job, timeout_s=120):
    """Wait until one more version was pushed."""

    def num_pushed():
        return sum("is version" in line for line in job.lines)

    before, end = num_pushed(), time.monotonic() + timeout_s
    while num_pushed() == before:
        assert time.monotonic() < end, job.tail()
        time.sleep(0.1)


def until_in_flight(site, engine, holds, timeout_s=60):
    """Wait until as many turns as are wanted are under way on an engine."""
    end = time.monotonic() + timeout_s
    while not holds(site.status()["engines"][engine]["num_in_flight"]):
        assert time.monotonic() < end, site.status()
        time.sleep(0.02)


def test_sync_with_two_ranks_while_a_device_is_taken_back_and_lent_again(run, site, policy):
    job, witness = run("actor_rollout_ref.rollout.dtype=float32", num_devices=2, num_steps=4)
    job.wait_for("step 0 is version", 240)
    job.wait_for("step 1 is version", 120)
    site.lend(on=False)
    assert site.status()["engines"]["gpu0"]["state"] == "away"
    job.wait_for("step 2 is version", 120)
    site.lend(on=True)
    assert job.end(240) == 0, job.tail()
    policies = evidence.Policies(policy, witness)
    check_training(job, policies, 4)
    assert any("(own shards)" in line for line in job.lines)
    assert not any("[rose] ERROR" in line for line in job.lines)

    site.wait("gpu0", "ready", timeout_s=60)
    wait_for_version(site, site.engines)
    check_engines(site, policies, 4, site.engines)

    trained = evidence.samples(witness)
    assert len(trained) == 4 * 8
    for sample in trained:
        evidence.check_fields(sample, RESPONSE)
        assert sample.tag["min_global_steps"] == sample.tag["max_global_steps"]
    assert {sample.tag["min_global_steps"] for sample in trained} == {
        0,
        1,
        2,
        3,
    }  # on policy: each step by the weights before it
    assert evidence.check_logprobs(trained, policies, mean=1e-4, p99=1e-3)
    assert "gpu0" in {engine for sample in trained for engine in sample.engines}

    greedy = [one for one in evidence.samples(witness, "val") if one.tag["max_global_steps"] == 0]
    assert len(greedy) == 4
    end = policies.at(0).config.eos_token_id
    for sample in greedy:
        assert sample.response == policies.greedy(0, sample.prompt, RESPONSE, end)


def test_separate_async_over_two_turns_while_engines_fail_in_every_way(run, site, policy, tmp_path):
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: two_turns\n  _target_: two_turns.TwoTurns\n")
    job, witness = run(
        "actor_rollout_ref.rollout.dtype=float32",
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=1",
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=rose",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=two_turns",
        "+actor_rollout_ref.rollout.engine_kwargs.rose.sync_timeout_s=15",
        "trainer.val_before_train=False",
        num_steps=NUM_FAULTY,
    )
    job.wait_for("step 0 is version", 240)
    site.fail_fast("own0")
    next_step(job)
    site.fail_fast("own0", on=False)
    site.hang("own1")
    until_in_flight(site, "own1", lambda number: number > 0)
    site.fail_updates("gpu0")
    next_step(job)
    site.fail_updates("gpu0", on=False)
    until_in_flight(site, "own1", lambda number: number == 0)  # its turns have stalled and moved
    site.hang("own1", on=False)
    site.hang("own0")  # so that it dies in mid-turn
    until_in_flight(site, "own0", lambda number: number > 0)
    site.kill("own0")
    assert job.end(240) == 0, job.tail()
    policies = evidence.Policies(policy, witness)
    check_training(job, policies, NUM_FAULTY)
    for step, figures in job.steps().items():
        lost = {name: value for name, value in figures.items() if "failure" in name and value}
        assert not lost, (step, lost)
    figures = job.steps()[1]
    assert figures["rose/bytes_sent"] > 0
    assert 0 < figures["rose/changed_fraction"] <= 1

    wait_for_version(site, ["own1", "gpu0"])
    check_engines(site, policies, NUM_FAULTY, ["own1", "gpu0"])
    trained = evidence.samples(witness)
    assert len(trained) >= NUM_FAULTY * 8
    for sample in trained:
        evidence.check_fields(sample, RESPONSE)
        assert len(sample.fields["rose_turns"]) == 2
        assert 0 in sample.mask  # the observation between the turns
    assert evidence.check_logprobs(trained, policies, mean=1e-4, p99=1e-3)
    ends = {hop[3] for sample in trained for turn in sample.fields["rose_turns"] for hop in turn["hops"]}
    assert {"lost", "stalled"} <= ends, ends


def test_a_pool_that_is_not_there_ends_the_job_with_one_line(policy, task, tmp_path):
    arguments = jobs.toy_job(policy, task, "http://127.0.0.1:9", num_steps=1)
    job = jobs.Job([*arguments, "trainer.val_before_train=False"], jobs.environment(), tmp_path)
    assert job.end(240) != 0
    told = [line for line in job.lines if re.search(r"\[rose\] ERROR .*127\.0\.0\.1:9", line)]
    assert len(told) == 1, job.tail()
    assert os.environ.get("ROSE_POOL") is None

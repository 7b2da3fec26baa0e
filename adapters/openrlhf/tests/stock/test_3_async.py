"""Stock ``train_ppo_ray``, asynchronous with partial rollouts, by the DAPO example, while engines fail in every way."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engines import check_equal, log_prob_differences, newest
from harness import ADAPTER, SMALL, Run, make_prompts, readme_command
from rose.testing import PoolSite

pytestmark = [pytest.mark.stock, pytest.mark.timeout(900)]
STEPS = 5
HELD = (
    ("own0", "own1", "gpu0"),
    ("own0", "own1"),  # gpu0 failed this update
    ("own0", "own1", "gpu0"),
    ("own1", "gpu0"),  # own0 is dead
    ("own1", "gpu0"),
)


class Faults:
    """What goes wrong after which sync. What is set after sync n meets the batch that the trainer takes two steps later."""

    def __init__(self, site: PoolSite) -> None:
        self.site, self.killed = site, []
        self.killer = threading.Thread(target=self.kill_in_mid_turn, args=("own0",))

    def after(self, number: int) -> None:
        if number == 0:
            self.site.fail_fast("own0")
            self.site.fail_updates("gpu0")
        elif number == 1:
            self.site.fail_fast("own0", on=False)
            self.site.hang("own1")
            self.site.fail_updates("gpu0", on=False)
        elif number == 2:
            self.site.hang("own1", on=False)
            self.killer.start()

    def kill_in_mid_turn(self, engine: str) -> None:
        give_up_s = time.monotonic() + 60
        while not self.killed and time.monotonic() < give_up_s:
            if self.site.status()["engines"][engine]["num_in_flight"]:
                self.killed.append(self.site.kill(engine))


@pytest.fixture(scope="module")
def run(site: PoolSite, model: Path, folder: Path) -> Run:
    here = folder / "async"
    here.mkdir()
    variables = {
        "ROSE_POOL": site.url,
        "MODEL": str(model),
        "PROMPTS": str(make_prompts(here / "prompts.jsonl", 2 * STEPS)),
        "REWARD": str(ADAPTER / "examples/reward.py"),
    }
    flags = ["--rose.weights_dtype", "float32", *SMALL, "--rollout.max_new_tokens", "64"]
    flags += ["--reward.overlong_buffer_len", "8", "--algo.dynamic_filtering_range", "-1", "2"]
    one = Run.start(here, readme_command("examples/dapo.sh", *flags), variables)
    faults = Faults(site)

    def on_sync(number: int, weights: dict[str, Any]) -> None:
        if number == 1:  # gpu0 takes no turns that need this version
            row = site.status()["engines"]["gpu0"]
            assert (row["version"], row["state"]) != (newest(site), "ready")
        if number == 3:
            faults.killer.join()
            one.killed.extend(faults.killed)
        one.versions.append(check_equal(site, weights, *HELD[number]))
        faults.after(number)

    try:
        code = one.wait(on_sync, timeout_s=500)
    finally:
        one.end()
        if faults.killer.is_alive():
            faults.killed.append(-1)  # ends it
            faults.killer.join()
    assert code == 0, one.log[-6000:]
    return one


def test_the_job_lives_and_no_sample_is_lost(run):
    assert run.num_syncs == STEPS
    prompts = [prompt for one in run.experience() for prompt in one["prompts"]]
    assert len(prompts) == 8 * STEPS
    assert all(prompts.count(prompt) == 4 for prompt in prompts)
    for one in run.experience():
        assert (one["action_mask"].sum(1) == 64).logical_or(~one["truncated"]).all()  # none was cut short


def test_the_faults_were_met(run):
    assert run.killed
    hops = [step["rose_hops"] for step in run.steps()]
    assert hops[0] == 1.0
    assert all(more > 1.0 for more in hops[2:]), hops  # failing fast, hanging, dead


def test_versions_go_on_through_all_of_it(run):
    assert [version.rpartition(":")[2] for version in run.versions] == ["1", "2", "3", "4", "5"]
    for number, status in enumerate(run.steps()):
        assert number - 2 <= status["rose_version_min"] <= status["rose_version_max"] <= number


def test_the_trainer_learns(run):
    assert len({step["policy_loss"] for step in run.steps()}) > 1


def test_log_probs_are_those_of_the_weights_that_drew_each_token(run):
    """Tokens of older weights keep their own: within the bounds of rounding they are the trainer's of then."""
    differences = log_prob_differences(run.experience()[:1])
    assert differences.mean() < 5e-3

"""Stock ``train_ppo_ray``, asynchronous with partial rollouts, by the DAPO example, while engines fail in every way."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from engines import check_equal, newest
from harness import ADAPTER, SMALL, Run, make_prompts, readme_command
from rose.testing import PoolSite

pytestmark = [pytest.mark.stock, pytest.mark.timeout(900)]
STEPS = 5


def kill_in_mid_turn(site: PoolSite, engine: str, done: list[int]) -> None:
    give_up_s = time.monotonic() + 60
    while time.monotonic() < give_up_s:
        if site.status()["engines"][engine]["num_in_flight"]:
            done.append(site.kill(engine))
            return
        time.sleep(0.02)


@pytest.fixture(scope="module")
def run(site: PoolSite, model: Path, folder: Path) -> Run:
    here = folder / "async"
    here.mkdir()
    variables = {
        "ROSE_POOL": site.url,
        "MODEL": str(model),
        "PROMPTS": str(make_prompts(here / "prompts.jsonl", 4 * STEPS)),
        "REWARD": str(ADAPTER / "examples/reward.py"),
    }
    flags = [
        "--rose.weights_dtype",
        "float32",
        *SMALL,
        "--reward.overlong_buffer_len",
        "8",
        "--algo.dynamic_filtering_range",
        "-1",
        "2",
    ]
    one = Run.start(here, readme_command("examples/dapo.sh", *flags), variables)

    def on_sync(number, weights):
        held = [
            ["own0", "own1", "gpu0"],
            ["own0", "own1", "gpu0"],
            ["own0", "own1"],
            ["own0", "own1", "gpu0"],
            ["own1", "gpu0"],
        ]
        if number == 2:  # gpu0 failed this update: it takes no turns that need it
            row = site.status()["engines"]["gpu0"]
            assert (row["version"], row["state"]) != (newest(site), "ready")
            site.fail_updates("gpu0", on=False)
        one.versions.append(check_equal(site, weights, *held[number]))
        if number == 0:
            site.fail_fast("own0")
        elif number == 1:
            site.fail_fast("own0", on=False)
            site.hang("own1")
            site.fail_updates("gpu0")
        elif number == 2:
            site.hang("own1", on=False)
        elif number == 3:
            threading.Thread(target=kill_in_mid_turn, args=(site, "own0", one.killed), daemon=True).start()

    try:
        code = one.wait(on_sync, timeout_s=500)
    finally:
        one.end()
    assert code == 0, one.log[-6000:]
    return one


def test_the_job_lives_and_no_sample_is_lost(run):
    assert run.num_syncs == STEPS
    prompts = [prompt for one in run.experience() for prompt in one["prompts"]]
    assert len(prompts) == 8 * STEPS
    assert all(prompts.count(prompt) == 2 for prompt in prompts)
    assert run.killed


def test_versions_go_on_through_all_of_it(run):
    assert [version.rpartition(":")[2] for version in run.versions] == ["1", "2", "3", "4", "5"]
    for number, status in enumerate(run.steps()):
        assert number - 2 <= status["rose_version_min"] <= status["rose_version_max"] <= number


def test_the_trainer_learns(run):
    assert len({step["policy_loss"] for step in run.steps()}) > 1

"""Stock ``train_ppo_ray``, synchronous, by the GRPO example as the README has it; a borrowed engine leaves and comes back meanwhile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engines import check_equal
from harness import ADAPTER, SMALL, Run, make_prompts

from rose.testing import PoolSite

pytestmark = [pytest.mark.stock, pytest.mark.timeout(600)]
STEPS = 3


@pytest.fixture(scope="module")
def run(site: PoolSite, model: Path, folder: Path) -> Run:
    here = folder / "sync"
    here.mkdir()
    variables = {
        "ROSE_POOL": site.url,
        "MODEL": str(model),
        "PROMPTS": str(make_prompts(here / "prompts.jsonl", 4 * STEPS)),
        "REWARD": str(ADAPTER / "examples/reward.py"),
    }
    flags = ["--rose.weights_dtype", "float32", *SMALL]
    one = Run.start(here, ["bash", "examples/grpo.sh", *flags], variables)
    one.versions = []

    def on_sync(number, weights):
        if number == 0:
            one.versions.append(check_equal(site, weights, "own0", "own1", "gpu0"))
            site.lend(on=False)
        elif number == 1:
            one.versions.append(check_equal(site, weights, "own0", "own1"))
            assert site.status()["engines"]["gpu0"]["state"] in ("away", "lost")
            site.lend(on=True)
        else:
            one.versions.append(check_equal(site, weights, "own0", "own1", "gpu0"))

    try:
        code = one.wait(on_sync)
    finally:
        one.end()
    assert code == 0, one.log[-6000:]
    return one


def test_every_step_is_made_and_every_sync_counts(run):
    assert run.num_syncs == STEPS
    assert [version.rpartition(":")[2] for version in run.versions] == ["1", "2", "3"]  # 0 is the checkpoint
    assert len({version.rpartition(":")[0] for version in run.versions}) == 1
    assert len(run.steps()) == STEPS

"""The demo, short, with real SGLang servers on either side: it ends, its weights are exact, no turn is lost, every lease ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import attrs
import pytest

for _library in ("torch", "gymnasium", "matplotlib", "vllm"):
    pytest.importorskip(_library, reason=f"{_library} is not installed: pip install 'rose-rl[demo]'")

from rose.observe.live import LiveView
from rose.reference import arms
from rose.reference.demo import run_demo
from rose.reference.demo_config import DemoConfig
from sglang_real import server_path, sglang_python

pytestmark = [pytest.mark.sglang, pytest.mark.alone, pytest.mark.timeout(900)]

SHORT = DemoConfig(
    steps=1,
    num_groups=3,
    group_size=8,
    cap_per_engine=8,
    num_dedicated=1,
    num_borrowed=1,
    num_eval_maps=4,
    num_eval_episodes=1,
    warm_start_steps=10,
    ungated_steps=0,
    uncapped_steps=0,
)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """SGLang's Python, with this tree's ROSE."""
    path = tmp_path / "python"
    found = os.pathsep.join(server_path(tmp_path))
    path.write_text(f'#!/bin/sh\nPYTHONPATH={found} exec {sglang_python()} "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("side", ["rollout_engine", "serving_engine"])
async def test_the_demo_ends_and_its_checks_hold(side, python, tmp_path, monkeypatch):
    leases: list[Any] = []
    results: list[arms.ArmResult] = []
    train = arms.Job.train_arm

    async def watched(job: arms.Job, name: str, *, has_borrowed: bool) -> arms.ArmResult:
        results.append(await train(job, name, has_borrowed=has_borrowed))
        leases.append(job.fleet.lender.leases)
        return results[-1]

    monkeypatch.setattr(arms.Job, "train_arm", watched)
    config = {"out": str(tmp_path / "out"), "sglang_python": python, side: "sglang"}
    with LiveView(is_json=True) as view:
        result = await run_demo(attrs.evolve(SHORT, **config), view=view)

    assert [arm.name for arm in results] == ["fixed", "rose"]
    assert leases == [(), ()]
    for arm in results:
        assert arm.is_bit_exact, "every tensor of every engine is the learner's after every sync"
        assert all(step.is_whole for step in arm.steps), "no turn is lost"
        assert arm.serving.records
    assert result.summary["k"] == 6.0
    assert result.summary["borrowed"]["turns"] > 0
    assert (tmp_path / "out" / "report.html").stat().st_size > 0

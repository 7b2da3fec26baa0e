"""The files of docs/run-a-job.md say what the commands read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.config import load
from rose.hosts.http.executor_config import ExecutorConfig
from rose.hosts.http.lender_config import LenderConfig
from rose.reference.loop_config import load_run
from rose.reference.run import check_run

PAGE = Path(__file__).parents[3] / "docs" / "run-a-job.md"


def test_the_files_of_the_page_are_in_order_and_fit_together(tmp_path: Path):
    paths = []
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)):
        paths.append(tmp_path / f"{number}.toml")
        paths[-1].write_text(block)
    job, executor, lender = load_run(paths[0]), load(ExecutorConfig, paths[1]), load(LenderConfig, paths[2])
    check_run(job)
    assert job.executors == {executor.rollout.engine_id: f"http://{executor.listen}"}
    assert set(lender.devices) == set(job.executors)
    assert job.lender is not None
    assert job.lender.url == f"http://{lender.listen}"
    assert str(lender.devices["gpu0"].ledger) == executor.device.ledgers[0]
    assert executor.rollout.model == str(job.model.path)
    assert job.loop.pool == f"http://{job.service.listen}"
    assert job.resources.n_serving == len(job.executors)

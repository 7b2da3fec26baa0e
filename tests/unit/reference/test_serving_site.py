"""The job's handle on the serving side, with a scripted host process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rose.errors import EngineError
from rose.observe.latency import Slo
from rose.reference import serving_site
from rose.reference.engines import EngineSpec
from rose.reference.load import ServingLoad
from rose.reference.serving_site import ServingSite
from rose.simulation.traces import Arrival

SLO = Slo(ttft_ms=500, tpot_ms=150)
LOAD = ServingLoad(by_device=((Arrival(0.0, 5, 3), Arrival(1.5, 6, 2)), (Arrival(0.5, 7, 1),)), source="two devices")


class ScriptedHost:
    """Answers ``ask`` from a table and keeps what it was asked."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.asked: list[dict[str, Any]] = []
        self.closed_after_s: float | None = None

    async def ask(self, request: dict[str, Any]) -> Any:
        self.asked.append(request)
        answer = self.answers.get(request.get("do", "start"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self, timeout_s: float) -> None:
        self.closed_after_s = timeout_s


def site(**answers: Any) -> tuple[ServingSite, ScriptedHost]:
    host = ScriptedHost(answers)
    return ServingSite(host, LOAD, vocab_size=500), host  # type: ignore[arg-type]


async def test_an_arm_sends_the_same_arrivals_under_its_own_label():
    here, host = site()
    await here.begin("rose")
    assert host.asked == [
        {
            "do": "replay",
            "label": "rose",
            "vocab_size": 500,
            "arrivals": [[(0.0, 5, 3), (1.5, 6, 2)], [(0.5, 7, 1)]],
        }
    ]


async def test_the_end_of_an_arm_counts_the_unanswered_that_are_over_the_budget():
    here, _ = site(
        stop={
            "duration_s": 10.0,
            "num_sent": [6, 4],
            "num_failed": 1,
            "waited_s": [0.4, 0.501, 3.0],
            "answers": [[0, "s0", 1.0, [1.2, 1.3, 1.5]], [3, "s1", 2.0, [2.1]]],
        }
    )
    arm = await here.end(SLO)
    assert (arm.num_sent, arm.num_unanswered, arm.duration_s, arm.rate_rps) == (10, 3, 10.0, 0.4)
    assert [(record.index, record.device) for record in arm.records] == [(0, "s0"), (3, "s1")]
    assert arm.records[0].ttft_s == pytest.approx(0.2)
    assert arm.records[0].tpot_s == pytest.approx(0.15)
    assert arm.records[1].tpot_s is None


async def test_progress_is_the_p99_in_milliseconds():
    here, _ = site(progress=[(0.1, 0.01), (0.3, None)])
    assert await here.progress() == (pytest.approx(298.0), pytest.approx(10.0))
    nothing, _ = site(progress=[])
    assert await nothing.progress() == (None, None)


async def test_a_warm_up_is_the_hosts():
    here, host = site()
    await here.warm_up()
    assert host.asked == [{"do": "warm_up"}]


async def test_step_logs_and_close_reach_the_host():
    here, host = site(step_logs={"s0": [[1.0]]})
    assert await here.step_logs(3.0) == {"s0": [[1.0]]}
    assert host.asked == [{"do": "step_logs", "since_s": 3.0}]
    await here.close()
    assert host.closed_after_s


async def test_a_host_that_does_not_start_is_closed_and_not_left_to_its_engines(monkeypatch):
    """A host that is killed leaves engine processes that are still loading; one that is closed ends them."""
    host = ScriptedHost({"start": EngineError("engine s0 did not start")})

    async def start(module: str, **_: Any) -> ScriptedHost:
        assert module == "rose.reference.serving_host"
        return host

    monkeypatch.setattr(serving_site.WorkerProcess, "start", start)
    spec = EngineSpec(
        kind="vllm",
        engine_id="s0",
        model="m",
        max_len=64,
        max_requests=4,
        kv_tokens=320,
        kv_token_bytes=2,
        rose={"role": "alone"},
    )
    with pytest.raises(EngineError, match="did not start"):
        await ServingSite.start([spec], LOAD, clock_path=Path("clock"), vocab_size=500)
    assert host.closed_after_s
    sent = json.loads(json.dumps(host.asked[0]["engines"]))
    assert [EngineSpec(**one) for one in sent] == [spec], "plain data that makes the same engine"

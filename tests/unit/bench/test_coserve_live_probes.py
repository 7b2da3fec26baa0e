from __future__ import annotations

import asyncio
import math
import types

import attrs
import pytest

from rose.bench.coserve import attached, probes
from rose.bench.coserve.live import ROLLOUT, SERVING, LiveRun
from rose.bench.coserve.settings import LiveSettings
from rose.coserving.ledger import Ledger, RolloutState
from rose.errors import EngineError
from rose.observe.latency import RequestRecord
from rose.types import FinishReason, TokenChunk


class Rig:
    """Answers yield runs: each policy's prompts wait for their prefill as long as ``waits_s`` says."""

    def __init__(self, waits_s):
        self.settings = LiveSettings(num_runs=1)
        self.waits_s = waits_s
        self.plans = []

    async def run(self, plan):
        self.plans.append(plan)
        waits_s = self.waits_s[plan.policy]
        records, rows = [], []
        for index, arrival in enumerate(plan.arrivals):
            start_s = arrival.at_s + waits_s[index % len(waits_s)]
            rows.append([start_s, 0.02, 0.0, 0.0, 0.0, arrival.prompt_tokens, 0])
            records.append(
                RequestRecord.from_token_times(
                    index=index, device="serving", arrived_s=arrival.at_s, token_times_s=[start_s + 0.02]
                )
            )
        turns = {SERVING: rows, ROLLOUT: [[0.0, 0.015, 0, 0, 0, 0, 16], [0.1, 0.017, 0, 0, 0, 64, 16]]}
        return LiveRun(
            policy=plan.policy,
            label=plan.label,
            duration_s=plan.duration_s,
            requests=tuple(records),
            num_unanswered=0,
            net_tokens=0,
            decoded_tokens=0,
            thrown_tokens=0,
            num_evicted=0,
            pacing={},
            turns=turns,
            problems=(),
        )


def test_a_yield_is_what_sharing_adds_to_the_wait_for_the_prefill():
    rig = Rig({"alone": [0.002, 0.004], "slo": [0.003, 0.013], "quiet": [0.003]})
    found = asyncio.run(probes.measure_yield(rig, num_arrivals=10))
    assert found["alone_ms"] == pytest.approx(3.0)
    assert found["slo"]["mean_ms"] == pytest.approx(5.0)
    assert found["slo"]["p99_ms"] == pytest.approx(10.0)
    assert found["slo"]["max_ms"] == pytest.approx(10.0)
    assert found["slo"]["step_bound_ms"] == pytest.approx(17.0)
    assert found["quiet"]["mean_ms"] == pytest.approx(0.0)
    assert found["quiet"]["ttft_p50_added_ms"] == pytest.approx(0.0)
    assert len({plan.label for plan in rig.plans}) == 3
    assert len({plan.arrivals for plan in rig.plans}) == 1


@pytest.fixture
def ledger(tmp_path):
    return Ledger.create(tmp_path / "ledger")


@pytest.mark.parametrize(
    ("left", "is_drained"),
    [
        ({}, True),
        ({"num_running": 1}, False),
        ({"kv_used_bytes": 1.0}, False),
        ({"turn_ends_s": 11.0}, False),
        ({"turn_ends_s": 9.0}, True),
    ],
)
def test_a_device_is_drained_without_requests_memory_and_turn(ledger, left, is_drained):
    ledger.publish_rollout(RolloutState(**left))
    rig = types.SimpleNamespace(ledger=ledger, clock=types.SimpleNamespace(now=lambda: 10.0))
    assert probes._is_drained(rig) is is_drained


def test_what_never_comes_is_an_error_that_says_what(monkeypatch):
    monkeypatch.setattr(probes, "_GIVE_UP_S", 0.01)
    with pytest.raises(EngineError, match=r"waited 0\.01 s in vain until pigs fly"):
        asyncio.run(probes._until(lambda: False, "pigs fly"))


@pytest.mark.parametrize(("pid", "has_ended"), [(2**22 + 1, True), (1, False)])
def test_an_ended_process_is_known_by_its_absence(monkeypatch, pid, has_ended):
    ticks = iter([0.0, 0.0, 5.0])
    monkeypatch.setattr(probes, "time", types.SimpleNamespace(monotonic=lambda: next(ticks)))
    assert asyncio.run(probes._has_ended(pid)) is has_ended


@attrs.define
class Engine:
    """Takes ``step_s`` of a made-up time for a batch."""

    options: object
    log: list

    async def generate(self, request):
        self.log.append(self.options.engine_id)
        yield TokenChunk(token_ids=(1,) * request.sampling.max_tokens, finish_reason=FinishReason.LENGTH)

    @property
    def engine_id(self):
        return self.options.engine_id

    async def close(self):
        self.log.append("closed")


def test_engines_take_turns_and_the_ratio_is_the_median_of_the_rounds(monkeypatch):
    log, made = [], []

    async def create(options):
        made.append(options)
        return Engine(options, log)

    rates = {"alone": iter([1.0, 100.0, 100.0, 100.0]), "attached": iter([1.0, 99.0, 50.0, 120.0])}

    async def tokens_per_s(engine, number):
        log.append((engine.engine_id, number))
        return next(rates[engine.engine_id])

    monkeypatch.setattr(attached, "make_qwen3", lambda path, **_: path)
    monkeypatch.setattr(attached.VllmEngine, "create", create)
    monkeypatch.setattr(attached, "_tokens_per_s", tokens_per_s)
    found = asyncio.run(attached.measure_attached(num_rounds=3))
    assert found["serving_throughput_attached_over_alone"] == pytest.approx(0.99)
    assert log[2:8] == [("attached", 0), ("alone", 0), ("alone", 1), ("attached", 1), ("attached", 2), ("alone", 2)]
    assert log[8:] == ["closed"] * 3
    roles = {options.engine_id: options.rose.get("role") for options in made}
    assert roles == {"alone": None, "attached": "serving", "rollout": "rollout"}
    assert [options.scheduler_cls is None for options in made] == [True, False, False]


def test_the_rate_counts_all_tokens_of_the_batch(monkeypatch):
    ticks = iter([10.0, 12.0])
    monkeypatch.setattr(attached, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    engine = Engine(types.SimpleNamespace(engine_id="e"), [])
    rate = asyncio.run(attached._tokens_per_s(engine, 0))
    assert math.isclose(rate, attached._NUM_REQUESTS * attached._OUTPUT_TOKENS / 2.0)
    assert len(engine.log) == attached._NUM_REQUESTS

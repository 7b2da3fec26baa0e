"""Co-serving in virtual time: what is counted, that policies keep their word, and that a report can be read."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence

import attrs
import numpy as np
import pytest

from rose.bench.coserve.figures import Sample, summarise_policy, weighted_percentile
from rose.bench.coserve.pairs import run_pair
from rose.bench.coserve.virtual import VirtualSettings, run_virtual
from rose.bench.coserve.workloads import CoserveWorkload
from rose.bench.coserve.world import (
    CoservePolicy,
    DeviceSetup,
    Observed,
    build_site,
    kv_pool,
    longest_step_s,
    poke_all,
    run_case,
)
from rose.errors import ConfigError
from rose.policies.admission import AdmissionConfig, Role, Slo
from rose.simulation.loop import new_loop
from rose.simulation.serving_site import Answer
from rose.simulation.traces import Arrival

SETUP = DeviceSetup(warm_up_s=5.0)
LOAD = CoserveWorkload(name="burst", rate_rps=5.0)
SECONDS = 25.0
SLO = Slo()


def arrivals(load: CoserveWorkload = LOAD, seed: int = 1, seconds: float = SECONDS) -> tuple[Arrival, ...]:
    return load.arrivals(duration_s=SETUP.warm_up_s + seconds, seed=seed, serving_profile=SETUP.serving)


def run(policy: CoservePolicy, setup: DeviceSetup = SETUP, load: Sequence[Arrival] | None = None) -> Observed:
    return run_case(setup, policy, arrivals() if load is None else load, duration_s=SECONDS, seed=1)


def worst_gap_s(seen: Observed) -> float:
    return max(gap for gap, _ in seen.gaps)


@pytest.fixture(scope="module")
def seen() -> dict[CoservePolicy, Observed]:
    return {policy: run(policy) for policy in CoservePolicy}


def test_every_policy_answers_the_same_requests(seen: dict[CoservePolicy, Observed]) -> None:
    expected = [arrival.at_s for arrival in arrivals() if arrival.at_s >= SETUP.warm_up_s]
    for policy, one in seen.items():
        if policy is not CoservePolicy.DEDICATED:
            assert [answer.arrived_s for answer in one.answers] == pytest.approx(expected), policy


def test_policies_keep_their_order(seen: dict[CoservePolicy, Observed]) -> None:
    def delay_s(policy: CoservePolicy) -> float:
        pairs = zip(seen[policy].answers, seen[CoservePolicy.ALONE].answers, strict=True)
        return float(np.mean([answer.ttft_s - alone.ttft_s for answer, alone in pairs]))

    assert delay_s(CoservePolicy.QUIET) < delay_s(CoservePolicy.SLO) < 0.5 * delay_s(CoservePolicy.UNGATED)
    assert delay_s(CoservePolicy.SLO) < 0.6 * delay_s(CoservePolicy.PAPER)
    tokens = {policy: one.net_tokens for policy, one in seen.items()}
    assert 0 == tokens[CoservePolicy.ALONE] < tokens[CoservePolicy.QUIET] < tokens[CoservePolicy.SLO]
    assert 0.5 * tokens[CoservePolicy.DEDICATED] < tokens[CoservePolicy.SLO] < tokens[CoservePolicy.DEDICATED]


def test_no_gap_between_tokens_passes_the_slo_where_the_published_rule_s_do(
    seen: dict[CoservePolicy, Observed],
) -> None:
    assert worst_gap_s(seen[CoservePolicy.SLO]) <= SLO.tpot_s
    assert worst_gap_s(seen[CoservePolicy.QUIET]) <= SLO.tpot_s
    assert worst_gap_s(seen[CoservePolicy.PAPER]) > SLO.tpot_s


@pytest.mark.parametrize("guess_ratio", [1.0, 0.5])
def test_noise_and_a_low_profile_add_no_violation(guess_ratio: float) -> None:
    setup = attrs.evolve(SETUP, noise_fraction=0.2, guess_ratio=guess_ratio)
    alone, shared = (Sample.of(run(policy, setup)) for policy in (CoservePolicy.ALONE, CoservePolicy.SLO))
    assert shared.violates(SLO).sum() == alone.violates(SLO).sum() == 0
    assert shared.rest.net_tokens > 0.4 * run(CoservePolicy.DEDICATED, setup).net_tokens


def test_a_small_pool_evicts_rather_than_hold_serving_up() -> None:
    small = attrs.evolve(SETUP, kv_memory_fraction=0.5, headroom_bytes=1 << 30)
    assert kv_pool(small) < 12e9
    shared = run(CoservePolicy.SLO, small)
    assert shared.num_held_for_kv == 0
    assert shared.net_tokens > 0
    assert max(answer.ttft_s for answer in shared.answers) < SLO.ttft_s


def test_an_arrival_on_an_idle_device_waits_for_at_most_one_rollout_step() -> None:
    sparse = tuple(Arrival(6.0 + 3.0 * i, 300, 5) for i in range(6))
    shared = run(CoservePolicy.SLO, load=sparse)
    assert len(shared.yields_s) >= 5
    assert max(shared.yields_s) <= longest_step_s(SETUP) < 0.030
    assert shared.idle_s > 0.8 * SECONDS
    assert shared.idle_used_s > 0.95 * shared.idle_s


def test_thrown_away_context_is_subtracted_until_it_is_computed_again() -> None:
    async def main() -> None:
        site = build_site(loop, SETUP, CoservePolicy.DEDICATED, 1)
        assert site.rollouts is not None
        assert site.guest is not None
        poke_all(site)
        await asyncio.sleep(3.0)
        site.devices[0].fold()
        job = site.guest.batch.decoding()[0]
        held = site.guest.batch.held_tokens(job)
        net, decoded, thrown, evicted = site.rollouts.counts()
        site.rollouts.evict([job])
        assert site.rollouts.counts() == (net - held, decoded, thrown + held, evicted + 1)
        assert held > 1000
        await asyncio.sleep(held / 2000 + 2)
        site.devices[0].fold()
        assert site.rollouts.counts()[0] > net, "it came back"

    loop = new_loop()
    loop.run(main())


def test_with_little_memory_trajectories_leave_and_come_back() -> None:
    crowded = run(CoservePolicy.STATIC, attrs.evolve(SETUP, growth_tokens=0))
    assert crowded.num_evicted > 0
    assert crowded.thrown_tokens > 1000 * crowded.num_evicted
    assert run(CoservePolicy.STATIC).num_evicted < crowded.num_evicted, "expected growth is reserved"


@pytest.mark.parametrize("policy", [CoservePolicy.SLO, CoservePolicy.PAPER])
def test_prefill_and_decode_devices_each_keep_their_half(policy: CoservePolicy) -> None:
    alone, shared = (
        run_pair(SETUP, each, arrivals(), duration_s=SECONDS, seed=1) for each in (CoservePolicy.ALONE, policy)
    )
    ttft = [np.array([answer.ttft_s for answer in pair[Role.DECODE].answers]) for pair in (alone, shared)]
    tpot_s = [answer.tpot_s for answer in shared[Role.DECODE].answers if answer.tpot_s is not None]
    assert max(tpot_s) <= SLO.tpot_s
    assert ttft[1].max() <= SLO.ttft_s
    assert all(shared[role].net_tokens > 1000 * SECONDS for role in shared)
    if policy is CoservePolicy.SLO:
        assert np.percentile(ttft[1], 99) <= np.percentile(ttft[0], 99) + 0.03
        assert worst_gap_s(shared[Role.DECODE]) <= SLO.tpot_s


def test_a_report_has_every_policy_and_is_json() -> None:
    messages: list[str] = []
    settings = VirtualSettings(
        workloads=(LOAD, attrs.evolve(LOAD, name="faster", rate_rps=8.0)),
        policies=(CoservePolicy.SLO,),
        num_seeds=2,
        duration_s=10.0,
        setup=SETUP,
    )
    report = json.loads(json.dumps(run_virtual(settings, messages.append), allow_nan=False))
    assert len(messages) == 4
    assert set(report["workloads"]) == {"burst", "faster"}
    assert set(report["policies"]) == {"alone", "slo"}
    slo = report["policies"]["slo"]
    assert slo["added_delay_mean_ms"] > report["policies"]["alone"]["added_delay_mean_ms"] == 0
    assert 0 < slo["rollout_over_dedicated"] < 1
    assert slo["inflation"]["tpot_p50"] > 0
    assert report["step_bound_ms"] == longest_step_s(SETUP) * 1e3


def test_an_slo_without_room_is_one_clear_error() -> None:
    setup = attrs.evolve(SETUP, admission=AdmissionConfig(slo=Slo(tpot_s=0.05)))
    settings = VirtualSettings(workloads=(LOAD,), policies=(CoservePolicy.SLO,), num_seeds=1, setup=setup)
    with pytest.raises(ConfigError, match=r"load burst, seed 0: serving engine .* TPOT SLO of 0\.05 s leaves no room"):
        run_virtual(settings)


def make_sample(ttft_s: Sequence[float], *, tpot_s: float = 0.02, start_s: float = 0.0) -> Sample:
    answers = tuple(Answer(start_s + 0.1 * i, t, tpot_s) for i, t in enumerate(ttft_s))
    return Sample.of(Observed(answers=answers, gaps=((0.01, 90), (0.2, 10)), duration_s=60.0, net_tokens=50))


def test_windows_count_when_they_have_enough_requests_and_alone_keeps_them() -> None:
    good, late = [0.1] * 120, [0.1] * 117 + [0.9] * 3
    alone, both = make_sample(good), make_sample(late)

    def broken(own: Sample, base: Sample) -> tuple[int, int]:
        figures = summarise_policy([own], [base], [alone], SLO)
        return figures["windows"], figures["windows_broken"]

    assert broken(both, alone) == (1, 1)
    assert broken(both, both) == (1, 0)
    assert broken(make_sample(late[-90:]), make_sample(good[:90])) == (0, 0)


def test_figures_are_paired_and_weighted() -> None:
    alone, own = make_sample([0.1, 0.2]), make_sample([0.11, 0.24])
    figures = summarise_policy([own], [alone], [attrs.evolve(own, rest=attrs.evolve(own.rest, net_tokens=100))], SLO)
    assert figures["added_delay_mean_ms"] == pytest.approx(25)
    assert figures["rollout_over_dedicated"] == 0.5
    assert (figures["itl_tokens_over_slo"], figures["itl_p50_ms"], figures["itl_p99_ms"]) == (10, 10, 200)
    with pytest.raises(ValueError, match="paired"):
        summarise_policy([own], [make_sample([0.1])], [own], SLO)
    assert math.isnan(weighted_percentile(np.array([]), np.array([]), 50))

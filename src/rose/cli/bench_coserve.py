"""``rose bench coserve``: what sharing a device costs serving's users and brings rollouts, policy by policy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.cli import bench_arguments as given
from rose.cli.parsers import add_output, add_parser
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.bench.coserve.workloads import CoserveWorkload

_DESCRIPTION = """\
Compare how a GPU is shared between a serving engine and rollouts of another model: serving alone, ungated, static halves,
priorities in one engine, the published rule, and this library's modes slo and quiet, each on the same arrivals.

--virtual (the default) runs engines, memory and policies in virtual time, over seeds. --live runs real vLLM engines of tiny models
on a paced device, whose steps take a named GPU's time; static and priority are virtual only.
"""

_EXAMPLES = """\
loads (--trace NAME or a trace file; those below the line need --traces DIR with the file in it):
  burst, burst-40, burst-80                 generated: every half minute a second at 4.22 times the mean
  ---
  azure, azure-third, azure-80, servegen    azure2023_conv.csv.gz, servegen_r1_24h_4rps.csv.gz

examples:
  rose bench coserve                                        burst, every policy, 10 seeds, virtual time
  rose bench coserve --trace azure,burst --traces traces --json | jq .policies.slo
  rose bench coserve --trace my-trace.csv.gz --rate 3 --policies slo,quiet --out runs/coserve
  rose bench coserve --live --runs 3 --out runs/coserve-live
  rose bench coserve --live --policies none --probes yield,drain

"""

_Columns = Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]]
_LATENCY: _Columns = (
    ("TTFT P50", lambda row: _ms(row["ttft_p50_ms"])),
    ("P90", lambda row: _ms(row["ttft_p90_ms"])),
    ("P99", lambda row: _ms(row["ttft_p99_ms"])),
    ("TPOT P50", lambda row: _ms(row["tpot_p50_ms"])),
    ("P99", lambda row: _ms(row["tpot_p99_ms"])),
    ("ITL P99", lambda row: _ms(row["itl_p99_ms"])),
    ("added", lambda row: _with_spread(row, "added_delay_mean_ms")),
    ("P99", lambda row: _ms(row["added_delay_p99_ms"])),
)
_COUNTS: _Columns = (
    ("violations", lambda row: f"{row['violations_fraction']:.2%}"),
    ("windows broken", lambda row: f"{row['windows_broken']} of {row['windows']}"),
    ("net tokens", lambda row: _with_spread(row, "rollout_net_tokens", digits=0)),
    ("evicted", lambda row: str(row["evicted"])),
)


def add_command(kinds: Any, *, epilog: str) -> None:
    """Add ``coserve`` to what ``rose bench`` measures."""
    parser = add_parser(
        kinds,
        "coserve",
        summary="what sharing a GPU costs serving and brings rollouts",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--trace", default="burst", metavar="NAME|FILE,...", help="serving's load, see below (default: burst)"
    )
    load.add_argument("--traces", metavar="DIR", help="folder of the trace files of named loads")
    rate = load.add_mutually_exclusive_group()
    rate.add_argument("--rate", type=given.positive, metavar="R", help="requests a second, instead of the load's own")
    rate.add_argument("--load", type=given.positive, metavar="F", help="instead: a share of what one device serves")
    how = parser.add_argument_group("runs")
    kind = how.add_mutually_exclusive_group()
    kind.add_argument("--live", action="store_true", help="real engines on a paced device")
    kind.add_argument("--virtual", action="store_true", help="virtual time (default)")
    how.add_argument(
        "--policies", metavar="NAME,...", help="of those above (default: all; alone is always run); 'none': probes only"
    )
    how.add_argument("--seeds", type=given.count, default=10, metavar="N", help="seeds, virtual (default: 10)")
    how.add_argument("--seed", type=given.seed, default=0, metavar="N", help="the first one (default: 0)")
    how.add_argument(
        "--runs", type=given.count, default=3, metavar="N", help="valid runs of each policy, live (default: 3)"
    )
    how.add_argument(
        "--duration", type=given.positive, metavar="S", help="modelled seconds of a run (default: 300, live 24)"
    )
    how.add_argument(
        "--k", type=given.positive, metavar="K", help="real seconds of a modelled one, live (default: by the cores)"
    )
    how.add_argument("--processes", type=given.count, metavar="N", help="at a time, virtual (default: the cores)")
    how.add_argument(
        "--probes",
        metavar="NAME,...",
        help="single figures: ledger, reclaim; with real engines yield, drain, watchdog, attached; all or none "
        "(default: live all, virtual the first two)",
    )
    add_output(parser, files="coserve.json and, where matplotlib is installed, figures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code.

    Raises:
        ConfigError: An argument cannot be used.
        RoseError: A probe failed; the other figures were printed and written.
    """
    measure = _live(arguments) if arguments.live else _virtual(arguments)
    return given.measure_and_show(
        measure, arguments, name="coserve", tables=coserve_tables, drawings="rose.bench.coserve.drawings"
    )


def _live(arguments: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    from rose.bench.coserve.report import run_live_bench  # noqa: PLC0415 - loads numpy
    from rose.bench.coserve.settings import LIVE_POLICIES, PROBES, VIRTUAL_ONLY, LiveSettings  # noqa: PLC0415

    asked = given.names(arguments.policies, (*LIVE_POLICIES, *VIRTUAL_ONLY), option="--policies", default=LIVE_POLICIES)
    for policy in set(asked) & set(VIRTUAL_ONLY):
        given.tell(f"{policy} is left out: virtual time only, {VIRTUAL_ONLY[policy]}")
    loads = _workloads(arguments)
    if len(loads) > 1:
        message = f"--trace: a live run takes one load, got {', '.join(load.name for load in loads)}"
        raise ConfigError(message)
    settings = LiveSettings(
        workload=loads[0],
        policies=tuple(policy for policy in asked if policy in LIVE_POLICIES),
        num_runs=arguments.runs,
        probes=given.names(arguments.probes, PROBES, option="--probes", default=PROBES),
        k=arguments.k,
        seed=arguments.seed,
        **({} if arguments.duration is None else {"duration_s": arguments.duration}),
    )
    return lambda: run_live_bench(settings, given.tell)


def _virtual(arguments: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    from rose.bench.coserve.report import ENGINE_PROBES, run_virtual_bench  # noqa: PLC0415 - loads numpy
    from rose.bench.coserve.settings import PROBES  # noqa: PLC0415
    from rose.bench.coserve.virtual import ALL_POLICIES, VirtualSettings  # noqa: PLC0415

    by_name = {policy.value: policy for policy in ALL_POLICIES}
    asked = given.names(arguments.policies, tuple(by_name), option="--policies", default=tuple(by_name))
    cheap = tuple(probe for probe in PROBES if probe not in ENGINE_PROBES)
    settings = VirtualSettings(
        workloads=_workloads(arguments),
        policies=tuple(by_name[name] for name in asked),
        num_seeds=arguments.seeds,
        first_seed=arguments.seed,
        num_processes=arguments.processes or len(os.sched_getaffinity(0)),
        **({} if arguments.duration is None else {"duration_s": arguments.duration}),
    )
    probes = given.names(arguments.probes, PROBES, option="--probes", default=cheap)
    return lambda: run_virtual_bench(settings, probes, given.tell)


def _workloads(arguments: argparse.Namespace) -> tuple[CoserveWorkload, ...]:
    """Return the loads; named ones whose file is absent are left out with a message, as long as one is left."""
    from rose.bench.coserve.cases import workload_named  # noqa: PLC0415 - loads numpy

    loads, problems = [], []
    for name in given.listed(arguments.trace, option="--trace"):
        try:
            load = workload_named(name, arguments.traces)
        except ConfigError as error:
            problems.append(f"--trace {name}: {error}")
            continue
        if load.trace is not None and not Path(load.trace).is_file():
            problems.append(f"--trace {name}: there is no file {load.trace}; give its folder with --traces")
            continue
        if arguments.rate is not None or arguments.load is not None:
            load = attrs.evolve(load, rate_rps=arguments.rate, load_fraction=arguments.load)
        loads.append(load)
    if not loads:
        raise ConfigError("\n".join(problems))
    for problem in problems:
        given.tell(f"left out: {problem}")
    return tuple(loads)


def coserve_tables(report: Mapping[str, Any]) -> RenderableType:
    """Return the report as text: a table of policies for each load, then the single figures."""
    parts: list[RenderableType] = []
    loads = report.get("workloads") or {report.get("load", ""): report}
    for name, load in loads.items():
        if load["policies"]:
            parts += [
                Text(f"{name}, {report['kind']}", style="bold"),
                _policy_table(load["policies"], "ms", _LATENCY),
                _policy_table(load["policies"], "", _COUNTS),
                Text(""),
            ]
    for key, label, unit in (
        ("yield_p99_ms", "yield, P99", "ms"),
        ("step_bound_ms", "longest rollout step", "ms"),
        ("drain_s", "kill switch to drained", "s"),
        ("reclaim_ms_per_gib", "pages back", "ms a GiB"),
        ("ledger_us_per_step", "ledger, of one step", "us"),
        ("serving_throughput_attached_over_alone", "throughput with an idle rollout engine over alone", ""),
    ):
        if report[key] is not None:
            parts.append(Text(f"{label}: {report[key]:.3g} {unit}".rstrip()))
    for key, ratio in report.get("comparison", {}).items():
        parts.append(Text(f"{key.replace('_', ' ')}: {ratio:.2f}"))
    parts += [Text(f"{name}: not measured, {why}", style="yellow") for name, why in report["skipped"].items()]
    return Group(*parts)


def _policy_table(policies: Mapping[str, Any], first: str, columns: _Columns) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for head, _ in columns:
        table.add_column(head, justify="right", no_wrap=True)
    for name, row in policies.items():
        table.add_row(name, *(render(row) for _, render in columns))
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _with_spread(row: Mapping[str, Any], key: str, digits: int = 1) -> str:
    spread = (row.get("spread") or {}).get(key)
    return f"{row[key]:.{digits}f}" + ("" if spread is None else f" ± {spread:.{digits}f}")

"""``rose bench scheduler``: what routing costs, beside other routers, and what it keeps."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.cli import bench_arguments as given
from rose.cli.parsers import add_output, add_parser
from rose.cli.stores import filled_path
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.bench.scheduler.settings import SchedulerSettings

_DESCRIPTION = """\
Measure the scheduler: routing decisions a second and their P99 by number of engines, memory of live trajectories, turns that keep their
engine, what the pool adds to a turn in the trainer's process, a server that fails at once, and turns over HTTP through ROSE and through
vllm-router and smg at equal load.

The routers are other projects' programs: pip install vllm-router smg, into an environment of their own. Those that are not found are
left out with a message.
"""

_EXAMPLES = """\
examples:
  rose bench scheduler --peers /opt/routers/bin             everything, about a quarter of an hour
  rose bench scheduler --only decisions --json | jq .decisions_per_s
  rose bench scheduler --quick                              a few seconds, to see that it works: no measurement
  rose bench scheduler --out runs/scheduler

"""

NOT_ASKED = "not asked for"
"""Why a figure of a section that was left out is absent."""

_SINGLES = (
    ("bytes_per_trajectory", "memory of a live trajectory", "bytes"),
    ("affinity_kept_fraction", "turns kept on their engine, of those that could be", ""),
    ("inprocess_added_p99_ms", "added by the pool in process, P99", "ms"),
    ("growth", "cost of a decision, most engines over 64", "x"),
)


def add_command(kinds: Any, *, epilog: str) -> None:
    """Add ``scheduler`` to what ``rose bench`` measures."""
    parser = add_parser(
        kinds,
        "scheduler",
        summary="what routing costs and keeps, beside other routers",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--only",
        metavar="SECTION,...",
        help="decisions, memory, affinity, in-process, dead-server, gateway (default: all)",
    )
    what.add_argument("--quick", action="store_true", help="small and short; no measurement")
    what.add_argument("--peers", metavar="DIR", help="folder of the programs vllm-router and smg (default: the path)")
    what.add_argument("--rate", type=given.positive, metavar="R", help="turns a second of the open loops (default: 60)")
    what.add_argument("--rounds", type=given.count, metavar="N", help="rounds of the section gateway (default: 5)")
    what.add_argument("--seed", type=given.seed, default=0, metavar="N", help="of everything (default: 0)")
    add_output(parser, files="scheduler.json and, where matplotlib is installed, two figures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns the exit code.

    Raises:
        ConfigError: An argument cannot be used.
        RoseError: A section failed; the others were printed and written.
    """
    settings = _settings(arguments)
    from rose.bench.scheduler import report  # noqa: PLC0415 - loads aiohttp

    return given.measure_and_show(
        lambda: report.run(settings, given.tell),
        arguments,
        name="scheduler",
        tables=scheduler_tables,
        drawings="rose.bench.scheduler.drawings",
    )


def _settings(arguments: argparse.Namespace) -> SchedulerSettings:
    from rose.bench.scheduler.settings import SECTIONS, SchedulerSettings  # noqa: PLC0415 - not for --help

    only = given.names(arguments.only, SECTIONS, option="--only", default=SECTIONS)
    peers = None if arguments.peers is None else filled_path(arguments.peers, option="--peers")
    if peers is not None and not peers.is_dir():
        message = f"--peers: {peers} is no folder; give the one with the programs vllm-router and smg"
        raise ConfigError(message)
    settings = SchedulerSettings(only=only, peers=None if peers is None else str(peers), seed=arguments.seed)
    settings = settings.quick() if arguments.quick else settings
    asked = {"rate_per_s": arguments.rate, "num_rounds": arguments.rounds}
    return attrs.evolve(settings, **{name: value for name, value in asked.items() if value is not None})


def scheduler_tables(report: Mapping[str, Any]) -> RenderableType:
    """Return the report as text: a table by engines, one by ways to the engines, then single figures."""
    parts: list[RenderableType] = []
    if report["by_engines"]:
        parts += [_decision_table([*report["by_engines"], *report["by_trajectories"]]), Text("")]
    if report["gateway"]:
        parts += [_gateway_table(report["gateway"]), Text("")]
    for key, label, unit in _SINGLES:
        if report[key] is not None:
            parts.append(Text(f"{label}: {report[key]:.4g} {unit}".rstrip()))
    if report["dead_server"]:
        parts.append(Text(_black_hole("rose", report["dead_server"])))
        others = {name: report["dead_server"][name] for name in ("burst", "verl_like")}
        others |= {f"{name} over HTTP": found for name, found in report["dead_server"]["http"].items()}
        parts += [Text(_black_hole(name, found)) for name, found in others.items()]
    parts += [
        Text(f"{name}: not measured, {why}", style="yellow")
        for name, why in report["skipped"].items()
        if why != NOT_ASKED
    ]
    return Group(*parts)


def _black_hole(name: str, found: Mapping[str, Any]) -> str:
    return f"dead server, {name}: {found['lost']} of {found['requests']} lost, {found['sent_to_dead']} sent to it"


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    return table


def _decision_table(rows: list[Mapping[str, Any]]) -> Table:
    table = _table("engines", "live", "waiting", "decisions/s", "P50 us", "P99 us", "turns/s")
    for row in rows:
        table.add_row(
            str(row["num_engines"]),
            str(row["num_trajectories"]),
            str(row["num_waiting"]),
            f"{row['decisions_per_s']:.0f}",
            f"{row['decision_p50_us']:.1f}",
            f"{row['decision_p99_us']:.1f}",
            f"{row['turns_per_s']:.0f}",
        )
    return table


def _gateway_table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    table = _table("", "turns/s", "P50 ms", "P99 ms", "added P50", "added P99", "CPU ms", "client's")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['turns_per_s']:.0f}",
            *(f"{row[key]:.2f}" for key in ("p50_ms", "p99_ms", "added_p50_ms", "added_p99_ms")),
            *(f"{row[key]:.2f}" for key in ("between_cpu_ms", "client_cpu_ms")),
        )
    return table

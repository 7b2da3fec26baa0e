"""``rose simulate``: arguments, the study they describe, its run, its result."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from rose.cli.parsers import add_parser
from rose.cli.signals import terminated_as_interrupted
from rose.cli.simulation_study import BASELINE, POLICY, Simulator, load_simulator, make_study
from rose.cli.simulation_tables import StudyView, plain_table, study_table
from rose.errors import BackendUnavailableError, ConfigError

if TYPE_CHECKING:
    from rose.simulation.scenario import Scenario
    from rose.simulation.study import Study, StudyRun

_EXTRA = "the report's figures need matplotlib; install it with: pip install 'rose-rl[demo]'"

_DESCRIPTION = """\
Run the live scheduler, lender and co-serving policies in virtual time against modelled engines, links and load, and say
what borrowing serving's GPUs would bring one RL job, and what it would cost serving.

Every strategy meets the same arrivals and trajectories. The same command gives the same bytes. With --out every finished
case is kept, and the same command goes on where it was interrupted.
"""

_EXAMPLES = """\
examples:
  rose simulate --list                                      presets, strategies and settings
  rose simulate frozenlake-8b-grpo                          all strategies, three seeds
  rose simulate frozenlake-8b-grpo --policy default --seeds 10 --json | jq .default.end_to_end_gain
  rose simulate alfworld-32b-grpo --sweep borrowed=0,8,16,32,64 --out runs/borrowed
  rose simulate --config my-cluster.toml --trace azure.csv.gz --set link.gbps=25
  rose simulate --calibrate runs/paced                      fit the profiles to a live run

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``simulate`` to the command line."""
    parser = add_parser(
        commands,
        "simulate",
        summary="what borrowing would bring, in virtual time",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    _add_what(parser)
    study = parser.add_argument_group("study")
    for kind, plural in ((POLICY, "policies"), (BASELINE, "baselines")):
        study.add_argument(
            f"--{kind}",
            nargs="+",
            action="extend",
            metavar="NAME",
            help=f"only these {plural}, and the baseline 'fixed' (default: all strategies)",
        )
    study.add_argument("--seeds", type=_count, default=3, metavar="N", help="number of seeds (default: 3)")
    study.add_argument("--seed", type=_seed, default=0, metavar="FIRST", help="the first of them (default: 0)")
    study.add_argument(
        "--sweep",
        metavar="AXIS=V1,V2,...",
        help="run at each value too: borrowed, link, load, layout, scale (times all GPUs and trajectories) or any key",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--jobs", type=_count, metavar="N", help="processes at a time (default: all cores)")
    output.add_argument(
        "--out", metavar="DIR", help="folder for result.json, cases/ and, where matplotlib is installed, report.html"
    )
    output.add_argument("--json", action="store_true", help="print one JSON document, nothing else, on standard output")
    output.add_argument("--report", action="store_true", help="refuse to start where report.html cannot be drawn")
    parser.set_defaults(run=run)


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("scenario")
    what.add_argument("preset", nargs="?", metavar="PRESET", help="a named scenario, see --list")
    what.add_argument("--config", metavar="FILE", help="TOML file with a scenario of one's own")
    what.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one setting; may be repeated"
    )
    what.add_argument("--trace", metavar="FILE", help="requests to replay on serving, the setting serving.trace")
    what.add_argument("--list", action="store_true", help="list presets, strategies and settings")
    what.add_argument("--calibrate", metavar="RUN_DIR", help="fit the profiles to a live run and say how well they fit")


def _count(text: str) -> int:
    return _whole(text, at_least=1)


def _seed(text: str) -> int:
    return _whole(text, at_least=0)


def _whole(text: str, *, at_least: int) -> int:
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= at_least:
            return number
    message = f"{text!r} is not a whole number >= {at_least}"
    raise argparse.ArgumentTypeError(message)


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments ask for; returns the exit code."""
    if arguments.calibrate is not None:
        return _calibrate(arguments)
    simulator = load_simulator()
    if arguments.list:
        return _list(simulator, is_json=arguments.json)
    study = make_study(arguments, simulator)
    out = _out(arguments)
    began_s = time.monotonic()
    done = _run_study(study, simulator, jobs=arguments.jobs, out=out)
    wall_s = round(time.monotonic() - began_s, 3)
    if not done.outcomes:
        return _tell_failures(done)
    result = _result(done, simulator)
    if out is not None:
        _write(out, result)
    _print(result, wall_s=wall_s, out=out, is_json=arguments.json)
    return _tell_failures(done)


def _out(arguments: argparse.Namespace) -> Path | None:
    """Return the folder of the results.

    Raises:
        ConfigError: A report was asked for without a folder.
        BackendUnavailableError: A report was asked for and cannot be drawn.
    """
    if arguments.report and arguments.out is None:
        message = "--report needs a folder; add --out DIR"
        raise ConfigError(message)
    if arguments.report and not _can_draw():
        raise BackendUnavailableError(_EXTRA)
    return None if arguments.out is None else Path(arguments.out)


def _can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _run_study(study: Study, simulator: Simulator, *, jobs: int | None, out: Path | None) -> StudyRun:
    from rose.simulation.study import run_study  # noqa: PLC0415 - see load_simulator

    try:
        with contextlib.redirect_stdout(sys.stderr), StudyView() as view, terminated_as_interrupted():
            return run_study(
                study,
                jobs=jobs,
                out=out,
                on_progress=view.update,
                simulate=simulator.simulate,
                simulate_serving=simulator.simulate_serving,
            )
    except KeyboardInterrupt:
        if out is not None:
            _note(f"finished cases are kept in {out / 'cases'}; the same command goes on from there")
        raise


def _result(done: StudyRun, simulator: Simulator) -> dict[str, Any]:
    from rose.simulation.results import build_result  # noqa: PLC0415 - see load_simulator

    return build_result(done, simulator.strategies, _published(done.study.scenario, simulator))


def _published(scenario: Scenario, simulator: Simulator) -> Mapping[str, float] | None:
    """Return the paper's figures for a preset; ``None`` where settings were changed that make it another set-up."""
    preset = simulator.presets.get(scenario.name)
    if preset is None:
        return None
    parts = [
        (it.cluster, it.serving, it.rollout.profile, it.rollout.workload, it.loop.algorithm)
        for it in (preset, scenario)
    ]
    return simulator.published.get(scenario.name) if parts[0] == parts[1] else None


def _write(out: Path, result: Mapping[str, Any]) -> None:
    path = out / "result.json"
    try:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        raise ConfigError(message) from error
    if not _can_draw():
        _note(f"no report.html: {_EXTRA}")
        return
    from rose.simulation.report import write_study_report  # noqa: PLC0415 - loads matplotlib

    write_study_report(out / "report.html", result)


def _print(result: Mapping[str, Any], *, wall_s: float, out: Path | None, is_json: bool) -> None:
    if is_json:
        print(json.dumps({**result, "wall_s": wall_s}, allow_nan=False), flush=True)  # noqa: T201 - this is the command line
        return
    console = Console(highlight=False)
    console.print(study_table(result))
    where = "" if out is None else f"; results in {out.resolve()}"
    console.print(Text(f"\n{result['simulated_turns']:,} turns simulated in {wall_s:,.1f} s{where}"), soft_wrap=True)


def _tell_failures(done: StudyRun) -> int:
    """Say which cases failed; returns the exit code.

    Raises:
        ConfigError: Cases failed, and all of them for something that the user can put right.
    """
    from rose.simulation.study import failure_lines  # noqa: PLC0415 - see load_simulator

    if not done.failures:
        return 0
    lines = failure_lines(done.failures)
    bugs = [failure for failure in done.failures if failure.is_bug]
    if not bugs:
        raise ConfigError("\n".join(lines))
    for trace in dict.fromkeys(failure.trace for failure in bugs):
        print(trace, end="", file=sys.stderr)  # noqa: T201 - this is the command line
    for line in lines:
        _note(f"error: {line}")
    return 1


def _note(text: str) -> None:
    print(f"rose: {text}", file=sys.stderr)  # noqa: T201 - this is the command line


def _list(simulator: Simulator, *, is_json: bool) -> int:
    from rose.simulation.axes import SCALE, SHORT_NAMES, setting_keys  # noqa: PLC0415 - see load_simulator

    axes = {SCALE: "all GPU counts and trajectories", **SHORT_NAMES}
    if is_json:
        strategies = [
            {"name": name, "kind": each.kind, "summary": each.summary} for name, each in simulator.strategies.items()
        ]
        listed = {
            "presets": list(simulator.presets),
            "strategies": strategies,
            "axes": axes,
            "keys": list(setting_keys()),
        }
        print(json.dumps(listed))  # noqa: T201 - this is the command line
        return 0
    lines = {
        "presets": list(simulator.presets),
        "strategies": [f"--{each.kind:<9} {name:<14} {each.summary}" for name, each in simulator.strategies.items()],
        "short names for --sweep": [f"{name:<9} {meaning}" for name, meaning in axes.items()],
        "settings for --set, --sweep and --config": _by_section(setting_keys()),
    }
    console = Console(highlight=False)
    for title, block in lines.items():
        console.print(Text(title, style="dim"))
        console.print(Text("\n".join(f"  {line}" for line in block) + "\n"), soft_wrap=True)
    return 0


def _by_section(keys: Sequence[str]) -> list[str]:
    """Return one line a section, its keys in full so that they can be copied."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        sections.setdefault(key.partition(".")[0], []).append(key)
    return ["  ".join(names) for names in sections.values()]


def _calibrate(arguments: argparse.Namespace) -> int:
    if arguments.preset is not None or arguments.config is not None:
        message = "--calibrate takes a run's folder alone; leave out the preset and --config"
        raise ConfigError(message)
    from rose.simulation.calibrate import HEADS, calibrate  # noqa: PLC0415 - see load_simulator

    with contextlib.redirect_stdout(sys.stderr), terminated_as_interrupted():
        report = calibrate(Path(arguments.calibrate))
    if arguments.json:
        print(json.dumps(report.to_json(), allow_nan=False))  # noqa: T201 - this is the command line
        return 0
    console = Console(highlight=False)
    console.print(plain_table(HEADS, report.rows()))
    console.print(Text("\n".join(["", *report.notes()])), soft_wrap=True)
    return 0

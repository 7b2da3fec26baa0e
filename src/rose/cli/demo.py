"""``rose demo``: arguments, early checks of what a run needs, the run, its table."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console

from rose import config as rose_config
from rose.cli.parsers import add_parser, installing
from rose.cli.signals import terminated_as_interrupted
from rose.cli.tables import demo_table
from rose.errors import ConfigError
from rose.observe.live import LiveView
from rose.reference.demo_config import ENGINES, TRAINERS, DemoConfig

_DESCRIPTION = """\
Train a small policy on FrozenLake by GRPO twice, with the same seeds and the same serving load:

  fixed  rollouts on dedicated engines only
  rose   the same, plus borrowed engines, each beside a serving engine that answers a replayed request trace

Engines, tokens and weights are real; the time that a step takes is that of a named GPU and model, and every figure is in
modelled seconds. At the end: a table fixed / rose / ratio, and in the folder of --out summary.json, metrics.jsonl,
timeline.json (for https://ui.perfetto.dev) and report.html.
"""

_EXAMPLES = """\
examples:
  rose demo                                          generated load, about ten minutes on two cores
  rose demo --trace azure.csv.gz --rate 5.5          replay a real trace at 5.5 requests a second and device
  rose demo --steps 4 --json | tail -n 1 | jq .gain  the summary for a script
  rose demo --config demo.toml --seed 1              a file, and one setting over it

"""

_FLAGS = {
    "trace": "--trace",
    "rate_rps": "--rate",
    "steps": "--steps",
    "seed": "--seed",
    "env": "--env",
    "trainer": "--trainer",
    "rollout_engine": "--rollout-engine",
    "serving_engine": "--serving-engine",
    "slo_ttft_ms": "--slo-ttft-ms",
    "slo_tpot_ms": "--slo-tpot-ms",
    "port": "--port",
    "out": "--out",
    "json": "--json",
}


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``demo`` to the command line."""
    parser = add_parser(
        commands,
        "demo",
        summary="one RL job with and without borrowed GPUs, on this machine",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    default = DemoConfig()
    load = parser.add_argument_group("serving load")
    load.add_argument(
        "--trace",
        metavar="FILE",
        help="requests to replay: Azure, BurstGPT or ServeGen CSV, Mooncake JSON lines, gz or not (default: a generated bursty load)",
    )
    load.add_argument(
        "--rate",
        dest="rate_rps",
        type=_decimal,
        metavar="RPS",
        help=f"mean requests a second and serving device (default: {default.rate_rps:g})",
    )
    load.add_argument(
        "--slo-ttft-ms",
        type=_decimal,
        metavar="X",
        help=f"budget for the first token (default: {default.slo_ttft_ms:g})",
    )
    load.add_argument(
        "--slo-tpot-ms",
        type=_decimal,
        metavar="X",
        help=f"budget for each further token (default: {default.slo_tpot_ms:g})",
    )
    job = parser.add_argument_group("RL job")
    job.add_argument("--steps", type=_whole, metavar="N", help=_steps_help(default))
    job.add_argument("--seed", type=_whole, metavar="S", help=f"seed of both arms (default: {default.seed})")
    job.add_argument("--env", metavar="MODULE:CLASS", help=f"environment (default: {default.env})")
    job.add_argument(
        "--trainer", metavar="NAME", help=f"what trains the policy: {', '.join(TRAINERS)} (default: {default.trainer})"
    )
    for side, what in (("rollout", "rollouts run on"), ("serving", "answers the serving load")):
        job.add_argument(
            f"--{side}-engine",
            metavar="NAME",
            help=f"what {what}: {', '.join(ENGINES)} (default: {getattr(default, f'{side}_engine')})",
        )
    job.add_argument("--port", type=_whole, metavar="P", help="loopback port of the weight relay (default: a free one)")
    output = parser.add_argument_group("output and configuration")
    output.add_argument("--out", metavar="DIR", help=f"folder for the results (default: {default.out})")
    output.add_argument(
        "--json",
        action="store_const",
        const=True,
        help="print the summary as the last line of the standard output, progress on the standard error",
    )
    output.add_argument("--config", metavar="FILE", help="TOML file with any field of DemoConfig; options go over it")
    parser.set_defaults(run=run)


def _steps_help(default: DemoConfig) -> str:
    return (
        f"RL steps an arm; the last {default.sparse_fraction:.0%} form the sparse phase (learning rate {default.sparse_lr:g}), "
        f"the rest learn ({default.learn_lr:g}) (default: {default.steps} = {default.learn_steps} + {default.sparse_steps})"
    ).replace("%", "%%")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        message = f"{text!r} is not a whole number"
        raise argparse.ArgumentTypeError(message) from error


def _decimal(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        message = f"{text!r} is not a number"
        raise argparse.ArgumentTypeError(message) from error


def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its result; returns the exit code."""
    config = make_config(arguments)
    check_surroundings(config, _given(arguments))
    run_demo = _load_runner()
    with LiveView(is_json=config.json) as view, terminated_as_interrupted():
        result = asyncio.run(run_demo(config, view=view))
    if config.json:
        print(json.dumps(result.summary, allow_nan=False), flush=True)  # noqa: T201 - this is the command line
        return 0
    console = Console(highlight=False)
    console.print(demo_table(result.summary))
    console.print(
        f"\nresults in {Path(config.out).resolve()}: open report.html, or timeline.json at https://ui.perfetto.dev"
    )
    return 0


def make_config(arguments: argparse.Namespace) -> DemoConfig:
    """Return the configuration: the file's where there is one, with the options that were given over it.

    Raises:
        ConfigError: The file or an option is wrong; names which.
    """
    config = rose_config.load(DemoConfig, Path(arguments.config)) if arguments.config is not None else DemoConfig()
    given = _given(arguments)
    try:
        return attrs.evolve(config, **given)
    except ConfigError as error:
        raise _name_flag(error, given) from error


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that options set."""
    return {name: value for name in _FLAGS if (value := getattr(arguments, name)) is not None}


def _name_flag(error: ConfigError, given: Mapping[str, Any]) -> ConfigError:
    """Return the complaint about a field in the words of the option that set it."""
    field, _, rest = str(error).partition(" ")
    return ConfigError(f"{_FLAGS[field]} {rest}") if field in given else error


def check_surroundings(config: DemoConfig, given: Collection[str] = ()) -> None:
    """Check what would else fail minutes into the run: the trace, the output folder, the port. Makes nothing.

    Args:
        config: What will run.
        given: The fields that options set; the others are called by their key in the configuration file.

    Raises:
        ConfigError: One of them is of no use; says which and what to do.
    """
    if config.trace is not None:
        try:
            with Path(config.trace).open("rb") as file:
                file.read(1)
        except OSError as error:
            message = (
                f"{_called('trace', given)}: cannot read {config.trace}: {error.strerror}; "
                "give the path of a trace file, or leave it out"
            )
            raise ConfigError(message) from error
    try:
        with tempfile.TemporaryFile(dir=_nearest_folder(Path(config.out))):
            pass
    except OSError as error:
        reason = "it is not a folder" if isinstance(error, NotADirectoryError) else error.strerror
        message = (
            f"{_called('out', given)}: cannot write into {config.out}: {reason}; choose a folder that you may write to"
        )
        raise ConfigError(message) from error
    _check_port(config.port, _called("port", given))


def _called(field: str, given: Collection[str]) -> str:
    return _FLAGS[field] if field in given else field


def _nearest_folder(path: Path) -> Path:
    """Return the folder itself, or the one in which it would be made: a refused run leaves no folder behind."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def _check_port(port: int, called: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            message = f"{called}: cannot listen on 127.0.0.1:{port}: {error.strerror}; choose another, or leave it out for a free one"
            raise ConfigError(message) from error


def _load_runner() -> Any:
    with installing("demo", what="the demo"):
        from rose.reference.demo import run_demo  # noqa: PLC0415 - loads the engines' libraries
    return run_demo

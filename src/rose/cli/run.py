"""``rose run``: the reference RL loop on the pool of a job file."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rose.cli.parsers import add_parser, installing
from rose.cli.signals import terminated_as_interrupted
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.reference.loop_config import RunConfig

_ENVIRONMENTS = ("frozenlake", "household", "alfworld")
_ALGORITHMS = ("grpo", "dapo", "async")

_DESCRIPTION = """\
Train a small policy on a text game: roll out on the job's own engines and on those it may borrow, train, publish the weights, and so on.

Starts the learner, the environments and, unless the job file names a running pool, the pool with its dedicated engines. Borrowed engines come
from the lender of the job file, never more than resources.n_serving at a time. Ctrl-C and SIGTERM end all that was started and give every
device back.
"""

_EXAMPLES = """\
examples:
  rose run job.toml --check
  rose run job.toml --save-model               write the first checkpoint, for executors to start from
  rose run job.toml --env household --algorithm async --steps 8
  rose run job.toml --json | tail -n 1         the summary for a script

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``run`` to the command line."""
    parser = add_parser(
        commands,
        "run",
        summary="the reference RL loop on the pool of a job file",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument("job", type=Path, metavar="JOB", help="TOML file")
    parser.add_argument("--env", metavar="NAME", help=f"{', '.join(_ENVIRONMENTS)} or MODULE:CLASS, over loop.env")
    parser.add_argument("--algorithm", metavar="NAME", help=f"{', '.join(_ALGORITHMS)}, over loop.algorithm")
    parser.add_argument("--steps", type=int, metavar="N", help="RL steps, over loop.steps")
    parser.add_argument("--pool", metavar="URL", help="a running rose pool, over loop.pool")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results, over loop.out")
    parser.add_argument("--check", action="store_true", help="say what is wrong with JOB, start nothing")
    parser.add_argument(
        "--save-model", action="store_true", help="write the policy's first checkpoint to model.path and end"
    )
    parser.add_argument(
        "--json", action="store_true", help="progress and, last, the summary as JSON lines on the standard output"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the job to its end; returns the exit code."""
    with installing("http,fsdp", what="rose run"):
        from rose.reference.run import check_run, run_job, save_model  # noqa: PLC0415 - loads aiohttp
    config = make_config(arguments)
    teller = _Teller(is_json=arguments.json)
    if arguments.check:
        check_run(config)
        teller.say(
            f"{arguments.job}: {config.loop.env} by {config.loop.algorithm}, {config.loop.steps} steps: in order"
        )
        return 0
    with terminated_as_interrupted():
        if arguments.save_model:
            asyncio.run(save_model(config, say=teller.say))
            return 0
        summary = asyncio.run(run_job(config, say=teller.say))
    if arguments.json:
        teller.write({"event": "summary", **summary})
    else:
        teller.say(f"done; results in {config.loop.out.resolve()}")
    return 0


def make_config(arguments: argparse.Namespace) -> RunConfig:
    """Return the job file's configuration with the options that were given over it.

    Raises:
        ConfigError: The file or an option is wrong; names which.
    """
    from rose.reference.loop_config import load_run  # noqa: PLC0415 - loads aiohttp

    config = load_run(arguments.job)
    names = {"env": "--env", "algorithm": "--algorithm", "steps": "--steps", "pool": "--pool", "out": "--out"}
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    try:
        loop = attrs.evolve(config.loop, **given)
    except ValueError as error:
        text = str(error.args[0])
        field, _, rest = text.partition(" ")
        message = f"{names[field]} {rest}" if field in given else text
        raise ConfigError(message) from error
    return attrs.evolve(config, loop=loop)


class _Teller:
    """Writes what happens: lines for people on the standard error, or JSON lines on the standard output."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._start_s = time.monotonic()

    def say(self, text: str) -> None:
        """Write one line."""
        at_s = time.monotonic() - self._start_s
        if self._is_json:
            self.write({"event": "progress", "at_s": round(at_s, 3), "text": text})
            return
        sys.stderr.write(f"rose run [{at_s:7.1f} s] {text}\n")
        sys.stderr.flush()

    def write(self, value: dict[str, Any]) -> None:
        """Write one JSON line."""
        sys.stdout.write(json.dumps(value, default=str) + "\n")
        sys.stdout.flush()

"""``rose serve``: the co-serving executor of one device, as a process."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose import config as configuration
from rose.cli.parsers import add_parser
from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.hosts.http.executor import Executor
    from rose.hosts.http.executor_config import ExecutorConfig

_DESCRIPTION = """\
Share one device between a serving engine and the rollouts of another model, within serving's SLO.

Starts the serving engine or finds it, keeps a rollout engine running beside it, and offers that engine to a rollout pool over HTTP, under the
leases that a lender writes into the device's ledger. Serving's traffic does not pass here. The serving engine survives this process; SIGTERM
ends the rollouts with the tokens they have, and this process, and leaves the serving engine alone.
"""

_EXAMPLES = """\
examples:
  rose serve gpu0.toml --check
  rose serve gpu0.toml
  rose serve gpu0.toml --stop-serving

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``serve`` to the command line."""
    parser = add_parser(
        commands,
        "serve",
        summary="the co-serving executor of one device",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument("config", metavar="CONFIG", help="TOML file")
    parser.add_argument("--check", action="store_true", help="check the configuration, start nothing")
    parser.add_argument("--json", action="store_true", help="what happens as JSON lines on the standard output")
    parser.add_argument(
        "--stop-serving", action="store_true", help="end the serving engine that an executor of this CONFIG started"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit code."""
    from rose.hosts.http.executor_config import (  # noqa: PLC0415 - needs aiohttp
        ExecutorConfig,
        load_config,
        place_problems,
    )

    path = Path(arguments.config)
    report = _Report(is_json=arguments.json)
    if arguments.stop_serving and not arguments.check:
        from rose.hosts.http.executor_serving import stop  # noqa: PLC0415 - needs aiohttp

        run_dir = configuration.load(ExecutorConfig, path).run_dir
        report.say("the serving engine was ended" if stop(run_dir) else "there is no serving engine to end")
        return 0
    config = load_config(path)
    if problems := place_problems(config):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    if arguments.check:
        report.check(config)
    else:
        asyncio.run(_serve(config, report))
    return 0


async def _serve(config: ExecutorConfig, report: _Report) -> None:
    from rose.hosts.http import executor  # noqa: PLC0415 - needs aiohttp

    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    await executor.run(config, stopped, say=report.say, tell=report.tell)
    report.say("ended")


class _Report:
    """Writes what happens: lines for people on the standard error, or JSON lines on the standard output."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._start_s = time.monotonic()

    def say(self, text: str) -> None:
        """Write one line."""
        at_s = time.monotonic() - self._start_s
        if self._is_json:
            self._write({"event": "progress", "at_s": round(at_s, 3), "text": text})
        else:
            sys.stderr.write(f"rose serve [{at_s:7.1f} s] {text}\n")
            sys.stderr.flush()

    def tell(self, executor: Executor) -> None:
        """Write that all is up, and where."""
        if self._is_json:
            self._write({"event": "ready", "url": executor.url, "engine_id": executor.engine_id})
        else:
            self.say(f"ready: rollout engine {executor.engine_id} at {executor.url}")

    def check(self, config: ExecutorConfig) -> None:
        """Write what a configuration means."""
        from rose.hosts.http.executor_config import (  # noqa: PLC0415 - needs aiohttp
            rollout_settings,
            serving_command,
            serving_settings,
        )

        facts = {
            "serving_command": list(serving_command(config)),
            "serving_settings": serving_settings(config),
            "rollout_settings": rollout_settings(config),
        }
        if self._is_json:
            self._write({"event": "checked", **facts})
            return
        command = " ".join(facts["serving_command"]) or "none: it runs already"
        sys.stdout.write(f"the configuration is in order\nserving command: {command}\n")
        for name in ("serving_settings", "rollout_settings"):
            sys.stdout.write(
                f'additional_config["rose"] of the {name.partition("_")[0]} engine: {json.dumps(facts[name])}\n'
            )

    def _write(self, value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

"""``rose pool``: the pool of a job file as a service."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.cli.parsers import add_parser, installing

if TYPE_CHECKING:
    from rose.hosts.http.tokenizers import Tokenizer
    from rose.hosts.job import JobConfig, OpenJob

_DESCRIPTION = """\
Run the pool of a job file for trainers in other processes: starts the dedicated engines, borrows devices from the lender, never more than
resources.n_serving at a time, and serves turns at service.listen.

Prints one JSON line with its address once it is up, and on the standard error a line for each engine that is lost or fenced (its weights are not
known after an update that failed), and when it takes turns again. SIGTERM or Ctrl-C ends the turns, gives every device back, ends the engines
that were started, and prints a last line with the most leases that were held at a time.
"""

_EXAMPLES = """\
examples:
  rose pool job.toml --check
  rose pool job.toml
  rose run job.toml --pool http://127.0.0.1:7100

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``pool`` to the command line."""
    parser = add_parser(
        commands,
        "pool",
        summary="the pool of a job file as a service",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument("job", type=Path, metavar="JOB", help="TOML file")
    parser.add_argument("--check", action="store_true", help="say what is wrong with JOB, start nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit code."""
    with installing("http", what="rose pool"):
        from rose.hosts.job import JobConfig, load_job  # noqa: PLC0415 - loads aiohttp
    config = load_job(JobConfig, arguments.job)
    tokenizer = _tokenizer(config)
    if arguments.check:
        _check(arguments.job, config)
        return 0
    asyncio.run(_serve(config, tokenizer))
    return 0


def _tokenizer(config: JobConfig) -> Tokenizer | None:
    """Read the tokenizer of the text routes, if there is to be one.

    Raises:
        ConfigError, BackendUnavailableError: It cannot be read.
    """
    from rose.hosts.http.tokenizers import FolderTokenizer  # noqa: PLC0415 - its package loads aiohttp

    folder = config.service.tokenizer
    return None if folder is None else FolderTokenizer(folder)


def _check(path: Path, config: JobConfig) -> None:
    resources = config.resources
    num_own = sum(engine.count for engine in config.engines.values())
    print(  # noqa: T201 - this is the command line
        f"{path}: job {config.job.name}: {num_own} dedicated engines on {resources.rollout} of {resources.n_rl} devices, "
        f"at most {resources.n_serving} of {len(config.executors)} executors, at {config.service.listen}"
    )


async def _serve(config: JobConfig, tokenizer: Tokenizer | None) -> None:
    """Serve until a signal comes, also while engines still start."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    serving = asyncio.create_task(_serve_until(config, tokenizer, stopped))
    waiting = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done() and not serving.cancelled():
            serving.cancel()
        await asyncio.wait((serving,))
    finally:
        waiting.cancel()
    if not serving.cancelled():
        serving.result()


async def _serve_until(config: JobConfig, tokenizer: Tokenizer | None, stopped: asyncio.Event) -> None:
    from rose.hosts.http.pool_service import PoolService, serve_pool  # noqa: PLC0415 - loads aiohttp
    from rose.hosts.job import offer_store, open_job  # noqa: PLC0415 - loads aiohttp
    from rose.hosts.job.losses import Losses  # noqa: PLC0415 - loads the pool

    held: OpenJob | None = None
    try:
        async with open_job(config, on_event=Losses(_teller())) as job:
            held = job
            name = config.model.name or config.job.name
            with offer_store(config) as store:
                service = PoolService(
                    job.pool, name=name, tokens=config.service.tokens, tokenizer=tokenizer, store=store
                )
                async with serve_pool(service, config.service.listen) as url:
                    num_engines = len(job.pool.snapshot().engines)
                    _print({"url": url, "pid": os.getpid(), "num_engines": num_engines})
                    await stopped.wait()
    finally:
        if held is not None:
            lender = held.lender
            _print({"ended": True, "most_leases": 0 if lender is None else lender.most_held})


def _teller() -> Callable[[str], None]:
    """Return what writes a line for people, with the time since now."""
    start_s = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"rose pool [{time.monotonic() - start_s:7.1f} s] {text}\n")
        sys.stderr.flush()

    return say


def _print(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()

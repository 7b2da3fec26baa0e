"""What ``rose check`` does once its options are read."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.text import Text

from rose.cli.check_target import CheckConfig, config_of_url, fitted, opened, weights_of
from rose.cli.stores import filled_path
from rose.config import load
from rose.errors import ConfigError
from rose.testing.conformance import Finding, Verdict, check_names, examine

_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.CANNOT: "yellow"}
_URLS = ("http://", "https://")
_EXIT_FAILED = 2
_NAME_WIDTH = max(map(len, check_names()))


def run_check(arguments: argparse.Namespace) -> int:
    """Check; returns the exit code."""
    if arguments.list:
        print("\n".join(check_names()))  # noqa: T201 - this is the command line
        return 0
    if arguments.target is None:
        message = "the following arguments are required: URL|CONFIG; see rose check --help"
        raise ConfigError(message)
    findings = asyncio.run(_examine(arguments))
    counts = Counter(finding.verdict for finding in findings)
    if arguments.json:
        print(json.dumps(_document(arguments.target, findings, counts)))  # noqa: T201 - this is the command line
    else:
        print(", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict))  # noqa: T201 - this is the command line
    return _EXIT_FAILED if counts[Verdict.FAIL] or not counts[Verdict.PASS] else 0


async def _examine(arguments: argparse.Namespace) -> list[Finding]:
    config = await _config(arguments)
    findings: list[Finding] = []
    console = Console(highlight=False, quiet=arguments.json, soft_wrap=True)
    async with weights_of(config.weights) as updater, opened(config.engine) as opener:
        async for finding in examine(opener, config.suite, updater=updater, only=arguments.only):
            findings.append(finding)
            console.print(_row(finding))
    return findings


def _row(finding: Finding) -> Text:
    """Return a finding's row of the table, which is printed while the checks are made."""
    row = Text(f"{finding.check:{_NAME_WIDTH}}  ").append(f"{finding.verdict.value:6}", _STYLES[finding.verdict])
    if finding.why:
        row.append(f"  {finding.why}")
    if finding.verdict is Verdict.FAIL:
        row.append(f"\n{'':{_NAME_WIDTH}}          {finding.advice}", "dim")
    return row


async def _config(arguments: argparse.Namespace) -> CheckConfig:
    """Read the configuration, or ask the server, and put the options over it."""
    token_file = None if arguments.token_file is None else filled_path(arguments.token_file, option="--token-file")
    leases = _leases(arguments.lease)
    if arguments.target.startswith(_URLS):
        config = await config_of_url(
            arguments.target,
            model=arguments.model,
            vocab_size=arguments.vocab_size,
            token_file=token_file,
            fencing_tokens=leases,
        )
    elif "://" in arguments.target:
        message = f"{arguments.target!r} is no URL of an engine; those begin with {' or '.join(_URLS)}"
        raise ConfigError(message)
    else:
        config = load(CheckConfig, filled_path(arguments.target, option="URL|CONFIG"))
        entry = config.engine
        if token_file is not None:
            entry = attrs.evolve(entry, token_file=token_file)
        if leases:
            entry = attrs.evolve(entry, fencing_tokens=leases)
        config = attrs.evolve(config, engine=entry)
    given = {name: getattr(arguments, name) for name in ("vocab_size", "max_model_len", "long_tokens", "timeout_s")}
    known = {name: value for name, value in given.items() if value is not None}
    if arguments.inexact:
        known |= {"is_batch_invariant": False, "is_continuable": False}
    try:
        suite = attrs.evolve(config.suite, **known)
    except ValueError as error:
        message = f"--{str(error).replace('_', '-')}"
        raise ConfigError(message) from error
    return attrs.evolve(config, suite=fitted(suite), weights=arguments.weights or config.weights)


def _leases(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        message = f"--lease {text!r} is no fencing token; give numbers with commas between them, one a device"
        raise ConfigError(message) from error


def _document(target: str, findings: Sequence[Finding], counts: Counter[Verdict]) -> dict[str, Any]:
    rows = [attrs.asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
    return {"target": target, **{verdict.value: counts[verdict] for verdict in Verdict}, "checks": rows}

"""``rose ledger``: what the ledger of a shared device says, for people."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console

from rose.cli.parsers import add_parser
from rose.coserving.ledger import Ledger

_EXAMPLES = """\
examples:
  rose ledger show /dev/shm/rose/gpu0.ledger
  rose ledger show /dev/shm/rose/gpu0.ledger --json | jq .budget.is_granted

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``ledger`` to the command line."""
    ledger = commands.add_parser(
        "ledger",
        help="read the ledger of a shared device",
        description="Read the ledger of a shared device. Reading disturbs nobody and needs no running service.",
        allow_abbrev=False,
    )
    kinds = ledger.add_subparsers(metavar="WHAT", title="what", dest="what", required=True)
    show = add_parser(
        kinds,
        "show",
        summary="print all sections",
        description="Print what serving, the rollout engine and the lender say of a device.",
        epilog=_EXAMPLES + epilog,
    )
    show.add_argument("path", type=Path, metavar="PATH", help="the ledger file")
    show.add_argument(
        "--json", action="store_true", help="print one JSON object; times are seconds of the device's clock"
    )
    show.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run ``rose ledger show``."""
    ledger = Ledger.attach(arguments.path)
    if arguments.json:
        print(json.dumps(_finite(ledger.as_dict()), indent=2))  # noqa: T201 - this is the command line
    else:
        Console(highlight=False, soft_wrap=True, markup=False).print(ledger.describe())
    return 0


def _finite(value: Any) -> Any:
    """Return the value with what JSON has no number for as ``None``."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

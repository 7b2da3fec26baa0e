"""``rose lineage``: from a token to the checksums of the weights that made it."""

from __future__ import annotations

import argparse
from typing import Any

from rose.cli.parsers import add_parser
from rose.cli.stores import TOKEN_VARIABLE

_DESCRIPTION = """\
Say which weights made a token: its version, the manifest of that version, the versions it builds on, and the checksum of every tensor
as the trainer published it and the engines verified it. Exit code 2 if a version was deleted by retention.
"""

_EXAMPLES = """\
examples:
  ROSE_UPSTREAM_TOKEN=... rose lineage grpo:12 --transport memory:10.0.0.5:7000
  rose lineage turns.jsonl --trajectory g3-t7 --turn 2 --token 40 --transport mooncake:10.0.0.5:50051

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``lineage`` to the command line."""
    parser = add_parser(
        commands,
        "lineage",
        summary="from a token to the checksums of the weights that made it",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument("what", metavar="RUN:N|FILE", help="a version, or a file of turns (rose.observe.turns.TurnLog)")
    parser.add_argument(
        "--transport",
        required=True,
        metavar="WHERE",
        help=f"memory:HOST:PORT[:TOKEN-FILE] (the token is in the file, or in {TOKEN_VARIABLE}) or mooncake:HOST:PORT",
    )
    parser.add_argument("--trajectory", metavar="ID", help="only the turns of this trajectory")
    parser.add_argument("--turn", type=int, metavar="N", help="only this turn of each, counted from 0")
    parser.add_argument("--token", type=int, metavar="I", help="only this token of the turn, counted from 0")
    parser.add_argument("--tensor", nargs="+", metavar="NAME", help="only these tensors")
    parser.add_argument("--pointer", default="current", help="pointer of the publisher (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Look the versions up; returns the exit code."""
    from rose.cli.lineage_run import run_lineage  # noqa: PLC0415 - loads numpy

    return run_lineage(arguments)

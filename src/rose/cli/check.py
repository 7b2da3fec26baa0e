"""``rose check``: whether an engine keeps the contract that the pool relies on."""

from __future__ import annotations

import argparse
from typing import Any

from rose.cli.parsers import add_parser

_DESCRIPTION = """\
Check an engine against the contract that the pool relies on: token round trip, log-probs, aborts, pauses, weight versions, budgets,
refusals. Prints pass, fail (with what was seen) or cannot (with why) for each check; exit code 2 if one failed.

The engine should have no other work: its load is counted.
"""

_EXAMPLES = """\
examples:
  rose check http://127.0.0.1:8000                      an OpenAI-compatible server that takes token ids, such as vLLM's
  rose check http://127.0.0.1:30000                     an SGLang server
  rose check http://127.0.0.1:8300 --lease 7            the rollout engine of an executor (rose serve)
  rose check engine.toml --weights memory:10.0.0.5:7000 a backend by name; TOML: [engine] backend = "vllm", options = {model = "..."}

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``check`` to the command line."""
    parser = add_parser(
        commands,
        "check",
        summary="whether an engine keeps the contract that the pool relies on",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument(
        "target", nargs="?", metavar="URL|CONFIG", help="where a server listens, or a TOML file that names a backend"
    )
    parser.add_argument("--only", nargs="+", metavar="CHECK", help="only these checks")
    parser.add_argument("--list", action="store_true", help="print the names of the checks and end")
    parser.add_argument(
        "--weights", metavar="WHERE", help="store of updates: memory:HOST:PORT[:FILE], mooncake:..., or numbers"
    )
    parser.add_argument("--model", metavar="NAME", help="the server's name of the model, where it has several")
    parser.add_argument("--token-file", metavar="FILE", help="where the bearer token of the server is")
    parser.add_argument("--lease", metavar="N[,N]", help="fencing token of the lease on an executor's engine")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="number of the model's token ids")
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="the model's longest prompt and answer, in tokens"
    )
    parser.add_argument("--long-tokens", type=int, metavar="N", help="length of the streams that are interrupted (256)")
    parser.add_argument("--timeout-s", type=float, metavar="S", help="bound of one check (60)")
    parser.add_argument(
        "--inexact",
        action="store_true",
        help="greedy tokens may change with the batch and with where the prompt ends, as those of 16-bit models on GPUs do",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check; returns the exit code."""
    from rose.cli.check_run import run_check  # noqa: PLC0415 - loads numpy and the contract

    return run_check(arguments)

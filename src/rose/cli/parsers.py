"""What the commands of ``rose`` have in common: their parsers, and the error for a library that is not installed."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

from rose.errors import BackendUnavailableError


def add_parser(commands: Any, name: str, *, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: Where it is added, as ``add_subparsers`` returns it.
        name: The command's.
        summary: One line for the list of commands.
        description: What ``--help`` begins with; shown as it is.
        epilog: What it ends with; shown as it is.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def add_output(parser: argparse.ArgumentParser, *, files: str) -> None:
    """Add the options of a measurement's results; ``files`` says what goes into the folder."""
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="DIR", help=f"folder for {files}")
    output.add_argument("--json", action="store_true", help="print one JSON object, nothing else, on standard output")


@contextlib.contextmanager
def installing(extra: str, *, what: str) -> Iterator[None]:
    """Say which extra to install when a library that the imports inside need is missing; ``what`` needs it.

    Raises:
        BackendUnavailableError: One is.
    """
    try:
        yield
    except ImportError as error:
        if isinstance(error, BackendUnavailableError) or (error.name or "rose").partition(".")[0] == "rose":
            raise
        message = f"{what} needs {error.name}, which cannot be imported ({error}); install it with: pip install 'rose-rl[{extra}]'"
        raise BackendUnavailableError(message) from error

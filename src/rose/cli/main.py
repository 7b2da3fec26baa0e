"""Entry point of the ``rose`` command.

Exit codes: 0 the command did its work, 1 a bug (with a traceback), 2 something that the user can put right (one line a
problem on the standard error, no traceback), 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import NoReturn

try:
    from rose.cli import (
        bench,
        check,
        demo,
        doctor,
        export,
        ledger,
        lend,
        lineage,
        pool,
        relay,
        run,
        serve,
        shadow,
        simulate,
    )
    from rose.errors import ConfigError, RoseError
except KeyboardInterrupt:  # Ctrl-C while modules load
    sys.stderr.write("rose: interrupted\n")
    sys.exit(130)

EXIT_OK, EXIT_BUG, EXIT_USER_ERROR, EXIT_INTERRUPTED = 0, 1, 2, 130

_EPILOG = """\
exit codes:
  0    done
  1    a bug in rose; the traceback says where
  2    something you can put right; each line says what, where and what to do
  130  interrupted
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are raised like every other bad input."""

    def error(self, message: str) -> NoReturn:
        """Raise the complaint.

        Raises:
            ConfigError: Always.
        """
        text = f"{message}; see {self.prog} --help"
        raise ConfigError(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``run`` of the result is the command to call."""
    parser = _Parser(
        prog="rose",
        description="Rollouts of agentic RL on serving GPUs that are idle for the moment.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rose {version('rose-rl')}")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", dest="command")
    demo.add_command(commands, epilog=_EPILOG)
    pool.add_command(commands, epilog=_EPILOG)
    run.add_command(commands, epilog=_EPILOG)
    simulate.add_command(commands, epilog=_EPILOG)
    shadow.add_command(commands, epilog=_EPILOG)
    bench.add_command(commands, epilog=_EPILOG)
    relay.add_command(commands, epilog=_EPILOG)
    lend.add_command(commands, epilog=_EPILOG)
    serve.add_command(commands, epilog=_EPILOG)
    export.add_command(commands, epilog=_EPILOG)
    ledger.add_command(commands, epilog=_EPILOG)
    lineage.add_command(commands, epilog=_EPILOG)
    check.add_command(commands, epilog=_EPILOG)
    doctor.add_command(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: Arguments without the program's name; the process's own when left out.
    """
    try:
        arguments, unknown = build_parser().parse_known_args(argv)
        page = " ".join(filter(None, ("rose", arguments.command, "--help")))
        if unknown:
            message = f"unknown option {' '.join(unknown)}; see {page}"
            raise ConfigError(message)
        if arguments.command is None:
            message = f"the following arguments are required: COMMAND; see {page}"
            raise ConfigError(message)
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except RoseError as error:
        return _complain([error])
    except BaseExceptionGroup as group:
        expected, rest = group.split(RoseError)
        if expected is None or rest is not None:
            raise
        return _complain(_leaves(expected))
    except KeyboardInterrupt:
        print("rose: interrupted", file=sys.stderr)  # noqa: T201 - this is the command line
        return EXIT_INTERRUPTED


def _complain(errors: Sequence[BaseException]) -> int:
    problems = dict.fromkeys(problem for error in errors for problem in str(error).splitlines() if problem.strip())
    for problem in problems:
        print(f"rose: error: {problem}", file=sys.stderr)  # noqa: T201 - this is the command line
    return EXIT_USER_ERROR


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return list(_walk(group))


def _walk(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _walk(inner)
    else:
        yield error


if __name__ == "__main__":
    sys.exit(main())

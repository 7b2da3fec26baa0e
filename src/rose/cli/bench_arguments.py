"""What the commands of ``rose bench`` share: argument types, the folder for results, showing and writing them."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from rose.cli.signals import terminated_as_interrupted
from rose.cli.stores import filled, filled_path
from rose.errors import ConfigError, RoseError

_NONE, _ALL = "none", "all"


def measure_and_show(
    measure: Callable[[], dict[str, Any]],
    arguments: argparse.Namespace,
    *,
    name: str,
    tables: Callable[[Mapping[str, Any]], RenderableType],
    drawings: str,
) -> int:
    """Measure, write what ``--out`` asks for, print; returns the exit code.

    Args:
        measure: Takes the measurement; a failed part is in ``failed`` of its result.
        arguments: ``out`` and ``json`` count.
        name: Of the file.
        tables: What is printed without ``--json``.
        drawings: The module with ``draw_plots(folder, result)``.

    Raises:
        ConfigError: ``--out`` cannot be used.
        RoseError: A part failed; the others were printed and written.
    """
    out = _out_folder(arguments.out)
    with terminated_as_interrupted():
        result = measure()
    if out is not None:
        _write(out / f"{name}.json", result)
        _draw(out, result, drawings)
    if arguments.json:
        print(json.dumps(result, allow_nan=False), flush=True)  # noqa: T201 - this is the command line
    else:
        Console(highlight=False).print(tables(result))
    if result["failed"]:
        raise RoseError("\n".join(f"{part}: {reason}" for part, reason in result["failed"].items()))
    return 0


def _out_folder(text: str | None) -> Path | None:
    if text is None:
        return None
    path = filled_path(text, option="--out")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--out: cannot make folder {path}: {error.strerror}; choose another"
        raise ConfigError(message) from error
    return path


def _write(path: Path, result: Mapping[str, Any]) -> None:
    try:
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        raise ConfigError(message) from error


def _draw(out: Path, result: Mapping[str, Any], drawings: str) -> None:
    try:
        module = importlib.import_module(drawings)  # needs matplotlib, which is an extra
    except ImportError as error:
        tell(f"no figures: matplotlib is missing ({error}); install it with: pip install 'rose-rl[demo]'")
        return
    module.draw_plots(out, result)


def tell(text: str) -> None:
    """Say something on the standard error."""
    print(f"rose bench: {text}", file=sys.stderr, flush=True)  # noqa: T201 - this is the command line


def listed(text: str, *, option: str) -> tuple[str, ...]:
    """Return the parts of ``a,b,c``, each once.

    Raises:
        ConfigError: One is empty.
    """
    return tuple(dict.fromkeys(filled(part.strip(), option=option) for part in text.split(",")))


def names(text: str | None, known: Sequence[str], *, option: str, default: Sequence[str]) -> tuple[str, ...]:
    """Return a choice of names in the order of ``known``; ``all`` and ``none`` are understood.

    Raises:
        ConfigError: A name is not known.
    """
    if text is None:
        return tuple(default)
    asked = listed(text, option=option)
    if asked in {(_ALL,), (_NONE,)}:
        return tuple(known) if asked == (_ALL,) else ()
    for name in asked:
        if name not in known:
            message = f"{option}: there is no {name!r}; choose of {', '.join(known)}, or all or none"
            raise ConfigError(message)
    return tuple(name for name in known if name in asked)


def share(text: str) -> float:
    """Read a share above 0 and at most 1."""
    number = _number(text)
    if number is None or not 0 < number <= 1:
        message = f"{text!r} is not a share above 0 and at most 1"
        raise argparse.ArgumentTypeError(message)
    return number


def positive(text: str) -> float:
    """Read a number above 0."""
    number = _number(text)
    if number is None or not 0 < number < float("inf"):
        message = f"{text!r} is not a number above 0"
        raise argparse.ArgumentTypeError(message)
    return number


def count(text: str) -> int:
    """Read a whole number of at least 1."""
    return _whole(text, at_least=1)


def seed(text: str) -> int:
    """Read a whole number of at least 0."""
    return _whole(text, at_least=0)


def _whole(text: str, *, at_least: int) -> int:
    number = _number(text)
    if number is None or number != int(number) or number < at_least:
        message = f"{text!r} is not a whole number >= {at_least}"
        raise argparse.ArgumentTypeError(message)
    return int(number)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if number - number == 0 else None  # neither NaN nor infinite

"""The text that an engine's ``/metrics`` answers, and recordings of it: a file of several, or a folder with one a file.

Invariants: only names that are asked for are kept; scrapes of a recording are sorted by time and no two have the same.

A scrape in a recording says when it was taken, by the first of these that is there: a line ``# scraped_at_s SECONDS`` (which
also begins a new scrape, so that one file can hold many), the time stamps of its samples, its file's name (``SECONDS.prom``).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import attrs

from rose.errors import ConfigError
from rose.simulation.text_files import read_lines

_MARK = "# scraped_at_s"
_LINE = re.compile(
    r"(?P<name>[A-Za-z_:][\w:]*)"
    r'(?:\{(?P<labels>(?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?'
    r"\s+(?P<value>[-+\w.]+)(?:\s+(?P<at>-?\d[\d.]*))?\s*(?:#.*)?$"
)
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"\s*,?')
_NAME_END = re.compile(r"[{\s]")
_ENDS = (".prom", ".txt", ".prom.gz", ".txt.gz")
_EXPECTED = "the text of an engine's /metrics"
_MS_FROM = 1e11  # larger time stamps are milliseconds


class Sample(NamedTuple):
    """One line: ``labels`` are pairs, sorted."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


@attrs.frozen
class Scrape:
    """One answer: when it was taken (seconds of any one clock) and its samples of the names that were asked for."""

    at_s: float
    samples: tuple[Sample, ...]


def looks_like_scrapes(first_line: str) -> bool:
    """Return whether a file that begins so holds metrics text rather than a request trace."""
    return first_line.startswith(("# HELP", "# TYPE", _MARK)) or _LINE.match(first_line.strip()) is not None


def mark(at_s: float) -> str:
    """Return the line that says when a scrape was taken, to be written before it."""
    return f"{_MARK} {at_s:.3f}\n"


def parse_scrape(text: str, at_s: float, is_wanted: Callable[[str], bool]) -> Scrape:
    """Return one answer's samples.

    Raises:
        ValueError: A wanted line is no sample; names it.
    """
    scrapes = list(_parse(text.splitlines(), is_wanted))
    return Scrape(at_s, tuple(sample for _, samples in scrapes for sample in samples))


def read_recording(path: Path, is_wanted: Callable[[str], bool]) -> list[Scrape]:
    """Read a recording.

    Raises:
        ConfigError: It cannot be read, is not metrics text, or does not say when its scrapes were taken; one line that says
            what to do.
    """
    files = sorted(file for file in path.iterdir() if file.name.endswith(_ENDS)) if path.is_dir() else [path]
    if not files:
        message = f"metrics {path}: no file that ends in {', '.join(_ENDS)}; name a folder of scrapes"
        raise ConfigError(message)
    by_time: dict[float, Scrape] = {}
    for file in files:
        for scrape in _read_file(file, is_wanted):
            by_time.setdefault(scrape.at_s, scrape)
    return [by_time[at_s] for at_s in sorted(by_time)]


def _read_file(file: Path, is_wanted: Callable[[str], bool]) -> list[Scrape]:
    with contextlib.closing(read_lines(file, "metrics", expected=_EXPECTED)) as lines:
        try:
            parsed = list(_parse(lines, is_wanted))
        except ValueError as error:
            message = f"metrics {file}: {error}; correct or remove it"
            raise ConfigError(message) from error
    scrapes = []
    for at_s, samples in parsed:
        when_s = _time_in_name(file) if at_s is None else at_s
        if when_s is None:
            message = (
                f"metrics {file}: nothing says when it was scraped; put a line '{_MARK} SECONDS' before each scrape, or name "
                "the file SECONDS.prom"
            )
            raise ConfigError(message)
        scrapes.append(Scrape(when_s, tuple(samples)))
    return scrapes


def _time_in_name(file: Path) -> float | None:
    found = re.match(r"\d+(\.\d+)?(?=\.)", file.name)
    return None if found is None else float(found[0])


def _parse(lines: Iterable[str], is_wanted: Callable[[str], bool]) -> Iterator[tuple[float | None, Sequence[Sample]]]:
    """Yield each scrape's time, as far as the text says it, and samples; at least one scrape."""
    at_s: float | None = None
    samples: list[Sample] = []
    is_begun = False
    for number, line in enumerate(lines, start=1):
        if line.startswith(_MARK):
            if is_begun:
                yield at_s, samples
            at_s, samples, is_begun = _seconds(number, line[len(_MARK) :]), [], True
        elif line.strip() and not line.startswith("#"):
            is_begun = True
            if is_wanted(_NAME_END.split(line, maxsplit=1)[0]):
                sample, stamp_s = _sample(number, line.strip())
                samples.append(sample)
                at_s = stamp_s if at_s is None else at_s
    yield at_s, samples


def _seconds(number: int, text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(at_s := float(text)):
            return at_s
    message = f"line {number}: {text.strip()[:40]!r} is no time in seconds"
    raise ValueError(message)


def _sample(number: int, line: str) -> tuple[Sample, float | None]:
    found, value = _LINE.match(line), None
    if found is not None:
        with contextlib.suppress(ValueError):
            value = float(found["value"])
    if found is None or value is None:
        message = f"line {number} is no sample: {line[:60]!r}"
        raise ValueError(message)
    labels = tuple(sorted(_LABEL.findall(found["labels"] or "")))
    stamp_s = None if found["at"] is None else float(found["at"])
    if stamp_s is not None and stamp_s > _MS_FROM:
        stamp_s /= 1000
    return Sample(found["name"], labels, value), stamp_s


def wanted_lines(text: str, is_wanted: Callable[[str], bool]) -> str:
    """Return the lines of an answer that are of use, to be kept in a recording."""
    lines = (line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    return "".join(line for line in lines if is_wanted(_NAME_END.split(line, maxsplit=1)[0]))

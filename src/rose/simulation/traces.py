"""Readers of public request traces; the format is found from the content, never from the name.

==========  =======================================================================================================
azure       CSV ``TIMESTAMP,ContextTokens,GeneratedTokens`` (LLM inference traces 2023 and 2024, conversation and code)
burstgpt    CSV ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type``, seconds from the start
servegen    CSV ``timestamp_s,input_tokens,output_tokens``, seconds from the start
mooncake    JSON lines ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``
prometheus  JSON of ``/api/v1/query_range``: a request counter or rate, and counters of tokens, see ``prometheus``
==========  =======================================================================================================

Any of them may be compressed with gzip. Requests without a prompt or without an answer (BurstGPT marks failures so) are left
out and counted; rows out of order are sorted and counted.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
from attrs import validators as v

from rose.errors import ConfigError
from rose.simulation.prometheus import looks_like_prometheus, prometheus_rows
from rose.simulation.text_files import read_lines

_KNOWN = (
    "Azure, BurstGPT or ServeGen CSV with its header line, Mooncake JSON lines, or the JSON of a Prometheus range query"
)

Row = tuple[float, int, int]


@attrs.frozen
class Arrival:
    """One request: when it arrives (seconds from the trace's first request) and how long it is."""

    at_s: float = attrs.field(validator=v.ge(0))
    prompt_tokens: int = attrs.field(validator=v.ge(1))
    output_tokens: int = attrs.field(validator=v.ge(1))


@attrs.frozen(kw_only=True)
class Trace:
    """A trace file in order of arrival.

    Attributes:
        arrivals: Sorted; the first is at 0.
        source_format: ``azure``, ``burstgpt``, ``servegen``, ``mooncake`` or ``prometheus``.
        num_skipped: Rows without a prompt or an answer.
        num_reordered: Rows that came earlier than the row before them.
    """

    arrivals: tuple[Arrival, ...]
    source_format: str
    num_skipped: int
    num_reordered: int


@attrs.frozen(kw_only=True)
class _CsvFormat:
    name: str
    time: str
    prompt: str
    output: str
    parse_time: Callable[[str], float]

    def rows(self, lines: Iterable[str], where: _Where) -> Iterator[Row]:
        reader = csv.reader(lines)
        header = [field.strip() for field in next(reader)]
        columns = [header.index(name) for name in (self.time, self.prompt, self.output)]
        for row in reader:
            if not row:
                continue
            where.line = reader.line_num
            if len(row) != len(header):
                message = f"{len(row)} fields where the header has {len(header)}"
                raise ValueError(message)
            at, prompt, output = (row[column] for column in columns)
            yield _time(self.time, at, self.parse_time), _count(self.prompt, prompt), _count(self.output, output)


@attrs.define
class _Where:
    line: int | None = 1

    def describe(self, error: Exception, source_format: str) -> str:
        if self.line is None:
            return f": {error} ({source_format} format)"
        return f", line {self.line}: {error}; correct or remove the row ({source_format} format)"


def _wall_seconds(text: str) -> float:
    """Read ``2023-11-16 18:15:46.6805900``, with or without a zone; without one it is taken as UTC."""
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _time(name: str, value: Any, parse: Callable[[Any], float]) -> float:
    try:
        time_s = parse(value)
    except (TypeError, ValueError):
        time_s = math.nan
    if not math.isfinite(time_s):
        message = f"{name} is {value!r}, which is no time"
        raise ValueError(message)
    return time_s


def _count(name: str, value: object) -> int:
    """Read a whole number of tokens, also where a tool has written it as ``374.0``."""
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or number != int(number):
        message = f"{name} is {value!r}, not a whole number of tokens"
        raise ValueError(message)
    return int(number)


_CSV_FORMATS = (
    _CsvFormat(
        name="azure", time="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens", parse_time=_wall_seconds
    ),
    _CsvFormat(name="burstgpt", time="Timestamp", prompt="Request tokens", output="Response tokens", parse_time=float),
    _CsvFormat(name="servegen", time="timestamp_s", prompt="input_tokens", output="output_tokens", parse_time=float),
)


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        message = f"not JSON ({error.msg}, column {error.colno})"
        raise ValueError(message) from error


def _mooncake_rows(lines: Iterable[str], where: _Where) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        where.line = number
        if not line.strip():
            continue
        row = _json(line)
        if not isinstance(row, Mapping):
            message = "not a JSON object"
            raise ValueError(message)  # noqa: TRY004 - a malformed row is a value problem of the file
        missing = [name for name in ("timestamp", "input_length", "output_length") if name not in row]
        if missing:
            message = f"no {', '.join(missing)}"
            raise ValueError(message)
        at_ms = _time(
            "timestamp", row["timestamp"], lambda value: float(value) if isinstance(value, (int, float)) else math.nan
        )
        counts = (_count(name, row[name]) for name in ("input_length", "output_length"))
        yield (at_ms / 1000, *counts)  # type: ignore[misc]


def _prometheus_rows(lines: Iterable[str], where: _Where) -> Iterator[Row]:
    where.line = None
    yield from prometheus_rows("".join(lines))


def read_trace(path: str | Path) -> Trace:
    """Read a trace file of any of the known formats.

    Raises:
        ConfigError: The file cannot be read, is empty or damaged, is of no known format, or has a malformed row; one line
            that names the file, the line and what to do.
    """
    path = Path(path)
    with contextlib.closing(read_lines(path, "trace", expected=_KNOWN)) as lines:
        head = [next(lines, "")]
        if head[0].strip() == "{":
            head.append(next(lines, ""))
        source_format, parse = _find_format(path, head)
        where = _Where()
        try:
            rows = list(parse(itertools.chain(head, lines), where))
        except ConfigError:
            raise
        except (ValueError, OverflowError, csv.Error) as error:
            message = f"trace {path}{where.describe(error, source_format)}"
            raise ConfigError(message) from error
    return _to_trace(path, source_format, rows)


def _find_format(path: Path, head: Sequence[str]) -> tuple[str, Callable[[Iterable[str], _Where], Iterator[Row]]]:
    first = head[0]
    if looks_like_prometheus("".join(head)):
        return "prometheus", _prometheus_rows
    if first.lstrip().startswith("{"):
        return "mooncake", _mooncake_rows
    header = {field.strip() for field in first.split(",")}
    for candidate in _CSV_FORMATS:
        if {candidate.time, candidate.prompt, candidate.output} <= header:
            return candidate.name, candidate.rows
    what = f"unknown format, its first line is {first.strip()[:80]!r}" if first.strip() else "the file is empty"
    message = f"trace {path}: {what}; expected {_KNOWN}"
    raise ConfigError(message)


def _to_trace(path: Path, source_format: str, rows: list[Row]) -> Trace:
    used = [row for row in rows if row[1] > 0 and row[2] > 0]
    if not used:
        message = (
            f"trace {path}: no request with a prompt and an answer among its {len(rows)} rows; choose another file"
        )
        raise ConfigError(message)
    num_reordered = sum(after[0] < before[0] for before, after in itertools.pairwise(used))
    used.sort(key=lambda row: row[0])
    start_s = used[0][0]
    return Trace(
        arrivals=tuple(Arrival(at_s - start_s, prompt, output) for at_s, prompt, output in used),
        source_format=source_format,
        num_skipped=len(rows) - len(used),
        num_reordered=num_reordered,
    )

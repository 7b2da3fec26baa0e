"""The tables beside ``run.json``, one file a run: its device turns, and the turns of its trajectories.

``steps-<arm>-<repeat>.<attempt>.csv.gz``: a row a device turn, an engine after the other (``STEP_COLUMNS``; after the engine the
values of ``StepRecord`` in order). ``turns-<...>.csv.gz``: a row a finished turn (``TURN_COLUMNS``); ``hops`` is
``engine:tokens:end`` of each attempt, with blanks between. Times are seconds from the start of the run.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from rose.errors import ConfigError
from rose.simulation.run_record import HOW_MADE, MeasuredRun

STEP_COLUMNS = (
    "engine_id",
    "start_s",
    "duration_s",
    "late_s",
    "slip_s",
    "waited_s",
    "num_prefill_tokens",
    "num_decodes",
)
TURN_COLUMNS = ("trajectory_id", "turn", "asked_s", "ended_s", "num_prompt_tokens", "num_tokens", "hops")


@attrs.frozen(kw_only=True)
class TurnRow:
    """One finished turn. ``engine_id`` is where all of it ran, ``None`` where it was moved."""

    trajectory_id: str
    turn: int
    asked_s: float
    ended_s: float
    num_prompt_tokens: int
    num_tokens: int
    engine_id: str | None


def write_steps(folder: Path, run: MeasuredRun, logs: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Write the device turns of a run, by engine."""
    rows = ([engine_id, *(f"{v:.9g}" for v in row)] for engine_id, log in sorted(logs.items()) for row in log)
    _write(_steps_file(folder, run), STEP_COLUMNS, rows)


def write_turns(folder: Path, run: MeasuredRun, rows: Iterable[Sequence[object]]) -> None:
    """Write the trajectories' turns of a run."""
    _write(_turns_file(folder, run), TURN_COLUMNS, rows)


def read_steps(folder: Path, run: MeasuredRun) -> dict[str, list[tuple[float, ...]]]:
    """Read the device turns of a run back, by engine.

    Raises:
        ConfigError: The file is missing, damaged or has a malformed row.
    """
    path = _steps_file(folder, run)
    logs: dict[str, list[tuple[float, ...]]] = {}
    for line, (engine_id, *values) in _read(path, STEP_COLUMNS):
        logs.setdefault(engine_id, []).append(_numbers(path, line, values))
    return logs


def read_turns(folder: Path, run: MeasuredRun) -> list[TurnRow]:
    """Read the trajectories' turns of a run back, in the order in which they ended.

    Raises:
        ConfigError: The file is missing, damaged or has a malformed row.
    """
    path = _turns_file(folder, run)
    turns = []
    for line, (trajectory_id, *values, hops) in _read(path, TURN_COLUMNS):
        turn, asked_s, ended_s, num_prompt_tokens, num_tokens = _numbers(path, line, values)
        engine_id, _, rest = hops.partition(":")
        turns.append(
            TurnRow(
                trajectory_id=trajectory_id,
                turn=int(turn),
                asked_s=asked_s,
                ended_s=ended_s,
                num_prompt_tokens=int(num_prompt_tokens),
                num_tokens=int(num_tokens),
                engine_id=None if " " in rest else engine_id,
            )
        )
    return turns


def _steps_file(folder: Path, run: MeasuredRun) -> Path:
    return folder / f"steps-{run.label}.csv.gz"


def _turns_file(folder: Path, run: MeasuredRun) -> Path:
    return folder / f"turns-{run.label}.csv.gz"


def _write(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def _read(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows with their line numbers, each as long as ``columns``."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            if next(rows, []) != list(columns):
                message = f"{path}: the header line is not {','.join(columns)}; {HOW_MADE}"
                raise ConfigError(message)
            for row in rows:
                if len(row) != len(columns):
                    message = f"{path}, line {rows.line_num}: {len(row)} fields where the header has {len(columns)}; {HOW_MADE}"
                    raise ConfigError(message)
                yield rows.line_num, row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        message = f"{path} cannot be read ({error}); {HOW_MADE}"
        raise ConfigError(message) from error


def _numbers(path: Path, line: int, values: Sequence[str]) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except ValueError as error:
        message = f"{path}, line {line}: {error}; {HOW_MADE}"
        raise ConfigError(message) from error

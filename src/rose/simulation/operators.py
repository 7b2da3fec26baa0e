"""Measured operator times, in the CSV format of Vidur's profiles (microsoft/vidur, ``data/profiling/compute``).

One row has the times in milliseconds of the operators of one layer that are not attention (``time_stats.<name>.median``)
for ``num_tokens`` tokens on ``num_tensor_parallel_workers`` GPUs, and the model's shape. A layer is the sum of its
operators, each once, as Vidur adds them up; the input embedding comes once a step. The output embedding and collectives are
not in the table: the former is taken at the GPU's bandwidth, the latter stay the roofline's.

A table of another model than the profile's stands for how fast the GPU multiplies: its layer times are multiplied by
the ratio of the two models' parameters a layer, which is 1 for the same model.
"""

from __future__ import annotations

import contextlib
import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import attrs

from rose.backends.paced.linear_table import LinearTable
from rose.backends.paced.profiles import Profile
from rose.backends.paced.shapes import DecoderShape
from rose.errors import ConfigError
from rose.simulation.text_files import read_lines

_LAYER_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
_EMBEDDING = "emb"
_SHAPE_COLUMNS = ("n_head", "n_kv_head", "n_embd", "n_expanded_embd", "vocab_size", "use_gated_mlp")
_TOKENS, _GPUS = "num_tokens", "num_tensor_parallel_workers"
_EXPECTED = "a CSV of operator times with Vidur's header line"
_MIN_TOKEN_COUNTS = 2


@attrs.frozen
class _Row:
    line: int
    num_tokens: int
    num_gpus: int
    layer_s: float
    embedding_s: float
    shape: tuple[str, ...]


@attrs.frozen(kw_only=True)
class OperatorTable:
    """Measured times of one model on one kind of GPU, ``num_gpus`` of them.

    Attributes:
        path: Where it was read from.
        num_gpus: Over which the model was cut.
        shape: The measured model's, as one layer.
        layer: Seconds of one layer's operators by number of tokens.
        embedding: Seconds of the input embedding.
    """

    path: str
    num_gpus: int
    shape: DecoderShape
    layer: LinearTable
    embedding: LinearTable

    @classmethod
    def read(cls, path: str | Path, *, num_gpus: int) -> OperatorTable:
        """Read a table.

        Raises:
            ConfigError: The file cannot be read, lacks a column, has a malformed row, or has nothing measured on
                ``num_gpus`` GPUs; one line that names the row and the column.
        """
        path = Path(path)
        with contextlib.closing(read_lines(path, "operators", expected=_EXPECTED)) as lines:
            rows = list(_rows(path, lines))
        measured = [row for row in rows if row.num_gpus == num_gpus]
        if len({row.num_tokens for row in measured}) < _MIN_TOKEN_COUNTS:
            others = ", ".join(str(number) for number in sorted({row.num_gpus for row in rows})) or "none"
            message = (
                f"operators {path}: fewer than {_MIN_TOKEN_COUNTS} token counts measured on {num_gpus} GPUs "
                f"({_GPUS} in the file: {others}); choose another file or profile"
            )
            raise ConfigError(message)
        return cls(
            path=str(path),
            num_gpus=num_gpus,
            shape=_shape(path, measured),
            layer=_curve(str(path), [(row.num_tokens, row.layer_s) for row in measured]),
            embedding=_curve(str(path), [(row.num_tokens, row.embedding_s) for row in measured]),
        )

    def linear_s(self, num_tokens: int, *, num_layers: int) -> float:
        """Return the seconds of the measured model's matrix products with ``num_layers`` layers."""
        return num_layers * self.layer.at(num_tokens) + self.embedding.at(num_tokens)

    def linear_table(self, profile: Profile) -> LinearTable:
        """Return the linear part of the profile's model, from these measurements.

        Raises:
            ConfigError: The profile has another number of GPUs.
        """
        if profile.num_gpus != self.num_gpus:
            message = (
                f"operators {self.path}: read for {self.num_gpus} GPUs, but {profile.name} has {profile.num_gpus}; read it "
                "for as many"
            )
            raise ConfigError(message)
        scale = profile.num_params / self.shape.layer_params  # = layers x ratio of the parameters of a layer
        head_bytes = profile.weight_bytes - 2 * profile.num_params
        head_s = max(0.0, head_bytes) / profile.gpu.bandwidth_bytes_per_s / self.num_gpus
        points = [
            (num_tokens, scale * layer_s + embedding_s + head_s)
            for num_tokens, layer_s, embedding_s in zip(
                self.layer.num_tokens, self.layer.seconds, self.embedding.seconds, strict=True
            )
        ]
        return _curve(self.path, points)


def measured_profile(profile: Profile, path: str | Path) -> Profile:
    """Return the profile with its linear part from a table of operator times.

    Raises:
        ConfigError: See ``OperatorTable.read``.
    """
    return profile.with_linear_table(OperatorTable.read(path, num_gpus=profile.num_gpus).linear_table(profile))


def _rows(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    """Read row by row."""
    reader = csv.DictReader(lines)
    try:
        missing = [column for column in _columns() if column not in (reader.fieldnames or ())]
        if missing:
            message = f"operators {path}: no column {missing[0]}; expected {_EXPECTED}"
            raise ConfigError(message)
        for row in reader:
            yield _row(reader.line_num, row)
    except (ValueError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        message = f"operators {path}, line {reader.line_num}: {error}; correct or remove the row"
        raise ConfigError(message) from error


def _columns() -> list[str]:
    times = [_time_column(name) for name in (*_LAYER_OPERATORS, _EMBEDDING)]
    return [*times, *_SHAPE_COLUMNS, _TOKENS, _GPUS]


def _time_column(name: str) -> str:
    return f"time_stats.{name}.median"


def _row(line: int, row: Mapping[str, str | None]) -> _Row:
    return _Row(
        line,
        _whole(row, _TOKENS),
        _whole(row, _GPUS),
        sum(_seconds(row, _time_column(name)) for name in _LAYER_OPERATORS),
        _seconds(row, _time_column(_EMBEDDING)),
        tuple((row[column] or "").strip() for column in _SHAPE_COLUMNS),
    )


def _whole(row: Mapping[str, str | None], column: str) -> int:
    text = row[column] or ""
    if not text.strip().isdecimal() or int(text) < 1:
        message = f"{column} is {text!r}, not a whole number >= 1"
        raise ValueError(message)
    return int(text)


def _seconds(row: Mapping[str, str | None], column: str) -> float:
    text = row[column] or ""
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not (math.isfinite(milliseconds) and milliseconds > 0):
        message = f"{column} is {text!r}, not a time in milliseconds > 0"
        raise ValueError(message)
    return milliseconds / 1e3


def _shape(path: Path, rows: Sequence[_Row]) -> DecoderShape:
    """Return the shape that all rows name, as one layer."""
    first = rows[0]
    other = next((row for row in rows if row.shape != first.shape), None)
    if other is not None:
        column = next(i for i, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)) if a != b)
        message = (
            f"operators {path}, line {other.line}: {_SHAPE_COLUMNS[column]} is {other.shape[column]!r}, but "
            f"{first.shape[column]!r} in line {first.line}; a table is of one model, split the file"
        )
        raise ConfigError(message)
    try:
        named = dict(zip(_SHAPE_COLUMNS, first.shape, strict=True))
        num_heads, num_kv_heads, hidden, intermediate, vocab = (_whole(named, column) for column in _SHAPE_COLUMNS[:-1])
        return DecoderShape(
            num_layers=1,
            hidden_size=hidden,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=hidden // num_heads,
            intermediate_size=intermediate,
            vocab_size=vocab,
            num_mlp_matrices=3 if named["use_gated_mlp"].lower() == "true" else 2,
        )
    except ValueError as error:
        message = f"operators {path}, line {first.line}: {error}; correct or remove the row"
        raise ConfigError(message) from error


def _curve(source: str, points: Iterable[tuple[int, float]]) -> LinearTable:
    """Return the curve that does not fall and is nearest to the points (least squares: falling neighbours are averaged)."""
    by_tokens: defaultdict[int, list[float]] = defaultdict(list)
    for num_tokens, seconds in points:
        by_tokens[num_tokens].append(seconds)
    tokens = sorted(by_tokens)
    pools: list[tuple[float, int]] = []  # sums of neighbours that share a value, and how many they are
    for number in tokens:
        total, count = fmean(by_tokens[number]), 1
        while pools and pools[-1][0] * count > total * pools[-1][1]:
            before, num_before = pools.pop()
            total, count = total + before, count + num_before
        pools.append((total, count))
    curve = [total / count for total, count in pools for _ in range(count)]
    return LinearTable(source=source, num_tokens=tuple(tokens), seconds=tuple(curve))

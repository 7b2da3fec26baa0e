"""What ``rose lineage`` does once its options are read."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from rose.cli.stores import filled, filled_path, open_store
from rose.errors import BlobNotFoundError, ConfigError
from rose.observe.turns import RecordedTurn, read_turns
from rose.transfer.lineage import Lineage, LineageReader
from rose.types import WeightVersion

_EXIT_GONE = 2


def run_lineage(arguments: argparse.Namespace) -> int:
    """Look the versions up; returns the exit code."""
    counts = _wanted(arguments)
    pointer = filled(arguments.pointer, option="--pointer")
    transport = open_store(arguments.transport, os.environ, option="--transport")
    try:
        reader = LineageReader(transport, pointer=pointer)
        found = [_traced(reader, version) for version in sorted(counts, key=lambda each: (each.run, each.n))]
    finally:
        transport.close()
    rows = [_row(*each, counts, arguments.tensor) for each in found]
    if arguments.json:
        print(json.dumps({"versions": rows}))  # noqa: T201 - this is the command line
    else:
        _print_rows(rows, arguments)
    return _EXIT_GONE if any("gone" in row for row in rows) else 0


def _wanted(arguments: argparse.Namespace) -> Counter[WeightVersion]:
    """Return the versions that are asked for, with the number of tokens that each made (0 for one that was named)."""
    given = filled(arguments.what, option="RUN:N|FILE")
    try:
        version = WeightVersion.parse(given)
    except ValueError:
        pass
    else:
        if any(option is not None for option in (arguments.trajectory, arguments.turn, arguments.token)):
            message = f"--trajectory, --turn and --token choose from a file of turns, and {given} is a version"
            raise ConfigError(message)
        return Counter({version: 0})
    turns = _chosen(arguments)
    if arguments.token is not None:
        return Counter({_maker(turns, arguments.token): 1})
    counts: Counter[WeightVersion] = Counter()
    for turn in turns:
        for span in turn.versions:
            counts[span.version] += span.end - span.start
    if not counts:
        message = f"no token of these {len(turns)} turns was made by weights of a published version"
        raise ConfigError(message)
    return counts


def _chosen(arguments: argparse.Namespace) -> list[RecordedTurn]:
    path = filled_path(arguments.what, option="RUN:N|FILE")
    turns = [
        turn
        for turn in read_turns(path)
        if arguments.trajectory in (None, turn.trajectory_id) and arguments.turn in (None, turn.turn)
    ]
    if not turns:
        message = f"{path} has no such turn; look at --trajectory and --turn (counted from 0)"
        raise ConfigError(message)
    return turns


def _maker(turns: Sequence[RecordedTurn], token: int) -> WeightVersion:
    if len(turns) > 1:
        message = f"--token names a token of one turn, and {len(turns)} are chosen; add --trajectory and --turn"
        raise ConfigError(message)
    version = turns[0].version_of(token)
    if version is None:
        message = f"token {token} was made by weights of no published version"
        raise ConfigError(message)
    return version


def _traced(reader: LineageReader, version: WeightVersion) -> tuple[WeightVersion, Lineage | None, str]:
    try:
        return version, reader.trace(version), ""
    except BlobNotFoundError as error:
        return version, None, str(error)


def _row(
    version: WeightVersion,
    lineage: Lineage | None,
    why_not: str,
    counts: Counter[WeightVersion],
    only: Sequence[str] | None,
) -> dict[str, Any]:
    row: dict[str, Any] = {"version": str(version), "tokens": counts[version]}
    if lineage is None:
        return row | {"gone": why_not}
    unknown = sorted(set(only or ()) - set(lineage.checksums))
    if unknown:
        message = f"version {version} has no tensor {', '.join(unknown)}"
        raise ConfigError(message)
    tensors = {
        spec.name: {"dtype": spec.dtype, "shape": list(spec.shape), "sum": lineage.checksums[spec.name]}
        for spec in lineage.tensors
        if only is None or spec.name in only
    }
    return row | {
        "manifest": lineage.manifest_key,
        "chain": [str(each) for each in lineage.chain],
        "sent_bytes": lineage.sent_bytes,
        "changed": lineage.num_changed,
        "tensors": tensors,
    }


def _print_rows(rows: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for row in rows:
        made = f" made {row['tokens']} tokens" if row["tokens"] > 1 else ""
        if arguments.token is not None:
            made = f" made token {arguments.token}"
        if "gone" in row:
            console.print(Text(f"{row['version']}{made}: {row['gone']}", "bold red"))
            continue
        chain = f"{row['chain'][0]} .. {row['chain'][-1]}, {len(row['chain'])} versions" if row["chain"] else "deleted"
        console.print(Text(f"{row['version']}{made}", "bold"))
        console.print(f"  manifest {row['manifest']}; from full weights on: {chain}")
        console.print(f"  {row['changed']:,} elements sent as changed, {row['sent_bytes']:,} bytes")
        for line in _tensor_lines(row["tensors"]):
            console.print(line)


def _tensor_lines(tensors: dict[str, Any]) -> list[str]:
    """Return a table that is never cut: a checksum of which a part is missing is of no use."""
    cells = [("tensor", "dtype", "shape", "sum")]
    for name, tensor in tensors.items():
        cells.append((name, tensor["dtype"], "x".join(map(str, tensor["shape"])) or "scalar", tensor["sum"]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]

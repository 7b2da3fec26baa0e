"""``rose export``: a published version of the weights as a checkpoint on disk."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rose.cli.parsers import add_parser
from rose.cli.stores import TOKEN_VARIABLE, filled, filled_path, open_store, parse_size
from rose.errors import ConfigError
from rose.types import WeightVersion

if TYPE_CHECKING:
    from rose.transfer.export import ExportReport


_DESCRIPTION = """\
Write a published version as a checkpoint (sharded safetensors, checkpoint names), verified against the trainer's own sums. Any
engine or framework that reads such checkpoints loads it.
"""

_EXAMPLES = """\
examples:
  ROSE_UPSTREAM_TOKEN=... rose export --transport memory:10.0.0.5:7000 --out ckpt --config-from Qwen3-8B
  rose export --transport mooncake:10.0.0.5:50051 --version grpo:120 --out ckpt-120 --config-from Qwen3-8B

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``export`` to the command line."""
    parser = add_parser(
        commands,
        "export",
        summary="a published version as a checkpoint",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument(
        "--transport",
        required=True,
        metavar="WHERE",
        help=f"memory:HOST:PORT[:TOKEN-FILE] (the token is in the file, or in {TOKEN_VARIABLE}) or mooncake:HOST:PORT",
    )
    parser.add_argument("--version", metavar="RUN:N", help="which version (default: the newest)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the checkpoint")
    parser.add_argument("--config-from", metavar="DIR", help="checkpoint whose config and tokenizer files are copied")
    parser.add_argument("--pointer", default="current", help="pointer of the publisher (default %(default)s)")
    parser.add_argument("--file-bytes", metavar="N", help="size of a weight file (default: 2GiB)")
    parser.add_argument("--json", action="store_true", help="print one JSON document, nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export; returns the exit code."""
    from rose.transfer.export import MAX_FILE_BYTES, export_version  # noqa: PLC0415 - loads numpy

    version = _version(arguments.version)
    pointer = filled(arguments.pointer, option="--pointer")
    out, config_from = filled_path(arguments.out, option="--out"), None
    if arguments.config_from is not None:
        config_from = filled_path(arguments.config_from, option="--config-from")
    max_file_bytes = MAX_FILE_BYTES
    if arguments.file_bytes is not None:
        max_file_bytes = parse_size(arguments.file_bytes, option="--file-bytes")
    transport = open_store(arguments.transport, os.environ, option="--transport")
    try:
        report = export_version(
            transport,
            out,
            version=version,
            config_from=config_from,
            pointer=pointer,
            max_file_bytes=max_file_bytes,
        )
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        message = f"cannot write {out}: {error.strerror or error}; free some space or choose another folder"
        raise ConfigError(message) from error
    finally:
        transport.close()
    print(_text(report, out, is_json=arguments.json))  # noqa: T201 - this is the command line
    return 0


def _version(text: str | None) -> WeightVersion | None:
    try:
        return None if text is None else WeightVersion.parse(text)
    except ValueError as error:
        message = f"--version: {error}"
        raise ConfigError(message) from error


def _text(report: ExportReport, out: Path, *, is_json: bool) -> str:
    if is_json:
        return json.dumps({**attrs.asdict(report), "version": str(report.version), "out": str(out.resolve())})
    copied = f" and {', '.join(report.copied)}" if report.copied else ""
    return (
        f"version {report.version}: {report.num_tensors} tensors, {report.num_bytes / 1e9:.3f} GB in "
        f"{len(report.files)} files{copied}; {out.resolve()}"
    )

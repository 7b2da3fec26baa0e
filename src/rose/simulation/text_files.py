"""Lines of a text file that may be compressed; trouble on the way becomes a ``ConfigError`` of one line."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Generator
from pathlib import Path

from rose.errors import ConfigError

_GZIP_MAGIC = b"\x1f\x8b"


def read_lines(path: Path, what: str, *, expected: str) -> Generator[str, None, None]:
    """Yield the lines of a plain or compressed text file, with their ends.

    Args:
        path: The file.
        what: What it is, for messages: "trace".
        expected: What it should hold, for messages.

    Raises:
        ConfigError: It cannot be read, is damaged, or is no text.
    """
    try:
        with path.open("rb") as file:
            is_compressed = file.peek(2)[:2] == _GZIP_MAGIC
            if path.suffix == ".gz" and not is_compressed and file.peek(1):
                message = f"{what} {path}: not gzip data despite its name; rename it or fetch it again"
                raise ConfigError(message)
            raw = gzip.GzipFile(fileobj=file) if is_compressed else file
            with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text:
                yield from text
    except UnicodeDecodeError as error:
        message = f"{what} {path}: not a text file ({error.reason}); expected {expected}"
        raise ConfigError(message) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        message = f"{what} {path}: the gzip data is damaged or cut short ({error}); fetch it again"
        raise ConfigError(message) from error
    except OSError as error:
        message = f"{what} {path}: cannot be read ({error.strerror or error}); check the path and its permissions"
        raise ConfigError(message) from error

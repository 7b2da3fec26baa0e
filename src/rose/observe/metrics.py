"""``metrics.jsonl``: one JSON object a line, written as things happen.

Invariant: after ``write`` returns the line is in the file, whole; a run that is killed leaves only whole lines.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rose.errors import ConfigError


class MetricsLog:
    """A writer of metric lines; a context manager.

    Args:
        path: File to start afresh.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            message = f"cannot write {path}: {error.strerror}; choose a folder that you may write to"
            raise ConfigError(message) from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one line: ``event`` names what the fields are about. Numbers that are not finite are written as null."""
        self._file.write(json.dumps(plain({"event": event, **fields}), allow_nan=False, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        """Return the log."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


def plain(value: Any) -> Any:
    """Return ``value`` with every number that JSON cannot write (nan, infinity) as ``None``, mappings and lists included."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value

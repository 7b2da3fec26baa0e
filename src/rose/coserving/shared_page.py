"""Small shared-memory pages with one writer a section, read without locks.

Invariants:

* A section has one writer at a time; only it changes the section's bytes. Any number of readers may read meanwhile.
* A reader gets exactly the values of one ``write`` or an error, never a mixture: the sequence number must be even and
  unchanged around the read, and the checksum must match (so that the order in which a weakly ordered machine makes the
  stores visible does not matter).
* A writer that dies in the middle leaves the section unreadable until the next writer's first ``write``.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from pathlib import Path

from rose.errors import LedgerError

SECTION_BYTES = 256
_HEAD = struct.Struct("<QI")
_HEAD_BYTES = 16
_EAGER_TRIES = 16
_RETRY_S = 20e-6


def map_file(path: Path | str, num_bytes: int, *, is_new: bool) -> mmap.mmap:
    """Map a shared file of ``num_bytes`` for reading and writing.

    Args:
        path: Usually below ``/dev/shm``.
        num_bytes: Size of the mapping; the file must have it already unless ``is_new``.
        is_new: Replace whatever is there by a zeroed file. Mappings of an older file stay as they are, cut off.

    Raises:
        LedgerError: The file is missing, too small or not accessible.
    """
    path = Path(path)
    try:
        if is_new:
            path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0), 0o600)
    except OSError as error:
        advice = (
            "create it first" if isinstance(error, FileNotFoundError) else "name a file that you may read and write"
        )
        message = f"cannot {'create' if is_new else 'open'} shared file {path}: {error.strerror}; {advice}"
        raise LedgerError(message) from error
    try:
        if is_new:
            os.ftruncate(descriptor, num_bytes)
        size = os.fstat(descriptor).st_size
        if size < num_bytes:
            message = f"shared file {path} has {size} bytes, {num_bytes} are needed; it was cut off, or another version wrote it"
            raise LedgerError(message)
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)


class Section:
    """A fixed record of numbers in a shared page, at most ``SECTION_BYTES`` long with its head."""

    def __init__(self, memory: mmap.mmap, index: int, layout: str, what: str) -> None:
        """Place section number ``index``; ``layout`` is a ``struct`` format, ``what`` names it in errors."""
        self._memory = memory
        self._offset = index * SECTION_BYTES
        self._body_at = self._offset + _HEAD_BYTES
        self._body = struct.Struct(layout)
        self._end = self._body_at + self._body.size
        self._what = what
        if self._body.size + _HEAD_BYTES > SECTION_BYTES:
            message = f"{what}: layout {layout!r} needs more than {SECTION_BYTES} bytes"
            raise ValueError(message)

    def write(self, *values: float) -> None:
        """Replace the record. Only the section's one writer may call this."""
        sequence = _HEAD.unpack_from(self._memory, self._offset)[0] | 1
        body = self._body.pack(*values)
        self._write_head(sequence, 0)
        self._memory[self._body_at : self._end] = body
        self._write_head(sequence + 1, zlib.crc32(body))

    def _write_head(self, sequence: int, checksum: int) -> None:
        # copied in one piece; Struct.pack_into zeroes its target first, and a reader would take that for a new page
        self._memory[self._offset : self._offset + _HEAD.size] = _HEAD.pack(sequence, checksum)

    def read(self, num_tries: int = 64) -> tuple[float, ...]:
        """Return the last record written.

        Raises:
            LedgerError: Nothing was written yet, or no untorn record was seen in ``num_tries`` tries.
        """
        sequence = 0
        for attempt in range(num_tries):
            sequence, checksum = _HEAD.unpack_from(self._memory, self._offset)
            if sequence == 0:
                break
            if not sequence & 1:
                body = self._memory[self._body_at : self._end]
                if _HEAD.unpack_from(self._memory, self._offset)[0] == sequence and zlib.crc32(body) == checksum:
                    return self._body.unpack(body)
            if attempt >= _EAGER_TRIES:
                time.sleep(_RETRY_S)
        reason = "was never written" if sequence == 0 else f"was torn in {num_tries} reads; its writer hangs or died"
        message = f"{self._what} {reason}"
        raise LedgerError(message)

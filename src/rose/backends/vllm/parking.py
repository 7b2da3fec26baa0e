"""The weights of a sleeping worker: off the device in a file without a name, and brought back bit by bit.

Invariants: memory is given back only when every byte is in the file; what is read back is compared with the digest of
what was written. Buffers stay: they are small, no update brings them back, and vLLM shares some of them between the engines
of a process.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import torch
import xxhash

from rose.backends.paging import give_back
from rose.errors import EngineError

_PART_BYTES = 256 << 20


class ParkedWeights:
    """The parameters of one model, in this process's memory or in a file."""

    def __init__(self, model: torch.nn.Module, directory: str | None = None) -> None:
        """Take a model that is awake.

        Args:
            model: Its parameters on the CPU; others are left alone.
            directory: Where the file goes, ``None`` is the system's folder for temporary files. The file goes with the process;
                in a folder that is kept in memory nothing would be won.
        """
        self._model = model
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._digests: list[int] = []
        self._is_dropped = False

    def park(self, *, keeps: bool) -> int:
        """Give the memory back.

        Args:
            keeps: Write it to the file first; otherwise it is lost.

        Returns:
            Bytes given back: whole pages, so a little less than the weights.

        Raises:
            EngineError: The file could not be written; nothing was given back.
        """
        if self._file is not None or self._is_dropped:
            return 0
        if keeps:
            self._write()
        self._is_dropped = not keeps
        return sum(give_back(bits.ctypes.data, bits.nbytes) for bits in self._bits())

    def restore(self) -> int | None:
        """Bring the weights back; returns the bytes compared, ``None`` when they were dropped or are not what they were."""
        file, self._file = self._file, None
        is_dropped, self._is_dropped = self._is_dropped, False
        if file is None:
            return None if is_dropped else 0
        num_bytes = 0
        with file:
            file.seek(0)
            for bits, digest in zip(self._bits(), self._digests, strict=True):
                for part in _parts(bits):
                    file.readinto(part)  # type: ignore[attr-defined] # an unbuffered file
                if xxhash.xxh3_128_intdigest(bits) != digest:
                    return None
                num_bytes += bits.nbytes
        return num_bytes

    def _write(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(
                    tempfile.TemporaryFile(dir=self._directory, prefix="rose-weights-", buffering=0)
                )
                self._digests = []
                for bits in self._bits():
                    for part in _parts(bits):
                        _write_all(file, part)
                    self._digests.append(xxhash.xxh3_128_intdigest(bits))
            except OSError as error:
                message = (
                    f"weights cannot be parked in {self._directory or tempfile.gettempdir()}: {error}; "
                    "name a folder with enough room (park_directory)"
                )
                raise EngineError(message) from error
            stack.pop_all()
        self._file = file

    def _bits(self) -> Iterator[Any]:
        """Yield every piece of memory that holds weights once, as bytes."""
        seen = {buffer.untyped_storage().data_ptr() for buffer in self._model.buffers()}
        for tensor in self._model.parameters():
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield np.asarray(torch.empty(0, dtype=torch.uint8).set_(storage))


def _write_all(file: IO[bytes], part: memoryview) -> None:
    while part:  # a full disk takes a part, then raises
        part = part[file.write(part) :]


def _parts(bits: Any) -> Iterator[memoryview]:
    """Yield the bytes in parts that the kernel takes in one call."""
    whole = memoryview(bits)
    for start in range(0, len(whole), _PART_BYTES):
        yield whole[start : start + _PART_BYTES]

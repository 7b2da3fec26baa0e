"""The inner loops in C (``kernels.c``), called through ctypes, which releases the interpreter lock for the call.

Each thread keeps its own working memory in the library, so that calls neither allocate nor wait; more than some tens of megabytes of
it are given back after the call that needed them.
"""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rose.errors import BackendUnavailableError, CorruptUpdateError
from rose.transfer.kernels import Array, ChangeStreams, Comparison, Rows, Sum
from rose.transfer.kernels.checks import (
    check_cell,
    check_columns,
    check_matrix,
    check_pair,
    check_positions,
    check_streams,
    check_values,
    check_writeable,
    checked_slabs,
    has_nibbles,
)

_LEVELS = ("native", "native-avx2", "native-avx512")
_NO_MEMORY, _TOO_SHORT, _TOO_LONG, _OUT_OF_RANGE, _BAD_CODE = 1, 2, 3, 4, 5
_REASONS = {
    _TOO_SHORT: "ends before the last change",
    _TOO_LONG: "goes on after the last change",
    _OUT_OF_RANGE: "goes beyond the cell",
    _BAD_CODE: "has a code that is never written",
}
_RESULT = struct.Struct("7Q12Q")
"""The head of `struct coder`, which is that of `struct scratch`: seven numbers, then address, size, capacity of four streams."""
_MAX_KEPT = 1 << 23  # changes of one call, about 4 bytes each
_GATHER, _SCATTER, _ADD = range(3)

_P, _N, _I = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rose_start": (_I, ()),
    "rose_constants": (None, (_P, _P, _N)),
    "rose_scratch": (_P, (_I,)),
    "rose_trim": (None, (_P,)),
    "rose_free": (None, (_P,)),
    "rose_compare": (_I, (_P, _N, _P, _N, _P, _N, _N, _N, _N, _N, _N)),
    "rose_sum": (None, (_I, _N, _P, _N, _N, _N, _N, _N, _P)),
    "rose_begin_group": (_I, (_P, _N, _P, _N, _N, _N, _N, _N)),
    "rose_scan_rows": (_I, (_P, _N, _P, _N, _P, _N, _N)),
    "rose_finish_group": (_I, (_P, _N)),
    "rose_lane": (_P, (_P, _N)),
    "rose_read_gaps": (_I, (_I, _P, _N, _P, _N, _N, _N, _P, _N)),
    "rose_read_codes": (_I, (_N, _P, _N, _P, _N, _P)),
    "rose_read_planes": (_I, (_N, _P, _N, _I, _P)),
    "rose_pass": (_I, (_N, _N, _P, _N, _N, _N, _P, _N, _N, _P)),
    "rose_changes_sum": (_I, (_N, _P, _N, _N, _P, _P, _N, _N, _N, _N, _P)),
}


def library_path() -> Path:
    """Return where the library is built for this platform."""
    return Path(__file__).with_name(f"kernels-{sys.platform}-{platform.machine().lower()}.so")


def open_library(path: Path) -> ctypes.CDLL:
    """Load the library and declare its functions.

    Raises:
        BackendUnavailableError: It is not there, or does not load.
    """
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        message = f"the C kernels do not load ({error}); install ROSE where there is a C compiler, or use 'numpy'"
        raise BackendUnavailableError(message) from error
    return library


class _Scratch:
    """One thread's memory in the library."""

    def __init__(self, library: ctypes.CDLL, level: int) -> None:
        address: int | None = library.rose_scratch(level)
        if not address:
            message = "no memory for the C kernels' scratch"
            raise MemoryError(message)
        self.address = address
        weakref.finalize(self, library.rose_free, address)


class NativeKernels:
    """``Kernels`` in C."""

    def __init__(self, *, path: Path | None = None, level: int | None = None) -> None:
        """Load the library.

        Args:
            path: The library, by default where the build puts it.
            level: 0 plain C, 1 AVX2, 2 AVX-512; by default, and at most, the best of this machine.

        Raises:
            BackendUnavailableError: It is not there, or does not load.
        """
        self._library = open_library(path or library_path())
        best = self._library.rose_start()
        self._level = best if level is None else min(best, level)
        self.name = _LEVELS[self._level]
        self._threads = threading.local()

    def compare(self, new: Array, old: Array, rows: Rows, *, is_overwrite: bool) -> Comparison:
        """Compare a cell with its old state; see ``Kernels``."""
        check_pair(new, old, rows)
        scratch = self._scratch()
        failed = self._library.rose_compare(
            scratch,
            new.itemsize,
            *_address_and_step(new),
            *_address_and_step(old),
            rows.num_rows,
            rows.row_len,
            rows.start,
            rows.stride,
            is_overwrite,
        )
        self._check_memory(failed, scratch, rows)
        found = _comparison(scratch)
        if found.num_changed > _MAX_KEPT:
            self._library.rose_trim(scratch)
        return found

    def compare_columns(
        self, pairs: Iterable[tuple[Array, Array]], cells: Sequence[Rows], *, is_overwrite: bool
    ) -> list[Comparison]:
        """Compare cells side by side; see ``Kernels``."""
        rows, itemsize = check_columns(cells), 0
        scratch, library = self._scratch(), self._library
        for new, old in checked_slabs(pairs, rows):
            if not itemsize:
                itemsize = new.itemsize
                lens = (ctypes.c_uint64 * len(cells))(*(cell.row_len for cell in cells))
                place = len(cells), rows.num_rows, rows.start, rows.stride
                failed = library.rose_begin_group(scratch, itemsize, lens, *place, is_overwrite)
                self._check_memory(failed, scratch, rows)
            places = *_address_and_step(new), *_address_and_step(old)
            self._check_memory(library.rose_scan_rows(scratch, itemsize, *places, len(new)), scratch, rows)
        self._check_memory(library.rose_finish_group(scratch, itemsize), scratch, rows)
        found = [_comparison(library.rose_lane(scratch, lane)) for lane in range(len(cells))]
        if sum(one.num_changed for one in found) > _MAX_KEPT:
            library.rose_trim(scratch)
        return found

    def _check_memory(self, failed: int, scratch: int, rows: Rows) -> None:
        if failed:
            self._library.rose_trim(scratch)
            message = f"no memory to code the changes of {rows.num_elements} elements"
            raise MemoryError(message)

    def decode(
        self, streams: ChangeStreams, *, num_elements: int, dtype: np.dtype[Any], is_overwrite: bool
    ) -> tuple[Array, Array]:
        """Read streams back; see ``Kernels``."""
        dtype = np.dtype(dtype)
        check_streams(streams, num_elements, dtype, is_overwrite=is_overwrite)
        num = streams.num_changed
        is_wide = num_elements >= 1 << 31
        positions, values = np.empty(num, dtype=np.int64 if is_wide else np.int32), np.empty(num, dtype=dtype)
        gaps, lows, codes, escapes = map(_readable, (streams.gaps, streams.lows, streams.codes, streams.escapes))
        _raise(
            self._library.rose_read_gaps(
                self._level,
                gaps[0],
                len(streams.gaps),
                lows[0],
                streams.shift,
                num,
                num_elements,
                _address(positions),
                is_wide,
            ),
            f"gaps of {num} changes in {num_elements} elements, {len(streams.gaps)} bytes",
        )
        if has_nibbles(dtype, is_overwrite=is_overwrite):
            failed = self._library.rose_read_codes(
                dtype.itemsize, codes[0], num, escapes[0], len(streams.escapes), _address(values)
            )
            _raise(failed, f"codes of {num} changes with {len(streams.escapes)} bytes of escapes")
        else:
            failed = self._library.rose_read_planes(dtype.itemsize, codes[0], num, is_overwrite, _address(values))
            _raise(failed, f"byte planes of {num} changes")
        return positions, values

    def gather(self, array: Array, positions: Array) -> Array:
        """Return the elements at flat positions; see ``Kernels``."""
        check_matrix(array)
        check_positions(positions)
        values = np.empty(positions.size, dtype=array.dtype)
        self._pass(_GATHER, array, positions, values)
        return values

    def scatter(self, array: Array, positions: Array, values: Array) -> None:
        """Overwrite the elements at flat positions; see ``Kernels``."""
        check_values(array, positions, values)
        check_writeable(array)
        self._pass(_SCATTER, array, positions, np.ascontiguousarray(values))

    def add(self, array: Array, positions: Array, differences: Array) -> None:
        """Add differences in place; see ``Kernels``."""
        check_values(array, positions, differences)
        check_writeable(array)
        self._pass(_ADD, array, positions, np.ascontiguousarray(differences))

    def _pass(self, what: int, array: Array, positions: Array, values: Array) -> None:
        if not positions.size:
            return
        positions = np.ascontiguousarray(positions)
        failed = self._library.rose_pass(
            what,
            array.itemsize,
            *_address_and_step(array),
            *array.shape,
            _address(positions),
            positions.itemsize == 8,  # noqa: PLR2004
            positions.size,
            _address(values),
        )
        if failed:
            message = f"positions {positions.min()} to {positions.max()} in a cell of {array.size} elements"
            raise IndexError(message)

    def state_sum(self, bits: Array, rows: Rows) -> Sum:
        """Return the sum of a whole cell; see ``Kernels``."""
        check_cell(bits, rows)
        total = (ctypes.c_uint64 * 2)()
        self._library.rose_sum(
            self._level,
            bits.itemsize,
            *_address_and_step(bits),
            rows.num_rows,
            rows.row_len,
            rows.start,
            rows.stride,
            total,
        )
        return total[0], total[1]

    def changes_sum(self, positions: Array, old: Array, new: Array, rows: Rows) -> Sum:
        """Return by how much the sum moves; see ``Kernels``."""
        check_values(new.reshape(1, -1), positions, new)
        check_values(old.reshape(1, -1), positions, old)
        if new.dtype != old.dtype:
            message = f"new patterns are {new.dtype}, old ones {old.dtype}"
            raise TypeError(message)
        if not positions.size:
            return 0, 0
        positions, old, new = map(np.ascontiguousarray, (positions, old, new))
        total = (ctypes.c_uint64 * 2)()
        failed = self._library.rose_changes_sum(
            new.itemsize,
            _address(positions),
            positions.itemsize == 8,  # noqa: PLR2004
            positions.size,
            _address(old),
            _address(new),
            rows.num_rows,
            rows.row_len,
            rows.start,
            rows.stride,
            total,
        )
        if failed:
            message = f"positions {positions.min()} to {positions.max()} in a cell of {rows.num_elements} elements"
            raise IndexError(message)
        return total[0], total[1]

    def _scratch(self) -> int:
        held: _Scratch | None = getattr(self._threads, "scratch", None)
        if held is None:
            held = self._threads.scratch = _Scratch(self._library, self._level)
        return held.address


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _address_and_step(array: Array) -> tuple[int, int]:
    return _address(array), array.strides[0]


def _readable(stream: bytes | memoryview) -> tuple[Any, Any]:
    """Return what ctypes takes for a stream's address, and what keeps it alive."""
    if isinstance(stream, bytes):
        return stream, stream
    if not len(stream):
        return b"", stream
    view = np.frombuffer(stream, dtype=np.uint8)
    return _address(view), view


def _comparison(address: int) -> Comparison:
    """Return the results of one cell, which lie there."""
    head = _RESULT.unpack(ctypes.string_at(address, _RESULT.size))
    num_changed, shift, is_coded, *sums = head[:7]
    streams = _streams(num_changed, shift, (sums[2], sums[3]), head[7:]) if is_coded else None
    return Comparison(num_changed=num_changed, streams=streams, sum_delta=(sums[0], sums[1]))


def _streams(num_changed: int, shift: int, values_sum: Sum, buffers: tuple[int, ...]) -> ChangeStreams:
    gaps, lows, codes, escapes = (
        ctypes.string_at(buffers[i], buffers[i + 1]) if buffers[i + 1] else b"" for i in range(0, 12, 3)
    )
    return ChangeStreams(
        num_changed=num_changed,
        shift=shift,
        gaps=gaps,
        lows=lows,
        codes=codes,
        escapes=escapes,
        values_sum=values_sum,
    )


def _raise(failed: int, what: str) -> None:
    if failed:
        message = f"the stream {_REASONS[failed]}: {what}"
        raise CorruptUpdateError(message)

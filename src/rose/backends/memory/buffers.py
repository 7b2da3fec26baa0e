"""``bytes`` objects that a socket fills in place.

A large blob's time goes into its memory, not into its transfer: the kernel clears each fresh 4 kB page when it is first
touched, and a buffer that is copied into ``bytes`` afterwards pays twice. So a large body is received straight into the ``bytes`` that its caller
gets, on huge pages where the kernel has them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

HUGE_BYTES = 2 << 20
"""From this size on a buffer asks for huge pages."""

_HEADER_BYTES = bytes.__basicsize__ - 1
_MADV_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", None)

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)


def fillable(size_bytes: int) -> tuple[bytes, memoryview]:
    """Return new ``bytes`` of undefined content, and a writable view of them.

    CPython allows to fill such an object as long as nobody else has seen it, so the caller fills all of it and lets go of the
    view before it passes the object on. ``size_bytes`` must be over 1: shorter objects are shared.

    Raises:
        MemoryError: There is not so much memory.
    """
    data: bytes = _new_bytes(None, size_bytes)
    start = id(data) + _HEADER_BYTES
    if size_bytes >= HUGE_BYTES:
        _ask_for_huge_pages(start, size_bytes)
    return data, memoryview((ctypes.c_char * size_bytes).from_address(start)).cast("B")


def _ask_for_huge_pages(start: int, size_bytes: int) -> None:
    """Ask for the whole pages inside a range; a kernel that has none goes on with small ones."""
    if _MADV_HUGEPAGE is None or sys.platform != "linux":
        return
    first = -(-start // HUGE_BYTES) * HUGE_BYTES
    last = (start + size_bytes) // HUGE_BYTES * HUGE_BYTES
    if last > first:
        _libc.madvise(first, last - first, _MADV_HUGEPAGE)


_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

"""Giving memory of this process back to the operating system while its address stays valid."""

from __future__ import annotations

import ctypes
import mmap
import os

from rose.errors import BackendUnavailableError, EngineError

_MADV_DONTNEED = 4


def give_back(address: int, num_bytes: int) -> int:
    """Return the whole pages inside ``[address, address + num_bytes)`` to the operating system.

    The range reads as zeros afterwards (anonymous memory) and takes pages again when it is written. Parts of pages at
    both ends are kept, since they may hold other data.

    Returns:
        Bytes really given, a multiple of the page size, possibly 0.

    Raises:
        BackendUnavailableError: The C library has no ``madvise``.
        EngineError: The kernel refused, for example because the range is not mapped.
    """
    page = mmap.PAGESIZE
    start = -(-address // page) * page
    length = (address + num_bytes) // page * page - start
    if length <= 0:
        return 0
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        message = "this machine's C library has no madvise, so KV pages cannot be given back; run on Linux"
        raise BackendUnavailableError(message)
    if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED) != 0:
        error = os.strerror(ctypes.get_errno())
        message = f"madvise refused to give back {length} bytes at {start:#x}: {error}"
        raise EngineError(message)
    return length

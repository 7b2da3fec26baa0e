"""Memory of this process in whole pages: taken in large ones, given back to the operating system while its address stays valid.

Invariant: a range that is given back reads as zeros and takes pages again when it is written. A part of a page is never
given: with 2 MiB pages it would only be split, not freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from rose.errors import BackendUnavailableError, EngineError

HUGE_PAGE_BYTES = 2 << 20
"""A large page of the kernel (x86-64 and most arm64)."""

_MADV_DONTNEED = 4


class HugeBuffer:
    """Zeroed private memory that starts on a large page and asks for large pages before its first touch.

    Attributes:
        memory: The mapping that holds it; keep it alive while ``address`` is used.
        offset: Where the buffer starts in ``memory``, in bytes.
        address: Its address, a multiple of ``HUGE_PAGE_BYTES``.
        num_bytes: Its size, rounded up to whole large pages.
    """

    def __init__(self, num_bytes: int, *, is_huge: bool = True) -> None:
        """Map the memory; nothing is resident yet.

        Args:
            num_bytes: At least so many bytes.
            is_huge: Ask for large pages; where the kernel has none the buffer has small ones.
        """
        self.num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.memory = mmap.mmap(-1, self.num_bytes + HUGE_PAGE_BYTES, flags=flags)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.offset = self.address - start
        advice = getattr(mmap, "MADV_HUGEPAGE" if is_huge else "MADV_NOHUGEPAGE", None)
        if advice is not None:
            with contextlib.suppress(OSError):  # a kernel without large pages
                self.memory.madvise(advice, self.offset, self.num_bytes)

    def view(self) -> memoryview:
        """Return the buffer's bytes; release the view before the mapping is closed."""
        return memoryview(self.memory)[self.offset : self.offset + self.num_bytes]


def give_back(address: int, num_bytes: int, *, page_bytes: int = mmap.PAGESIZE) -> int:
    """Return the whole pages inside ``[address, address + num_bytes)`` to the operating system.

    Parts of pages at both ends are kept, since they may hold other data.

    Args:
        address: Start of the range.
        num_bytes: Its length.
        page_bytes: Size of the pages it is made of.

    Returns:
        Bytes really given, a multiple of the page size, possibly 0.

    Raises:
        BackendUnavailableError: The C library has no ``madvise``.
        EngineError: The kernel refused, for example because the range is not mapped.
    """
    start = -(-address // page_bytes) * page_bytes
    length = (address + num_bytes) // page_bytes * page_bytes - start
    if length <= 0:
        return 0
    if _madvise()(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED) != 0:
        error = os.strerror(ctypes.get_errno())
        message = f"madvise refused to give back {length} bytes at {start:#x}: {error}"
        raise EngineError(message)
    return length


@functools.cache
def _madvise() -> Any:
    found = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if found is None:
        message = "this machine's C library has no madvise, so KV pages cannot be given back; run on Linux"
        raise BackendUnavailableError(message)
    return found


def resident_bytes(pid: int | str = "self") -> int:
    """Return how much memory of a process is resident, in bytes (``/proc``)."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:  # noqa: PTH123 - read often
        return int(file.read().split()[1]) * mmap.PAGESIZE


def reclaim_ms_per_gib(
    num_bytes: int = 256 << 20, *, num_rounds: int = 5, is_huge: bool = True, clock: Callable[[], float] | None = None
) -> float:
    """Measure how long this machine takes to get pages back, as KV memory gives them.

    A buffer is touched in full and given back, ``num_rounds`` times.

    Args:
        num_bytes: Size of the buffer.
        num_rounds: Of which the median counts.
        is_huge: With 2 MiB pages, as KV memory is laid out; otherwise with small ones, to compare.
        clock: A timer in seconds; ``time.perf_counter`` when left out.

    Returns:
        Milliseconds a GiB.

    Raises:
        EngineError: Memory that was given back is still resident.
    """
    now = clock or time.perf_counter
    buffer = HugeBuffer(num_bytes, is_huge=is_huge)
    times_s = []
    for _ in range(num_rounds):
        ctypes.memset(buffer.address, 1, buffer.num_bytes)
        before = resident_bytes()
        start_s = now()
        give_back(buffer.address, buffer.num_bytes, page_bytes=HUGE_PAGE_BYTES)
        times_s.append(now() - start_s)
        gone = before - resident_bytes()
        if gone < buffer.num_bytes // 2:
            message = f"{buffer.num_bytes} bytes were given back, but resident memory fell by {gone} only"
            raise EngineError(message)
    return sorted(times_s)[num_rounds // 2] * 1e3 * (1 << 30) / buffer.num_bytes

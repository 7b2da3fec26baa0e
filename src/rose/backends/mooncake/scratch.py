"""Buffers for small objects, registered with the library once and used again.

Invariants: a buffer has one user at a time; none is freed before ``close``, because the library keeps the address.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rose.errors import TransportError


class ScratchPool:
    """As many buffers as there were calls at the same time.

    Args:
        store: The library's store.
        size_bytes: Size of a buffer.
    """

    def __init__(self, store: Any, size_bytes: int) -> None:
        self._store = store
        self._size_bytes = size_bytes
        self._lock = threading.Lock()
        self._free: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._all: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    @contextmanager
    def borrow(self) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Give a buffer of undefined content.

        Raises:
            TransportError: The library does not take it.
        """
        with self._lock:
            buffer = self._free.pop() if self._free else self._new()
        try:
            yield buffer
        finally:
            with self._lock:
                self._free.append(buffer)

    def close(self) -> None:
        """Take every buffer back from the library; nobody may be using one."""
        with self._lock:
            for buffer in self._all:
                self._store.unregister_buffer(buffer.ctypes.data)
            self._all, self._free = [], []

    def _new(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        buffer = np.empty(self._size_bytes, dtype=np.uint8)
        code = self._store.register_buffer(buffer.ctypes.data, buffer.nbytes)
        if code:
            message = f"Mooncake does not register a buffer of {buffer.nbytes} bytes (code {code}); its log says why"
            raise TransportError(message)
        self._all.append(buffer)
        return buffer

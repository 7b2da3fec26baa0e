"""One piece of work that many callers share."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from rose.errors import RoseError, TransportError

T = TypeVar("T")


class Flight(Generic[T]):
    """A call on its way, and those who wait for its end.

    Args:
        num_sets: For pointers: how many times this side had set it when the call began.

    Attributes:
        is_stale: What it brings must not be kept.
    """

    def __init__(self, num_sets: int = 0) -> None:
        self.num_sets = num_sets
        self.is_stale = False
        self._is_over = threading.Event()
        self._value: tuple[T] | None = None
        self._error: BaseException | None = None

    def land(self, value: T) -> None:
        """End well."""
        self._value = (value,)
        self._is_over.set()

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self._error = error
        self._is_over.set()

    def result(self) -> T:
        """Wait for the end; return what it brought, or raise an error of one's own like the one that ended it."""
        self._is_over.wait()
        if self._value is not None:
            return self._value[0]
        if isinstance(self._error, RoseError):
            raise type(self._error)(*self._error.args) from self._error
        message = f"the transfer that this call shared was ended by {self._error!r}; call again"
        raise TransportError(message) from self._error

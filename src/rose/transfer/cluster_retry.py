"""Trying again when a link fails: bounded, with growing pauses that are spread so that many do not come back at once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

import attrs
from attrs import validators as v

from rose.errors import CorruptUpdateError, TransportError

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class RetryPolicy:
    """How often and when a call is repeated.

    Attributes:
        num_tries: Calls in all.
        first_pause_s: The longest pause after the first failure; it doubles with every further one.
        max_pause_s: No pause is longer.
    """

    num_tries: int = attrs.field(default=6, validator=v.ge(1))
    first_pause_s: float = attrs.field(default=0.05, validator=v.ge(0))
    max_pause_s: float = attrs.field(default=2.0, validator=v.ge(0))

    def pause_s(self, num_failures: int) -> float:
        """Return how long to wait after so many failures: between half of the longest pause and all of it."""
        longest_s: float = min(self.first_pause_s * 2 ** (num_failures - 1), self.max_pause_s)
        return longest_s * random.uniform(0.5, 1.0)

    def call(self, work: Callable[[], T], *, on_failure: Callable[[], None], stopped: threading.Event) -> T:
        """Do the work; do it again after a failure of the transport or a blob that it knows to be damaged.

        Args:
            work: One try.
            on_failure: Called before each further try.
            stopped: Once set, a failure is the last.

        Raises:
            TransportError: The last try failed, too.
            CorruptUpdateError: The last try failed, too.
        """
        for num_failures in range(1, self.num_tries):
            try:
                return work()
            except (TransportError, CorruptUpdateError):
                if stopped.wait(self.pause_s(num_failures)):
                    raise
            on_failure()
        return work()

"""Batches that were handed to a device and whose outputs have not come. Imports no engine library.

Invariants: outputs come in the order of the batches; a mark is passed once every batch that was launched before it has landed,
whether or not others were launched since.
"""

from __future__ import annotations

from collections import deque
from typing import Any


class InFlight:
    """The batches of one engine's step loop: at most one, or as many as its queue holds with asynchronous scheduling."""

    def __init__(self) -> None:
        self._batches: deque[tuple[Any, bool]] = deque()
        self._num_launched = 0
        self._num_landed = 0

    def __len__(self) -> int:
        return len(self._batches)

    def launch(self, batch: Any, *, is_charged: bool) -> None:
        """Note a batch that the scheduler has built; ``is_charged``: the device's turn is held for it."""
        self._batches.append((batch, is_charged))
        self._num_launched += 1

    def land(self, batch: Any) -> bool:
        """Note that a batch's outputs are here; returns whether it was charged. ``False`` for a stranger's."""
        if not any(batch is mine for mine, _ in self._batches):
            return False
        while True:
            first, is_charged = self._batches.popleft()
            self._num_landed += 1
            if first is batch:
                return is_charged

    def mark(self) -> int:
        """Return a mark behind everything that is in flight now."""
        return self._num_launched

    def has_passed(self, mark: int) -> bool:
        """Return whether everything before ``mark`` has landed."""
        return self._num_landed >= mark

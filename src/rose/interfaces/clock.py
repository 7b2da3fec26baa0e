"""The clock role: every wait and every time stamp of ROSE goes through one of these."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Clock(ABC):
    """Monotonic time in seconds. Paced clocks run slower than the machine's and may stand still."""

    @abstractmethod
    def now(self) -> float:
        """Return the time in seconds; never goes back."""

    @abstractmethod
    async def sleep(self, duration_s: float) -> None:
        """Return once ``now()`` has advanced by ``duration_s`` (at once for zero or less)."""

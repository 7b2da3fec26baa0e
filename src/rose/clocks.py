"""The machine's own clock. Tests use ``rose.testing.ManualClock``; paced devices bring clocks of their own."""

from __future__ import annotations

import asyncio
import time

from rose.interfaces.clock import Clock


class MonotonicClock(Clock):
    """Seconds of ``time.monotonic``: comparable between the processes of one machine, not between machines."""

    def now(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        """Sleep on the running event loop; zero or less lets other tasks run once."""
        await asyncio.sleep(max(0.0, duration_s))

"""One part of the check: what it shows, what it needs, and the figures that it gives."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import attrs
import torch

from rose.bench.gpu_check.outcome import Figure


class MismatchError(AssertionError):
    """Something that must be bit for bit the same is not."""


@attrs.define(kw_only=True)
class Bench:
    """Where the parts run.

    Attributes:
        device: The device: a GPU, or the CPU in a rehearsal.
        is_quick: Tiny shapes, so that the script itself can be tested.
        copy_gb_s: Rate at which the device copies its own memory; 0 until it was measured.
    """

    device: torch.device
    is_quick: bool
    copy_gb_s: float = 0.0

    @property
    def is_gpu(self) -> bool:
        """Return whether there are queues, events and a memory of its own."""
        return bool(self.device.type == "cuda")

    def wait(self) -> None:
        """Wait until the device has done everything."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], Any], *, repeats: int = 5) -> float:
        """Return the median time of a piece of work in seconds, the device's part of it included, after one that warms up."""
        times = []
        for _ in range(1 + repeats):
            self.wait()
            started = perf_counter()
            work()
            self.wait()
            times.append(perf_counter() - started)
        return median(times[1:])

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        """Return by how much a piece of work raised what the device's allocator holds; 0 on the CPU."""
        if not self.is_gpu:
            work()
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_allocated(self.device) - before)


class Part(ABC):
    """A part of the check.

    Attributes:
        name: Its name.
        shows: What it shows, one sentence.
    """

    name: str
    shows: str

    def problem(self, bench: Bench) -> str:  # noqa: ARG002 - most parts need nothing more
        """Return why it cannot run here; empty where it can."""
        return ""

    @abstractmethod
    def run(self, bench: Bench) -> Sequence[Figure]:
        """Check and measure.

        Raises:
            MismatchError: Bits are not what they must be.
        """


def lacking(*modules: str) -> str:
    """Return which of these modules are not installed, as a reason; empty where all are."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""

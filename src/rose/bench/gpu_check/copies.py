"""The card's own rates: what everything else is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rose.bench.gpu_check.outcome import Figure
from rose.bench.gpu_check.part import Bench, Part


class Copies(Part):
    """Copies within the device, and between it and page-locked memory of the host."""

    name = "copies"
    shows = "the card's own copy rate, which the rates of the delta path are compared with, and that of the bus"

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Measure three copies."""
        size = 1 << 20 if bench.is_quick else 1 << 30
        source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        host = torch.empty(size, dtype=torch.uint8, pin_memory=bench.is_gpu)

        def rate(to: torch.Tensor, from_: torch.Tensor) -> float:
            return size / bench.timed(lambda: to.copy_(from_, non_blocking=True)) / 1e9

        bench.copy_gb_s = rate(target, source)
        return [
            Figure(name="copy within the device", value=bench.copy_gb_s, unit="GB/s"),
            Figure(name="copy to the host, page-locked", value=rate(host, source), unit="GB/s"),
            Figure(name="copy from the host, page-locked", value=rate(target, host), unit="GB/s"),
        ]

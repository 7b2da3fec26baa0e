"""The parts of the check, in the order in which they run."""

from __future__ import annotations

import torch

from rose.bench.gpu_check.collective import OneRank, TwoOnOneCard
from rose.bench.gpu_check.copies import Copies
from rose.bench.gpu_check.deltas import Blobs, DeltaPath
from rose.bench.gpu_check.memory import KvcachedMemory, VllmMemory
from rose.bench.gpu_check.part import Bench, Part
from rose.bench.gpu_check.scatter import Scatter
from rose.bench.gpu_check.turns import DeviceTurns


def parts() -> list[Part]:
    """Return all parts."""
    return [
        Copies(),
        DeltaPath("torch"),
        DeltaPath("triton"),
        Blobs(),
        Scatter(),
        DeviceTurns(),
        OneRank(),
        TwoOnOneCard(),
        KvcachedMemory(),
        VllmMemory(),
    ]


def bench_on(device: str, *, is_quick: bool) -> Bench:
    """Return where the parts run: the first GPU, or the CPU."""
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    return Bench(device=place, is_quick=is_quick)

"""The delta path: cells compared and coded on the device, byte for byte as the CPU codec does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from rose.backends.device_codec import DeviceBits, DeviceComparer
from rose.backends.device_codec.keys import Keys
from rose.backends.device_codec.torch_way import TorchWay, Way
from rose.backends.device_codec.triton_way import TritonWay
from rose.backends.fsdp.bits import bits_of
from rose.bench.gpu_check import qwen3
from rose.bench.gpu_check.outcome import Figure
from rose.bench.gpu_check.part import Bench, MismatchError, Part, lacking
from rose.interfaces.trainer import ShardBits
from rose.transfer import kernels
from rose.transfer.delta import as_rows
from rose.transfer.encoder import RankEncoder
from rose.transfer.kernels import Comparison
from rose.transfer.layout import rows_of, slices_in
from rose.transfer.resident import Part as CellPart

_FRACTIONS = (0.0, 0.0005, 0.01, 0.1, 0.6, 1.0)
_TYPICAL = 0.01
_AIM = 0.5
_NUM_LAYERS = 4


class DeltaPath(Part):
    """One way: bit-exact on one layer at several densities, its rate on several layers at the usual one."""

    def __init__(self, way: str) -> None:
        """Take a way by name: ``torch`` or ``triton``."""
        self._way = way
        self.name = f"delta-{way}"
        self.shows = (
            f"cells of Qwen3-8B compared by {way} and coded on the device: the CPU codec's bytes and sums, and the rate"
        )

    def problem(self, bench: Bench) -> str:
        """Triton needs Triton, and a GPU or its interpreter."""
        if self._way == "torch":
            return ""
        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return lacking("triton") or ("" if bench.is_gpu or is_interpreted else "needs a GPU, or Triton's interpreter")

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Prove, then measure."""
        make: dict[str, Callable[[Keys], Way]] = {"torch": TorchWay, "triton": TritonWay}
        comparer = DeviceComparer(bench.device, make_way=make[self._way])
        num_cells = sum(_check_exact(bench, comparer, fraction, seed) for seed, fraction in enumerate(_FRACTIONS))
        weights = qwen3.layers(1 if bench.is_quick else _NUM_LAYERS, bench.device, is_quick=bench.is_quick)
        parts = _parts(weights, comparer)
        qwen3.change(weights, seed=99, fraction=_TYPICAL)
        size = qwen3.num_bytes(weights)

        def work() -> None:
            for _ in comparer.compare(parts, is_overwrite=False):
                pass

        seconds = bench.timed(work)
        rate = size / seconds / 1e9
        share = rate / bench.copy_gb_s if bench.copy_gb_s else 0.0
        small = "" if _has_c_kernels() else " (tiny ones: its C kernels are not built)"
        return [
            Figure(name=f"cells with the CPU codec's bytes and sums{small}", value=num_cells, unit="cells"),
            Figure(name="compare and encode at 1 % changed", value=rate, unit="GB/s of weights"),
            Figure.at_least("the same over the card's copy rate", share, "", _AIM),
            Figure(
                name="of which 8.2 billion parameters would take",
                value=seconds * 2 * qwen3.NUM_PARAMETERS / size,
                unit="s",
            ),
            Figure(name="working memory beside the base", value=bench.peak_bytes(work) / 1e6, unit="MB"),
        ]


class Blobs(Part):
    """A trainer rank's versions over the device's shards are, blob for blob, those over the host's."""

    name = "publish"
    shows = (
        "whole versions of one layer: the blobs over shards on the device are those over the same shards on the host"
    )

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Publish a row of versions both ways."""
        weights = qwen3.layers(1, bench.device, is_quick=bench.is_quick or not _has_c_kernels())
        comparer = DeviceComparer(bench.device)
        ranks = [_Rank(weights), _Rank(weights)]
        times = [0.0, 0.0]
        for version, fraction in enumerate((0.0, _TYPICAL, 0.2, _TYPICAL)):
            qwen3.change(weights, seed=version, fraction=fraction)
            on_device = {n: DeviceBits(tensor, torch.bfloat16, comparer=comparer) for n, tensor in weights.items()}
            on_host = {name: bits_of(tensor) for name, tensor in weights.items()}
            both: tuple[Mapping[str, ShardBits], ...] = (on_device, on_host)
            for i, (rank, shards) in enumerate(zip(ranks, both, strict=True)):
                times[i] = bench.timed(lambda r=rank, s=shards: r.encode(s), repeats=1)  # type: ignore[misc] # bound now
                rank.encoder.commit(shards)
            if ranks[0].blobs != ranks[1].blobs:
                message = f"version {version}, {fraction:.2%} changed: the blobs differ"
                raise MismatchError(message)
        ranks[0].encoder.audit()
        small = "" if _has_c_kernels() else " (tiny: the C kernels are not built)"
        return [
            Figure(name="a version of one layer, shards on the device", value=1e3 * times[0], unit="ms"),
            Figure(name="the same, shards copied to the host before", value=1e3 * times[1], unit="ms"),
            Figure(
                name=f"blobs of the last version{small}", value=sum(map(len, ranks[0].blobs.values())) / 1e6, unit="MB"
            ),
        ]


class _Rank:
    """A trainer rank that keeps what it put."""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        layout, cells = qwen3.cells_of(weights, num_ranks=2)
        self.encoder = RankEncoder(qwen3.specs_of(weights), layout, cells, num_threads=2)
        self.blobs: dict[str, bytes] = {}

    def encode(self, shards: Mapping[str, Any]) -> None:
        self.blobs.clear()

        def put(key: str, payload: Any) -> None:
            self.blobs[key] = bytes(payload)

        self.encoder.encode(shards, put, "v", is_full=False, on_key=lambda _: None)


def _parts(weights: Mapping[str, torch.Tensor], comparer: DeviceComparer) -> list[CellPart]:
    """Return the cells of weights whose base is what they are now."""
    shards = {name: DeviceBits(tensor, torch.bfloat16, comparer=comparer) for name, tensor in weights.items()}
    bases = {name: shard.new_base() for name, shard in shards.items()}
    for name, shard in shards.items():
        bases[name].take(shard, tuple(slice(0, size) for size in shard.shape))
    layout, cells = qwen3.cells_of(weights, num_ranks=2)
    return [
        CellPart(
            shard=shards[cell.tensor],
            base=bases[cell.tensor],
            index=slices_in(cell.box, layout[cell.tensor]),
            rows=rows_of(cell.box, layout[cell.tensor].shape),
        )
        for cell in cells
    ]


def _check_exact(bench: Bench, comparer: DeviceComparer, fraction: float, seed: int) -> int:
    """Compare one layer with the CPU kernels, cell by cell; return how many cells there were."""
    weights = qwen3.layers(1, bench.device, is_quick=bench.is_quick or not _has_c_kernels())
    parts = _parts(weights, comparer)
    olds = {id(part): part.base[part.index] for part in parts}
    qwen3.change(weights, seed=seed, fraction=fraction)
    loops = kernels.load()
    found = comparer.compare(parts, is_overwrite=bool(seed % 2))
    for part, one in zip(parts, found, strict=True):
        new, old = (as_rows(bits, part.rows) for bits in (np.asarray(part.shard[part.index]), olds[id(part)]))
        expected = loops.compare(new, old, part.rows, is_overwrite=bool(seed % 2))
        if _facts(one) != _facts(expected):
            size = prod(new.shape)
            message = f"a cell of {size} elements, {fraction:.2%} changed, is not coded as on the CPU"
            raise MismatchError(message)
    return len(parts)


def _has_c_kernels() -> bool:
    """Return whether there is something fast to compare with: numpy takes minutes for a layer where most has changed."""
    return kernels.load().name != "numpy"


def _facts(found: Comparison) -> tuple[Any, ...]:
    streams = found.streams
    if streams is None:
        return found.num_changed, found.sum_delta, None
    pieces = (bytes(one) for one in (streams.gaps, streams.lows, streams.codes, streams.escapes))
    return found.num_changed, found.sum_delta, streams.shift, streams.values_sum, *pieces

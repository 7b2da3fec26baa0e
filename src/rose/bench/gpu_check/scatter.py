"""The engine's side: staged changes written into live, fused weights in place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rose.backends.torch_weights.sink import DeviceSink, ParameterSink
from rose.backends.torch_weights.slices import Piece, SlicePlan
from rose.bench.gpu_check import qwen3
from rose.bench.gpu_check.outcome import Figure
from rose.bench.gpu_check.part import Bench, MismatchError, Part
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import whole_box

_FRACTION = 0.01


class Scatter(Part):
    """Sparse and dense writes of a layer, into fused and cut parameters."""

    name = "scatter"
    shows = "changes of one layer written in place into fused live weights: the same bits as on the host, and how long the engine is paused"

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Write to the device and to the host, and compare."""
        plan, live = _plan(bench.device, is_quick=bench.is_quick)
        host_plan, host_live = _plan(torch.device("cpu"), is_quick=bench.is_quick)
        sink, host = DeviceSink(plan), ParameterSink(host_plan)
        rng = np.random.default_rng(0)
        changes = {name: _draw(rng, box) for name, (box,) in sink.boxes().items()}
        dense = {n: rng.integers(0, 1 << 16, box.shape, dtype=np.uint16) for n, (box,) in sink.boxes().items()}

        def sparse() -> None:
            _write_sparse(sink, changes)
            sink.flush()

        def whole() -> None:
            for name, (box,) in sink.boxes().items():
                sink.write_dense(name, box, dense[name])
            sink.flush()

        whole_s, sparse_s = bench.timed(whole), bench.timed(sparse)
        for name, (box,) in host.boxes().items():
            host.write_dense(name, box, dense[name])
        _write_sparse(host, changes)
        wrong = [name for name, tensor in live.items() if not torch.equal(tensor.cpu(), host_live[name])]
        _check_reads(sink, host, changes, wrong)
        num = sum(positions.size for positions, _ in changes.values())
        size = qwen3.num_bytes({name: tensor for name, tensor in live.items()})  # noqa: C416 - a mapping of tensors
        return [
            Figure(name="sparse writes of one layer, 1 % changed", value=1e3 * sparse_s, unit="ms"),
            Figure(name="changes written", value=num / sparse_s / 1e6, unit="million/s"),
            Figure(
                name="of which the pause of 8.2 billion parameters would be",
                value=1e3 * sparse_s * 2 * qwen3.NUM_PARAMETERS / size,
                unit="ms",
            ),
            Figure(name="dense writes", value=size / whole_s / 1e9, unit="GB/s"),
        ]


def _plan(device: torch.device, *, is_quick: bool) -> tuple[SlicePlan, dict[str, torch.Tensor]]:
    """Return a layer's weights as an engine holds them: q, k and v in one parameter, gate and up in one, a half of ``down``'s columns."""
    shapes = qwen3.layer_shapes(is_quick=is_quick)
    hidden = shapes["q"][1]
    sizes = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
    live = {
        fused: torch.zeros(sum(shapes[n][0] for n in names), hidden, dtype=torch.int16, device=device)
        for fused, names in sizes.items()
    }
    live["down"] = torch.zeros(shapes["down"][0], shapes["down"][1] // 2, dtype=torch.int16, device=device)
    live["o"] = torch.zeros(shapes["o"], dtype=torch.int16, device=device).T.contiguous().T
    pieces: dict[str, tuple[Piece, ...]] = {}
    for fused, names in sizes.items():
        row = 0
        for name in names:
            pieces[name] = (Piece(box=whole_box(shapes[name]), live=live[fused][row : row + shapes[name][0]]),)
            row += shapes[name][0]
    columns = shapes["down"][1] // 2
    pieces["down"] = (Piece(box=ShardSpec(offset=(0, columns), shape=(shapes["down"][0], columns)), live=live["down"]),)
    pieces["o"] = (Piece(box=whole_box(shapes["o"]), live=live["o"]),)
    specs = {name: TensorSpec(name=name, shape=shapes[name], dtype="bfloat16") for name in pieces}
    return SlicePlan(tensors=specs, pieces=pieces), live


def _draw(rng: np.random.Generator, box: ShardSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return positions of a box, ascending, and new patterns."""
    num = max(1, int(_FRACTION * box.num_elements))
    positions = np.unique(rng.integers(0, box.num_elements, num, dtype=np.int32))
    return positions, rng.integers(0, 1 << 16, positions.size, dtype=np.uint16)


def _write_sparse(sink: ParameterSink, changes: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for name, (box,) in sink.boxes().items():
        sink.write_sparse(name, box, *changes[name])


def _check_reads(
    sink: ParameterSink, host: ParameterSink, changes: dict[str, tuple[np.ndarray, np.ndarray]], wrong: list[str]
) -> None:
    for name, (box,) in host.boxes().items():
        positions = changes[name][0]
        if not np.array_equal(sink.gather(name, box, positions), host.gather(name, box, positions)):
            wrong.append(f"what is read of {name}")
    if wrong:
        message = f"not the bits that were written: {', '.join(wrong)}"
        raise MismatchError(message)

"""The slice plan of made-up loaders that fuse, pad, cut and replicate as vLLM's do, and the sink over it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rose.backends.torch_weights.sink import ParameterSink
from rose.backends.torch_weights.slices import SlicePlan, read_checkpoint
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec

BF16 = torch.bfloat16


def parameter(*shape: int, dtype: Any = BF16) -> Any:
    return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class Fused(torch.nn.Module):
    """Rank ``rank`` of 2: q and k cut by rows and fused, o cut by columns, an embedding padded from 5 to 8 rows."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.qk = parameter(4, 6)
        self.o = parameter(4, 3)
        self.embed = parameter(8, 6)
        self.norm = parameter(6)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name == "q":
                self.qk.data[0:2].copy_(tensor.narrow(0, 2 * self.rank, 2))
            elif name == "k":
                self.qk.data.narrow(0, 2, 2).copy_(tensor[2 * self.rank : 2 * self.rank + 2])
            elif name == "o":
                self.o.data.copy_(tensor.narrow(1, 3 * self.rank, 3))
            elif name == "embed":
                self.embed.data[:5] = tensor
                self.embed.data[5:].fill_(0)
            elif name == "norm":
                self.norm.data.copy_(tensor)


SHAPES = {"q": (4, 6), "k": (4, 6), "o": (4, 6), "embed": (5, 6), "norm": (6,), "rotary.inv_freq": (3,)}


def checkpoint(shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    return {name: torch.empty(shape, dtype=BF16, device="meta") for name, shape in (shapes or SHAPES).items()}


def bits_of(tensor: Any) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


class Padded(torch.nn.Module):
    """Rank ``rank`` of 2 of a tensor of 3 rows that is padded to 8: the second rank holds padding only."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.w = rank, parameter(4, 6)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        for _, tensor in weights:
            num_rows = 0 if self.rank else 3
            self.w.data.narrow(0, num_rows, 4 - num_rows).zero_()
            source = tensor.narrow(0, 0, 3) if num_rows else torch.zeros_like(self.w.data.narrow(0, 0, 0))
            self.w.data.narrow(0, 0, num_rows).copy_(source)


@pytest.mark.parametrize(("rank", "num_rows"), [(0, 3), (1, 0)])
def test_a_rank_may_hold_padding_only(rank: int, num_rows: int) -> None:
    plan = SlicePlan.trace(Padded(rank), checkpoint({"w": (3, 6)}))
    assert plan.tensors["w"].shape == (3, 6)
    boxes = ParameterSink.over(plan).boxes().get("w", ())
    assert [box.shape for box in boxes] == ([(num_rows, 6)] if num_rows else [])
    assert set(ParameterSink.over(plan).checksums()) == ({"w"} if num_rows else set())


@pytest.mark.parametrize("rank", [0, 1])
def test_plan_finds_where_each_slice_lives(rank: int) -> None:
    plan = SlicePlan.trace(Fused(rank), checkpoint())
    boxes = {name: [piece.box for piece in pieces] for name, pieces in plan.pieces.items()}
    assert boxes == {
        "q": [ShardSpec(offset=(2 * rank, 0), shape=(2, 6))],
        "k": [ShardSpec(offset=(2 * rank, 0), shape=(2, 6))],
        "o": [ShardSpec(offset=(0, 3 * rank), shape=(4, 3))],
        "embed": [ShardSpec(offset=(0, 0), shape=(5, 6))],
        "norm": [ShardSpec(offset=(0,), shape=(6,))],
    }
    assert "rotary.inv_freq" not in plan.tensors
    assert plan.tensors["o"].shape == (4, 6)
    assert plan.tensors["o"].dtype == "bfloat16"


def test_trace_leaves_live_weights_alone() -> None:
    """Padding that a loader clears included: an engine may be traced while it serves."""
    model = Fused()
    for live in model.parameters():
        live.data.fill_(3)
    SlicePlan.trace(model, checkpoint())
    assert all(bool((live == 3).all()) for live in model.parameters())


@pytest.mark.parametrize("rank", [0, 1])
def test_writes_through_the_sink_equal_a_load(rank: int) -> None:
    """Dense and sparse writes of every box give what the loader gives for the whole checkpoint."""
    rng = np.random.default_rng(rank)
    whole = {name: torch.from_numpy(rng.normal(size=shape)).to(BF16) for name, shape in SHAPES.items()}
    expected, model = Fused(rank), Fused(rank)
    expected.load_weights(iter(whole.items()))
    sink = ParameterSink(SlicePlan.trace(model, checkpoint()))
    for number, (name, boxes) in enumerate(sink.boxes().items()):
        for box in boxes:
            index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            bits = np.ascontiguousarray(bits_of(whole[name])[index])
            bits.setflags(write=False)
            if number % 2:
                sink.write_dense(name, box, bits)
            else:
                sink.write_sparse(name, box, np.arange(bits.size), bits.reshape(-1))
            np.testing.assert_array_equal(sink.read(name, box), bits)
    for name, live in model.named_parameters():
        assert torch.equal(live, expected.get_parameter(name)), name


def test_sparse_write_into_a_part_of_a_fused_parameter() -> None:
    """A cell smaller than the piece, in memory that is not contiguous for it."""
    model = Fused()
    sink = ParameterSink(SlicePlan.trace(model, checkpoint()))
    cell = ShardSpec(offset=(1, 2), shape=(1, 3))
    sink.write_sparse("k", cell, np.array([0, 2]), np.array([0x3F80, 0x4000], dtype=np.uint16))
    expected = torch.zeros(4, 6, dtype=BF16)
    expected[3, 2], expected[3, 4] = 1.0, 2.0
    assert torch.equal(model.qk.data, expected)
    sink.write_dense("k", cell, np.array([[1, 2, 3]], dtype=np.uint16))
    np.testing.assert_array_equal(sink.read("k", cell), np.array([[1, 2, 3]], dtype=np.uint16))


def test_a_read_shows_the_live_bits() -> None:
    model = Fused()
    sink = ParameterSink(SlicePlan.trace(model, checkpoint()))
    box = ShardSpec(offset=(0,), shape=(6,))
    model.norm.data.fill_(1)
    assert sink.read("norm", box).tolist() == [0x3F80] * 6
    assert sink.gather("norm", box, np.array([1, 5])).tolist() == [0x3F80] * 2


def test_boxes_of_other_ranks_are_refused() -> None:
    sink = ParameterSink(SlicePlan.trace(Fused(0), checkpoint()))
    for box in (ShardSpec(offset=(2, 0), shape=(2, 6)), ShardSpec(offset=(1, 0), shape=(2, 6))):
        with pytest.raises(LayoutMismatchError, match="'q'"):
            sink.write_dense("q", box, np.zeros(box.shape, dtype=np.uint16))


class Copies(torch.nn.Module):
    """One checkpoint tensor in two places (an untied copy, a replicated head), and a scalar held as one element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = parameter(3, 2), parameter(3, 2), parameter(1)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            if name == "scale":
                self.scale.data.copy_(tensor.reshape(1))
            else:
                self.first.data.copy_(tensor)
                self.second.data.copy_(tensor)


def test_every_copy_is_written_and_scalars_work() -> None:
    model = Copies()
    sink = ParameterSink(SlicePlan.trace(model, checkpoint({"w": (3, 2), "scale": ()})))
    (box,) = sink.boxes()["w"]
    sink.write_dense("w", box, np.full((3, 2), 0x3F80, dtype=np.uint16))
    assert bool((model.first == 1).all())
    assert bool((model.second == 1).all())
    sink.write_dense("scale", ShardSpec(offset=(), shape=()), np.array(0x4000, dtype=np.uint16))
    assert model.scale.item() == 2
    assert sink.read("scale", ShardSpec(offset=(), shape=())) == 0x4000
    assert sink.checksums().keys() == {"w", "scale"}


def _loader(load: Any) -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = parameter(3, 2)
            self.other = parameter(2)

        def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
            for name, tensor in weights:
                if name == "other":
                    self.other.data.copy_(tensor)
                else:
                    load(self.w, tensor)

    return Model()


@pytest.mark.parametrize(
    ("load", "shape", "says"),
    [
        (lambda w, t: w.data.copy_(t.t()), (2, 3), "w is reshaped or transposed"),
        (lambda w, t: w.data.copy_(t * 2), (3, 2), "computes a parameter"),
        (lambda w, t: w.data.copy_(t), (3, 1), "had taken w, needed more than cuts and copies"),
        (lambda w, t: w.data.fill_(t.sum().item()), (3, 2), "had taken w, needed more than cuts and copies"),
        (lambda _w, _t: None, (3, 2), "come from no checkpoint tensor.*: w"),
    ],
)
def test_loaders_beyond_cutting_are_refused(load: Any, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(LayoutMismatchError, match=says):
        SlicePlan.trace(_loader(load), checkpoint({"w": shape, "other": (2,)}))


def test_repacked_weights_are_refused_by_name() -> None:
    """What vLLM's CPU prepacking leaves behind: a parameter without elements."""
    model = Fused()
    model.qk = torch.nn.Parameter(torch.empty(0, dtype=BF16), requires_grad=False)
    with pytest.raises(LayoutMismatchError):
        SlicePlan.trace(model, checkpoint())


def write_safetensors(path: Path, entries: dict[str, tuple[str, list[int]]]) -> None:
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]} for name, (dtype, shape) in entries.items()
    }
    raw = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


def test_checkpoint_headers_of_all_files_are_read(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-00001-of-00002.safetensors", {"a": ("BF16", [2, 3])})
    write_safetensors(tmp_path / "model-00002-of-00002.safetensors", {"b": ("F32", [])})
    found = read_checkpoint(tmp_path)
    assert {name: (tuple(t.shape), t.dtype, t.is_meta) for name, t in found.items()} == {
        "a": ((2, 3), torch.bfloat16, True),
        "b": ((), torch.float32, True),
    }


def test_checkpoints_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatchError, match=r"no \*\.safetensors"):
        read_checkpoint(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", {"a": ("F4", [2])})
    with pytest.raises(LayoutMismatchError, match="F4"):
        read_checkpoint(tmp_path)

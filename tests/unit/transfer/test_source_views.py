"""Checkpoint tensors inside fused, stacked and padded parameters."""

from __future__ import annotations

import numpy as np
import pytest

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec
from rose.transfer.layout import find_cover_problem, slices_in, split_evenly, whole_box
from rose.transfer.source_views import (
    HeldBits,
    View,
    fused_expert_views,
    gate_up_views,
    grouped_qkv_views,
    held_tensors,
)

QKV = ("q", "k", "v")


def _read(bits: HeldBits) -> np.ndarray:
    return bits[tuple(slice(0, size) for size in bits.shape)]


def _rows(first: int, num_rows: int, *rest: int) -> ShardSpec:
    return ShardSpec(offset=(first, *(0 for _ in rest)), shape=(num_rows, *rest))


def _tensors(views: tuple[View, ...], whole: np.ndarray, box: ShardSpec) -> dict[str, tuple[ShardSpec, np.ndarray]]:
    local = whole[slices_in(box, whole_box(whole.shape))]
    held = held_tensors(views, {"p": box})
    return {name: (one.box, _read(HeldBits(one, {"p": local}))) for name, one in held.items()}


def test_w03_query_key_and_value_come_out_of_megatrons_groups() -> None:
    """Case W03: rows 0 1 2 3 100 101 200 201 | 4 5 6 7 102 103 202 203, over two ranks and at any other cut."""
    views = grouped_qkv_views("p", QKV, num_heads=4, num_kv_heads=2, head_dim=2, rest=(1,))
    fused = np.array([0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203], dtype=np.uint16)[:, None]
    full = {"q": np.arange(8), "k": np.arange(100, 104), "v": np.arange(200, 204)}
    for num_ranks in (1, 2, 3, 5, 16):
        boxes: dict[str, list[ShardSpec]] = {name: [] for name in QKV}
        for first, num_rows in split_evenly(16, num_ranks):
            for name, (box, bits) in _tensors(views, fused, _rows(first, num_rows, 1)).items():
                boxes[name].append(box)
                start = box.offset[0]
                assert bits[:, 0].tolist() == full[name][start : start + box.shape[0]].tolist()
        assert [find_cover_problem((len(full[name]), 1), boxes[name]) for name in QKV] == [None] * 3
    rank_1 = _tensors(views, fused, _rows(8, 8, 1))
    assert {name: box.offset[0] for name, (box, _) in rank_1.items()} == {"q": 4, "k": 2, "v": 2}


def test_w05_gate_and_up_come_out_of_two_ranks() -> None:
    """Case W05: shards [0 1 10 11] and [2 3 12 13] are gate 0..3 and up 10..13."""
    views = gate_up_views("p", ("gate", "up"), (4,), num_ranks=2)
    fused = np.array([0, 1, 10, 11, 2, 3, 12, 13], dtype=np.uint16)
    rank_1 = _tensors(views, fused, _rows(4, 4))
    assert {name: (box.offset, bits.tolist()) for name, (box, bits) in rank_1.items()} == {
        "gate": ((2,), [2, 3]),
        "up": ((2,), [12, 13]),
    }
    whole = _tensors(views, fused, _rows(0, 8))
    assert {name: bits.tolist() for name, (_, bits) in whole.items()} == {
        "gate": [0, 1, 2, 3],
        "up": [10, 11, 12, 13],
    }


def test_stacked_experts_are_views_of_the_stack() -> None:
    """Experts 2 and 3 of 4 on one rank: checkpoint tensors of those alone, without a copy."""
    whole = np.arange(4 * 6 * 5, dtype=np.uint16).reshape(4, 6, 5)
    views = fused_expert_views("m.mlp.experts.gate_up_proj", whole.shape)
    box = ShardSpec(offset=(2, 0, 0), shape=(2, 6, 5))
    held = held_tensors(views, {"m.mlp.experts.gate_up_proj": box})
    assert list(held) == [f"m.mlp.experts.{e}.{part}_proj.weight" for e in (2, 3) for part in ("gate", "up")]
    up = HeldBits(held["m.mlp.experts.3.up_proj.weight"], {"m.mlp.experts.gate_up_proj": whole[2:]})
    assert (up.shape, up.dtype) == ((3, 5), whole.dtype)
    assert np.shares_memory(up[slice(1, 3), slice(0, 5)], whole)
    np.testing.assert_array_equal(up[slice(1, 3), slice(2, 4)], whole[3, 4:6, 2:4])
    np.testing.assert_array_equal(np.asarray(up), whole[3, 3:])
    assert np.array(up, copy=True).base is None


def test_stacked_experts_cut_inside() -> None:
    """Ranks that hold columns of every down projection, or rows that cross from gate to up."""
    down = np.arange(4 * 5 * 3, dtype=np.uint16).reshape(4, 5, 3)
    held = held_tensors(
        fused_expert_views("experts.down_proj", down.shape),
        {"experts.down_proj": ShardSpec(offset=(0, 0, 1), shape=(4, 5, 2))},
    )
    assert {one.box for one in held.values()} == {ShardSpec(offset=(0, 1), shape=(5, 2))}
    bits = HeldBits(held["experts.2.down_proj.weight"], {"experts.down_proj": down[:, :, 1:]})
    np.testing.assert_array_equal(_read(bits), down[2, :, 1:])
    views = fused_expert_views("experts.gate_up_proj", (1, 6, 2))
    held = held_tensors(views, {"experts.gate_up_proj": ShardSpec(offset=(0, 2, 0), shape=(1, 2, 2))})
    assert [one.box.offset[0] for one in held.values()] == [2, 0]


def test_padding_rows_belong_to_no_tensor() -> None:
    """Case W06, the trainer's side: 10 rows padded to 16 over two ranks; rank 1 has rows 8 and 9."""
    padded = np.arange(16, dtype=np.uint16)[:, None]
    views = (View.whole("embed", (10, 1), "p"),)
    box, bits = _tensors(views, padded, _rows(8, 8, 1))["embed"]
    assert (box, bits[:, 0].tolist()) == (_rows(8, 2, 1), [8, 9])
    assert _tensors(views, padded, _rows(10, 6, 1)) == {}


def test_slices_across_pieces_are_put_together() -> None:
    views = grouped_qkv_views("p", QKV, num_heads=4, num_kv_heads=2, head_dim=2, rest=())
    fused = np.arange(16, dtype=np.uint16)
    bits = HeldBits(held_tensors(views, {"p": _rows(0, 16)})["q"], {"p": fused})
    assert bits[(slice(3, 6),)].tolist() == [3, 8, 9]
    assert np.shares_memory(bits[(slice(0, 4),)], fused)
    assert bits[(slice(2, 2),)].shape == (0,)


def test_tensors_from_several_parameters() -> None:
    views = (
        View(name="w", shape=(4,), part=_rows(0, 2), parameter="a", box=_rows(0, 2)),
        View(name="w", shape=(4,), part=_rows(2, 2), parameter="b", box=ShardSpec(offset=(1, 1), shape=(1, 2))),
    )
    held = held_tensors(views, {"a": _rows(0, 2), "b": whole_box((2, 4))})
    bits = HeldBits(held["w"], {"a": np.array([7, 8], np.uint8), "b": np.arange(8, dtype=np.uint8).reshape(2, 4)})
    assert _read(bits).tolist() == [7, 8, 5, 6]


def test_what_does_not_fit_is_refused_by_name() -> None:
    views = (
        View(name="w", shape=(6,), part=_rows(0, 2), parameter="p", box=_rows(0, 2)),
        View(name="w", shape=(6,), part=_rows(4, 2), parameter="p", box=_rows(2, 2)),
    )
    with pytest.raises(LayoutMismatchError, match=r"one box.* w: .*4 of 6"):
        held_tensors(views, {"p": _rows(0, 4)})
    with pytest.raises(LayoutMismatchError, match=r"w in p: a box of \(3,\) cannot hold"):
        View(name="w", shape=(6,), part=_rows(0, 2), parameter="p", box=_rows(0, 3))
    with pytest.raises(LayoutMismatchError, match="leaves shape"):
        View(name="w", shape=(1,), part=_rows(0, 2), parameter="p", box=_rows(0, 2))
    for name, shape in (("mlp.up_proj", (4, 6, 5)), ("experts.gate_up_proj", (4, 5, 5)), ("experts.down_proj", (4, 5))):
        with pytest.raises(LayoutMismatchError, match="is not a stack of experts"):
            fused_expert_views(name, shape)
    with pytest.raises(LayoutMismatchError, match="5 query heads"):
        grouped_qkv_views("p", QKV, num_heads=5, num_kv_heads=2, head_dim=1, rest=())
    with pytest.raises(LayoutMismatchError, match="3 rows of gate"):
        gate_up_views("p", ("gate", "up"), (3,), num_ranks=2)

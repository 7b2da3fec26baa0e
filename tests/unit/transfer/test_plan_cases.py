"""Cases of weights that went wrong elsewhere: fused projections, padding, experts, names, coverage."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import pytest
from carrying import Rank, carry, plan_all
from model_files import load_file

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.engine_tables import table_layout
from rose.transfer.layout import TargetLayout, whole_box
from rose.transfer.plan import check_targets, find_coverage
from rose.transfer.source_views import View, gate_up_views, grouped_qkv_views, stacked_experts_in

ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
QKV = tuple(f"{ATTENTION}.{part}_proj.weight" for part in "qkv")
GATE_UP = (f"{MLP}.gate_proj.weight", f"{MLP}.up_proj.weight")


def _spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="bfloat16")


def _column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint16)[:, None]


def _rows(first: int, num_rows: int) -> ShardSpec:
    return ShardSpec(offset=(first, 0), shape=(num_rows, 1))


def _fused(arrived: Mapping[str, np.ndarray], names: tuple[str, ...]) -> list[int]:
    """Return a fused engine parameter: its parts on top of one another."""
    return np.concatenate([arrived[name][:, 0] for name in names if name in arrived]).tolist()


def test_w03_fused_qkv_reaches_every_rank_in_its_own_order() -> None:
    """Case W03: from Megatron's order by KV head to [Q|K|V] of each of two ranks, not a chunk of the whole [Q|K|V]."""
    views = grouped_qkv_views("qkv", QKV, num_heads=4, num_kv_heads=2, head_dim=2, rest=(1,))
    shards = [_column(0, 1, 2, 3, 100, 101, 200, 201), _column(4, 5, 6, 7, 102, 103, 202, 203)]
    ranks = [Rank.viewed(views, {"qkv": (_rows(8 * i, 8), shard)}) for i, shard in enumerate(shards)]
    specs = [_spec(name, rows, 1) for name, rows in zip(QKV, (8, 4, 4), strict=True)]
    config = {"heads": 4, "kv": 2}
    arrived = carry(specs, ranks, table_layout(specs, config, engine="vllm", tp=2))
    assert _fused(arrived[0], QKV) == [0, 1, 2, 3, 100, 101, 200, 201]
    assert _fused(arrived[1], QKV) == [4, 5, 6, 7, 102, 103, 202, 203]
    whole = _fused(carry(specs, ranks, table_layout(specs, config, engine="vllm", tp=1))[0], QKV)
    assert whole[8:] == [100, 101, 102, 103, 200, 201, 202, 203]
    assert whole[8:] != _fused(arrived[1], QKV)
    arrived = carry(specs, ranks, table_layout(specs, config, engine="vllm", tp=4))
    assert [_fused(rank, QKV) for rank in arrived[2:]] == [[4, 5, 102, 103, 202, 203], [6, 7, 102, 103, 202, 203]]


def test_w05_gate_and_up_stay_apart() -> None:
    """Case W05: shards [0 1 10 11] and [2 3 12 13] for one rank and for four."""
    views = gate_up_views("fc1", GATE_UP, (4, 1), num_ranks=2)
    shards = [_column(0, 1, 10, 11), _column(2, 3, 12, 13)]
    ranks = [Rank.viewed(views, {"fc1": (_rows(4 * i, 4), shard)}) for i, shard in enumerate(shards)]
    specs = [_spec(name, 4, 1) for name in GATE_UP]
    arrived = {
        tp: carry(specs, ranks, table_layout(specs, {"heads": 4, "kv": 4}, engine="vllm", tp=tp)) for tp in (1, 4)
    }
    assert _fused(arrived[1][0], GATE_UP) == [0, 1, 2, 3, 10, 11, 12, 13]
    assert _fused(arrived[4][2], GATE_UP) == [2, 12]


def test_w06_padding_rows_are_no_part_of_the_plan() -> None:
    """Case W06: 10 rows padded to 16 over two trainer ranks; garbage in rows 10 to 15 is in no cell."""
    name = "model.embed_tokens.weight"
    views = [View.whole(name, (10, 1), "embedding")]
    padded = np.arange(16, dtype=np.uint16)[:, None]
    ranks = [Rank.viewed(views, {"embedding": (_rows(8 * i, 8), padded[8 * i : 8 * i + 8])}) for i in range(2)]
    specs = [_spec(name, 10, 1)]
    assert ranks[1].layout == {name: _rows(8, 2)}
    before = padded.copy()
    padded[9] += 1
    padded[10:] += 7
    changed = [
        row
        for cell in plan_all(specs, ranks, [])
        for row in range(cell.box.offset[0], cell.box.offset[0] + cell.box.shape[0])
        if padded[row] != before[row]
    ]
    assert changed == [9]
    layout = table_layout(specs, {"heads": 2, "kv": 2}, engine="vllm", tp=2)
    arrived = carry(specs, ranks, layout)
    assert arrived[0][name][:, 0].tolist() == [*range(9), 10]
    assert name not in arrived[1], "rows 32 to 63 of the padded vocabulary are no real ones"


def test_w15_experts_are_named_globally() -> None:
    """Case W15: two trainer ranks with two experts each, engines that hold one expert a rank or all."""
    specs = [_spec(f"{MLP}.experts.{e}.{part}_proj.weight", 1, 1) for e in range(4) for part in ("gate", "up", "down")]
    ranks = [
        Rank.plain({s.name: _column(100 * e) for e in (2 * r, 2 * r + 1) for s in specs[3 * e : 3 * e + 3]})
        for r in range(2)
    ]
    config = {"heads": 4, "kv": 4, "experts": 4}
    over_four = table_layout(specs, config, engine="vllm", tp=4, ep=4)
    for rank, arrived in enumerate(carry(specs, ranks, over_four)):
        assert {int(array[0, 0]) for array in arrived.values()} == {100 * rank}
        assert len(arrived) == 3
    everything = carry(specs, ranks, table_layout(specs, config, engine="vllm", tp=1))[0]
    assert sorted({int(array[0, 0]) for array in everything.values()}) == [0, 100, 200, 300]
    cells = [cell for cell in plan_all(specs, ranks, [over_four]) if ".experts.3." in cell.tensor]
    assert {cell.targets for cell in cells} == {("vllm-tp4-ep4/3",)}
    with pytest.raises(LayoutMismatchError, match=r"experts\.0\.gate_proj.* hold 2 of 1"):
        plan_all(specs, [*ranks, Rank.plain({specs[0].name: _column(7)})], [])


def _small_moe() -> tuple[list[TensorSpec], list[TensorSpec], dict[str, int]]:
    """Return Qwen3-30B-A3B shrunk to 2 layers, 4 experts and narrow tensors: checkpoint's and in-memory names."""
    table, raw = load_file("Qwen3-30B-A3B.json.gz")
    sizes = {2048: 8, 768: 4, 4096: 16, 512: 4, 128: 4, 1536: 8, 151936: 10}
    config = {"heads": 8, "kv": 2, "experts": 4, "hidden": 8}

    def is_kept(name: str) -> bool:
        parts = name.split(".")
        if "layers" in parts and int(parts[2]) > 1:
            return False
        return not ("experts" in parts and parts[5].isdigit() and int(parts[5]) > 3)

    def shrink(rows: list[tuple[str, tuple[int, ...]]]) -> list[TensorSpec]:
        return [_spec(name, *(sizes[size] for size in shape)) for name, shape in rows if is_kept(name)]

    checkpoint = shrink([(spec.name, spec.shape) for spec in table.tensors])
    return checkpoint, shrink([(name, tuple(shape)) for name, shape, _ in raw["transformers5_inmemory_params"]]), config


def test_w17_both_namings_of_experts_reach_the_same_bits() -> None:
    """Case W17: per-expert tensors of a checkpoint, and the stacks that transformers 5 keeps in memory."""
    checkpoint, in_memory, config = _small_moe()
    rng = np.random.default_rng(0)
    stacks = {spec.name: rng.integers(0, 1 << 16, spec.shape, dtype=np.uint16) for spec in in_memory}
    views = stacked_experts_in({spec.name: spec.shape for spec in in_memory})
    viewed = {view.parameter for view in views}
    plain = [View.whole(s.name, s.shape, s.name) for s in in_memory if s.name not in viewed]
    stacked = Rank.viewed([*plain, *views], {name: (whole_box(a.shape), a) for name, a in stacks.items()})
    assert set(stacked.layout) == {spec.name for spec in checkpoint}
    unstacked = Rank.plain({name: np.array(stacked.bits[name]) for name in stacked.layout})
    for tp, ep in ((2, 1), (2, 2)):
        layout = table_layout(checkpoint, config, engine="vllm", tp=tp, ep=ep)
        assert not find_coverage(layout).incomplete
        ways = [carry(checkpoint, [rank], layout) for rank in (stacked, unstacked)]
        for first, second in zip(*ways, strict=True):
            assert first.keys() == second.keys()
            assert all(np.array_equal(first[name], second[name]) for name in first)


def test_w17_names_without_a_rule_are_refused_all_at_once() -> None:
    checkpoint, in_memory, config = _small_moe()
    strange = [_spec("model.layers.0.mlp.experts.routed_experts.w13_weight", 4, 8, 8), _spec("model.rotary.freq", 4)]
    with pytest.raises(LayoutMismatchError, match="add a rule") as caught:
        table_layout([*checkpoint, *strange], config, engine="vllm", tp=2)
    assert all(spec.name in str(caught.value) for spec in strange)
    assert "down_proj" not in str(caught.value)
    with pytest.raises(LayoutMismatchError, match=r"experts\.gate_up_proj .* is transposed.*source_views"):
        table_layout(in_memory, config | {"hidden": 99}, engine="vllm", tp=2)


def test_w23_a_misspelled_tensor_is_named_on_both_sides() -> None:
    """Case W23: one of 399 names is wrong; nothing is planned, and both the missing and the unknown name are told."""
    table, _ = load_file("Qwen3-8B.json")
    layout = table_layout(table.tensors, table.config, engine="vllm", tp=2)
    tensors = {spec.name: spec for spec in table.tensors}
    check_targets(tensors, [layout], table.aliases)
    assert find_coverage(layout).text == "399/399"
    right, wrong = "model.layers.3.mlp.down_proj.weight", "model.layers.3.mlp.down_prj.weight"
    tensors[wrong] = attrs.evolve(tensors.pop(right), name=wrong)
    with pytest.raises(LayoutMismatchError) as caught:
        check_targets(tensors, [layout], table.aliases)
    text = str(caught.value)
    assert f"{right}, required by vllm-tp2, is not a tensor of the trainer" in text
    assert f"{wrong} of the trainer is unknown to vllm-tp2" in text
    assert text.count("model.layers.") == 2


def test_w23_a_tensor_that_no_rank_holds_is_not_covered() -> None:
    table, _ = load_file("Qwen3-8B.json")
    layout = table_layout(table.tensors, table.config, engine="vllm", tp=2)
    name = "model.layers.3.mlp.down_proj.weight"
    ranks = [{n: boxes for n, boxes in layout.ranks[0].items() if n != name}, layout.ranks[1]]
    coverage = find_coverage(attrs.evolve(layout, ranks=tuple(ranks)))
    assert (coverage.text, list(coverage.incomplete)) == ("398/399", [name])
    assert coverage.incomplete[name] == f"no rank holds {4096 * 12288 // 2} of its elements"


def test_boxes_of_one_rank_may_not_overlap() -> None:
    spec = _spec("w", 4)
    boxes = (ShardSpec(offset=(0,), shape=(3,)), ShardSpec(offset=(2,), shape=(2,)))
    target = TargetLayout(layout_id="x", tensors=(spec,), ranks=({"w": boxes},))
    assert find_coverage(target).text == "1/1"
    with pytest.raises(LayoutMismatchError, match="w in x/0: boxes overlap"):
        check_targets({"w": spec}, [target], {})

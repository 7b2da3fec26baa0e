"""Plans: the common refinement of sources and targets, and what is refused before a byte moves."""

from __future__ import annotations

import pytest

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import TargetLayout, rows_of, split_evenly, whole_box
from rose.transfer.plan import MAX_CELL_ELEMENTS, Cell, check_sources, check_targets, plan_source


def _spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def _rows(spec: TensorSpec, num_ranks: int) -> list[dict[str, ShardSpec]]:
    cuts = split_evenly(spec.shape[0], num_ranks)
    rest = spec.shape[1:]
    return [
        {spec.name: ShardSpec(offset=(start, *(0 for _ in rest)), shape=(n, *rest))} for start, n in cuts
    ]  # fmt: skip


def plan_cells(tensors, sources, targets=(), aliases=None) -> list[Cell]:
    """Plan every rank as the publishers of one trainer do together."""
    check_sources(tensors, sources)
    check_targets(tensors, targets, aliases or {})
    return [cell for rank, layout in enumerate(sources) for cell in plan_source(rank, layout, targets, aliases or {})]


def test_rows_over_four_ranks_meet_two_engine_ranks() -> None:
    """Case W13: rows 3, 3, 3, 1 against 5 + 5; rank 1's rows are cut at 5, an engine rank gets its half only."""
    spec = _spec("w", 10, 4)
    target = TargetLayout.tensor_parallel("tp2", [spec], num_ranks=2, split_dims={"w": 0})
    plan = plan_cells({"w": spec}, _rows(spec, 4), [target])
    rows = [(c.source_rank, c.box.offset[0], c.box.shape[0], c.targets) for c in plan]
    first, second = ("tp2/0",), ("tp2/1",)
    assert rows == [(0, 0, 3, first), (1, 3, 2, first), (1, 5, 1, second), (2, 6, 3, second), (3, 9, 1, second)]
    assert sum(c.box.num_elements for c in plan if c.targets == second) == 5 * 4


def test_several_layouts_refine_together() -> None:
    """Columns for one engine, rows for another, everything for a third: each cell says who needs it."""
    spec = _spec("w", 4, 6)
    targets = [
        TargetLayout.tensor_parallel("cols", [spec], num_ranks=3, split_dims={"w": 1}),
        TargetLayout.tensor_parallel("rows", [spec], num_ranks=2, split_dims={"w": 0}),
        TargetLayout.whole("all", [spec]),
    ]
    plan = plan_cells({"w": spec}, [{"w": whole_box((4, 6))}], targets)
    assert len(plan) == 6
    assert all(cell.box.shape == (2, 2) and len(cell.targets) == 3 for cell in plan)
    assert sum(cell.box.num_elements for cell in plan if "cols/1" in cell.targets) == 8


def test_edges_cut_only_where_they_pass() -> None:
    """A box elsewhere in the tensor does not cut a shard that it does not touch."""
    spec = _spec("w", 8)
    target = TargetLayout(
        layout_id="odd", tensors=(spec,), ranks=({"w": (ShardSpec(offset=(5,), shape=(1,)),)},)
    )  # fmt: skip
    plan = plan_cells({"w": spec}, _rows(spec, 2), [target])
    assert [(c.box.offset, c.box.shape) for c in plan] == [((0,), (4,)), ((4,), (1,)), ((5,), (1,)), ((6,), (2,))]
    assert [c.targets for c in plan] == [(), (), ("odd/0",), ()]


def test_empty_and_scalar_shards() -> None:
    """Case W10: empty shards have no cell, a scalar has one, an empty tensor none."""
    specs = {"q": _spec("q", 128), "z": _spec("z", 0, 4), "s": _spec("s"), "t": _spec("t", 3)}
    layouts = [_rows(specs["q"], 24)[r] | _rows(specs["z"], 24)[r] | _rows(specs["t"], 24)[r] for r in range(24)]
    layouts[0]["s"] = whole_box(())
    plan = plan_cells(specs, layouts)
    assert sum(c.tensor == "q" for c in plan) == 22
    assert not any(c.source_rank in (22, 23) for c in plan)
    assert [c.box for c in plan if c.tensor == "s"] == [whole_box(())]
    assert not any(c.tensor == "z" for c in plan)
    assert sum(c.box.num_elements for c in plan if c.tensor == "t") == 3


def test_tied_names_are_one_tensor() -> None:
    """An engine that holds the head separately cuts the one tensor that travels."""
    embed = _spec("embed", 8, 4)
    target = TargetLayout.tensor_parallel(
        "tp2", [embed, _spec("head", 8, 4)], num_ranks=2, split_dims={"head": 0}
    )  # fmt: skip
    plan = plan_cells({"embed": embed}, [{"embed": whole_box((8, 4))}], [target], {"head": "embed"})
    assert [c.box.offset for c in plan] == [(0, 0), (4, 0)]
    assert {c.tensor for c in plan} == {"embed"}


def test_sources_must_cover_each_element_once() -> None:
    specs = {"a": _spec("a", 4), "b": _spec("b", 4), "c": _spec("c", 4)}
    twice = {"a": whole_box((4,)), "b": whole_box((4,)), "c": whole_box((4,)), "ghost": whole_box((1,))}
    with pytest.raises(LayoutMismatchError, match="a of shape") as caught:
        plan_cells(specs, [twice, {"a": whole_box((4,)), "b": ShardSpec(offset=(4,), shape=(0,))}])
    assert "b of" not in str(caught.value)
    assert "ghost" in str(caught.value)
    with pytest.raises(LayoutMismatchError, match=r"b of shape .*; c of shape"):
        plan_cells(specs, [{"a": whole_box((4,))}])


def test_targets_that_do_not_fit_are_refused_by_name() -> None:
    """Unknown, missing, misshapen, mistyped and misplaced tensors are all named at once."""
    trainer = {n: _spec(n, 4) for n in ("ok", "shape", "dtype", "unknown", "place")}
    target = TargetLayout(
        layout_id="x",
        tensors=(
            _spec("ok", 4),
            _spec("shape", 5),
            _spec("dtype", 4, dtype="float32"),
            _spec("missing", 4),
            _spec("place", 4),
        ),
        ranks=({"place": (ShardSpec(offset=(2,), shape=(3,)),), "stray": (whole_box((4,)),)},),
    )
    with pytest.raises(LayoutMismatchError) as caught:
        plan_cells(trainer, [{n: whole_box((4,)) for n in trainer}], [target])
    text = str(caught.value)
    for name in ("shape is", "dtype is", "unknown of the trainer", "missing, required", "place in x/0", "stray, held"):
        assert name in text
    assert "ok" not in text


def test_cells_are_rows_at_equal_distances() -> None:
    """A stack that is cut inside both of its inner dimensions: one cell a matrix, where the shape is known and where it is not."""
    spec = _spec("w", 3, 4, 6)
    corner = ShardSpec(offset=(0, 1, 2), shape=(3, 2, 3))
    target = TargetLayout(layout_id="t", tensors=(spec,), ranks=({"w": (corner,)},))
    plan = plan_cells({"w": spec}, [{"w": whole_box((3, 4, 6))}], [target])
    assert [c.box.shape for c in plan if c.targets] == [(3, 1, 3), (3, 1, 3)]
    assert sum(c.box.num_elements for c in plan if c.targets) == corner.num_elements
    assert all(rows_of(c.box, spec.shape).num_elements == c.box.num_elements for c in plan)
    half = ShardSpec(offset=(0, 0, 0), shape=(3, 4, 3))
    known = plan_source(0, {"w": half}, [], {}, tensors={"w": spec})
    assert [c.box for c in known] == [half]
    unknown = plan_source(0, {"w": half}, [], {})
    assert [c.box.shape for c in unknown] == [(1, 4, 3)] * 3


def test_large_cells_are_cut() -> None:
    """Into near-equal pieces of whole rows, the same ones on every call; a box on its own stays inside the limit by default."""
    spec = _spec("w", 10, 6)
    target = TargetLayout.tensor_parallel("tp2", [spec], num_ranks=2, split_dims={"w": 1})
    layout = {"w": whole_box((10, 6))}
    plan = plan_source(0, layout, [target], {}, max_cell_elements=9)
    assert [(c.box.offset, c.box.shape) for c in plan] == [
        ((row, column), (n, 3)) for column in (0, 3) for row, n in ((0, 2), (2, 3), (5, 2), (7, 3))
    ]
    assert plan == plan_source(0, layout, [target], {}, max_cell_elements=9)
    big = plan_source(0, {"w": whole_box((1 << 23, 3))}, [], {})
    assert max(c.box.num_elements for c in big) <= MAX_CELL_ELEMENTS
    assert sum(c.box.num_elements for c in big) == 3 << 23
    assert len(big) == 7


def test_alike_layers_are_cut_alike() -> None:
    """Tensors of one shape share a cut only where the same engine ranks need the same boxes."""
    specs = [_spec(name, 4, 4) for name in "abc"]
    halves = [ShardSpec(offset=(2 * i, 0), shape=(2, 4)) for i in range(2)]
    ranks = ({"a": (halves[0],), "b": (halves[1],), "c": (halves[0],)}, {"a": (halves[1],), "b": (halves[0],)})
    target = TargetLayout(layout_id="t", tensors=tuple(specs), ranks=ranks)
    plan = plan_source(0, {name: whole_box((4, 4)) for name in "abc"}, [target], {})
    assert [(c.tensor, c.targets) for c in plan] == [
        ("a", ("t/0",)), ("a", ("t/1",)), ("b", ("t/1",)), ("b", ("t/0",)), ("c", ("t/0",)), ("c", ()),
    ]  # fmt: skip

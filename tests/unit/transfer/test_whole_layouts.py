"""Whole real models, every tensor of every layer: what engines of each size hold, and the plan that serves them."""

from __future__ import annotations

from math import prod

import pytest
from model_files import FILES, load_file

from rose.errors import LayoutMismatchError
from rose.transfer.engine_tables import ModelTable, table_layout
from rose.transfer.layout import TargetLayout, find_cover_problem, whole_box
from rose.transfer.plan import check_targets, plan_source

DEEPSEEK = "DeepSeek-V3.template.json"
REFUSED = {("Qwen2.5-0.5B.json", tp) for tp in (4, 8, 16)}  # 14 heads


def check_whole(table: ModelTable, layout: TargetLayout) -> None:
    """Every element is held, a rank holds none twice, and the cells are each element once, each wanted by some rank."""
    specs = {spec.name: spec for spec in table.tensors}
    check_targets(specs, [layout], table.aliases)  # refuses unknown and missing names, and overlaps within a rank
    for spec in layout.tensors:
        boxes = {box for rank in layout.ranks for box in rank.get(spec.name, ())}  # replicas are equal boxes
        assert find_cover_problem(spec.shape, list(boxes)) is None, spec.name
    held = {name: whole_box(spec.shape) for name, spec in specs.items()}
    cells = plan_source(0, held, [layout], table.aliases, tensors=specs)
    assert sum(cell.box.num_elements for cell in cells) == sum(prod(spec.shape) for spec in specs.values())
    assert all(cell.targets for cell in cells)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("name", [name for name in FILES if name != DEEPSEEK])
def test_every_tensor_is_planned(name: str, tp: int) -> None:
    table, _ = load_file(name)
    if (name, tp) in REFUSED:
        with pytest.raises(LayoutMismatchError, match="14 heads"):
            table_layout(table.tensors, table.config, engine="vllm", tp=tp)
        return
    check_whole(table, table_layout(table.tensors, table.config, engine="vllm", tp=tp))


def test_every_tensor_of_deepseek_is_planned_for_whole_experts_a_rank() -> None:
    table, raw = load_file(DEEPSEEK)
    layout = table_layout(table.tensors, table.config, engine="vllm", tp=16, ep=16)
    names = [spec.name for spec in table.tensors if not spec.name.endswith("weight_scale_inv")]
    num_buffers = sum(name.endswith("e_score_correction_bias") for name in names)
    assert (len(names) - num_buffers, num_buffers) == (raw["n_tensors_without_scales_and_mtp"], 58)
    check_whole(table, layout)

"""Tensors of known models and their cuts, beside the published checkpoints where a copy of their names is at hand."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from rose.backends.paced.shapes import DecoderShape
from rose.errors import ConfigError
from rose.simulation.model_shapes import MODEL_SHAPES, ModelShape, engine_layout, fsdp_layout, model_shape
from rose.transfer.layout import find_cover_problem
from rose.transfer.plan import check_sources, check_targets

MODELS = Path(__file__).resolve().parents[4] / "shared" / "models"
QWEN25_05B = ModelShape(
    name="qwen2.5-0.5b",
    decoder=DecoderShape(
        num_layers=24,
        hidden_size=896,
        num_heads=14,
        num_kv_heads=2,
        head_size=64,
        intermediate_size=4864,
        vocab_size=151_936,
    ),
    has_qkv_bias=True,
)
SMALL = ModelShape(
    name="small",
    decoder=DecoderShape(
        num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=2, head_size=16, intermediate_size=96, vocab_size=200
    ),
    has_qkv_bias=True,
    has_qk_norm=True,
)


def published(name: str) -> dict:
    path = MODELS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-32B"])
def test_names_and_shapes_are_the_checkpoints(name: str) -> None:
    data = published(name)
    specs = model_shape(name.lower()).tensors()
    assert [[spec.name, list(spec.shape), spec.dtype] for spec in specs] == data["params"]
    assert sum(prod(spec.shape) for spec in specs) == data["unique_params"]


def test_qwen25_has_its_biases_in_the_checkpoints_order() -> None:
    """The one model of that family with a list at hand ties its head, which is left out of the comparison."""
    params = published("Qwen2.5-0.5B")["params"]
    specs = [spec for spec in QWEN25_05B.tensors() if spec.name != "lm_head.weight"]
    assert [[spec.name, list(spec.shape)] for spec in specs] == [
        row[:2] for row in params if row[0] != "lm_head.weight"
    ]


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-32b", 32_763_876_352),
    ],
)
def test_totals_are_the_published_ones(name: str, num_params: int) -> None:
    assert sum(prod(spec.shape) for spec in model_shape(name).tensors()) == num_params
    assert model_shape(f"h800x4:{name}") is MODEL_SHAPES[name]


@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-32B"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_rows_of_a_rank_are_vllms(name: str, num_ranks: int) -> None:
    expected = published(name)["tp"][str(num_ranks)]
    layout = engine_layout(model_shape(name.lower()), num_ranks)
    for rank, held in enumerate(layout.ranks):
        boxes = {part: held[f"model.layers.0.self_attn.{part}_proj.weight"][0] for part in ("q", "k", "v", "o")}
        assert boxes["q"].shape[0] == expected["q_rows"]
        assert boxes["k"].shape[0] == boxes["v"].shape[0] == expected["kv_rows"]
        assert boxes["k"].offset[0] == boxes["v"].offset[0] == 128 * expected["kv_head_of_rank"][rank]
        assert boxes["o"].shape[1] == expected["o_cols"]
        assert 2 * held["model.layers.0.mlp.gate_proj.weight"][0].shape[0] == expected["gate_up_rows"]
        assert held["lm_head.weight"][0].shape[0] == expected["vllm_vocab_rows"]
        assert held["model.norm.weight"][0].num_elements == model_shape(name.lower()).decoder.hidden_size


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_trainers_and_engines_hold_every_element(num_ranks: int) -> None:
    """Of the trainer's ranks one each, of an engine's one each where it is cut, and all where it is not."""
    tensors = {spec.name: spec for spec in SMALL.tensors()}
    check_sources(tensors, [fsdp_layout(SMALL, rank, 7) for rank in range(7)])
    layout = engine_layout(SMALL, num_ranks)
    check_targets(tensors, [layout], {})
    for name, spec in tensors.items():
        boxes = [held[name][0] for held in layout.ranks]
        assert find_cover_problem(spec.shape, sorted(set(boxes), key=lambda box: box.offset)) is None, name


def test_kv_heads_are_repeated_where_ranks_outnumber_them() -> None:
    layout = engine_layout(SMALL, 8)
    boxes = [held["model.layers.1.self_attn.v_proj.bias"][0] for held in layout.ranks]
    assert [box.offset[0] for box in boxes] == [0, 0, 0, 0, 16, 16, 16, 16]
    assert {box.shape for box in boxes} == {(16,)}


def test_the_last_ranks_rows_end_with_the_vocabulary_not_with_its_padding() -> None:
    layout = engine_layout(SMALL, 4)
    boxes = [held["model.embed_tokens.weight"][0] for held in layout.ranks]
    assert [(box.offset[0], box.shape[0]) for box in boxes] == [(0, 64), (64, 64), (128, 64), (192, 8)]


def test_what_cannot_be_cut_is_refused() -> None:
    for num_ranks in (3, 8):  # 28 heads, 4 KV heads
        with pytest.raises(ConfigError, match=rf"qwen2\.5-7b cannot run on {num_ranks} GPUs an engine"):
            engine_layout(model_shape("qwen2.5-7b"), num_ranks)
    with pytest.raises(ConfigError, match=r"qwen3-9b.*qwen2\.5-32b, "):
        model_shape("h100:qwen3-9b")

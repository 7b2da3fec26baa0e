"""Layouts from tables: real models at every size of engine, and the rules one by one."""

from __future__ import annotations

import re
from math import prod

import pytest
from model_files import FILES, load_file

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.engine_tables import ModelTable, table_layout
from rose.transfer.layout import TargetLayout, find_cover_problem, intersect, rows_of, split_evenly
from rose.transfer.plan import Cell, check_sources, check_targets, find_coverage, plan_source

ATTENTION = "model.layers.0.self_attn"
SIZES = (1, 2, 4, 8, 16)
MOE_FILES = ("DeepSeek-V3.template.json", "Qwen3-30B-A3B.json.gz", "gpt-oss-20b.json")
TOY = {"heads": 4, "kv": 2, "experts": 6, "hidden": 8}


def _spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def _layer_sample(table: ModelTable) -> list[TensorSpec]:
    """Return the tensors outside layers, of the first layer and of the last one: layers of a kind are alike."""
    last = table.config["layers"] - 1
    return [
        spec
        for spec in table.tensors
        if (found := re.search(r"layers\.(\d+)\.", spec.name)) is None or int(found[1]) in (0, last)
    ]


def _held(layout: TargetLayout, rank: int, name: str) -> ShardSpec:
    (box,) = layout.ranks[rank][name]
    return box


def _valid_sizes(table: ModelTable) -> list[int]:
    """Return which TP from 1 to 16 fit the model's numbers."""
    config = table.config
    kv = config.get("kv", config["heads"])
    return [
        tp
        for tp in range(1, 17)
        if config["heads"] % tp == 0 and (kv % tp == 0 or tp % kv == 0) and -(-config["vocab"] // 64) * 64 % tp == 0
    ]


def _fsdp(specs: list[TensorSpec], num_ranks: int) -> list[dict[str, ShardSpec]]:
    ranks: list[dict[str, ShardSpec]] = [{} for _ in range(num_ranks)]
    for spec in specs:
        for rank, (start, length) in enumerate(split_evenly(spec.shape[0], num_ranks)):
            zeros = (0,) * (len(spec.shape) - 1)
            ranks[rank][spec.name] = ShardSpec(offset=(start, *zeros), shape=(length, *spec.shape[1:]))
    return ranks


def _check_written_once(specs: list[TensorSpec], cells: list[Cell], layout: TargetLayout) -> None:
    """Check that cells are disjoint rows that cover each tensor, and cover each engine rank's boxes with its own cells."""
    shapes = {spec.name: spec.shape for spec in specs}
    by_name: dict[str, list[Cell]] = {name: [] for name in shapes}
    for cell in cells:
        by_name[cell.tensor].append(cell)
        assert rows_of(cell.box, shapes[cell.tensor]).num_elements == cell.box.num_elements <= 4 << 20
    for name, mine in by_name.items():
        assert find_cover_problem(shapes[name], [cell.box for cell in mine]) is None
        for rank, held in enumerate(layout.ranks):
            key = f"{layout.layout_id}/{rank}"
            wanted = held.get(name, ())
            taken = [cell.box for cell in mine if key in cell.targets]
            assert sum(box.num_elements for box in taken) == sum(box.num_elements for box in wanted)
            assert all(any(intersect(box, one) == box for one in wanted) for box in taken)


def _num_copies(spec: TensorSpec, table: ModelTable, tp: int) -> int:
    """Return how many ranks of an engine without expert parallelism hold an element of a tensor."""
    name = spec.name
    if re.search(r"[kv]_proj\.(weight|bias)$", name):
        return max(1, tp // table.config["kv"])
    is_cut = re.search(
        r"embed_tokens|lm_head|self_attn\.(q_proj|sinks|(q|kv)_b_proj)|o_proj\.weight|(gate|up|down)_proj\.weight|experts",
        name,
    )
    return 1 if is_cut else tp


@pytest.mark.parametrize("file", FILES)
def test_tables_hold_what_they_say(file: str) -> None:
    table, raw = load_file(file)
    if "expand" in raw:
        plain = [s for s in table.tensors if not s.name.endswith(("_scale_inv", "e_score_correction_bias"))]
        assert len(plain) == raw["n_tensors_without_scales_and_mtp"]
        assert sum(prod(spec.shape) for spec in plain) == raw["total_params_without_mtp"]
    else:
        assert len(table.tensors) == raw["n_unique_tensors"]
        assert (table.num_elements, table.num_bytes) == (raw["unique_params"], raw["unique_bytes"])
        assert len(table.aliases) == raw["n_tensors"] - raw["n_unique_tensors"]


@pytest.mark.parametrize("file", FILES)
def test_every_size_is_planned_or_refused(file: str) -> None:
    """Every TP from 1 to 16: a plan in which each element of each rank is written once, with the counts of copies, or an error."""
    table, _ = load_file(file)
    specs = [spec for spec in _layer_sample(table) if not re.search(r"experts\.([1-9]|\d{2,})\.", spec.name)]
    for tp in range(1, 17):
        if tp not in _valid_sizes(table):
            with pytest.raises(LayoutMismatchError, match=r"no multiple|copied to|shared out"):
                table_layout(specs, table.config, engine="vllm", tp=tp)
            continue
        layout = table_layout(specs, table.config, engine="vllm", tp=tp)
        held = {s.name: sum(b.num_elements for r in layout.ranks for b in r.get(s.name, ())) for s in specs}
        assert held == {s.name: prod(s.shape) * _num_copies(s, table, tp) for s in specs}
        tensors, sources = {spec.name: spec for spec in specs}, _fsdp(specs, 2)
        check_sources(tensors, sources)
        check_targets(tensors, [layout], table.aliases)
        cells = [
            c for r, own in enumerate(sources) for c in plan_source(r, own, [layout], table.aliases, tensors=tensors)
        ]
        _check_written_once(specs, cells, layout)


@pytest.mark.parametrize("file", [file for file in FILES if "DeepSeek" not in file])
def test_the_numbers_of_each_rank(file: str) -> None:
    """Rows of q, k and v, heads, columns of o, rows of gate and up and of the vocabulary, as each file lists them."""
    table, raw = load_file(file)
    kv_rows_of_head = table.config["head_dim"]
    specs = _layer_sample(table)
    for text, numbers in raw["tp"].items():
        tp = int(text)
        if isinstance(numbers, str):
            with pytest.raises(LayoutMismatchError, match="no multiple"):
                table_layout(specs, table.config, engine="vllm", tp=tp)
            continue
        layout = table_layout(specs, table.config, engine="vllm", tp=tp)
        for rank in range(tp):
            q, k, v, o = (_held(layout, rank, f"{ATTENTION}.{part}_proj.weight") for part in "qkvo")
            assert q.shape[0] + k.shape[0] + v.shape[0] == numbers["qkv_rows"]
            assert (q.shape[0], k.shape[0], k) == (numbers["q_rows"], numbers["kv_rows"], v)
            assert k.offset[0] == numbers["kv_head_of_rank"][rank] * kv_rows_of_head
            assert (o.shape[1], o.offset[1]) == (numbers["o_cols"], rank * numbers["o_cols"])
            rows = _held(layout, rank, "model.embed_tokens.weight")
            start = rank * numbers["vllm_vocab_rows"]
            assert (rows.offset[0], rows.shape[0]) == (
                start,
                min(numbers["vllm_vocab_rows"], table.config["vocab"] - start),
            )
            if "experts" not in table.config:
                gate, up = (_held(layout, rank, f"model.layers.0.mlp.{part}_proj.weight") for part in ("gate", "up"))
                assert gate.shape[0] + up.shape[0] == numbers["gate_up_rows"]
            elif "gpt-oss" in file:
                assert (
                    _held(layout, rank, "model.layers.0.mlp.experts.gate_up_proj").shape[2] == numbers["gate_up_rows"]
                )


@pytest.mark.parametrize("file", [file for file in FILES if "DeepSeek" not in file and "gpt-oss" not in file])
def test_every_parameter_of_the_engine_is_filled(file: str) -> None:
    """One rank's tensors fill vLLM's parameters exactly: the rows and elements that each file lists."""
    table, raw = load_file(file)
    layout = table_layout(table.tensors, table.config, engine="vllm", tp=1)
    num_experts = table.config.get("experts", 1)
    seen = set()
    for name, shape, _, pieces, _ in raw["vllm_params"]:
        names = [
            (piece[0].format(e=e), piece) for piece in pieces for e in range(num_experts if "{e}" in piece[0] else 1)
        ]
        held = {source: _held(layout, 0, source) for source, _ in names}
        assert sum(box.num_elements for box in held.values()) == prod(shape), name
        assert all(held[source].shape[0] == piece[3] for source, piece in names if len(shape) < 3)
        seen |= held.keys()
    assert seen == set(layout.ranks[0])


@pytest.mark.parametrize("file", MOE_FILES)
@pytest.mark.parametrize(("engine", "tp", "ep"), [("vllm", 8, 8), ("sglang", 8, 2), ("vllm", 16, 16)])
def test_whole_experts_a_rank(file: str, engine: str, tp: int, ep: int) -> None:
    table, _ = load_file(file)
    specs = _layer_sample(table)
    layout = table_layout(specs, table.config, engine=engine, tp=tp, ep=ep)
    assert layout.layout_id == f"{engine}-tp{tp}-ep{ep}"
    assert not find_coverage(layout).incomplete
    weights = [spec for spec in specs if ".experts." in spec.name and not spec.name.endswith("down_proj_bias")]
    for rank in range(tp):
        held = sum(box.num_elements for spec in weights for box in layout.ranks[rank].get(spec.name, ()))
        assert held * tp == sum(prod(spec.shape) for spec in weights)
    first = sorted({int(found[1]) for name in layout.ranks[0] if (found := re.search(r"experts\.(\d+)\.", name))})
    assert first == list(range(table.config["experts"] // ep)) or "gpt-oss" in file


def test_a_whole_large_model_is_covered() -> None:
    table, _ = load_file("DeepSeek-V3.template.json")
    layout = table_layout(table.tensors, table.config, engine="vllm", tp=16, ep=16)
    assert find_coverage(layout).text == "90427/90427"
    scale = "model.layers.3.self_attn.q_b_proj.weight_scale_inv"
    assert _held(layout, 3, scale) == ShardSpec(offset=(36, 0), shape=(12, 12))
    assert _held(layout, 3, "model.layers.3.mlp.gate.e_score_correction_bias").shape == (256,)
    assert _held(layout, 3, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv").shape == (5, 56)


def test_fused_experts_are_cut_in_pairs_of_gate_and_up() -> None:
    """gpt-oss: columns 2i and 2i + 1 of gate_up are one unit; the down bias is added once, so one rank has it."""
    prefix = "model.layers.0.mlp.experts"
    specs = [
        _spec(f"{prefix}.gate_up_proj", 6, 8, 12),
        _spec(f"{prefix}.gate_up_proj_bias", 6, 12),
        _spec(f"{prefix}.down_proj", 6, 6, 8),
        _spec(f"{prefix}.down_proj_bias", 6, 8),
        _spec(f"{ATTENTION}.sinks", 4),
    ]
    layout = table_layout(specs, TOY, engine="vllm", tp=2)
    assert _held(layout, 1, specs[0].name) == ShardSpec(offset=(0, 0, 6), shape=(6, 8, 6))
    assert _held(layout, 1, specs[1].name) == ShardSpec(offset=(0, 6), shape=(6, 6))
    assert _held(layout, 1, specs[2].name) == ShardSpec(offset=(0, 3, 0), shape=(6, 3, 8))
    assert specs[3].name in layout.ranks[0]
    assert specs[3].name not in layout.ranks[1]
    assert _held(layout, 1, specs[4].name) == ShardSpec(offset=(2,), shape=(2,))
    whole = table_layout(specs, TOY, engine="vllm", tp=2, ep=2)
    assert _held(whole, 1, specs[0].name) == ShardSpec(offset=(3, 0, 0), shape=(3, 8, 12))
    assert _held(whole, 1, specs[3].name) == ShardSpec(offset=(3, 0), shape=(3, 8))
    with pytest.raises(LayoutMismatchError, match="12 in 6 units cannot be shared out over 4 ranks"):
        table_layout(specs, TOY, engine="vllm", tp=4)
    with pytest.raises(LayoutMismatchError, match=r"gate_up_proj of shape \(6, 12, 8\).* is transposed"):
        table_layout([_spec(f"{prefix}.gate_up_proj", 6, 12, 8)], TOY, engine="vllm", tp=2)


def test_experts_that_do_not_divide() -> None:
    """vLLM gives the first ranks one more; SGLang refuses."""
    specs = [_spec(f"model.layers.0.mlp.experts.{e}.gate_proj.weight", 4, 8) for e in range(6)]
    layout = table_layout(specs, TOY, engine="vllm", tp=4, ep=4)
    assert [[int(name.split(".")[5]) for name in rank] for rank in layout.ranks] == [[0, 1], [2, 3], [4], [5]]
    with pytest.raises(LayoutMismatchError, match="6 experts cannot be shared out over 4 groups"):
        table_layout(specs, TOY, engine="sglang", tp=4, ep=4)
    with pytest.raises(LayoutMismatchError, match=r"experts\.6.* has 6 experts only"):
        table_layout([_spec("model.layers.0.mlp.experts.6.gate_proj.weight", 4, 8)], TOY, engine="vllm", tp=1)


def test_shared_experts_biases_and_norms() -> None:
    specs = {
        "model.layers.0.mlp.shared_experts.gate_proj.weight": ((8, 4), (4, 4)),
        "model.layers.0.mlp.shared_experts.down_proj.weight": ((4, 8), (4, 4)),
        "model.layers.0.mlp.shared_expert_gate.weight": ((1, 4), (1, 4)),
        "model.layers.0.mlp.gate.weight": ((6, 4), (6, 4)),
        f"{ATTENTION}.q_proj.bias": ((8,), (4,)),
        f"{ATTENTION}.k_proj.bias": ((4,), (2,)),
        f"{ATTENTION}.o_proj.bias": ((4,), (4,)),
        f"{ATTENTION}.q_norm.weight": ((2,), (2,)),
    }
    tensors = [_spec(name, *shape) for name, (shape, _) in specs.items()]
    layout = table_layout(tensors, TOY, engine="sglang", tp=2)
    assert {name: _held(layout, 1, name).shape for name in specs} == {name: shape for name, (_, shape) in specs.items()}


def test_a_tied_head_is_an_alias() -> None:
    specs = [_spec("model.embed_tokens.weight", 100, 4), _spec("lm_head.weight", 100, 4)]
    tied = table_layout(specs, TOY | {"tie_word_embeddings": True}, engine="vllm", tp=2)
    assert (len(tied.tensors), dict(tied.aliases)) == (1, {"lm_head.weight": "model.embed_tokens.weight"})
    apart = table_layout(specs, TOY | {"tied": False}, engine="vllm", tp=2, layout_id="mine")
    assert (apart.layout_id, len(apart.ranks[1]), dict(apart.aliases)) == ("mine", 2, {})
    assert _held(apart, 1, "lm_head.weight") == ShardSpec(offset=(64, 0), shape=(36, 4))


def test_block_scales_go_with_their_weights() -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    specs = [_spec(name, 300, 512, dtype="float8_e4m3fn"), _spec(f"{name}_scale_inv", 3, 4, dtype="float32")]
    layout = table_layout(specs, TOY, engine="vllm", tp=2)
    assert _held(layout, 1, f"{name}_scale_inv") == ShardSpec(offset=(0, 2), shape=(3, 2))
    with pytest.raises(LayoutMismatchError, match="elements 0 to 64 are no whole blocks"):
        table_layout([_spec(name, 300, 128), _spec(f"{name}_scale_inv", 3, 1)], TOY, engine="vllm", tp=2)
    with pytest.raises(LayoutMismatchError, match=r"do not fit a weight of shape \(300, 512\)"):
        table_layout([specs[0], _spec(f"{name}_scale_inv", 3, 5)], TOY, engine="vllm", tp=2)
    with pytest.raises(LayoutMismatchError, match=r"no rule for .*_scale_inv"):
        table_layout(specs[1:], TOY, engine="vllm", tp=2)


@pytest.mark.parametrize(
    ("config", "engine", "tp", "ep", "problem"),
    [
        (TOY, "other", 1, 1, "unknown; there are rules for vllm, sglang"),
        (TOY, "vllm", 0, 1, "at least 1"),
        (TOY, "vllm", 4, 3, "multiple of ep"),
        (TOY, "vllm", 4, 2, "ep must be 1 or 4"),
        (TOY, "vllm", 3, 1, "4 heads are no multiple of 3"),
        ({"heads": 6, "kv": 4}, "vllm", 6, 1, "4 KV heads can neither"),
        ({"heads": 4, "kv": 4}, "vllm", 2, 2, "0 experts cannot"),
        ({"kv": 4}, "vllm", 2, 1, "heads or num_attention_heads"),
        ({"heads": "many"}, "vllm", 2, 1, "got 'many'"),
    ],
)
def test_what_cannot_be_held_is_refused(config: dict[str, object], engine: str, tp: int, ep: int, problem: str) -> None:
    with pytest.raises(LayoutMismatchError, match=problem):
        table_layout([_spec("model.norm.weight", 4)], config, engine=engine, tp=tp, ep=ep)


def test_too_few_dimensions_and_odd_vocabularies_are_named() -> None:
    with pytest.raises(LayoutMismatchError, match=r"o_proj\.weight of shape \(4,\): it should have more than 1"):
        table_layout([_spec(f"{ATTENTION}.o_proj.weight", 4)], TOY, engine="vllm", tp=1)
    with pytest.raises(LayoutMismatchError, match="a vocabulary of 10, padded to 64"):
        table_layout([_spec("lm_head.weight", 10, 4)], {"heads": 12, "kv": 12}, engine="vllm", tp=12)

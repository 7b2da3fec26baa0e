"""Files of model tables."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rose.errors import LayoutMismatchError
from rose.transfer.engine_tables import load_model_table

TABLE = {
    "model": "toy",
    "config": {"heads": 2},
    "tied": ["lm_head.weight", "embed.weight"],
    "params": [
        ["embed.weight", [4, 2], "bfloat16"],
        ["layers.{0..1}.experts.{2..3}.weight", [128, 2], "bfloat16"],
        ["lm_head.weight", [4, 2], "bfloat16"],
    ],
    "buffers_in_state_dict": [["layers.{0..1}.bias", [2], "float32"]],
    "fp8_scales": [["layers.1.experts.{2..3}.weight_scale_inv", [1, 1], "float32"]],
}


def _write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


def test_names_are_expanded_and_scaled_weights_have_8_bits(tmp_path: Path) -> None:
    table = load_model_table(_write(tmp_path / "toy.json", TABLE))
    assert [(spec.name, spec.dtype) for spec in table.tensors] == [
        ("embed.weight", "bfloat16"),
        ("layers.0.experts.2.weight", "bfloat16"),
        ("layers.0.experts.3.weight", "bfloat16"),
        ("layers.1.experts.2.weight", "float8_e4m3fn"),
        ("layers.1.experts.3.weight", "float8_e4m3fn"),
        ("layers.0.bias", "float32"),
        ("layers.1.bias", "float32"),
        ("layers.1.experts.2.weight_scale_inv", "float32"),
        ("layers.1.experts.3.weight_scale_inv", "float32"),
    ]
    assert (table.name, dict(table.aliases)) == ("toy", {"lm_head.weight": "embed.weight"})
    assert table.num_elements == 8 + 4 * 256 + 4 + 2
    assert table.num_bytes == 16 + 2 * 512 + 2 * 256 + 16 + 8
    plain = load_model_table(tmp_path / "toy.json", has_fp8=False)
    assert {spec.dtype for spec in plain.tensors} == {"bfloat16", "float32"}
    assert len(plain.tensors) == 7


def test_gzipped_tables_are_read(tmp_path: Path) -> None:
    path = tmp_path / "toy.json.gz"
    path.write_bytes(gzip.compress(json.dumps(TABLE).encode()))
    assert load_model_table(path) == load_model_table(_write(tmp_path / "toy.json", TABLE))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"params": None}, "not a model table"),
        ({"params": [["w", [2], "complex64"]]}, "complex64"),
        ({"params": [["w", "x", "bfloat16"]]}, "not a model table"),
        ({"params": [["w", [2]]]}, "not a model table"),
        ({"params": [["w", [2], "bfloat16"], ["w", [2], "bfloat16"]], "tied": None, "fp8_scales": []}, "there twice"),
        ({"fp8_scales": [["ghost.weight_scale_inv", [1], "float32"]]}, "ghost.weight"),
        ({"tied": ["lm_head.weight", "ghost"]}, "ghost"),
        ({"config": 3}, "'config' is 3, not an object"),
        ({"params": []}, "'params' is empty"),
        ({"params": {"w": 1}}, "'params' is .*, not a list"),
        ({"params": [["w", [0], "bfloat16"]]}, r"'w' in 'params' has the shape \[0\]; sizes are whole numbers over 0"),
        ({"params": [["w", [4, -1], "bfloat16"]]}, r"the shape \[4, -1\]"),
        ({"params": [["w", [8.5], "bfloat16"]]}, r"the shape \[8\.5\]"),
        ({"params": [["w", [True], "bfloat16"]]}, r"the shape \[True\]"),
        ({"params": [["", [8], "bfloat16"]]}, "without a name"),
        ({"params": [["w", [8], 16]]}, "the dtype 16"),
        ({"params": [{"name": "w", "size": [8]}]}, "shape None"),
        ({"params": [["w{3..1}", [8], "bfloat16"]]}, "stands for 0 names"),
        ({"params": [["w{1..99999}{1..99999}", [8], "bfloat16"]]}, "stands for 9999800001 names"),
        ({"tied": ["one"]}, "'tied' is .*, not"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    path = _write(tmp_path / "toy.json", TABLE | change)
    with pytest.raises(LayoutMismatchError, match=problem):
        load_model_table(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    for key in ("model", "config", "params"):
        path = _write(tmp_path / "toy.json", {name: value for name, value in TABLE.items() if name != key})
        with pytest.raises(LayoutMismatchError, match=f"it has no '{key}'; it needs"):
            load_model_table(path)


def test_rows_may_be_objects(tmp_path: Path) -> None:
    rows = [dict(zip(("dtype", "name", "shape"), (row[2], row[0], row[1]), strict=True)) for row in TABLE["params"]]
    with_objects = load_model_table(_write(tmp_path / "toy.json", TABLE | {"params": rows}))
    assert with_objects == load_model_table(_write(tmp_path / "toy.json", TABLE))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.json.gz").write_bytes(b"no gzip")
    (tmp_path / "bad.json").write_bytes(b"{")
    for name in ("absent.json", "bad.json", "bad.json.gz"):
        with pytest.raises(LayoutMismatchError, match=f"cannot read the model table .*{name}"):
            load_model_table(tmp_path / name)
    with pytest.raises(LayoutMismatchError, match="not a model table"):
        load_model_table(_write(tmp_path / "list.json", [1]))

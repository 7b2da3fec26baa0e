"""Measured operator tables."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import attrs
import pytest

from rose.backends.paced.profiles import H100, PROFILES, Profile
from rose.errors import ConfigError
from rose.simulation.operators import OperatorTable, measured_profile

SHARED = Path(__file__).parents[3] / ".." / "shared" / "traces"
OPERATORS = (
    "emb",
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)
SHAPE = {
    "n_head": "8",
    "n_kv_head": "2",
    "n_embd": "512",
    "n_expanded_embd": "1024",
    "vocab_size": "1000",
    "use_gated_mlp": "True",
}
LAYER_PARAMS = 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1024


def row(num_tokens: int, layer_ms: float, /, num_gpus: int = 1, **changes: str) -> dict[str, str]:
    """Return a row whose nine layer operators take ``layer_ms`` together and whose embedding takes 0.5 ms."""
    times = {f"time_stats.{name}.median": str(0.5 if name == "emb" else layer_ms / 9) for name in OPERATORS}
    noise = {f"time_stats.{name}.mean": "77" for name in OPERATORS}
    return {
        **times,
        **noise,
        **SHAPE,
        "num_tokens": str(num_tokens),
        "num_tensor_parallel_workers": str(num_gpus),
        **changes,
    }


def write(tmp_path: Path, rows: list[dict[str, str]], without: str = "") -> Path:
    columns = [column for column in rows[0] if column != without]
    path = tmp_path / "mlp.csv"
    path.write_text(
        "\n".join([",".join(columns), *(",".join(one[column] for column in columns) for one in rows)]) + "\n"
    )
    return path


def profile_like(num_layers: int = 4, num_gpus: int = 1, **changes: float) -> Profile:
    """Return a profile of the table's own model."""
    fields = {"num_params": num_layers * LAYER_PARAMS, "weight_bytes": 2 * num_layers * LAYER_PARAMS, **changes}
    return attrs.evolve(PROFILES["h100:qwen3-8b"], num_layers=num_layers, num_gpus=num_gpus, **fields)


def test_a_step_is_its_layers_and_one_embedding(tmp_path):
    table = OperatorTable.read(write(tmp_path, [row(128, 1.8), row(1, 0.9)]), num_gpus=1)
    assert table.shape.layer_params == LAYER_PARAMS
    assert table.linear_s(1, num_layers=4) == pytest.approx((4 * 0.9 + 0.5) / 1e3)
    assert table.linear_s(128, num_layers=4) == pytest.approx((4 * 1.8 + 0.5) / 1e3)


def test_times_of_other_gpu_counts_are_left_alone(tmp_path):
    path = write(tmp_path, [row(1, 0.9), row(64, 1.0), row(1, 0.3, num_gpus=4), row(64, 0.4, num_gpus=4)])
    assert OperatorTable.read(path, num_gpus=4).layer.seconds == pytest.approx((0.3e-3, 0.4e-3))


def test_falling_and_repeated_measurements_are_averaged(tmp_path):
    rows = [row(1, 1.0), row(8, 3.0), row(16, 2.0), row(32, 1.0), row(64, 5.0), row(64, 7.0)]
    random.Random(0).shuffle(rows)
    layer = OperatorTable.read(write(tmp_path, rows), num_gpus=1).layer
    assert layer.num_tokens == (1, 8, 16, 32, 64)
    assert layer.seconds == pytest.approx((1e-3, 2e-3, 2e-3, 2e-3, 6e-3))


def test_the_same_model_takes_the_measured_times_and_reads_its_output_embedding(tmp_path):
    path = write(tmp_path, [row(1, 0.9), row(128, 1.8)])
    head_bytes = 2 * 1000 * 512
    profile = profile_like(weight_bytes=2 * 4 * LAYER_PARAMS + head_bytes)
    measured = measured_profile(profile, path)
    head_s = head_bytes / H100.bandwidth_bytes_per_s
    assert measured.linear_s(128) == pytest.approx((4 * 1.8 + 0.5) / 1e3 + head_s)
    assert attrs.evolve(measured, linear_table=None) == profile


def test_another_model_takes_the_measured_times_by_its_parameters(tmp_path):
    path = write(tmp_path, [row(1, 0.9), row(128, 1.8)])
    measured = measured_profile(profile_like(num_params=10 * LAYER_PARAMS, weight_bytes=20 * LAYER_PARAMS), path)
    assert measured.linear_s(1) == pytest.approx((10 * 0.9 + 0.5) / 1e3)


@pytest.mark.parametrize(
    ("rows", "num_gpus", "complaint"),
    [
        ([row(1, 1.0), row(2, 1.0)], 4, r"measured on 4 GPUs \(num_tensor_parallel_workers in the file: 1\)"),
        ([row(1, 1.0), row(1, 1.1)], 1, "fewer than 2 token counts"),
        ([row(1, 1.0), row(2, 1.0, num_tokens="2.5")], 1, r"line 3: num_tokens is '2\.5', not a whole number >= 1"),
        ([row(1, 1.0), row(2, 1.0, num_tokens="0")], 1, "line 3: num_tokens is '0'"),
        (
            [row(1, 1.0), row(2, 1.0, **{"time_stats.mlp_act.median": "fast"})],
            1,
            r"line 3: time_stats\.mlp_act\.median is 'fast', not a time in milliseconds",
        ),
        ([row(1, 1.0), row(2, 1.0, **{"time_stats.emb.median": "-1"})], 1, r"time_stats\.emb\.median is '-1'"),
        ([row(1, 1.0), row(2, 1.0, **{"time_stats.add.median": "nan"})], 1, r"time_stats\.add\.median is 'nan'"),
        ([row(1, 1.0), row(2, 1.0, n_embd="768")], 1, "line 3: n_embd is '768', but '512' in line 2"),
        ([row(1, 1.0, n_head="x"), row(2, 1.0, n_head="x")], 1, "line 2: n_head is 'x'"),
    ],
)
def test_a_table_of_no_use_is_refused_with_its_row_and_column(tmp_path, rows, num_gpus, complaint):
    path = write(tmp_path, rows)
    with pytest.raises(ConfigError, match=complaint) as caught:
        OperatorTable.read(path, num_gpus=num_gpus)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("column", ["time_stats.attn_rope.median", "num_tokens", "n_kv_head"])
def test_a_missing_column_is_named(tmp_path, column):
    with pytest.raises(ConfigError, match=f"no column {column}; expected a CSV of operator times"):
        OperatorTable.read(write(tmp_path, [row(1, 1.0)], without=column), num_gpus=1)


def test_short_rows_empty_and_damaged_files_are_refused(tmp_path):
    path = write(tmp_path, [row(1, 1.0)])
    path.write_text(path.read_text() + "1,2\n")
    with pytest.raises(ConfigError, match=r"line 3: .* is '', not"):
        OperatorTable.read(path, num_gpus=1)
    path.write_text("")
    with pytest.raises(ConfigError, match="no column"):
        OperatorTable.read(path, num_gpus=1)
    path.write_bytes(gzip.compress(b"x" * 1000)[:20])
    with pytest.raises(ConfigError, match=r"operators .* damaged or cut short"):
        OperatorTable.read(path, num_gpus=1)


def test_a_table_fits_profiles_of_as_many_gpus_only(tmp_path):
    table = OperatorTable.read(write(tmp_path, [row(1, 1.0), row(2, 1.0)]), num_gpus=1)
    with pytest.raises(ConfigError, match=r"read for 1 GPUs, but h100x4:qwen3-32b has 4"):
        table.linear_table(PROFILES["h100x4:qwen3-32b"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public tables are not beside this checkout")
@pytest.mark.parametrize(
    ("num_tokens", "error"), [(1, 0.02), (32, -0.004), (64, 0.03), (256, -0.01), (1024, 0.23), (4096, 0.17)]
)
def test_the_roofline_is_within_a_quarter_of_a_public_table(num_tokens: int, error: float):
    """Llama-2-7B on one H100: 32 layers of 202 M parameters."""
    table = OperatorTable.read(SHARED / "vidur_h100_llama2_7b_mlp.csv.gz", num_gpus=1)
    num_params = 32 * table.shape.layer_params
    assert num_params == 6_476_005_376
    roofline = attrs.evolve(PROFILES["h100:qwen2.5-7b"], num_params=num_params, weight_bytes=2 * num_params)
    measured_s = table.linear_s(num_tokens, num_layers=32)
    assert roofline.linear_s(num_tokens) / measured_s - 1 == pytest.approx(error, abs=0.01)

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.config import load
from rose.errors import ConfigError
from rose.reference.demo_config import DemoConfig


def test_the_defaults_are_the_documented_demo():
    config = DemoConfig()
    assert (config.num_dedicated, config.num_borrowed) == (2, 2)
    assert (config.num_groups, config.group_size, config.cap_per_engine) == (20, 8, 16)
    assert (config.slo_ttft_ms, config.slo_tpot_ms) == (500, 150)
    assert config.tokens_per_token == 8


@given(st.integers(1, 500), st.floats(0, 0.99))
def test_the_phases_share_the_steps_and_learning_has_at_least_one(steps, sparse_fraction):
    config = DemoConfig(steps=steps, sparse_fraction=sparse_fraction)
    assert config.learn_steps + config.sparse_steps == steps
    assert config.learn_steps >= 1
    assert (config.sparse_steps >= 1) is (steps > 1 and sparse_fraction > 0)


@pytest.mark.parametrize(
    ("steps", "learn", "sparse"), [(1, 1, 0), (2, 1, 1), (3, 2, 1), (4, 3, 1), (16, 12, 4), (18, 14, 4)]
)
def test_how_steps_are_shared(steps, learn, sparse):
    config = DemoConfig(steps=steps)
    assert (config.learn_steps, config.sparse_steps) == (learn, sparse)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("slo_ttft_ms", 0), ("slo_tpot_ms", 0), ("slo_tpot_ms", -5.0), ("slo_ttft_ms", float("nan")),
        ("slo_ttft_ms", float("inf")), ("slo_ttft_ms", True), ("slo_ttft_ms", "500"),
        ("steps", 0), ("steps", 10_001), ("steps", 1.0), ("steps", True), ("seed", -1), ("seed", 2**31),
        ("port", -1), ("port", 65536), ("rate_rps", 0.0), ("trace", ""), ("trace_offset_s", -1.0),
        ("out", ""), ("env", "FrozenLake"), ("env", "a:b:c"), ("env", "a/b:C"),
        ("admission", "paper"), ("k", 0.0), ("rollout_engine", "vlm"), ("serving_engine", ""), ("sglang_python", ""), ("sparse_fraction", 1.0),
        ("fixed_rollout_share", 1.0), ("fixed_rollout_share", 0.0), ("group_size", 1), ("num_dedicated", 0),
        ("num_borrowed", 0), ("cap_per_engine", 0), ("learn_lr", 0.0), ("json", 1), ("ungated_steps", -1),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_with_name_value_and_advice(field, bad):
    with pytest.raises(ConfigError) as caught:
        DemoConfig(**{field: bad})
    message = str(caught.value)
    assert message.startswith(f"{field} must be ")
    assert f"got {bad!r}; " in message
    assert "\n" not in message


def test_every_field_is_described():
    for field in attrs.fields(DemoConfig):
        assert f"        {field.name}: " in DemoConfig.__doc__


def test_the_page_lists_every_key_with_its_default():
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    for field in attrs.fields(DemoConfig):
        shown = "none" if field.default is None else f"`{json.dumps(field.default)}`"
        assert f"| `{field.name}` | {shown} | " in page


def test_a_file_sets_any_field(tmp_path):
    path = tmp_path / "demo.toml"
    path.write_text('steps = 4\nslo_ttft_ms = 800\nenv = "mine:World"\njson = true\nrate_rps = 6\n')
    config = load(DemoConfig, path)
    assert (config.steps, config.slo_ttft_ms, config.env, config.json) == (4, 800, "mine:World", True)
    assert config.rate_rps == 6.0


def test_a_refused_value_in_a_file_names_the_file(tmp_path):
    path = tmp_path / "demo.toml"
    path.write_text("slo_ttft_ms = 0\n")
    with pytest.raises(ConfigError, match=r"demo\.toml: slo_ttft_ms must be above 0"):
        load(DemoConfig, path)


@pytest.mark.parametrize(
    ("fields", "stretch"),
    [({}, 2.5), ({"serving_engine": "sglang"}, 6.0), ({"rollout_engine": "sglang"}, 6.0),
     ({"rollout_engine": "sglang", "k": 3.0}, 3.0)],
)  # fmt: skip
def test_time_is_stretched_for_the_slower_engine_unless_it_is_said_how_far(fields, stretch):
    assert DemoConfig(**fields).stretch == stretch

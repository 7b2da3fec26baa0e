"""Profiles: known figures, several GPUs, measured linear parts, fast forms, memory for KV."""

from __future__ import annotations

import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.backends.paced.linear_table import LinearTable
from rose.backends.paced.profiles import (
    H100,
    H800,
    PROFILES,
    Profile,
    kv_pool_bytes,
    make_profile,
    profile_named,
)
from rose.backends.paced.shapes import SHAPES
from rose.errors import ConfigError
from rose.interfaces.device import StepWork

TABLE = LinearTable(source="t.csv", num_tokens=(1, 64, 512, 4096), seconds=(4e-3, 5e-3, 11e-3, 80e-3))
FAST = [*PROFILES.values(), PROFILES["h100x4:qwen3-32b"].with_linear_table(TABLE)]

DECODE = StepWork(num_decodes=8, context_tokens=8000)
CHUNK = StepWork(num_prefill_tokens=2048, prefill_positions=2048**2 / 2)
MIXED = StepWork(777, 40, 51_234, 777 * 1234.5)
LARGE = StepWork(6000, 100, 1_234_567, 6e6)


@pytest.mark.parametrize("gpu", ["h100", "h800"])
@pytest.mark.parametrize(
    ("model", "work", "expected"),
    [
        ("qwen2.5-7b", DECODE, "0x1.b37b19cb90b9bp-8"),
        ("qwen2.5-7b", CHUNK, "0x1.afa4c2fac9c70p-5"),
        ("qwen2.5-7b", MIXED, "0x1.899096246546fp-6"),
        ("qwen2.5-7b", LARGE, "0x1.793c3b952326bp-3"),
        ("qwen3-8b", DECODE, "0x1.e4934a8627340p-8"),
        ("qwen3-8b", CHUNK, "0x1.d267471d095a4p-5"),
        ("qwen3-8b", MIXED, "0x1.c8e053a86132fp-6"),
        ("qwen3-8b", LARGE, "0x1.f587118b91310p-3"),
    ],
)
def test_the_figures_of_one_gpu_are_on_record_to_the_bit(gpu: str, model: str, work: StepWork, expected: str):
    assert PROFILES[f"{gpu}:{model}"].step_s(work) == float.fromhex(expected)


@pytest.mark.parametrize(
    ("model", "num_params", "weight_bytes", "kv_bytes", "width"),
    [
        ("qwen2.5-7b", 6.53e9, 14.1e9, 57_344, 3584),
        ("qwen3-8b", 6.95e9, 15.1e9, 147_456, 4096),
        ("qwen2.5-32b", 31.2e9, 64.0e9, 262_144, 5120),
        ("qwen3-32b", 31.2e9, 64.0e9, 262_144, 8192),
    ],
)
def test_sizes_follow_from_the_published_shapes(model, num_params, weight_bytes, kv_bytes, width):
    profile = make_profile("h100", model)
    assert (profile.num_params, profile.weight_bytes) == (num_params, weight_bytes)
    assert (profile.kv_bytes_per_token, profile.attention_width) == (kv_bytes, width)


def test_a_layer_s_parameters_are_counted_matrix_by_matrix():
    """Qwen3-8B: q and o 4096 x 4096, k and v 4096 x 1024, three of 4096 x 12288."""
    assert SHAPES["qwen3-8b"].layer_params == 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12_288
    assert attrs.evolve(SHAPES["qwen3-8b"], num_mlp_matrices=2).layer_params == 4096 * (8192 + 2048 + 2 * 12_288)


def test_every_profile_is_found_by_its_name():
    assert set(PROFILES) == {
        *(f"{gpu}:{model}" for gpu in ("h100", "h800") for model in ("qwen2.5-7b", "qwen3-8b")),
        *(f"{gpu}x4:{model}" for gpu in ("h100", "h800") for model in ("qwen2.5-32b", "qwen3-32b")),
    }
    assert all(profile_named(name).name == name for name in PROFILES)
    assert {profile.num_gpus for name, profile in PROFILES.items() if "x4" in name} == {4}


@pytest.mark.parametrize(("gpu", "model"), [("b200", "qwen3-8b"), ("h100", "llama")])
def test_an_unknown_gpu_or_model_is_refused(gpu, model):
    with pytest.raises(ConfigError, match=r"GPUs are h100, h800, models qwen2\.5-7b"):
        make_profile(gpu, model)


def test_on_several_gpus_work_is_shared_and_collectives_are_added():
    one, four = make_profile("h800", "qwen3-32b"), make_profile("h800", "qwen3-32b", num_gpus=4)
    for work in (DECODE, CHUNK, MIXED):
        num_tokens = work.num_decodes + work.num_prefill_tokens
        shared_s = (one.step_s(work) - H800.launch_s) / 4
        sent_bytes = 2 * 3 / 4 * num_tokens * 5120 * 2
        added_s = 2 * 64 * (9e-6 + sent_bytes / 150e9)
        assert four.step_s(work) == pytest.approx(H800.launch_s + shared_s + added_s, rel=1e-12)


def test_a_slower_link_is_the_only_difference_of_an_h800():
    assert attrs.evolve(H800, link_bytes_per_s=H100.link_bytes_per_s) == H100
    assert H800.link_bytes_per_s / H100.link_bytes_per_s == pytest.approx(400 / 900)
    fast, slow = PROFILES["h100x4:qwen3-32b"], PROFILES["h800x4:qwen3-32b"]
    assert slow.step_s(CHUNK) - fast.step_s(CHUNK) == pytest.approx(slow.collective_s(2048) - fast.collective_s(2048))
    assert slow.collective_s(2048) > 2 * fast.collective_s(2048) - 2 * 64 * 9e-6


def test_a_measured_linear_part_replaces_the_roofline_s_alone():
    plain = PROFILES["h100x4:qwen3-32b"]
    measured = plain.with_linear_table(TABLE)
    assert measured.name == plain.name
    for work in (DECODE, CHUNK, MIXED):
        num_tokens = work.num_decodes + work.num_prefill_tokens
        other_s = plain.step_s(work) - plain.linear_s(num_tokens)
        assert measured.step_s(work) == pytest.approx(other_s + TABLE.at(num_tokens))


@given(
    profile=st.sampled_from(FAST),
    num_prefill_tokens=st.integers(0, 9000),
    num_decodes=st.integers(0, 600),
    context_tokens=st.integers(0, 3_000_000),
    prefill_positions=st.floats(0, 1e9),
)
def test_the_fast_step_is_the_step(profile, num_prefill_tokens, num_decodes, context_tokens, prefill_positions):
    work = StepWork(num_prefill_tokens, num_decodes, context_tokens, prefill_positions)
    fast_s = profile.fast_step()(num_prefill_tokens, num_decodes, context_tokens, prefill_positions)
    assert fast_s == pytest.approx(profile.step_s(work), rel=1e-9, abs=0)


@given(
    profile=st.sampled_from(FAST),
    num_decodes=st.one_of(st.integers(1, 300), st.integers(4090, 4100)),
    context_tokens=st.integers(0, 3_000_000),
    num_steps=st.integers(0, 300),
)
def test_a_run_of_decode_steps_is_the_sum_of_its_steps(profile, num_decodes, context_tokens, num_steps):
    step_s = profile.fast_step()
    summed_s = sum(step_s(0, num_decodes, context_tokens + i * num_decodes, 0.0) for i in range(num_steps))
    assert profile.decode_run(num_decodes, context_tokens, num_steps) == pytest.approx(summed_s, rel=1e-9, abs=0)


def test_a_profile_that_was_used_can_be_compared_copied_and_sent():
    used, fresh = make_profile("h100", "qwen3-8b"), make_profile("h100", "qwen3-8b")
    run_s = used.decode_run(4, 1000, 10)
    sent: Profile = pickle.loads(pickle.dumps(used))  # noqa: S301 - what was dumped here
    assert used == fresh == sent
    assert hash(used) == hash(sent)
    assert sent.decode_run(4, 1000, 10) == run_s
    assert attrs.evolve(used, num_gpus=4).decode_run(4, 1000, 10) < run_s


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(0, 4e-3), (1, 4e-3), (64, 5e-3), (288, 8e-3), (4096, 80e-3), (8192, 80e-3 + 69e-3 / 3584 * 4096)],
)
def test_a_curve_is_straight_between_its_points_and_beyond(num_tokens: int, seconds: float):
    assert TABLE.at(num_tokens) == pytest.approx(seconds)


def test_beyond_a_curve_its_upper_half_decides_the_slope():
    curve = LinearTable(source="t", num_tokens=(100, 500, 900, 1000), seconds=(1.0, 5.0, 9.4, 9.4))
    assert curve.at(2000) == pytest.approx(9.4 + 1000 * (9.4 - 5.0) / 500)


@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=2))
def test_a_curve_never_falls(pair):
    assert TABLE.at(min(pair)) <= TABLE.at(max(pair))


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "complaint"),
    [
        ((1,), (1.0,), "are no curve"),
        ((1, 2), (1.0,), "2 token counts and 1 times"),
        ((2, 2), (1.0, 2.0), "must rise"),
        ((1, 2), (2.0, 1.0), "must not fall"),
        ((1, 2), (0.0, 1.0), "must be positive"),
    ],
)
def test_points_that_are_no_curve_are_refused(num_tokens, seconds, complaint):
    with pytest.raises(ValueError, match=complaint):
        LinearTable(source="t.csv", num_tokens=num_tokens, seconds=seconds)


def test_kv_memory_is_what_the_resident_weights_leave():
    serving, rollout = PROFILES["h100:qwen2.5-7b"], PROFILES["h100:qwen3-8b"]
    assert kv_pool_bytes(0.9, serving) == 72e9 - 14.1e9
    assert kv_pool_bytes(0.9, serving, rollout) == 72e9 - 29.2e9
    assert kv_pool_bytes(0.9, PROFILES["h800x4:qwen3-32b"], PROFILES["h800x4:qwen2.5-32b"]) == 288e9 - 128e9


@pytest.mark.parametrize(
    ("fraction", "names", "complaint"),
    [
        (0.3, ("h100:qwen2.5-7b", "h100:qwen3-8b"), r"take 29\.2 GB, but kv_memory_fraction = 0\.3 allows 24\.0 GB"),
        (0.9, ("h100:qwen2.5-7b", "h100x4:qwen3-32b"), "cannot share an engine's GPUs"),
        (0.9, ("h100:qwen2.5-7b", "h800:qwen3-8b"), "cannot share an engine's GPUs"),
    ],
)
def test_weights_that_leave_no_room_or_lie_elsewhere_are_refused(fraction, names, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        kv_pool_bytes(fraction, *(PROFILES[name] for name in names))
    assert "\n" not in str(caught.value)

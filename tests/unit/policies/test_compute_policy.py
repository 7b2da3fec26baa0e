"""Device turns of an engine step, and the size of prefill chunks."""

from __future__ import annotations

import pytest

from rose.backends.paced import profile_named
from rose.interfaces.device import StepWork
from rose.policies.compute import ChunkConfig, StepShape, device_turns, fit_chunk

SHAPE = StepShape(
    num_prefill_tokens=10,
    prefill_positions=100.0,
    num_decodes=3,
    decode_context_tokens=60,
    num_completed=1,
    completed_context_tokens=30,
)


def test_a_plain_step_is_one_turn() -> None:
    assert device_turns(SHAPE, 1, 512) == [StepWork(10, 3, 60, 100.0)]


def test_a_word_of_m_tokens_is_m_turns_with_growing_contexts() -> None:
    first, *later = device_turns(SHAPE, 8, 512)
    assert first == StepWork(80, 3, 480, 6400.0)
    assert len(later) == 7
    assert {work.num_decodes for work in later} == {4}, "the sequence whose prefill ended says its word too"
    assert [work.context_tokens for work in later[:2]] == [720 + 4, 720 + 8]


@pytest.mark.parametrize(("chunk", "parts"), [(512, [80]), (32, [32, 32, 16]), (1, [10] * 8)])
def test_prompt_tokens_go_into_the_first_turns_a_chunk_each(chunk: int, parts: list[int]) -> None:
    turns = device_turns(SHAPE, 8, chunk)
    assert [work.num_prefill_tokens for work in turns] == parts + [0] * (8 - len(parts))
    assert sum(work.prefill_positions for work in turns) == pytest.approx(64 * SHAPE.prefill_positions)


def test_a_step_that_says_nothing_has_turns_for_its_prompt_alone() -> None:
    turns = device_turns(StepShape(num_prefill_tokens=10), 8, 32)
    assert [(work.num_prefill_tokens, work.num_decodes) for work in turns] == [(32, 0), (32, 0), (16, 0)]


def test_a_chunk_is_as_long_as_allowed_when_time_does_not_bind() -> None:
    assert fit_chunk(ChunkConfig(), StepWork(), lambda _: 0.0) == 512


def test_a_chunk_is_bounded_by_the_turn_it_makes() -> None:
    profile = profile_named("h100:qwen3-8b")
    decodes = StepWork(num_decodes=16, context_tokens=16 * 1000)
    chunk = fit_chunk(ChunkConfig(), decodes, profile.step_s)
    assert chunk % 64 == 0
    assert 64 <= chunk < 512
    work = StepWork(chunk, 16, 16 * 1000, chunk**2 / 2)
    bound_s = ChunkConfig().max_step_s
    assert profile.step_s(work) <= bound_s
    assert profile.step_s(StepWork(chunk + 64, 16, 16 * 1000, (chunk + 64) ** 2 / 2)) > bound_s


def test_a_chunk_deep_in_a_long_prompt_is_shorter() -> None:
    profile, config = profile_named("h100:qwen3-8b"), ChunkConfig(max_step_s=0.020)
    first, later = (fit_chunk(config, StepWork(), profile.step_s, context_tokens=tokens) for tokens in (0, 30_000))
    assert later < first
    assert profile.step_s(StepWork(later, 0, 0, later * (30_000 + later / 2))) <= config.max_step_s


def test_a_chunk_is_never_nothing() -> None:
    assert fit_chunk(ChunkConfig(), StepWork(), lambda _: 9.0) == 64

"""When an attempt counts as stalled while prompts are being computed on its engine."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from rose.policies.routing import EngineState
from rose.pool import PoolConfig
from rose.pool.retries import stall_due_s

CONFIG = PoolConfig(stall_s=2.0)
PREFILL_S = 0.001


def due_s(
    *,
    num_tokens: int = 0,
    num_fresh: int = 0,
    num_waiting: int = 0,
    last_token_s: float = -math.inf,
    now_s: float = 0.0,
) -> float:
    """Return when an attempt is due that came at 0, on an engine that showed no token since unless one is named."""
    member = SimpleNamespace(
        state=EngineState.READY, last_token_s=last_token_s, num_waiting_prompt_tokens=num_waiting + num_fresh
    )
    attempt = SimpleNamespace(member=member, last_progress_s=0.0, num_tokens=num_tokens, num_fresh_tokens=num_fresh)
    return stall_due_s(attempt, CONFIG, now_s, prefill_s=PREFILL_S)


def test_without_prompts_to_compute_it_is_due_after_the_time_out() -> None:
    assert due_s() == due_s(num_tokens=5) == 2.0


def test_other_prompts_do_not_hide_a_dead_engine() -> None:
    assert due_s(num_waiting=1_000_000) == due_s(num_tokens=5, num_waiting=1_000_000) == 2.0


def test_its_own_prompt_may_take_as_long_as_it_takes() -> None:
    assert due_s(num_fresh=30_000) == pytest.approx(2.0 + 2 * 30.0)
    assert due_s(num_fresh=30_000, num_tokens=1) == 2.0


def test_behind_many_prompts_it_waits_as_long_as_they_take_while_the_engine_makes_tokens() -> None:
    now_s = CONFIG.first_token_s + 5.0
    assert due_s(last_token_s=now_s, now_s=now_s) == CONFIG.first_token_s
    assert due_s(num_waiting=100_000, last_token_s=now_s, now_s=now_s) == now_s + 2.0, (
        "and no longer than the engine does"
    )
    assert due_s(num_waiting=100_000, last_token_s=now_s, now_s=250.0) == 2.0, "an engine that stands is found at once"

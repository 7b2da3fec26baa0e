"""When an attempt counts as stalled, and how long a turn rests between attempts. Pure, but for the jitter's generator."""

from __future__ import annotations

from random import Random

from rose.policies.routing import EngineState
from rose.pool.config import PoolConfig
from rose.pool.turns import Attempt, TurnRecord

_MIN_FAILED_TO_REST = 2
_PREFILL_SLACK = 2.0


def rest_s(record: TurnRecord, config: PoolConfig, rng: Random) -> float:
    """Return how long a turn rests before its next attempt: not at all until two in a row failed without a token."""
    num_failed = record.num_fruitless_in_a_row
    if num_failed < _MIN_FAILED_TO_REST or record.finish_reason_so_far() is not None:
        return 0.0
    pause_s = min(config.retry_s * 2.0 ** (num_failed - _MIN_FAILED_TO_REST), config.retry_max_s)
    return pause_s * (1.0 + config.jitter_fraction * rng.random())


def stall_due_s(attempt: Attempt, config: PoolConfig, now_s: float, *, prefill_s: float = 0.0) -> float:
    """Return when an open attempt counts as stalled, unless it or its engine makes a token until then.

    ``prefill_s`` is what a prompt token takes, as far as is known.

    The time of an activation is no stall. One without a token yet may wait longer while its engine makes tokens for others, as long as the
    prompts that wait there take: it waits for its place, nothing stands, and elsewhere its prompt would only be one more.
    """
    member, due_s = attempt.member, attempt.last_progress_s + config.stall_s
    if attempt.num_tokens == 0:  # a long prompt is no stall, also where nothing else runs that would show tokens
        due_s += _PREFILL_SLACK * prefill_s * attempt.num_fresh_tokens
    if member.state is EngineState.UPDATING:
        return now_s + config.stall_s
    if attempt.num_tokens == 0 and member.last_token_s > now_s - config.stall_s:
        prompts_s = (
            _PREFILL_SLACK * prefill_s * member.num_waiting_prompt_tokens
        )  # its own and those that may be before it
        due_s = max(due_s, attempt.last_progress_s + max(config.first_token_s, prompts_s))
        due_s = min(due_s, max(now_s, member.last_token_s) + config.stall_s)
    return due_s

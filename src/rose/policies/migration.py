"""When a trajectory is better off on another engine, judged at a turn boundary. Pure.

What a step waits for is its last trajectory, so engines are compared by when the *latest* of the trajectories concerned would end: the
one that asks, the one with the most left on the engine that it leaves, and the one with the most left on the engine that
it would join. A move must end that clearly earlier, with the prompt that is to be computed anew counted in, and by more than that prompt
holds up all the others there together: on a crowded engine a small gain is not worth everybody's wait. So a
trajectory with much left gets a fast engine to itself, one with little left makes room for it, and nobody moves for a trifle.

What is left is judged by progress alone: who has run long is expected to run on for long. Lengths are not predicted.
"""

# ruff: noqa: FURB136 - calls of ``max`` would take most of the time of ``gain_s``, which most decisions ask twice
from __future__ import annotations

from rose.policies.route_views import EngineLoad, RoutingConfig, TurnView


def remaining_tokens(config: RoutingConfig, *, num_made: int, num_context: int) -> float:
    """Return how many tokens a trajectory is expected to make yet.

    Args:
        config: The terms.
        num_made: Tokens that it has made.
        num_context: Its context now: prompts, observations and what it made.
    """
    left = config.progress_factor * num_made
    if config.max_context_tokens is None:
        return left
    share = config.max_context_tokens / max(1, num_context) - 1.0
    return min(left, max(0.0, share) * num_made)


def gain_s(config: RoutingConfig, turn: TurnView, here: EngineLoad, there: EngineLoad) -> float:
    """Return how much earlier the latest of the trajectories concerned ends if ``turn`` moves, 0 unless that is clear.

    Both loads are without the turn. Engines without a known pace are not compared.
    """
    pace_here_s, pace_there_s = here.pace_s, there.pace_s
    if pace_here_s is None or pace_there_s is None:
        return 0.0
    left, prompt = turn.num_left_tokens, turn.num_prompt_tokens
    left_here, left_there = here.most_left_tokens, there.most_left_tokens
    stay_s = _last_end_s(here, pace_here_s, left, prompt) + here.prefill_s * here.num_waiting_prompt_tokens
    go_s = _last_end_s(there, pace_there_s, left, prompt)
    go_s += there.prefill_s * (there.num_waiting_prompt_tokens + prompt)
    rest_here_s, rest_there_s = pace_here_s * left_here, pace_there_s * left_there
    before_s = stay_s if stay_s > rest_there_s else rest_there_s
    gain = before_s - (go_s if go_s > rest_here_s else rest_here_s)
    if gain <= config.min_gain_s or gain <= config.hysteresis_fraction * before_s:
        return 0.0
    crowd_s = there.prefill_s * prompt * (there.num_in_flight + there.num_seats)
    return gain if gain > crowd_s else 0.0


def _last_end_s(load: EngineLoad, pace_s: float, left: float, prompt: int) -> float:
    """Return when the latest ends of a trajectory with so much left and those of an engine that it is with.

    They share it until the first of it and the most advanced one ends; the other then has what is left to itself.
    """
    own_s, others = load.slope_s * prompt, load.most_left_tokens
    if left > others:
        return (pace_s + own_s) * others + (load.idle_s + own_s) * (left - others)
    return pace_s * others + own_s * left


def is_crowded(config: RoutingConfig, here: EngineLoad, there: EngineLoad) -> bool:
    """Return whether a turn that stays would leave too large a load gap to an engine of the same kind; asked while no pace is known."""
    return here.num_in_flight + here.num_seats + 1 - there.num_in_flight - there.num_seats > config.load_margin

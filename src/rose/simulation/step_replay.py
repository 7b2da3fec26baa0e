"""What each step of an engine computed, made out from its log and the requests that it answered. Pure.

A log says how many prompt tokens and decodes a step had, not how long their contexts were. A continuous-batching engine
decodes every request that has its first token in every step, so the log and the lengths of the requests give the rest.

``replay_steps`` goes forward, for a serving engine: it takes prompts in the order of arrival. From the first step on whose
decodes do not come out as logged (a request was preempted, cut off, or its prefix was in the cache) nothing more is made out.
``replay_decodes`` goes back from each answer's end, for a rollout engine, whose prompts are cached in part: it makes out
steps without prompts, those whose decodes come out as logged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import attrs

from rose.interfaces.device import StepWork
from rose.simulation.profile_fit import TimedStep

_CLOCK_S = 1e-6  # times in logs are rounded
_START, _DURATION, _PREFILL, _DECODES = 0, 1, 5, 6  # places in a row of ``StepRecord``'s values


@attrs.frozen(kw_only=True)
class ServedRequest:
    """One request in the order of arrival, its first token at ``first_token_s`` as its client saw it."""

    prompt_tokens: int
    output_tokens: int
    first_token_s: float


@attrs.frozen(kw_only=True)
class StepReplay:
    """What was made out.

    Attributes:
        steps: As far as they came out as logged.
        num_logged: Steps in the log.
        gaps_s: Time between a step and the next, where the engine had requests to go on with.
        first_token_delays_s: From the end of the step that finished a prompt until its client had the first token.
    """

    steps: tuple[TimedStep, ...]
    num_logged: int
    gaps_s: tuple[float, ...]
    first_token_delays_s: tuple[float, ...]


@attrs.define
class _Live:
    request: ServedRequest
    num_computed: int = 0
    num_made: int = 0

    @property
    def is_over(self) -> bool:
        return self.num_made >= self.request.output_tokens


def replay_steps(rows: Sequence[Sequence[float]], requests: Sequence[ServedRequest]) -> StepReplay:
    """Go through a log.

    Args:
        rows: The values of ``StepRecord`` in order, in the order of their starts.
        requests: All that the engine answered, in the order of arrival.
    """
    waiting = deque(_Live(request) for request in requests)
    decoding: list[_Live] = []
    steps: list[TimedStep] = []
    gaps_s: list[float] = []
    delays_s: list[float] = []
    last_end_s: float | None = None
    for row in rows:
        if len(decoding) != int(row[_DECODES]):
            break
        if last_end_s is not None:
            gaps_s.append(row[_START] - last_end_s)
        context = sum(live.num_computed + 1 for live in decoding)
        for live in decoding:
            live.num_computed += 1
            live.num_made += 1
        positions, finished = _prefill(waiting, int(row[_PREFILL]))
        work = StepWork(int(row[_PREFILL]), len(decoding), context, positions)
        steps.append(TimedStep(work, row[_DURATION]))
        end_s = row[_START] + row[_DURATION]
        delays_s += [live.request.first_token_s - end_s for live in finished]
        decoding = [live for live in (*decoding, *finished) if not live.is_over]
        has_begun = bool(waiting) and waiting[0].num_computed > 0
        last_end_s = end_s if decoding or has_begun else None
    return StepReplay(
        steps=tuple(steps), num_logged=len(rows), gaps_s=tuple(gaps_s), first_token_delays_s=tuple(delays_s)
    )


def _prefill(waiting: deque[_Live], num_tokens: int) -> tuple[float, list[_Live]]:
    """Take prompt tokens off the queue; return the positions they attend to, and the requests whose prompts are done."""
    positions, finished = 0.0, []
    while num_tokens and waiting:
        live = waiting[0]
        chunk = min(num_tokens, live.request.prompt_tokens - live.num_computed)
        live.num_computed += chunk
        num_tokens -= chunk
        positions += chunk * (live.num_computed - chunk / 2)
        if live.num_computed == live.request.prompt_tokens:
            live.num_made = 1
            finished.append(waiting.popleft())
    return positions, finished


@attrs.frozen(kw_only=True)
class EndedAnswer:
    """One answer that ran on one engine as a whole; its client had the last token at ``ended_s``."""

    prompt_tokens: int
    output_tokens: int
    ended_s: float


def replay_decodes(rows: Sequence[Sequence[float]], answers: Sequence[EndedAnswer]) -> list[TimedStep]:
    """Make out the steps of pure decoding.

    Args:
        rows: The values of ``StepRecord`` in order, in the order of their starts.
        answers: What the engine answered, in any order.
    """
    ends_s = [row[_START] + row[_DURATION] for row in rows]
    counts, contexts = [0] * len(rows), [0] * len(rows)
    for answer in answers:
        last = bisect_right(ends_s, answer.ended_s + _CLOCK_S) - 1
        for back in range(answer.output_tokens - 1):  # the first token came with the prompt
            if (at := last - back) >= 0:
                counts[at] += 1
                contexts[at] += answer.prompt_tokens + answer.output_tokens - 1 - back
    return [
        TimedStep(StepWork(0, count, context, 0.0), row[_DURATION])
        for row, count, context in zip(rows, counts, contexts, strict=True)
        if count and not row[_PREFILL] and count == int(row[_DECODES])
    ]


def extra_guest_turns(owner: Sequence[Sequence[float]], guest: Sequence[Sequence[float]]) -> tuple[int, int]:
    """Count how often a guest had the device again before its owner, who wanted it, had it once.

    Two engines that both want a device all the time take turns. A lock that does not hand itself over lets the one that let go
    of it take it again while the other is still waking up.

    Returns:
        Between two of the owner's steps that decode: the guest's turns beyond one, and how many of these gaps had any.
    """
    starts_s = sorted(row[_START] for row in guest)
    num_extra = num_contested = 0
    for before, after in pairwise(owner):
        if not after[_DECODES]:
            continue  # it may have had nothing to do
        end_s = before[_START] + before[_DURATION]
        num = bisect_right(starts_s, after[_START] - _CLOCK_S) - bisect_right(starts_s, end_s - _CLOCK_S)
        num_extra += max(0, num - 1)
        num_contested += num > 0
    return num_extra, num_contested

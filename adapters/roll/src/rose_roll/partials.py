"""Tokens of turns that ended early, kept until the same turn is asked again. Pure; one owner a store.

Invariants:

* What is kept belongs to one trajectory and one exact prompt; another prompt of that trajectory drops it.
* Tokens, log-probs and spans of a joined result are those of its parts, in order; each part's log-probs are as long as its tokens, or
  all parts have none. The budget of new tokens holds over all parts.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from rose.types import FinishReason, Sampling, TurnResult, VersionSpan

_MAX_TRAJECTORIES = 4096
NOTHING = TurnResult(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORTED, versions=(), hops=())


def join(first: TurnResult, second: TurnResult) -> TurnResult:
    """Return the result of a turn that was made in two parts; how it ended is the second part's."""
    start = len(first.token_ids)
    spans = list(first.versions)
    for span in second.versions:
        moved = attrs.evolve(span, start=span.start + start, end=span.end + start)
        if spans and spans[-1].version == moved.version and spans[-1].end == moved.start:
            spans[-1] = attrs.evolve(spans[-1], end=moved.end)
        else:
            spans.append(moved)
    return TurnResult(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        finish_reason=second.finish_reason,
        versions=tuple(spans),
        hops=first.hops + second.hops,
    )


def remaining(sampling: Sampling, done: TurnResult) -> Sampling | None:
    """Return how to draw what is left of a turn, ``None`` when its budget is used up or a stop token ends it."""
    left = sampling.max_tokens - len(done.token_ids)
    if left <= 0 or _is_stopped(done, sampling):
        return None
    seed = None if sampling.seed is None else sampling.seed + len(done.token_ids)
    return attrs.evolve(sampling, max_tokens=left, seed=seed)


def ended(done: TurnResult, sampling: Sampling) -> TurnResult:
    """Return the result of a turn of which nothing is left: up to its stop token, or the first tokens of its budget.

    An abort may come between a turn's last token and the word that it has ended.
    """
    max_tokens = sampling.max_tokens
    is_stopped = len(done.token_ids) <= max_tokens and _is_stopped(done, sampling)
    spans = [
        VersionSpan(version=span.version, start=span.start, end=min(span.end, max_tokens))
        for span in done.versions
        if span.start < max_tokens
    ]
    return attrs.evolve(
        done,
        token_ids=done.token_ids[:max_tokens],
        logprobs=done.logprobs[:max_tokens],
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        versions=tuple(spans),
    )


def _is_stopped(done: TurnResult, sampling: Sampling) -> bool:
    return bool(done.token_ids) and done.token_ids[-1] in sampling.stop_token_ids


@attrs.define
class Partials:
    """The kept parts, at most one a trajectory; the trajectories that were not asked for longest go first."""

    max_trajectories: int = _MAX_TRAJECTORIES
    _kept: OrderedDict[str, tuple[tuple[int, ...], TurnResult]] = attrs.field(factory=OrderedDict, init=False)

    def take(self, trajectory_id: str, prompt_ids: tuple[int, ...]) -> TurnResult:
        """Return, and forget, what was kept of this turn; nothing where it is another."""
        prompt, done = self._kept.pop(trajectory_id, (None, NOTHING))
        return done if prompt == prompt_ids else NOTHING

    def keep(self, trajectory_id: str, prompt_ids: tuple[int, ...], done: TurnResult) -> None:
        """Keep what a turn has so far."""
        if not done.token_ids:
            return
        self._kept[trajectory_id] = (prompt_ids, done)
        self._kept.move_to_end(trajectory_id)
        while len(self._kept) > self.max_trajectories:
            self._kept.popitem(last=False)

    def __len__(self) -> int:
        """Return how many turns are kept."""
        return len(self._kept)

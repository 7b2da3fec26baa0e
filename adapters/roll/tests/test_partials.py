from __future__ import annotations

import attrs

from rose.types import FinishReason, Sampling, TurnResult, VersionSpan, WeightVersion
from rose_roll.partials import NOTHING, Partials, ended, join, remaining


def result(num_tokens: int, *, n: int = 0, first: int = 0, ended: FinishReason = FinishReason.ABORTED) -> TurnResult:
    tokens = tuple(range(first, first + num_tokens))
    spans = (VersionSpan(version=WeightVersion("r", n), start=0, end=num_tokens),) if num_tokens else ()
    logprobs = tuple(-0.1 * (1 + token) for token in tokens)
    return TurnResult(token_ids=tokens, logprobs=logprobs, finish_reason=ended, versions=spans, hops=())


def test_parts_are_joined_in_order_with_their_versions() -> None:
    whole = join(result(3), result(2, n=1, first=3, ended=FinishReason.STOP))
    assert whole.token_ids == (0, 1, 2, 3, 4)
    assert len(whole.logprobs) == 5
    assert [(str(span.version), span.start, span.end) for span in whole.versions] == [("r:0", 0, 3), ("r:1", 3, 5)]
    assert whole.finish_reason is FinishReason.STOP


def test_parts_of_one_version_are_one_span() -> None:
    assert [(span.start, span.end) for span in join(result(3), result(2, first=3)).versions] == [(0, 5)]


def test_nothing_changes_nothing() -> None:
    part = result(4, ended=FinishReason.STOP)
    assert join(NOTHING, part) == part


def test_the_budget_holds_over_all_parts() -> None:
    assert remaining(Sampling(max_tokens=5, seed=10), result(3)) == Sampling(max_tokens=2, seed=13)
    assert remaining(Sampling(max_tokens=3), result(3)) is None
    short = ended(join(result(3), result(4, n=1, first=3)), Sampling(max_tokens=5))
    assert (len(short.token_ids), len(short.logprobs), short.finish_reason) == (5, 5, FinishReason.LENGTH)
    assert [(span.start, span.end) for span in short.versions] == [(0, 3), (3, 5)]


def test_nothing_is_drawn_behind_a_stop_token() -> None:
    """An abort may come between a turn's last token and the word that it has ended."""
    done, sampling = result(3), Sampling(max_tokens=5, stop_token_ids=(2,))
    assert remaining(sampling, done) is None
    assert ended(done, sampling) == attrs.evolve(done, finish_reason=FinishReason.STOP)
    assert remaining(sampling, result(2)) == attrs.evolve(sampling, max_tokens=3)


def test_a_part_belongs_to_its_prompt() -> None:
    partials = Partials()
    partials.keep("t", (1, 2), result(3))
    assert partials.take("t", (1, 2, 9)) == NOTHING
    assert partials.take("t", (1, 2)) == NOTHING, "another prompt of the trajectory drops it"
    partials.keep("t", (1, 2), result(3))
    assert partials.take("t", (1, 2)).token_ids == (0, 1, 2)
    assert partials.take("t", (1, 2)) == NOTHING, "it is taken once"


def test_what_was_not_asked_for_longest_goes_first() -> None:
    partials = Partials(max_trajectories=2)
    for name in "abc":
        partials.keep(name, (1,), result(1))
    assert len(partials) == 2
    assert partials.take("a", (1,)) == NOTHING
    partials.keep("d", (1,), NOTHING)
    assert len(partials) == 2, "nothing is not kept"

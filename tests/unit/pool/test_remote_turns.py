"""A client's turn on the direct path, without a network: what it keeps, what it tells, when it gives the result."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.errors import EngineError, EngineLostError, TurnFailedError
from rose.pool import direct
from rose.pool.remote_turns import RemoteCall
from rose.pool.wire import error_to_plain
from rose.types import (
    AnyVersion,
    AtLeast,
    EngineId,
    FinishReason,
    Hop,
    HopEnd,
    RequestId,
    RouteReason,
    Sampling,
    TokenChunk,
    Turn,
    TurnResult,
    WeightVersion,
)

V3, V4 = WeightVersion("r", 3), WeightVersion("r", 4)
MOVED = Hop(engine_id=EngineId("e0"), reason=RouteReason.DEDICATED, num_tokens=2, ended=HopEnd.STALLED)


def call(max_tokens: int = 6, **options: Any) -> RemoteCall:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, seed=5)
    turn = Turn(trajectory_id="t", group_id="g", prompt_ids=(1, 2), sampling=sampling, **options)
    return RemoteCall.of("7", turn, asyncio.Future(loop=_LOOP))


def start(attempt: int = 1, num_kept: int = 0, **options: Any) -> direct.Start:
    given: dict[str, Any] = {
        "max_tokens": 6 - num_kept,
        "hops": (),
        "version": V3,
        "versions": AnyVersion(),
        "run": "r",
    }
    return direct.Start(
        turn_id="7",
        attempt=attempt,
        request_id=RequestId(f"p-{attempt}"),
        engine_id=f"e{attempt}",
        reason=RouteReason.AFFINITY,
        address=None,
        num_kept=num_kept,
        **{**given, **options},
    )


def chunk(*ids: int, version: WeightVersion | None = V3, end: FinishReason | None = None) -> TokenChunk:
    return TokenChunk(token_ids=ids, logprobs=(-0.5,) * len(ids), version=version, finish_reason=end)


def told(news: list[Any] | None) -> tuple[int, list[int], Any]:
    assert news is not None
    report = direct.report_from_wire(news)
    return report.start, [token for part in report.chunks for token in part.token_ids], report.end


_LOOP = asyncio.new_event_loop()  # futures want one; nothing runs on it
_LOOP.close()


def test_the_result_is_there_before_the_report() -> None:
    one = call()
    request = one.begin(start(max_tokens=4))
    assert request is not None
    assert (request.prompt_ids, request.sampling.max_tokens) == ((1, 2), 4)
    assert not one.take(chunk(5, 6))
    assert not one.deliver()
    assert one.take(chunk(7, end=FinishReason.STOP))
    assert one.deliver()
    result = one.waiter.result()
    assert (result.token_ids, result.finish_reason) == ((5, 6, 7), FinishReason.STOP)
    assert [(hop.engine_id, hop.num_tokens, hop.ended) for hop in result.hops] == [("e1", 3, HopEnd.FINISHED)]
    assert told(one.news()) == (0, [5, 6, 7], FinishReason.STOP)
    assert one.news() is None
    one.settle({"error": {}})  # the pool's word comes later and changes nothing
    assert one.waiter.result() is result


def test_a_move_keeps_what_the_pool_has_and_moves_the_seed_on() -> None:
    one = call()
    one.begin(start())
    one.take(chunk(5, 6, 7, version=V3))
    assert told(one.news()) == (0, [5, 6, 7], None)
    request = one.begin(start(2, num_kept=2, hops=(MOVED,)))
    assert request is not None
    assert (request.prompt_ids, request.sampling.max_tokens, request.sampling.seed) == ((1, 2, 5, 6), 4, 7)
    one.take(chunk(8, version=V4, end=FinishReason.STOP))
    assert one.deliver()
    result = one.waiter.result()
    assert result.token_ids == (5, 6, 8)
    assert [(span.version, span.start, span.end) for span in result.versions] == [(V3, 0, 2), (V4, 2, 3)]
    assert result.hops[0] is MOVED
    assert result.hops[1].num_tokens == 1
    assert told(one.news()) == (2, [8], FinishReason.STOP)


def test_the_same_attempt_again_is_told_again() -> None:
    one = call()
    one.begin(start())
    one.take(chunk(5, 6, end=FinishReason.LENGTH))
    assert one.deliver()
    one.news()
    assert one.begin(start(num_kept=1)) is None
    assert told(one.news()) == (1, [6], FinishReason.LENGTH)


def test_an_attempt_that_is_told_again_counts_from_its_beginning() -> None:
    one = call()
    one.begin(start(2, num_kept=2, hops=(MOVED,)))
    one.record.token_ids[:], one.record.logprobs[:] = [5, 6], [-0.5, -0.5]
    one.take(chunk(7))
    assert (
        one.begin(start(2, num_kept=3, hops=(MOVED,))) is None
    )  # after another connection; the pool has one of its tokens
    one.take(chunk(8, end=FinishReason.STOP))
    assert one.deliver()
    assert [hop.num_tokens for hop in one.waiter.result().hops] == [2, 2]


def test_an_attempt_of_a_pool_that_was_started_anew_is_another_one() -> None:
    one = call()
    one.begin(start())
    one.take(chunk(5, 6))
    request = one.begin(attrs.evolve(start(), request_id=RequestId("q-1")))
    assert request is not None
    assert (request.request_id, request.prompt_ids) == ("q-1", (1, 2))
    one.take(chunk(7))
    assert told(one.news()) == (0, [7], None)


@pytest.mark.parametrize("end", [FinishReason.ABORTED, FinishReason.EVICTED])
def test_what_may_go_on_elsewhere_is_the_pool_s_to_say(end: FinishReason) -> None:
    one = call()
    one.begin(start())
    assert one.take(chunk(5, end=end))
    assert not one.deliver()
    assert told(one.news()) == (0, [5], end)
    summary = {"num_tokens": 1, "finish_reason": "aborted", "versions": [], "hops": []}
    one.settle(summary)
    assert one.waiter.result().finish_reason is FinishReason.ABORTED
    assert one.waiter.result().token_ids == (5,)


def test_tokens_without_a_label_wait_for_the_pool_s_word() -> None:
    one = call()
    one.begin(start())
    one.take(chunk(5, version=None, end=FinishReason.STOP))
    assert not one.deliver()
    other = call()
    other.begin(start(version=None))
    other.take(chunk(5, version=None, end=FinishReason.STOP))
    assert other.deliver()


def test_a_version_that_is_not_allowed_is_not_delivered() -> None:
    one = call(versions=AtLeast(4))
    one.begin(start(versions=AtLeast(4), version=V4))
    assert one.take(chunk(5, version=V3, end=FinishReason.STOP))
    assert not one.deliver()
    assert told(one.news()) == (0, [5], None)


def test_tokens_beyond_the_budget_are_not_taken() -> None:
    one = call(max_tokens=2)
    one.begin(start(max_tokens=2))
    assert one.take(chunk(5, 6, 7))
    assert one.deliver()
    assert one.waiter.result().finish_reason is FinishReason.LENGTH
    assert told(one.news()) == (0, [5, 6], FinishReason.LENGTH)


def test_the_budget_is_what_the_pool_asks_for() -> None:
    one = call()
    request = one.begin(start(max_tokens=3))
    assert request is not None
    assert request.sampling.max_tokens == 3
    one.take(chunk(5))
    one.begin(start(2, num_kept=1, max_tokens=2))
    assert one.take(chunk(6, 7, 8, end=FinishReason.STOP))
    assert one.deliver()
    assert one.waiter.result().token_ids == (5, 6, 7)
    assert one.waiter.result().finish_reason is FinishReason.STOP


def test_errors_are_told_and_the_turn_stays_open() -> None:
    one = call()
    one.begin(start())
    one.take(chunk(5))
    one.fail(EngineLostError("gone"))
    assert not one.deliver()
    assert told(one.news())[2]["error"]["type"] == "engine_lost_error"
    assert not one.waiter.done()
    one.settle(error_to_plain(TurnFailedError("given up", (MOVED,))))
    with pytest.raises(TurnFailedError, match="given up") as caught:
        one.waiter.result()
    assert caught.value.hops == (MOVED,)
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == (5,)


def test_log_probs_that_do_not_match_end_the_attempt() -> None:
    one = call()
    one.begin(start())
    assert one.take(TokenChunk(token_ids=(5, 6), logprobs=(-0.5,)))
    assert told(one.news())[2]["error"]["message"] == "2 tokens came with 1 log-probs"


def test_a_pool_that_counts_more_than_came_is_an_error() -> None:
    one = call()
    one.begin(start())
    one.settle({"num_tokens": 3, "finish_reason": "stop", "versions": [], "hops": []})
    with pytest.raises(TurnFailedError, match="0 came"):
        one.waiter.result()


AHEAD = start(direct.AHEAD, versions=AnyVersion())


def test_nothing_is_told_or_given_of_a_head_start_before_the_pool_took_it_over() -> None:
    one = call()
    assert one.begin(AHEAD) is not None
    assert one.take(chunk(5, 6, end=FinishReason.STOP))
    assert not one.deliver()
    assert one.news() is None
    assert one.begin(attrs.evolve(start(4), request_id=AHEAD.request_id)) is None
    assert one.deliver()
    assert one.waiter.result().token_ids == (5, 6)
    assert told(one.news()) == (0, [5, 6], FinishReason.STOP)


def test_a_head_start_that_the_pool_did_not_want_leaves_nothing() -> None:
    one, other = call(), call()
    one.begin(AHEAD)
    one.take(chunk(5, 6, version=None))
    request = one.begin(start(4))
    assert request is not None
    assert request.prompt_ids == (1, 2)
    assert one.take(chunk(7, end=FinishReason.STOP))
    assert one.deliver()
    assert one.waiter.result().token_ids == (7,)
    other.begin(AHEAD)
    other.take(chunk(5, 6))
    other.drop_ahead()
    assert other.partial().token_ids == ()
    assert other.news() is None


def test_a_call_that_ends_with_a_head_start_keeps_nothing_of_it() -> None:
    one = call()
    one.begin(AHEAD)
    one.take(chunk(5, 6))
    one.settle(error_to_plain(TurnFailedError("closed", ())))
    with pytest.raises(TurnFailedError) as caught:
        one.waiter.result()
    assert caught.value.partial is not None
    assert caught.value.partial.token_ids == ()


class _Pool:
    """The pool's half: it takes reports in order, each perhaps lost, and may move the turn at any time."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.attempt = 0

    def begin(self, one: RemoteCall) -> None:
        self.attempt += 1
        one.begin(start(self.attempt, num_kept=len(self.tokens), max_tokens=40 - len(self.tokens)))

    def hear(self, news: list[Any] | None) -> None:
        if news is None:
            return
        report = direct.report_from_wire(news)
        if report.attempt == self.attempt and report.start <= len(self.tokens):
            fresh = [token for part in report.chunks for token in part.token_ids]
            self.tokens += fresh[len(self.tokens) - report.start :]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(["token", "report", "lost", "reconnect", "move"]), max_size=40))
def test_client_and_pool_agree_whatever_is_lost(history: list[str]) -> None:
    """Tokens of a greedy turn are a function of their place, so a gap or a repetition would show."""
    one, pool = call(max_tokens=40), _Pool()
    pool.begin(one)
    for step in history:
        if step == "token":
            one.take(chunk(100 + len(one.record.token_ids)))
        elif step == "report":
            pool.hear(one.news())
        elif step == "lost":
            one.news()
            one.begin(start(pool.attempt, num_kept=len(pool.tokens)))
        elif step == "reconnect":
            one.begin(start(pool.attempt, num_kept=len(pool.tokens)))
        else:
            pool.begin(one)
        assert one.record.token_ids[: len(pool.tokens)] == pool.tokens
    if len(one.record.token_ids) < 40:
        one.take(chunk(100 + len(one.record.token_ids), end=FinishReason.STOP))
    pool.hear(one.news())
    assert pool.tokens == one.record.token_ids == [100 + n for n in range(len(pool.tokens))]


def test_a_failure_of_the_stream_is_an_engine_error() -> None:
    one = call()
    one.begin(start())
    one.fail(EngineError("odd"))
    assert isinstance(one.end, dict)
    result: asyncio.Future[TurnResult] = one.waiter
    assert not result.done()

"""Serving feeds: what arrives is answered and counted once."""

from __future__ import annotations

import asyncio
import math

import pytest

from rose.simulation.loop import VirtualLoop
from rose.simulation.outcome import ServingOutcome
from rose.simulation.serving_site import ServingFeed, hand_over, summarise
from rose.simulation.traces import Arrival
from rose.simulation.world import alone, pair_up, poker

from test_device import make_lane  # isort: skip

ARRIVALS = (Arrival(0.5, 100, 3), Arrival(1.0, 200, 1))


def run(main: object) -> object:
    return VirtualLoop().run(main)  # type: ignore[arg-type]


def make_feed(period_s: float = 10.0, arrivals: tuple[Arrival, ...] = ARRIVALS, name: str = "s") -> ServingFeed:
    lane = make_lane(name, has_cache=False)
    device = alone(asyncio.get_running_loop(), lane)
    return ServingFeed(lane, arrivals, period_s, poker(device))


def outcome(feed: ServingFeed, window: tuple[float, float], now_s: float) -> ServingOutcome:
    return summarise([feed], [window], ttft_slo_s=0.5, tpot_slo_s=0.15, now_s=now_s)


def test_requests_come_again_each_period_and_are_counted_within_windows() -> None:
    async def main() -> None:
        feed = make_feed()
        feed.start()
        await asyncio.sleep(25)
        assert [round(answer.arrived_s, 3) for answer in feed.answers] == [0.5, 1.0, 10.5, 11.0, 20.5, 21.0]
        counted = outcome(feed, (10.0, 20.0), 25.0)
        assert counted.num_requests == 2
        assert counted.ttft_p50_ms == pytest.approx(25.0)  # of 20 and 30
        assert counted.tpot_p50_ms == pytest.approx(11.1, abs=0.1)
        assert counted.violations_fraction == 0

    run(main())


def test_without_a_period_they_come_once() -> None:
    async def main() -> None:
        feed = make_feed(math.inf)
        feed.start()
        await asyncio.sleep(100)
        assert len(feed.answers) == 2

    run(main())


def test_a_request_that_waits_beyond_its_slo_is_a_violation_though_never_answered() -> None:
    async def main() -> None:
        feed = make_feed(arrivals=(Arrival(0.0, 100_000, 5),))
        feed.start()
        await asyncio.sleep(2.0)
        counted = outcome(feed, (0.0, 2.0), 2.0)
        assert (counted.num_requests, counted.violations_fraction) == (1, 1.0)

    run(main())


def test_redirected_requests_are_answered_elsewhere() -> None:
    async def main() -> None:
        feed, other = make_feed(), make_feed(arrivals=(), name="o")
        feed.redirect = other
        feed.start()
        other.start()
        await asyncio.sleep(5)
        assert (len(feed.answers), len(other.answers)) == (0, 2)
        assert feed.rate_rps(5.0) == pytest.approx(2 / 5)

    run(main())


def test_prefill_here_and_decode_there_gives_one_answer_a_request() -> None:
    async def main() -> None:
        prefill, decode = make_feed(), make_feed(arrivals=(), name="d")
        hand_over(prefill, decode, lambda num_tokens: num_tokens * 1e-3)
        prefill.start()
        decode.start()
        await asyncio.sleep(5)
        assert [answer.ttft_s for answer in prefill.answers] == pytest.approx([0.030])  # one token, all made here
        (answer,) = decode.answers
        assert answer.ttft_s == pytest.approx(0.020)
        assert answer.tpot_s == pytest.approx((0.1 + 2 * 0.0111) / 2, abs=0.002)

    run(main())


def test_engines_that_are_paired_share_one_load() -> None:
    async def main() -> None:
        feeds = [make_feed(name=f"s{i}") for i in range(3)]
        pair_up(feeds, lambda _: 0.0)
        assert [len(feed.arrivals) for feed in feeds] == [4, 0, 2]

    run(main())


def test_requests_that_are_redirected_among_pairs_are_answered_once_in_full() -> None:
    async def main() -> None:
        pair = make_feed(), make_feed(arrivals=(), name="d")
        hand_over(*pair, lambda _: 0.001)
        away = make_feed(arrivals=(Arrival(0.5, 100, 30),), name="a"), make_feed(arrivals=(), name="ad")
        hand_over(*away, lambda _: 0.001)
        away[0].redirect, away[1].redirect = pair  # one to the prefill engine, one to the decode engine
        lone = make_feed(arrivals=(Arrival(2.0, 100, 30),), name="l")
        lone.redirect = pair[0]  # does both itself, goes to one that does not
        for feed in (*pair, *away, lone):
            feed.start()
        await asyncio.sleep(5)
        assert [len(feed.answers) for feed in (*pair, *away, lone)] == [1, 3, 0, 0, 0]  # the one token of ARRIVALS
        assert all(answer.tpot_s is not None and answer.tpot_s > 0.009 for answer in pair[1].answers)

    run(main())


def test_what_was_handed_over_is_finished_by_whoever_stands_in_for_the_decode_engine() -> None:
    async def main() -> None:
        prefill, decode, other, last = feeds = [
            make_feed(arrivals=arrivals, name=name)
            for name, arrivals in (("p", ARRIVALS), ("d", ()), ("o", ()), ("l", ()))
        ]
        hand_over(prefill, decode, lambda _: 0.001)
        hand_over(other, last, lambda _: 0.001)
        decode.redirect = other  # which prefills, and hands over what it began, but not what it was given to finish
        for feed in feeds:
            feed.start()
        await asyncio.sleep(5)
        assert [len(feed.answers) for feed in feeds] == [1, 0, 1, 0]

    run(main())


def test_an_open_request_is_judged_by_the_first_token_that_its_user_saw() -> None:
    async def main() -> None:
        feed = make_feed(arrivals=(Arrival(0.0, 100, 5000),))
        feed.api_overhead_s = 0.6
        feed.start()
        await asyncio.sleep(2.0)
        (answer,) = feed.unanswered(2.0)
        assert answer.ttft_s == pytest.approx(0.620)
        assert outcome(feed, (0.0, 2.0), 2.0).violations_fraction == 1.0

    run(main())

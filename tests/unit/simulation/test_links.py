"""A link that transfers share: times, ends, accounts; beside a plain model that moves from change to change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.simulation.links import SharedLink
from rose.simulation.loop import VirtualLoop

RATE = 1000  # bytes/s
GBPS = RATE * 8 / 1e9


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    VirtualLoop().run(main())


@attrs.frozen
class Job:
    """Begins at ``start_s``; given up ``patience_s`` later."""

    start_s: float
    num_bytes: int
    patience_s: float = 1e9


def ends(link: SharedLink, jobs: list[Job]) -> tuple[list[float | None], list[int]]:
    """Return when each job ended (``None``: given up) and in which order they did."""
    found: list[float | None] = [None] * len(jobs)
    order: list[int] = []

    async def one(index: int, job: Job) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(job.start_s)
        try:
            async with asyncio.timeout(job.patience_s):
                await link.transfer(job.num_bytes)
        except TimeoutError:
            return
        found[index] = loop.time()
        order.append(index)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            for index, job in enumerate(jobs):
                group.create_task(one(index, job))

    run(work)
    return found, order


def test_alone_it_takes_latency_and_bytes_over_bandwidth() -> None:
    link = SharedLink(gbps=GBPS, latency_s=0.25)

    async def work() -> None:
        await link.transfer(500, num_trips=3)
        assert asyncio.get_running_loop().time() == pytest.approx(3 * 0.25 + 0.5)
        await link.transfer(0)
        assert asyncio.get_running_loop().time() == pytest.approx(4 * 0.25 + 0.5)

    run(work)
    assert (link.delivered_bytes, link.num_active) == (500, 0)
    assert link.busy_s == pytest.approx(0.5)


def test_those_in_flight_have_equal_shares() -> None:
    """1000 bytes from 0 s and 250 from 0.5 s: shared until 1 s, so the first ends at 1.25 s."""
    found, _ = ends(SharedLink(gbps=GBPS), [Job(0, 1000), Job(0.5, 250)])
    assert found == pytest.approx([1.25, 1.0])


def test_one_that_gives_up_gives_its_share_back() -> None:
    """Two of 1000 bytes; one gives up at 0.5 s, when each has had 250: the other ends at 1.25 s."""
    link = SharedLink(gbps=GBPS)
    found, _ = ends(link, [Job(0, 1000), Job(0, 1000, patience_s=0.5)])
    assert found == [pytest.approx(1.25), None]
    assert (link.delivered_bytes, link.num_active) == (1000, 0)
    assert link.busy_s == pytest.approx(1.25)


def test_equal_ends_come_in_the_order_of_their_starts() -> None:
    found, order = ends(SharedLink(gbps=GBPS), [Job(0, 300) for _ in range(20)])
    assert found == pytest.approx([6.0] * 20)
    assert order == list(range(20))


def test_given_up_at_the_very_end() -> None:
    """Loops may run the cancellation and the timer of one moment back to back: gone from the link, and not delivered."""
    link = SharedLink(gbps=GBPS)

    def give_up(task: asyncio.Task[None]) -> None:
        task.cancel()
        assert link._timer is not None
        link._timer.cancel()
        link._finish_first()

    async def work() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(link.transfer(1000))
        loop.call_at(1.0, give_up, task)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (link.num_active, link.delivered_bytes) == (0, 0)
        await link.transfer(1000)
        assert loop.time() == pytest.approx(2.0)

    run(work)


def test_given_up_in_its_latency_it_never_takes_a_share() -> None:
    link = SharedLink(gbps=GBPS, latency_s=1.0)
    found, _ = ends(link, [Job(0, 1000, patience_s=0.5)])
    assert found == [None]
    assert (link.busy_s, link.delivered_bytes) == (0.0, 0)


def test_nonsense_is_refused() -> None:
    for gbps, latency_s in ((0, 0), (-1, 0), (1, -1), (float("nan"), 0)):
        with pytest.raises(ValueError, match="a link needs"):
            SharedLink(gbps=gbps, latency_s=latency_s)

    async def work() -> None:
        with pytest.raises(ValueError, match="got -1"):
            await SharedLink(gbps=1).transfer(-1)

    run(work)


def plain_ends(jobs: list[Job]) -> tuple[list[float | None], float]:
    """The same by the rule itself: from change to change, every job in flight gets its share; returns ends and busy time."""
    left = [float(job.num_bytes) for job in jobs]
    found: list[float | None] = [None] * len(jobs)
    is_over = [False] * len(jobs)
    now_s = busy_s = 0.0
    while not all(is_over):
        active = [i for i, job in enumerate(jobs) if job.start_s <= now_s and not is_over[i]]
        changes = [job.start_s for job in jobs if job.start_s > now_s]
        changes += [jobs[i].start_s + jobs[i].patience_s for i in active]
        changes += [now_s + left[i] * len(active) / RATE for i in active]
        next_s = min(changes)
        for i in active:
            left[i] -= (next_s - now_s) * RATE / len(active)
            is_done, is_given_up = left[i] < 1e-6, jobs[i].start_s + jobs[i].patience_s <= next_s
            is_over[i] = is_done or is_given_up
            found[i] = next_s if is_done else None
        busy_s += next_s - now_s if active else 0.0
        now_s = next_s
    return found, busy_s


jobs_strategy = st.lists(
    st.builds(
        Job,
        st.integers(0, 40).map(lambda n: n / 8),
        st.integers(1, 4000),
        # off the grid of starts and sizes, so that no job is given up at the moment of its end
        st.one_of(st.just(1e9), st.integers(1, 30).map(lambda n: n / 7 + 0.0123456)),
    ),
    min_size=1,
    max_size=12,
)


@given(jobs_strategy)
def test_it_shares_as_the_plain_model_does(jobs: list[Job]) -> None:
    link = SharedLink(gbps=GBPS)
    found, order = ends(link, jobs)
    expected, busy_s = plain_ends(jobs)
    assert [end is None for end in found] == [end is None for end in expected]
    assert [end for end in found if end is not None] == pytest.approx([end for end in expected if end is not None])
    assert link.busy_s == pytest.approx(busy_s)
    assert link.delivered_bytes == sum(job.num_bytes for job, end in zip(jobs, found, strict=True) if end is not None)
    assert link.num_active == 0
    assert ends(SharedLink(gbps=GBPS), jobs) == (found, order)

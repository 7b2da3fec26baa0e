"""Modelled devices: closed forms equal single steps, nothing is cut short, no wake-up is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.simulation.batch import Batch, Job
from rose.simulation.device import Device, Idle, Lane, Run, Turn
from rose.simulation.loop import VirtualLoop
from rose.simulation.sharing import AloneRule

KV_BYTES = 100


@attrs.frozen
class Times:
    """10 ms a step, 0.1 ms a prompt token, 1 us a token of context, 1 ms between steps."""

    host_gap_s: float = 0.001
    kv_bytes_per_token: int = KV_BYTES

    def step_s(self, num_prefill: int, num_decodes: int, context_tokens: int, positions: float) -> float:
        return 0.010 + 1e-4 * num_prefill + 1e-6 * context_tokens

    def growth_s(self, num_decodes: int) -> float:
        return 1e-6 * num_decodes


class OneStepAtATime(AloneRule):
    def choose(self, now_s: float) -> Turn | Idle:
        word = super().choose(now_s)
        return attrs.evolve(word, max_steps=1) if isinstance(word, Turn) else word


def make_lane(name: str = "lane", *, kv_tokens: int = 100_000, **more: object) -> Lane:
    batch = Batch(max_seqs=64, kv_tokens=kv_tokens, **more)  # type: ignore[arg-type]
    return Lane(name=name, batch=batch, times=Times(), chunk_tokens=512)


def make_job(name: str, prompt: int, output: int, at_s: float = 0.0) -> Job:
    return Job(job_id=name, prompt_tokens=prompt, output_tokens=output, max_output_tokens=output, arrived_s=at_s)


Log = list[tuple[str, str, float]]


def listen(lane: Lane) -> Log:
    log: Log = []

    def hear(started: list[Job], ended: list[Job], now_s: float) -> None:
        for job in started:
            job.first_token_s = now_s
            log.append(("first", job.job_id, now_s))
        log.extend(("last", job.job_id, now_s) for job in ended)

    lane.listener = hear
    return log


def play(jobs: Sequence[tuple[float, int, int]], rule: type[AloneRule], **lane_options: int) -> tuple[Log, int]:
    loop = VirtualLoop()
    lane = make_lane(**lane_options)
    log = listen(lane)
    device = Device(loop, rule(lane))

    async def main() -> None:
        for i, (at_s, prompt, output) in enumerate(jobs):
            await asyncio.sleep(at_s - loop.time())
            lane.batch.add(make_job(f"j{i}", prompt, output, at_s))
            device.poke()
        while len(lane.batch):
            await asyncio.sleep(1)

    loop.run(main())
    return log, loop.num_callbacks


def test_one_request_takes_the_sum_of_its_steps() -> None:
    log, _ = play([(0.0, 100, 3)], AloneRule)
    first = 0.010 + 0.010
    steps = [0.010 + 1e-6 * 100, 0.010 + 1e-6 * 101]
    assert log[0] == ("first", "j0", pytest.approx(first))
    assert log[1] == ("last", "j0", pytest.approx(first + sum(steps) + 2 * 0.001))


JOBS = st.lists(st.tuples(st.floats(0, 3), st.integers(1, 800), st.integers(1, 120)), min_size=1, max_size=10).map(
    sorted
)


@settings(deadline=None, max_examples=50)
@given(JOBS, st.sampled_from([100_000, 1200]))
def test_runs_in_closed_form_equal_single_steps(jobs: list[tuple[float, int, int]], kv_tokens: int) -> None:
    runs, singles = play(jobs, AloneRule, kv_tokens=kv_tokens)[0], play(jobs, OneStepAtATime, kv_tokens=kv_tokens)[0]
    assert [entry[:2] for entry in runs] == [entry[:2] for entry in singles]
    assert [entry[2] for entry in runs] == pytest.approx([entry[2] for entry in singles], abs=1e-6)


def test_a_long_answer_costs_few_events() -> None:
    assert play([(0.0, 100, 10_000)], AloneRule)[1] < 400  # one a second for the test's own watching


def test_a_request_joins_after_the_step_in_progress() -> None:
    log, _ = play([(0.0, 100, 1000), (1.0, 100, 1)], AloneRule)
    first_s = next(at_s for what, name, at_s in log if (what, name) == ("first", "j1"))
    assert 1.0 + 0.020 <= first_s <= 1.0 + 0.020 + 0.012


EVENTS = st.lists(
    st.tuples(
        st.floats(0, 2.5), st.sampled_from(["add", "drop", "pause", "resume", "poke", "fold"]), st.integers(0, 20)
    ),
    min_size=1,
    max_size=20,
).map(sorted)


def disturb(
    events: Sequence[tuple[float, str, int]], rule: type[AloneRule]
) -> tuple[Log, list[tuple[str, int]], float]:
    """Play events on a lane; returns its log, what each dropped job had made, and the lane's busy time."""
    loop = VirtualLoop()
    lane = make_lane()
    log, made = listen(lane), []
    device = Device(loop, rule(lane))
    jobs = [make_job("j0", 50, 100)]

    def happen(what: str, number: int) -> None:
        if what == "add":
            jobs.append(make_job(f"j{len(jobs)}", 10 + number, 5 + 7 * number))
            lane.batch.add(jobs[-1])
        elif what == "drop":
            device.fold()
            job = jobs[number % len(jobs)]
            made.append((job.job_id, lane.batch.made_tokens(job)))
            lane.batch.drop(job)
        elif what == "pause":
            lane.is_paused = True
        elif what == "resume":
            lane.is_paused = False
        if what == "fold":
            device.fold()
        else:
            device.poke()

    async def main() -> None:
        lane.batch.add(jobs[0])
        device.poke()
        for at_s, what, number in events:
            await asyncio.sleep(at_s - loop.time())
            happen(what, number)
        happen("resume", 0)
        await asyncio.sleep(60)

    loop.run(main())
    assert len(lane.batch) == 0  # no wake-up was lost
    return log, made, lane.busy_s


@settings(deadline=None, max_examples=150)
@given(EVENTS)
def test_what_happens_meanwhile_finds_a_run_as_single_steps_would_have_left_it(
    events: list[tuple[float, str, int]],
) -> None:
    runs, singles = disturb(events, AloneRule), disturb(events, OneStepAtATime)
    assert [entry[:2] for entry in runs[0]] == [entry[:2] for entry in singles[0]]
    assert [entry[2] for entry in runs[0]] == pytest.approx([entry[2] for entry in singles[0]], abs=1e-6)
    assert runs[1] == singles[1]
    assert runs[2] == pytest.approx(singles[2], abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 1.5), max_size=30).map(sorted))
def test_pokes_change_no_step(times_s: list[float]) -> None:
    def ends(pokes_s: Sequence[float]) -> Log:
        loop = VirtualLoop()
        lane = make_lane()
        log = listen(lane)
        device = Device(loop, AloneRule(lane))

        async def main() -> None:
            lane.batch.add(make_job("a", 100, 60))
            lane.batch.add(make_job("b", 700, 90))
            device.poke()
            for at_s in pokes_s:
                await asyncio.sleep(at_s - loop.time())
                device.poke()
            await asyncio.sleep(5)

        loop.run(main())
        return log

    poked, left = ends(times_s), ends(())
    assert [entry[:2] for entry in poked] == [entry[:2] for entry in left]
    assert [entry[2] for entry in poked] == pytest.approx([entry[2] for entry in left], abs=1e-6)


def test_a_pause_returns_when_the_step_in_progress_is_over_and_in_a_gap_at_once() -> None:
    loop = VirtualLoop()
    lane = make_lane()
    device = Device(loop, AloneRule(lane))

    async def stop_at(at_s: float) -> float:
        await asyncio.sleep(at_s - loop.time())
        lane.is_paused = True
        await device.stop_at_boundary(lane)
        stopped_s = loop.time()
        lane.is_paused = False
        device.poke()
        return stopped_s

    async def main() -> None:
        lane.batch.add(make_job("a", 100, 1000))
        device.poke()
        first_gap_s = 0.020 + 0.001 + 0.0101
        assert await stop_at(0.005) == pytest.approx(0.020)
        assert await stop_at(first_gap_s + 0.0005) == pytest.approx(first_gap_s + 0.0005)
        await asyncio.sleep(0.005)
        for _ in range(3):  # waits that are given up leave nothing behind
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.0001):
                    await device.stop_at_boundary(lane)
        await asyncio.sleep(1)
        device.fold()
        assert lane.batch.num_steps > 50

    loop.run(main())


def test_no_step_of_a_run_but_the_first_starts_at_its_limit() -> None:
    run = Run(make_lane(), None, start_s=10.0, num_steps=100, base_s=0.010, growth_s=0.0, gap_s=0.001)
    starts_s = [10.0 + 0.011 * i for i in range(100)]
    for until_s in (9.0, 10.0, 10.005, 10.0105, 10.0111, 10.3, 10.5, 99.0):
        assert run.num_begun(until_s) == max(1, sum(start_s < until_s for start_s in starts_s))

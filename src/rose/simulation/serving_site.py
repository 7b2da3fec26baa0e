"""The serving side in virtual time: requests arrive at engines, and what their users saw is kept.

Invariants: a request arrives whether or not the engine keeps up; what a request saw is counted once, when its last token is
made, or as a violation when the run ends while it waits beyond its SLO.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import attrs

from rose.observe.latency import percentile
from rose.simulation.batch import Job
from rose.simulation.device import Lane
from rose.simulation.outcome import ServingOutcome
from rose.simulation.traces import Arrival


@attrs.frozen
class Answer:
    """What one user saw; ``tpot_s`` is ``None`` for an answer of one token, ``nan`` for one that was not finished."""

    arrived_s: float
    ttft_s: float
    tpot_s: float | None


@attrs.define(eq=False)
class ServingFeed:
    """Sends arrivals to one serving engine, over and over.

    Attributes:
        lane: The engine's step loop.
        arrivals: Of one period, sorted.
        period_s: After which they come again; ``inf``: never.
        on_change: Called after the engine's requests changed, with whether one more decodes; pokes the device.
        redirect: Where a request goes instead, if anywhere; whether it is decoded there is that engine's affair.
        api_overhead_s: Added to each first token.
        on_answer: Called with a request whose last token was made here, and when.
        after_prefill: Takes over requests whose first token was made here, where decode is elsewhere.
    """

    lane: Lane
    arrivals: Sequence[Arrival]
    period_s: float
    on_change: Callable[[bool], None]
    api_overhead_s: float = 0.0
    redirect: ServingFeed | None = None
    after_prefill: Callable[[Job, float], None] | None = None
    on_answer: Callable[[Job, float], None] | None = None
    answers: list[Answer] = attrs.field(factory=list)
    _loop: asyncio.AbstractEventLoop = attrs.field(factory=asyncio.get_running_loop)
    _next: int = 0
    _lap: int = 0
    _number: int = 0
    _start_s: float = 0.0
    _timer: asyncio.TimerHandle | None = None
    _open: dict[str, Job] = attrs.field(factory=dict)
    _handed_over: set[str] = attrs.field(factory=set)

    def start(self) -> None:
        """Let requests come from now on."""
        self.lane.listener = self.hear
        self._start_s = self._loop.time()
        self._set_timer()

    def stop(self) -> None:
        """Let no more requests come."""
        if self._timer is not None:
            self._timer.cancel()

    def _set_timer(self) -> None:
        if not self.arrivals:
            return
        lap_s = self._lap * self.period_s if self._lap else 0.0
        at_s = self._start_s + lap_s + self.arrivals[self._next].at_s
        self._timer = self._loop.call_at(at_s, self._arrive)

    def _arrive(self) -> None:
        arrival = self.arrivals[self._next]
        self._next += 1
        is_over = self._next == len(self.arrivals)
        if is_over:
            self._next, self._lap = 0, self._lap + 1
        self._number += 1
        feed = self.redirect or self
        job = Job(
            job_id=f"{self.lane.name}/{self._number}",
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=1 if feed.after_prefill is not None else arrival.output_tokens,
            max_output_tokens=arrival.output_tokens,
            arrived_s=self._loop.time(),
        )
        feed.take(job)
        if not (is_over and self.period_s == math.inf):
            self._set_timer()

    def rate_rps(self, window_s: float) -> float:
        """Return the mean rate at which requests were sent here over the last ``window_s``, redirected ones included."""
        now_s = self._loop.time() - self._start_s
        begin_s = max(0.0, now_s - window_s)
        if now_s <= begin_s:
            return len(self.arrivals) / self.period_s
        place, end = begin_s % self.period_s, now_s % self.period_s
        num = bisect_left(self.arrivals, end, key=_at_s) - bisect_left(self.arrivals, place, key=_at_s)
        return (num + (len(self.arrivals) if end < place else 0)) / (now_s - begin_s)

    def take(self, job: Job) -> None:
        """Take a request in."""
        self._open[job.job_id] = job
        if job.first_token_s >= 0:
            self._handed_over.add(job.job_id)
        self.lane.batch.add(job)
        self.on_change(False)  # noqa: FBT003 - one meaning, said where it is declared

    def hear(self, started: list[Job], ended: list[Job], now_s: float) -> None:
        """Note first and last tokens."""
        for job in started:
            if job.first_token_s < 0:
                job.first_token_s = now_s
                job.own_at_first_s = self.lane.own_s
            elif job.job_id in self._handed_over:  # what came before, its transfer included, is serving's own
                job.own_at_first_s = self.lane.own_s - (now_s - job.first_token_s)
        for job in ended:
            del self._open[job.job_id]
            if self.after_prefill is not None and job.output_tokens < job.max_output_tokens:
                self.after_prefill(job, now_s)
            else:
                self.answers.append(self._answer(job, now_s))
                if self.on_answer is not None:
                    self.on_answer(job, now_s)
        self.on_change(bool(started))

    def _answer(self, job: Job, now_s: float) -> Answer:
        num_gaps = job.output_tokens - (0 if job.job_id in self._handed_over else 1)
        self._handed_over.discard(job.job_id)
        tpot_s = (now_s - job.first_token_s) / num_gaps if num_gaps > 0 else None
        return Answer(job.arrived_s, self._ttft_s(job, now_s), tpot_s)

    def unanswered(self, now_s: float) -> list[Answer]:
        """Return requests still open: those without a first token with the time they have waited."""
        return [Answer(job.arrived_s, self._ttft_s(job, now_s), math.nan) for job in self._open.values()]

    def _ttft_s(self, job: Job, now_s: float) -> float:
        if job.first_token_s < 0:
            return now_s - job.arrived_s
        return job.first_token_s - job.arrived_s + self.api_overhead_s


def _at_s(arrival: Arrival) -> float:
    return arrival.at_s


def hand_over(prefill: ServingFeed, decode: ServingFeed, transfer_s: Callable[[int], float]) -> None:
    """Let ``decode`` make the rest of what ``prefill`` began, after the context's transfer."""
    loop = asyncio.get_running_loop()

    def after_prefill(job: Job, now_s: float) -> None:
        rest = Job(
            job_id=job.job_id,
            prompt_tokens=job.prompt_tokens + 1,
            output_tokens=job.max_output_tokens - 1,
            max_output_tokens=job.max_output_tokens - 1,
            arrived_s=job.arrived_s,
            computed_tokens=job.prompt_tokens,
            first_token_s=job.first_token_s,
        )
        loop.call_at(now_s + transfer_s(job.prompt_tokens), lambda: (decode.redirect or decode).take(rest))

    prefill.after_prefill = after_prefill


def summarise(
    feeds: Iterable[ServingFeed],
    windows: Sequence[tuple[float, float]],
    *,
    ttft_slo_s: float,
    tpot_slo_s: float,
    now_s: float,
) -> ServingOutcome:
    """Return what the users saw whose requests arrived within the windows.

    A request that is still open counts if its first token came, or is awaited, beyond the TTFT SLO; its TPOT is unknown.
    """
    feeds = list(feeds)

    def is_inside(answer: Answer) -> bool:
        return any(begin <= answer.arrived_s < end for begin, end in windows)

    answers = [answer for feed in feeds for answer in feed.answers if is_inside(answer)]
    late = [a for feed in feeds for a in feed.unanswered(now_s) if is_inside(a) and a.ttft_s > ttft_slo_s]
    answers += late
    ttfts = [answer.ttft_s * 1e3 for answer in answers]
    tpots = [answer.tpot_s * 1e3 for answer in answers if answer.tpot_s is not None and not math.isnan(answer.tpot_s)]
    num_over = sum(
        answer.ttft_s > ttft_slo_s or (answer.tpot_s is not None and answer.tpot_s > tpot_slo_s) for answer in answers
    )
    gaps = sorted(gap for feed in feeds for gap in feed.lane.gaps)
    busy_s = sum(feed.lane.busy_s for feed in feeds)
    return ServingOutcome(
        num_requests=len(answers),
        ttft_mean_ms=sum(ttfts) / len(ttfts) if ttfts else None,
        ttft_p50_ms=percentile(ttfts, 50),
        ttft_p90_ms=percentile(ttfts, 90),
        ttft_p99_ms=percentile(ttfts, 99),
        tpot_p50_ms=percentile(tpots, 50),
        tpot_p90_ms=percentile(tpots, 90),
        tpot_p99_ms=percentile(tpots, 99),
        itl_p50_ms=_weighted_percentile(gaps, 0.50),
        itl_p99_ms=_weighted_percentile(gaps, 0.99),
        violations_fraction=num_over / len(answers) if answers else 0.0,
        busy_fraction=busy_s / (now_s * len(feeds)) if feeds and now_s > 0 else 0.0,
    )


def _weighted_percentile(gaps: Sequence[tuple[float, int]], q: float) -> float | None:
    """Return the percentile, in milliseconds, of sorted ``(seconds, how many)``."""
    total = sum(weight for _, weight in gaps)
    seen = 0
    for gap_s, weight in gaps:
        seen += weight
        if seen >= q * total:
            return gap_s * 1e3
    return None

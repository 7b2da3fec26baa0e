"""A modelled device: one engine's step loop, or two that take turns on it, in virtual time.

Invariants:

* At most one step runs on the device at a time; a step that runs is never cut short.
* Steps without prompts run as one *run*: its end is known in closed form, so it costs one event however long it is. Whatever
  happens meanwhile first counts the steps that are over (``fold``), then ends the run after the step in progress.
* Who goes next is the rule's decision alone (``rose.simulation.sharing``); this class only makes time pass.

Life cycle of a run: the rule chooses a lane -> the lane's batch plans -> the device is busy until the run ends -> the batch
takes the steps -> the lane's listener hears of first and last tokens -> the rule chooses again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

import attrs

from rose.interfaces.device import StepWork
from rose.simulation.batch import Batch, Job, StepPlan

NEVER_S = math.inf


class StepTimes(Protocol):
    """How long steps take on the lane's GPU, in seconds."""

    @property
    def host_gap_s(self) -> float:
        """From a step's end until the next can be ready."""

    @property
    def kv_bytes_per_token(self) -> int:
        """On all GPUs of the engine together."""

    def step_s(self, num_prefill: int, num_decodes: int, context_tokens: int, positions: float) -> float:
        """Return the time of one step."""

    def growth_s(self, num_decodes: int) -> float:
        """Return by how much a pure decode step is longer than the one before it."""


Listener = Callable[[list[Job], list[Job], float], None]
"""Called with jobs that got their first token, jobs that made their last one, and when."""


def _ignore(_started: list[Job], _ended: list[Job], _now_s: float) -> None:
    """Listen to nothing."""


@attrs.define(eq=False, kw_only=True)
class Lane:
    """One engine's step loop.

    Attributes:
        chunk_tokens: Prompt tokens of one step at most.
        ready_s: When its host could have the next step ready.
        ends_s: When its last step ended.
        busy_s: Device time of its steps.
        own_s: The same with the host's gap after each step.
        noise: What a step takes, given what it would; every step is then an event of its own.
        last_work, last_step_s: The first step of the last run, and how long it took.
        gaps: ``(seconds between two steps that decode, tokens)``, while ``keeps_gaps``.
    """

    name: str
    batch: Batch
    times: StepTimes
    chunk_tokens: int
    listener: Listener = _ignore
    is_paused: bool = False
    ready_s: float = 0.0
    ends_s: float = -math.inf
    busy_s: float = 0.0
    own_s: float = 0.0
    noise: Callable[[float], float] | None = None
    last_work: StepWork | None = None
    last_step_s: float = 0.0
    keeps_gaps: bool = False
    gaps: list[tuple[float, int]] = attrs.field(factory=list)

    @property
    def wants(self) -> bool:
        """Whether it would make a step if it had the device; lets waiting jobs into its batch to find that out."""
        if self.is_paused:
            return False
        batch = self.batch
        if batch.waiting:
            batch.admit()
        return batch.is_running

    def note_steps(self, num_steps: int, first_end_s: float, last_end_s: float, num_tokens: int) -> None:
        """Count steps that ended, with ``num_tokens`` tokens each."""
        if self.keeps_gaps and num_tokens:
            self.gaps.append((first_end_s - self.ends_s, num_tokens))
            if num_steps > 1:
                self.gaps.append(((last_end_s - first_end_s) / (num_steps - 1), num_tokens * (num_steps - 1)))
        self.ends_s = last_end_s


@attrs.frozen
class Turn:
    """A rule's word: ``lane`` makes up to ``max_steps`` steps with prompts in chunks of ``chunk_tokens``, from now on.

    No step but the first starts at ``until_s`` or later.
    """

    lane: Lane
    max_steps: float
    chunk_tokens: int
    until_s: float = NEVER_S


@attrs.frozen
class Idle:
    """A rule's word: nobody goes before ``until_s``, unless something happens."""

    until_s: float


class Rule(Protocol):
    """Decides who makes the next steps."""

    def choose(self, now_s: float) -> Turn | Idle:
        """Return whose turn it is at ``now_s``, the device being free."""

    def note_step(self, lane: Lane, now_s: float) -> None:
        """Hear that a run of ``lane`` is over."""


@attrs.define(eq=False)
class Run:
    """Steps in progress: step ``i`` (from 0) takes ``base_s + growth_s * i`` and then ``gap_s`` of host time."""

    lane: Lane
    plan: StepPlan | None
    start_s: float
    num_steps: int
    base_s: float
    growth_s: float
    gap_s: float

    def end_s(self, num_steps: int) -> float:
        """Return when the first ``num_steps`` are over."""
        gaps_s = (num_steps - 1) * self.gap_s
        return self.start_s + num_steps * self.base_s + self.growth_s * num_steps * (num_steps - 1) / 2 + gaps_s

    def num_done(self, now_s: float) -> int:
        """Return how many steps are over at ``now_s``."""
        b, g = self.base_s + self.gap_s - self.growth_s / 2, self.growth_s
        left_s = now_s - self.start_s + self.gap_s
        if left_s <= 0:
            return 0
        guess = left_s / b if g * left_s < 1e-9 * b * b else (math.sqrt(b * b + 2 * g * left_s) - b) / g
        num_done = min(self.num_steps, int(guess) + 1)
        while num_done > 0 and self.end_s(num_done) > now_s:
            num_done -= 1
        return num_done

    def num_begun(self, until_s: float) -> int:
        """Return how many steps start before ``until_s``, at least the first."""
        num_done = self.num_done(until_s)
        is_next_begun = self.end_s(num_done) + self.gap_s < until_s
        return max(1, min(self.num_steps, num_done + is_next_begun))


class Device:
    """Makes time pass for the lanes of one device."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rule: Rule) -> None:
        """Let ``rule`` decide on ``loop``'s time."""
        self._loop = loop
        self._rule = rule
        self._run: Run | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_asked = False
        self._waiters: list[asyncio.Future[None]] = []

    def poke(self) -> None:
        """Hear that something changed: decide again, at the end of the step in progress if there is one."""
        if self._run is not None:
            self._shorten(self._run)
        elif not self._is_asked:
            self._is_asked = True
            self._loop.call_soon(self._ask)

    def fold(self) -> None:
        """Count the steps of the run that are over by now, so that the lane's batch is up to date."""
        run = self._run
        if run is None or run.plan is not None:
            return
        num_done = min(run.num_done(self._loop.time()), run.num_steps - 1)
        if num_done <= 0:
            return
        end_s = run.end_s(num_done)
        self._take_steps(run, num_done, end_s)
        run.start_s = end_s + run.gap_s
        run.base_s += run.growth_s * num_done
        run.num_steps -= num_done

    async def stop_at_boundary(self, lane: Lane) -> None:
        """Return when no step of ``lane`` is in progress; pause the lane first."""
        while (run := self._run) is not None and run.lane is lane:
            self._shorten(run)
            if self._run is not run:
                continue  # it was between two steps
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def _shorten(self, run: Run) -> None:
        """End a run after the step in progress; in the host's gap between two steps, at once."""
        self.fold()
        if run.start_s > self._loop.time():
            self._cancel_timer()
            self._close(run, 0)
        elif run.num_steps > 1:
            run.num_steps = 1
            self._set_timer(run.end_s(1), self._finish)

    def _ask(self) -> None:
        self._is_asked = False
        if self._run is None:
            self._decide()

    def _decide(self) -> None:
        now_s = self._loop.time()
        word = self._rule.choose(now_s)
        if isinstance(word, Idle):
            if word.until_s < NEVER_S:
                self._set_timer(max(word.until_s, now_s), self._wake)
            else:
                self._cancel_timer()
            return
        self._begin(word, now_s)

    def _wake(self) -> None:
        self._timer = None
        if self._run is None:
            self._decide()

    def _begin(self, turn: Turn, now_s: float) -> None:
        lane, batch = turn.lane, turn.lane.batch
        batch.relieve()
        decodes, context = batch.num_decodes, batch.decode_context_tokens
        plan = batch.plan_step(turn.chunk_tokens) if batch.has_prefill else None
        if plan is not None and plan.num_tokens:
            duration_s = lane.times.step_s(plan.num_tokens, decodes, context, plan.positions)
            if lane.noise is not None:
                duration_s = lane.noise(duration_s)
            run = Run(lane, plan, now_s, 1, duration_s, 0.0, lane.times.host_gap_s)
        else:
            num_steps = int(min(batch.steps_to_change(), turn.max_steps))
            base_s = lane.times.step_s(0, decodes, context, 0.0)
            if lane.noise is not None:
                base_s, num_steps = lane.noise(base_s), 1
            run = Run(lane, None, now_s, num_steps, base_s, lane.times.growth_s(decodes), lane.times.host_gap_s)
            if turn.until_s < NEVER_S:
                run.num_steps = run.num_begun(turn.until_s)
        num_tokens, positions = (0, 0.0) if run.plan is None else (run.plan.num_tokens, run.plan.positions)
        lane.last_work, lane.last_step_s = StepWork(num_tokens, decodes, context, positions), run.base_s
        self._run = run
        self._set_timer(run.end_s(run.num_steps), self._finish)

    def _finish(self) -> None:
        self._timer = None
        if self._run is not None:
            self._close(self._run, self._run.num_steps)

    def _close(self, run: Run, num_steps: int) -> None:
        self._run = None
        lane, now_s = run.lane, self._loop.time()
        if run.plan is not None:
            num_decodes = lane.batch.num_decodes
            lane.busy_s += run.base_s
            lane.own_s += run.base_s + run.gap_s
            lane.note_steps(1, now_s, now_s, num_decodes)
            started, ended = lane.batch.finish_step(run.plan)
            if started or ended:
                lane.listener(started, ended, now_s)
        elif num_steps:
            self._take_steps(run, num_steps, now_s)
        lane.ready_s = lane.ends_s + run.gap_s
        self._rule.note_step(lane, now_s)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        if not self._is_asked and self._run is None:
            self._decide()

    def _take_steps(self, run: Run, num_steps: int, end_s: float) -> None:
        lane = run.lane
        lane.busy_s += end_s - run.start_s - (num_steps - 1) * run.gap_s
        lane.own_s += end_s - run.start_s + run.gap_s
        lane.note_steps(num_steps, run.end_s(1), end_s, lane.batch.num_decodes)
        ended = lane.batch.advance(num_steps)
        if ended:
            lane.listener([], ended, end_s)

    def _set_timer(self, when_s: float, callback: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_at(when_s, callback)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

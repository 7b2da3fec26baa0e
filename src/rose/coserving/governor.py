"""Step governors: what an engine's step loop asks before a step and tells after it. No engine library is imported here.

Invariants:

* A turn of the device is held only between ``ask`` and ``finish`` / ``release`` of one engine step. An engine that is
  paused or has lost its requests is not stepped any more, so a turn kept across steps would be lost.
* A governor never keeps its caller longer than the device turns of one step, plus ``max_hold_s`` for each of the later
  ones, so that aborts, pauses and remote calls are served while the gate is closed.
* A turn is never waited for with old inputs: the caller's ``on_grant`` runs after the wait and before it builds the step.
* While the clock is frozen serving makes no step; rollout and dedicated engines run unpaced.
* An engine that schedules ahead (``max_in_flight`` batches, two with vLLM's asynchronous scheduling) keeps the turn until the last
  batch in flight is done. Nobody is kept waiting for it: a batch behind another one is asked for with the time of both.

Life cycle of one engine step:

1. [STEP LOOP] ``ask...``: may a step start? ``False``: make an empty step and come back.
2. [STEP LOOP] builds the batch, then ``begin(first, later)``: the device turns that the batch stands for.
3. The engine computes.
4. [STEP LOOP] ``finish()``: wait for the modelled end (rollouts also take their later turns here), publish, ``release()``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol, cast, runtime_checkable

import attrs
from attrs import validators as v

from rose.coserving.predictor import StepPredictor
from rose.coserving.step_log import StepLog
from rose.interfaces.device import Device, StepWork


class StepClock(Protocol):
    """What a step loop needs of its device's clock."""

    @property
    def is_frozen(self) -> bool:
        """Whether time stands still."""

    def now(self) -> float:
        """Return the time in seconds."""

    def block(self, duration_s: float) -> None:
        """Wait on this thread; passes also while frozen."""


@runtime_checkable
class SupportsReleaseHint(Protocol):
    """A device that knows when its present turn ends."""

    @property
    def expected_release_s(self) -> float:
        """When the device becomes free if nobody takes another turn."""


@runtime_checkable
class SupportsMeasuredSteps(Protocol):
    """A device that measures how long it computed."""

    @property
    def measured_s(self) -> float | None:
        """How long the step that was finished last kept the device busy; ``None`` where that is not known."""


@attrs.frozen(kw_only=True)
class GovernorConfig:
    """Timing of a step loop, in seconds of the device's clock.

    Attributes:
        host_gap_s: From a step's end until the engine could start the next on a real GPU.
        on_time_s: An engine that asks within this of being ready counts as on time: its host work is the machine's,
            not the model's, and its step starts when it was ready.
        poll_s: Between two looks at a closed gate.
        max_poll_s: After this long the engine loop is given a chance to serve its inputs.
        think_s: How long after a step the rollout engine still counts as about to ask again.
        max_hold_s: Each later turn of a step waits at most this long for the gate; then it and those after it are owed.
        watchdog_s: A rollout engine that keeps the device for this much longer than its turn is ended by serving.
        usage_window_s: Of serving's means in the ledger.
    """

    host_gap_s: float = attrs.field(default=1.5e-3, validator=v.ge(0))
    on_time_s: float = attrs.field(default=5e-3, validator=v.ge(0))
    poll_s: float = attrs.field(default=100e-6, validator=v.gt(0))
    max_poll_s: float = attrs.field(default=2.5e-3, validator=v.gt(0))
    think_s: float = attrs.field(default=5e-3, validator=v.ge(0))
    max_hold_s: float = attrs.field(default=0.25, validator=v.gt(0))
    watchdog_s: float = attrs.field(default=0.2, validator=v.gt(0))
    usage_window_s: float = attrs.field(default=10.0, validator=v.gt(0))


@attrs.frozen
class ChargedTurn:
    """A device turn in progress: its work, the device's guess, and its charged start and end."""

    work: StepWork
    guess_s: float
    start_s: float
    end_s: float


class StepGovernor:
    """The step loop of an engine that has its device to itself."""

    def __init__(self, device: Device, clock: StepClock, config: GovernorConfig, log: StepLog) -> None:
        """Govern one engine's steps on ``device``, whose clock is ``clock``."""
        self.device = device
        self.log = log
        self._clock = clock
        self._config = config
        self._predictor = StepPredictor()
        self._asked_s = 0.0
        self._granted_s: float | None = None
        self._is_unpaced = False
        self._ready_s: float | None = None
        self.max_in_flight = 1
        self._turns: deque[ChargedTurn | None] = (
            deque()
        )  # of the batches in flight, oldest first; None: time stands still
        self._later: Sequence[StepWork] = ()
        self._finished_s = -math.inf
        self._is_measured = isinstance(device, SupportsMeasuredSteps)

    @property
    def num_in_flight(self) -> int:
        """Batches that were begun and are not finished."""
        return len(self._turns)

    @property
    def has_queue(self) -> bool:
        """Whether a further batch would be queued behind one in flight, under the same turn."""
        return self.max_in_flight > 1 and bool(self._turns)

    @property
    def is_frozen(self) -> bool:
        """Whether the device's clock stands still."""
        return self._clock.is_frozen

    def ask(self) -> bool:
        """Take the turn; a dedicated device is always free. While frozen no turn is needed."""
        self._start_asking()
        return self._is_unpaced or self.device.acquire(is_blocking=True)

    def begin(self, first: StepWork, later: Iterable[StepWork] = ()) -> None:
        """Charge the batch's first turn to the device; ``later`` turns follow in ``finish``. Nothing while frozen, or if it was asked for so."""
        is_free = self._is_unpaced or self.is_frozen
        if self.max_in_flight == 1:
            self._turns.clear()  # a batch whose end nobody told is over
        self._later = () if is_free else tuple(later)
        self._turns.append(None if is_free else self._charge(first))

    def finish(self, *, has_more: bool) -> None:
        """Wait until the step's turns are over. ``has_more``: the engine has requests for another step at once."""
        self._finish_oldest(has_more=has_more)

    def _finish_oldest(self, *, has_more: bool) -> ChargedTurn | None:
        """Wait until the oldest batch in flight is over; returns what it took, ``None`` for one that was not charged."""
        turn = self._turns.popleft() if self._turns else None
        if turn is None:
            self._ready_s = None
            return None
        last = turn
        for work in self._later:
            self._asked_s = self._ready_s = last.end_s + self._config.host_gap_s
            last = self._charge(work)
        last = self._await_end(last)
        self._ready_s = last.end_s + self._config.host_gap_s if has_more else None
        return turn if self._later else last

    def skip(self) -> None:
        """Note that no step came of the last ``ask``."""
        if not self.has_queue:
            self._turns.clear()
            self._ready_s = None
        self.release()

    def release(self) -> None:
        """Give the turn back, unless batches were scheduled ahead."""
        if not self.has_queue:
            self.device.release()

    def close(self) -> None:
        """Let go of the device."""
        self._turns.clear()
        self.release()

    def _start_asking(self) -> None:
        self._asked_s, self._granted_s = self._clock.now(), None
        self._is_unpaced = self.is_frozen

    def _charge(self, work: StepWork) -> ChargedTurn:
        """Begin a device turn."""
        ready_s, slip_s = self._starting_point()
        guess_s = self.device.predict_s(work)
        end_s = self.device.begin_step(work, ready_s)
        if self._turns:
            end_s = max(end_s, self._in_flight_until_s() + guess_s)  # it waits for those before it
        start_s = end_s - guess_s
        if start_s > self._asked_s:
            slip_s = 0.0
        waited_s = 0.0 if self._granted_s is None else self._granted_s - self._asked_s
        shape = (work.num_prefill_tokens, work.num_decodes)
        self.log.append((start_s, guess_s, math.nan, slip_s, waited_s, *shape))
        return ChargedTurn(work, guess_s, start_s, end_s)

    def expected_s(self, work: StepWork) -> float:
        """Return how long a turn is expected to take by what earlier ones took, in seconds of the device's clock."""
        return self._predictor.predict_s(work, self.device.predict_s(work))

    def _upper_s(self, work: StepWork) -> float:
        """Return how long a turn is held at most: what is measured on the device has no host work in it."""
        host_s = self._config.host_gap_s if self._is_measured else 0.0
        return self._predictor.upper_s(work, self.device.predict_s(work)) + host_s

    def _in_flight_until_s(self) -> float:
        """Return when the last batch in flight should be over; the past where none is."""
        return max((turn.end_s for turn in self._turns if turn is not None), default=-math.inf)

    def _in_flight_at_most_s(self) -> float:
        """Return when the last batch in flight is over at the latest, by what such batches took; the past where none is."""
        until_s = -math.inf
        for turn in self._turns:
            if turn is not None:
                until_s = max(until_s, turn.start_s) + self._upper_s(turn.work)
        return until_s

    def _learn(self, turn: ChargedTurn) -> None:
        """Learn from a turn that is over now, unless time stood still meanwhile."""
        if not self.is_frozen:
            self._predictor.observe(turn.work, turn.guess_s, self._clock.now() - turn.start_s)

    def _starting_point(self) -> tuple[float, float]:
        """Return from when on the step may run, and how long the engine itself kept the device idle."""
        if self._turns:
            return max(self._asked_s, self._in_flight_until_s()), 0.0
        if self._granted_s is not None:
            return self._granted_s, 0.0
        if self._ready_s is None:
            return self._asked_s, 0.0
        if self._asked_s - self._ready_s <= self._config.on_time_s:
            return self._ready_s, 0.0
        return self._asked_s, self._asked_s - self._ready_s

    def _await_end(self, turn: ChargedTurn) -> ChargedTurn:
        """Wait for the end of a turn that is no longer among those in flight; return it as it was."""
        late_s = self.device.finish_step(turn.end_s)
        measured_s = cast("SupportsMeasuredSteps", self.device).measured_s if self._is_measured else None
        now_s, floor_s = self._clock.now(), self._finished_s
        self._finished_s = now_s if self._turns else -math.inf
        num_later = sum(later is not None for later in self._turns)
        if measured_s is None:
            self.log.set_lateness(late_s, num_later=num_later)
            return turn if turn.start_s >= floor_s else attrs.evolve(turn, start_s=floor_s)
        start_s = now_s - measured_s
        self.log.set_lateness(late_s, num_later=num_later, start_s=start_s, duration_s=measured_s)
        return attrs.evolve(turn, start_s=start_s, end_s=now_s)

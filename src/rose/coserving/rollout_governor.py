"""The step loop of an engine that borrows serving's slack, on one device or on several at once.

Invariants: no turn starts without a valid lease and the admission policy's consent on every device, both read again after the
turn was taken; whatever cannot be read counts as a no. Turns whose tokens were delivered early are owed and taken before the
next step. A fencing token never goes back. KV memory is what the tightest device allows. A batch is queued behind another one only
where the policy would let one step of both their lengths start now, and a serving engine with requests waits for ``max_in_flight`` of
them at most.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from rose.coserving.governor import GovernorConfig, StepClock, StepGovernor, SupportsReleaseHint
from rose.coserving.ledger import Ledger, RolloutState
from rose.coserving.lent_device import LentDevice
from rose.coserving.processes import process_start
from rose.coserving.step_log import StepLog
from rose.interfaces.device import Device, StepWork
from rose.policies.admission import AdmissionConfig, HoldReason, Mode
from rose.policies.memory import MemoryConfig

_LEASE_OVER = (HoldReason.LEASE_MISSING, HoldReason.LEASE_EXPIRED, HoldReason.LEASE_FENCED)


class RolloutGovernor(StepGovernor):
    """The step loop of an engine that borrows serving's slack."""

    def __init__(
        self,
        device: Device,
        clock: StepClock,
        config: GovernorConfig,
        log: StepLog,
        *,
        ledgers: Sequence[Ledger],
        admission: AdmissionConfig,
        memory: MemoryConfig | None = None,
    ) -> None:
        """Govern a rollout engine's steps.

        Args:
            device: The shared device, or a gang of them.
            clock: Its clock.
            config: Timing.
            log: Where turns are noted.
            ledgers: One a device; this engine writes their rollout sections.
            admission: The SLO and how it is spent.
            memory: How each device's KV memory is shared; ``None`` where it is not.
        """
        super().__init__(device, clock, config, log)
        self.last_hold: HoldReason | None = None
        self._lent = tuple(LentDevice(ledger, admission, memory) for ledger in ledgers)
        pid = os.getpid()
        self._state = RolloutState(pid=pid, pid_start=process_start(pid))
        self._has_release_hint = isinstance(device, SupportsReleaseHint)
        self._owed: deque[StepWork] = deque()
        self._num_in_turn = 0
        self._write()

    @property
    def _is_fifo(self) -> bool:
        return all(lent.mode is Mode.UNGATED for lent in self._lent)

    @property
    def bounds_chunks(self) -> bool:
        """Whether the modes in force keep steps short for serving's sake."""
        return any(lent.mode not in {Mode.UNGATED, Mode.PAPER} for lent in self._lent)

    @property
    def owed_s(self) -> float:
        """Device time of turns whose tokens were delivered before the gate let them run."""
        return sum(self.device.predict_s(work) for work in self._owed)

    def lease_problem(self) -> HoldReason | None:
        """Return why a lease allows no work now, or ``None``."""
        now_s = self._clock.now()
        return next((problem for lent in self._lent if (problem := lent.lease_problem(now_s)) is not None), None)

    def is_lease_over(self) -> bool:
        """Return whether a lease ended for good, so that no request may stay. An unreadable ledger only holds."""
        now_s = self._clock.now()
        return any(lent.lease_problem(now_s) in _LEASE_OVER for lent in self._lent)

    def kv_budget_bytes(self) -> int | None:
        """Return the engine's KV budget by the memory policy, ``None`` where memory is not shared. 0 without a lease."""
        now_s = self._clock.now()
        budgets = [lent.kv_budget_bytes(now_s) for lent in self._lent]
        shared = [budget for budget in budgets if budget is not None]
        return min(shared) * len(self._lent) if shared else None

    def possible_kv_bytes(self) -> float:
        """Return the largest KV budget this engine could ever get."""
        return min(lent.possible_kv_bytes() for lent in self._lent) * len(self._lent)

    def ask_rollout(self, first: StepWork, on_grant: Callable[[], None]) -> bool:
        """Return whether a step whose first turn is about ``first`` may start; if so the turn is held."""
        self._start_asking()
        if self._is_unpaced:
            hold = self.lease_problem()
            self.last_hold = hold
            return hold is None
        if self.has_queue:
            return self._may_queue(first)
        while self._owed:
            if not self._run_turn(self._owed[0], self._config.max_poll_s):
                return False
            self._owed.popleft()
            self._start_asking()
        if not self._wait_turn(first, self._config.max_poll_s):
            self._ready_s = None
            return False
        if self._granted_s is not None:
            on_grant()
        return True

    def _may_queue(self, work: StepWork) -> bool:
        """Return whether a batch may be queued behind those in flight, whose turn is held: serving would wait for all of them.

        A serving engine that may be waiting for the turn gets it after ``max_in_flight`` batches. Nothing is waited for here, so that those
        in flight are finished and the device is given up.
        """
        rest_s = max(0.0, self._in_flight_at_most_s() - self._clock.now())
        self.last_hold = self._ruling(rest_s + self._upper_s(work))
        if self.last_hold is not None:
            return False
        return self._num_in_turn < self.max_in_flight or all(lent.is_serving_idle for lent in self._lent)

    def finish(self, *, has_more: bool) -> None:
        """Wait for the oldest turn's end, give the device up, then take the later turns one by one through the gate."""
        if not self._turns or self._turns[0] is None:
            self._finish_oldest(has_more=has_more)
            self.release()
            return
        later = deque(self._later)
        self._close_turn()
        while later and self._run_turn(later[0], self._config.max_hold_s):
            later.popleft()
        self._owed.extend(later)
        if not has_more or later:
            self._ready_s = None

    def publish(
        self, *, num_running: int, num_waiting: int, kv_used_bytes: float, num_evicted: int, num_tokens: int
    ) -> None:
        """Write the rollout engine's state to the ledgers; it wants the device on if it has requests."""
        state, now_s = self._state, self._clock.now()
        state.wants_until_s = now_s + self._config.think_s if num_running + num_waiting else -math.inf
        state.num_running, state.num_waiting = num_running, num_waiting
        state.kv_used_bytes = kv_used_bytes / len(self._lent)
        state.num_evicted, state.num_tokens = num_evicted, num_tokens
        state.updated_s = now_s
        self._write()

    def _run_turn(self, work: StepWork, limit_s: float) -> bool:
        """Take one whole device turn through the gate; ``False`` when it did not open in time."""
        if self._ready_s is not None:
            self._clock.block(self._ready_s - self._clock.now())
        self._start_asking()
        if not self._wait_turn(work, limit_s):
            return False
        self._turns.append(self._charge(work))
        self._announce_turn()
        self._close_turn()
        return True

    def begin(self, first: StepWork, later: Iterable[StepWork] = ()) -> None:
        """Charge the batch's first turn to the device and let serving's watchdog know when it should be over."""
        self._num_in_turn = self._num_in_turn + 1 if self.has_queue else 1
        super().begin(first, later)
        self._announce_turn()

    def _turn_ends_s(self) -> float:
        """Return when the watchdog may begin to doubt: where ends are guessed, by what steps took and not by the guess."""
        return self._in_flight_at_most_s() if self._is_measured else self._in_flight_until_s()

    def _announce_turn(self) -> None:
        until_s = self._turn_ends_s()
        if until_s > -math.inf:
            self._want(until_s + self._config.think_s, self._state.step_s, turn_ends_s=until_s)

    def _close_turn(self) -> None:
        turn = self._turns.popleft() if self._turns else None
        if turn is None:
            return
        turn = self._await_end(turn)
        self._learn(turn)
        self._ready_s = turn.end_s + self._config.host_gap_s
        self._state.turn_ends_s = self._turn_ends_s()
        self._state.busy_s += turn.end_s - turn.start_s
        self._write()
        self.release()

    def _wait_turn(self, work: StepWork, limit_s: float) -> bool:
        step_s = self._upper_s(work)
        give_up_s = self._clock.now() + limit_s
        while True:
            self.last_hold = self._attempt(step_s)
            if self.last_hold is None:
                return True
            self._granted_s = self._clock.now()
            if self._granted_s >= give_up_s or self.is_frozen or self.last_hold in _LEASE_OVER:
                return False
            self._clock.block(self._nap_s(give_up_s))
            self._granted_s = self._clock.now()

    def _nap_s(self, give_up_s: float) -> float:
        nap_s = self._config.poll_s
        if self._has_release_hint:
            release_s = cast("SupportsReleaseHint", self.device).expected_release_s
            nap_s = max(nap_s, release_s - self._clock.now())
        return min(nap_s, max(self._config.poll_s, give_up_s - self._clock.now()), self._config.max_poll_s)

    def _attempt(self, step_s: float) -> HoldReason | None:
        """Take the turn if the gate is open; return why not otherwise."""
        hold = self._ruling(step_s)
        if hold in _LEASE_OVER:
            return hold
        now_s = self._clock.now()
        if step_s != self._state.step_s or self._state.wants_until_s < now_s + self._config.think_s / 2:
            self._want(now_s + self._config.think_s, step_s)
        if hold is not None:
            return hold
        is_fifo = self._is_fifo
        if not self.device.acquire(is_blocking=is_fifo):
            return HoldReason.DEVICE_BUSY
        hold = self._ruling(step_s)  # serving or the lender may have spoken between the look and the grant
        if hold is not None:
            self.device.release()
        elif is_fifo:
            self._granted_s = self._clock.now()
        return hold

    def _ruling(self, step_s: float) -> HoldReason | None:
        """Return why a step may not start by what the ledgers say."""
        now_s = self._clock.now()
        return next((hold for lent in self._lent if (hold := lent.ruling(step_s, now_s)) is not None), None)

    def _want(self, until_s: float, step_s: float, turn_ends_s: float = -math.inf) -> None:
        state = self._state
        state.wants_until_s, state.step_s, state.turn_ends_s = until_s, step_s, turn_ends_s
        self._write()

    def _write(self) -> None:
        for lent in self._lent:
            lent.publish(self._state)

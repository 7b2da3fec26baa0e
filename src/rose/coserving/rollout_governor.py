"""The step loop of an engine that borrows serving's slack.

Invariants: no turn starts without a valid lease and the admission policy's consent, both read again after the turn was
taken; whatever cannot be read counts as a no. Turns whose tokens were delivered early are owed and taken before the next
step. A fencing token never goes back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import cast

import attrs

from rose.coserving.governor import GovernorConfig, StepClock, StepGovernor, SupportsReleaseHint
from rose.coserving.ledger import Ledger, RolloutState
from rose.coserving.step_log import StepLog
from rose.errors import LedgerError
from rose.interfaces.device import Device, StepWork
from rose.policies.admission import AdmissionConfig, Budget, Hold, HoldReason, Mode, check_lease, decide
from rose.policies.memory import MemoryConfig, next_budget, possible_budget

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
        ledger: Ledger,
        admission: AdmissionConfig,
        memory: MemoryConfig | None = None,
    ) -> None:
        """Govern a rollout engine's steps. ``memory`` is ``None`` where KV memory is not shared."""
        super().__init__(device, clock, config, log)
        self.last_hold: HoldReason | None = None
        self._ledger = ledger
        self._admission = admission
        self._memory = memory
        self._budget_bytes = 0
        self._grown_s = -math.inf
        self._highest_token = 0
        self._mode = Mode.CLOSED
        self._state = RolloutState()
        self._has_release_hint = isinstance(device, SupportsReleaseHint)
        self._owed: deque[StepWork] = deque()

    @property
    def is_gated(self) -> bool:
        """Whether the mode in force protects serving at all."""
        return self._mode is not Mode.UNGATED

    @property
    def owed_s(self) -> float:
        """Device time of turns whose tokens were delivered before the gate let them run."""
        return sum(self.device.predict_s(work) for work in self._owed)

    def lease_problem(self) -> HoldReason | None:
        """Return why the lease allows no work now, or ``None``."""
        try:
            return self._check(self._ledger.budget(), self._clock.now())
        except LedgerError:
            return HoldReason.UNREADABLE

    def is_lease_over(self) -> bool:
        """Return whether the lease ended for good, so that no request may stay. An unreadable ledger only holds."""
        return self.lease_problem() in _LEASE_OVER

    def kv_budget_bytes(self) -> int | None:
        """Return the KV budget by the memory policy, ``None`` where memory is not shared. 0 without a lease."""
        if self._memory is None:
            return None
        try:
            budget, serving = self._ledger.budget(), self._ledger.serving()
        except LedgerError:
            return self._budget_bytes
        now_s = self._clock.now()
        if self._check(budget, now_s) is not None:
            self._budget_bytes = 0
            return 0
        change = next_budget(
            self._memory,
            serving_used_bytes=serving.kv_used_bytes,
            cap_bytes=budget.kv_cap_bytes,
            current_bytes=self._budget_bytes,
            since_growth_s=now_s - self._grown_s,
        )
        if change.has_grown:
            self._grown_s = now_s
        self._budget_bytes = change.budget_bytes
        return self._budget_bytes

    def possible_kv_bytes(self) -> float:
        """Return the largest KV budget this device could ever give."""
        if self._memory is None:
            return math.inf
        try:
            return possible_budget(self._memory, self._ledger.budget().kv_cap_bytes)
        except LedgerError:
            return math.inf

    def ask_rollout(self, first: StepWork, on_grant: Callable[[], None]) -> bool:
        """Return whether a step whose first turn is about ``first`` may start; if so the turn is held."""
        self._start_asking()
        if self.is_frozen:
            hold = self.lease_problem()
            self.last_hold = hold
            return hold is None
        while self._owed:
            if not self._run_turn(self._owed[0], self._config.max_poll_s):
                return False
            self._owed.popleft()
            self._start_asking()
        if not self._wait_turn(self.device.predict_s(first), self._config.max_poll_s):
            self._ready_s = None
            return False
        if self._granted_s is not None:
            on_grant()
        return True

    def finish(self, *, has_more: bool) -> None:
        """Wait for the first turn's end, give the device up, then take the later turns one by one through the gate."""
        if self._turn is None:
            self._ready_s = None
            self.release()
            return
        later = deque(self._later)
        self._close_turn()
        while later and self._run_turn(later[0], self._config.max_hold_s):
            later.popleft()
        self._owed.extend(later)
        if not has_more or later:
            self._ready_s = None

    def publish(self, *, num_running: int, num_waiting: int, kv_used_bytes: float, num_evicted: int) -> None:
        """Write the rollout engine's state to the ledger; it wants the device on if it has requests."""
        now_s = self._clock.now()
        has_requests = bool(num_running + num_waiting)
        self._state = attrs.evolve(
            self._state,
            wants_until_s=now_s + self._config.think_s if has_requests else -math.inf,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_used_bytes=kv_used_bytes,
            kv_budget_bytes=self._budget_bytes,
            num_evicted=num_evicted,
            updated_s=now_s,
        )
        self._ledger.publish_rollout(self._state)

    def _run_turn(self, work: StepWork, limit_s: float) -> bool:
        """Take one whole device turn through the gate; ``False`` when it did not open in time."""
        if self._ready_s is not None:
            self._clock.block(self._ready_s - self._clock.now())
        self._start_asking()
        if not self._wait_turn(self.device.predict_s(work), limit_s):
            return False
        self._turn = self._charge(work)
        self._close_turn()
        return True

    def _close_turn(self) -> None:
        if self._turn is None:
            return
        start_s, end_s = self._turn
        self._want(end_s + self._config.think_s, self._state.step_s)
        self._await_end(end_s)
        if not self.is_frozen:
            self._predictor.observe(end_s - start_s, self._clock.now() - start_s)
        self._ready_s = end_s + self._config.host_gap_s
        self.release()

    def _wait_turn(self, guess_s: float, limit_s: float) -> bool:
        step_s = self._predictor.upper_s(guess_s)
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
        self._want(self._clock.now() + self._config.think_s, step_s)
        if hold is not None:
            return hold
        is_fifo = self._mode is Mode.UNGATED
        if not self.device.acquire(is_blocking=is_fifo):
            return HoldReason.DEVICE_BUSY
        hold = self._ruling(step_s)  # serving or the lender may have spoken between the look and the grant
        if hold is not None:
            self.device.release()
        elif is_fifo:
            self._granted_s = self._clock.now()
        return hold

    def _ruling(self, step_s: float) -> HoldReason | None:
        """Return why a step may not start by what the ledger says now."""
        try:
            budget = self._ledger.budget()
        except LedgerError:
            return HoldReason.UNREADABLE
        now_s = self._clock.now()
        problem = self._check(budget, now_s)
        if problem is not None:
            return problem
        self._mode = budget.mode
        try:
            serving = None if budget.mode is Mode.UNGATED else self._ledger.serving()
        except LedgerError:
            serving = None
        decision = decide(self._admission, budget.mode, serving, step_s, now_s)
        return decision.reason if isinstance(decision, Hold) else None

    def _check(self, budget: Budget, now_s: float) -> HoldReason | None:
        self._highest_token = max(self._highest_token, budget.fencing_token)
        return check_lease(budget, self._highest_token, now_s)

    def _want(self, until_s: float, step_s: float) -> None:
        self._state = attrs.evolve(self._state, wants_until_s=until_s, step_s=step_s)
        self._ledger.publish_rollout(self._state)

"""One device as the engine that borrows it sees it: lease, admission and KV budget, by its ledger.

Invariants: what cannot be read is a no; a fencing token never goes back; the budget is 0 without a lease.
"""

from __future__ import annotations

import math

from rose.coserving.ledger import Ledger, RolloutState
from rose.errors import LedgerError
from rose.policies.admission import AdmissionConfig, Budget, Hold, HoldReason, Mode, ServingState, check_lease, decide
from rose.policies.memory import MemoryConfig, next_budget, possible_budget


class LentDevice:
    """What one ledger allows to a rollout engine.

    Attributes:
        mode: The mode read last.
    """

    def __init__(self, ledger: Ledger, admission: AdmissionConfig, memory: MemoryConfig | None) -> None:
        """Read ``ledger``; ``memory`` is ``None`` where KV memory is not shared."""
        self.mode = Mode.CLOSED
        self._ledger = ledger
        self._admission = admission
        self._memory = memory
        self._budget_bytes = 0
        self._grown_s = -math.inf
        self._highest_token = 0
        self._budget: Budget | None = None
        self._serving: ServingState | None = None
        self._has_looked = False

    def lease_problem(self, now_s: float) -> HoldReason | None:
        """Return why the lease allows no work at ``now_s``, or ``None``. The first ruling after it goes by the same look."""
        self._look()
        self._has_looked = True
        return self._problem(now_s)

    def ruling(self, step_s: float, now_s: float) -> HoldReason | None:
        """Return why a step of at most ``step_s`` may not start at ``now_s``, or ``None``."""
        if not self._has_looked:
            self._look()
        self._has_looked = False
        problem = self._problem(now_s)
        if problem is not None or self._budget is None:
            return problem
        self.mode = self._budget.mode
        decision = decide(self._admission, self.mode, self._serving, step_s, now_s)
        return decision.reason if isinstance(decision, Hold) else None

    @property
    def is_serving_idle(self) -> bool:
        """Whether serving had no request and no prompt on its way at the last look."""
        serving = self._serving
        return serving is not None and not serving.num_running and not serving.num_prompts_waiting

    def kv_budget_bytes(self, now_s: float) -> int | None:
        """Return the KV budget of this device, ``None`` where memory is not shared."""
        if self._memory is None:
            return None
        if not self._has_looked:
            self._look()
        budget, serving = self._budget, self._serving
        if budget is None:
            return self._budget_bytes
        if self._problem(now_s) is not None:
            self._budget_bytes, self._grown_s = 0, -math.inf  # the next lease begins with a first share at once
            return 0
        if serving is None:
            return self._budget_bytes
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
        """Return the largest KV budget that this device could ever give."""
        if self._memory is None:
            return math.inf
        self._look()
        return math.inf if self._budget is None else possible_budget(self._memory, self._budget.kv_cap_bytes)

    def publish(self, state: RolloutState) -> None:
        """Write the rollout engine's state, with this device's own budget and token put in."""
        state.kv_budget_bytes, state.fencing_token = self._budget_bytes, self._highest_token
        self._ledger.publish_rollout(state)

    def _look(self) -> None:
        try:
            self._budget = self._ledger.budget()
            self._highest_token = max(self._highest_token, self._budget.fencing_token)
        except LedgerError:
            self._budget = None
        try:
            self._serving = self._ledger.serving()
        except LedgerError:
            self._serving = None

    def _problem(self, now_s: float) -> HoldReason | None:
        return check_lease(self._budget, self._highest_token, now_s)

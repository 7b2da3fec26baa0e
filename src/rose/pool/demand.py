"""What a pool needs of its borrowed engines, as its own figures say."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rose.policies.demand import DemandTracker, Load
from rose.policies.routing import EngineState, EngineView, WaitReason
from rose.pool.loans import Loan
from rose.pool.membership import EngineAccount
from rose.pool.pool import PoolSnapshot, RolloutPool
from rose.types import EngineId, EngineKind

_READY_S = 5.0
_NUM_READY = 8
_WORKING = frozenset({EngineState.READY, EngineState.UPDATING, EngineState.STALE})


class PoolDemand:
    """Looks at a pool for one borrower.

    Args:
        pool: Whose demand it is.
        tracker: Remembers it.
    """

    def __init__(self, pool: RolloutPool, tracker: DemandTracker) -> None:
        self._pool = pool
        self._tracker = tracker
        self._seen_s: dict[str, float] = {}
        self._ready_s: deque[float] = deque([_READY_S], maxlen=_NUM_READY)

    def begin(self, now_s: float) -> None:
        """Note that the job begins to borrow."""
        self._tracker.begin(now_s)

    def look(self, loans: Iterable[Loan], num_held: int, now_s: float) -> float:
        """Return how many engines the job wants to have borrowed; notes which of those it has were used."""
        snapshot, accounts = self._pool.snapshot(), self._pool.accounts()
        views = {view.engine_id: view for view in snapshot.engines}
        joined = {loan.engine.engine_id: loan for loan in loans if loan.is_joined}
        for engine_id, loan in joined.items():
            if engine_id in views:
                self._note(loan, views[engine_id], accounts[engine_id], now_s)
        load = self._load(snapshot, joined, num_held, self._num_under_way(now_s))
        self._tracker.note(load, now_s)
        ready_s, announced = max(self._ready_s), self._pool.announced
        return self._tracker.wanted(load, now_s, ready_s=ready_s, announced=announced)

    def idle(self, loans: Iterable[Loan], now_s: float) -> list[Loan]:
        """Return the engines that could be given back, as of the last look: not used for long, the longest first."""
        since_s = now_s - self._tracker.config.idle_giveback_s
        unused = [loan for loan in loans if loan.is_joined and not loan.is_revoking and loan.used_s <= since_s]
        return sorted((loan for loan in unused if not loan.is_leaving), key=lambda loan: loan.used_s)

    def _note(self, loan: Loan, view: EngineView, account: EngineAccount, now_s: float) -> None:
        is_ready = view.state is EngineState.READY
        if is_ready and not loan.is_ready:
            self._ready_s.append(now_s - loan.asked_s)
        loan.note(account, now_s, is_ready=is_ready, has_turns=view.num_in_flight > 0)

    def _num_under_way(self, now_s: float) -> int:
        """Return how many trajectories have a turn, or had one so lately that their environment may be at work."""
        since_s = now_s - self._tracker.config.env_s
        self._seen_s.update(dict.fromkeys(self._pool.live_trajectories(), now_s))
        self._seen_s = {name: seen_s for name, seen_s in self._seen_s.items() if seen_s >= since_s}
        return len(self._seen_s)

    def _load(self, snapshot: PoolSnapshot, joined: dict[EngineId, Loan], num_held: int, num_under_way: int) -> Load:
        is_full = any(snapshot.waiting.get(reason) for reason in (WaitReason.SLOTS, WaitReason.KV))
        own = [v for v in snapshot.engines if v.kind is EngineKind.DEDICATED and v.state in _WORKING]
        used = [v for v in snapshot.engines if v.engine_id in joined and v.num_in_flight]
        lent_slots = [self._num_slots(view, is_full=is_full) for view in used]
        return Load(
            num_trajectories=num_under_way,
            num_own_slots=sum(self._num_slots(view, is_full=is_full) for view in own),
            num_slots=max(1.0, sum(lent_slots) / len(used)) if used else self._pool.config.routing.cap_per_engine,
            num_used=len(used),
            num_held=num_held,
        )

    def _num_slots(self, view: EngineView, *, is_full: bool) -> int:
        """Return how many turns an engine can take.

        While turns wait it is what it holds, for trajectories that will be back too: memory may be short before slots are. One that just joined has more to come.
        """
        if is_full and view.num_shown is None:
            return view.num_in_flight + view.num_seats
        cap = self._pool.config.routing.cap_per_engine
        return cap if view.num_slots is None else min(cap, view.num_slots)

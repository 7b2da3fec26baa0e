"""The engines of a pool: their states, what is reserved on them, their accounts.

Invariants:

* An engine's state changes along ``_ALLOWED`` only.
* ``held`` has every request that the engine may still be working on, those being aborted included; slots and KV
  reservations are computed from it, so that neither can leak.
* The routing index holds exactly one view of each member, never older than the last change of it.
* Accounts outlive the membership and add up over rejoins of one id.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections import deque
from random import Random
from typing import NamedTuple

import attrs

from rose.errors import EngineLostError
from rose.interfaces import ServingEngine
from rose.policies.concurrency import KvReading, SlotLimit
from rose.policies.pace import PaceModel
from rose.policies.returns import ReturnModel
from rose.policies.routing import Circuit, EngineLoad, EngineState, EngineView, RoutingIndex
from rose.pool.circuit import CircuitBreaker
from rose.pool.config import PoolConfig
from rose.pool.turns import Attempt
from rose.pool.waiting import Known
from rose.types import EngineId, EngineKind, EngineSnapshot, HopEnd, LeaseId, RouteReason, WeightVersion

_MAX_LOANS = 512
_MOVES = (RouteReason.MIGRATED, RouteReason.REBALANCED)  # a tuple: members of an enum are slow to hash
_S = EngineState
_SERVING = frozenset({_S.READY, _S.UPDATING})
_ALLOWED: dict[EngineState, frozenset[EngineState]] = {
    _S.JOINING: frozenset({_S.STALE, _S.READY, _S.DRAINING, _S.LOST}),
    _S.STALE: frozenset({_S.READY, _S.UPDATING, _S.DRAINING, _S.FENCED, _S.LOST}),
    _S.READY: frozenset({_S.STALE, _S.UPDATING, _S.DRAINING, _S.FENCED, _S.LOST}),
    _S.UPDATING: frozenset({_S.READY, _S.DRAINING, _S.FENCED, _S.LOST}),
    _S.DRAINING: frozenset({_S.LOST}),
    _S.FENCED: frozenset({_S.UPDATING, _S.DRAINING, _S.LOST}),
    _S.LOST: frozenset(),
}


@attrs.define(kw_only=True)
class EngineAccount:
    """What one engine did for the pool.

    Attempts that ended are counted by how; ``num_attempts`` counts those that were begun. Tokens are those kept. ``busy_s`` is the time
    in which it had at least one request of the pool, ``present_s`` the time in which it was in the pool and not lost. ``num_moved_in``
    counts turns that the routing policy took from another engine that could have gone on, with the prompts computed anew for it.
    """

    kind: EngineKind
    num_attempts: int = 0
    num_tokens: int = 0
    num_ended: dict[HopEnd, int] = attrs.field(factory=lambda: dict.fromkeys(HopEnd, 0))
    num_rerouted: int = 0
    num_moved_in: int = 0
    num_moved_prompt_tokens: int = 0
    busy_s: float = 0.0
    present_s: float = 0.0

    def copy(self) -> EngineAccount:
        """Return a copy that does not change any more."""
        return attrs.evolve(self, num_ended=dict(self.num_ended))


class Seat(NamedTuple):
    """A trajectory whose environment is at work: until when it is expected, its context, what it is expected to make yet."""

    expected_s: float
    num_context_tokens: int
    left_tokens: float


@attrs.define(kw_only=True, eq=False)
class Member:
    """One engine and what the pool knows of it.

    Attributes:
        asked_s: When it was asked for a reading that it has not given yet.
        joined_s: When it joined.
        load_tokens: Context of all that is held, prompts and what was made.
        seat_tokens: Context of all that has a seat.
        kv_used_fraction: How much of its KV memory was in use when it was read.
        left_tokens: What the trajectory of each held attempt and of each seat is expected to make yet, the least first.
        num_waiting_prompt_tokens: Prompt tokens of held attempts that show no token yet, without prefixes that were here.
        seats: Trajectories whose last turn ended here and whose next one is expected, in the order in which they were given.
        lease_ends_s: When its lease ends unless it is renewed; ``None`` when the pool was not told.
        num_shown: Turns that it has shown a token of since it joined; enough from the start for one that joined before the pool had any,
            when holding back would only send the first trajectories to worse engines.
        slots: How many turns it may have in flight, as its KV memory tells.
        is_kept_free: See ``EngineView``.
        is_emptied: It takes no turn at all meanwhile.
        why: What brought it into its state.
    """

    engine: ServingEngine
    kind: EngineKind
    lease_id: LeaseId | None
    circuit: CircuitBreaker
    account: EngineAccount
    slots: SlotLimit
    state: EngineState = EngineState.JOINING
    version: WeightVersion | None = None
    reading: EngineSnapshot | None = None
    kv_used_fraction: float = 0.0
    held: dict[int, Attempt] = attrs.field(factory=dict)
    kv_reserved_tokens: int = 0
    load_tokens: int = 0
    seat_tokens: int = 0
    left_tokens: array[float] = attrs.field(factory=lambda: array("d"))
    num_waiting_prompt_tokens: int = 0
    seats: dict[str, Seat] = attrs.field(factory=dict)
    num_shown: int = 0
    last_token_s: float = -math.inf
    busy_since_s: float = 0.0
    asked_s: float = math.inf
    joined_s: float = 0.0
    lease_ends_s: float | None = None
    is_kept_free: bool = False
    is_emptied: bool = False
    why: str = ""
    engine_id: EngineId = attrs.field(init=False)
    _num_tokens_read: int = 0

    @engine_id.default
    def _read_engine_id(self) -> EngineId:
        return self.engine.engine_id

    @property
    def is_serving(self) -> bool:
        """Return whether it takes turns, now or after the activation that it is in."""
        return self.state in _SERVING

    @property
    def is_new(self) -> bool:
        """Return whether it has shown tokens of fewer turns than it may have at once."""
        return self.num_shown < self.slots.cap

    def keep_seat(self, trajectory_id: str, seat: Seat) -> None:
        """Expect a trajectory back."""
        self.free_seat(trajectory_id)
        self.seats[trajectory_id] = seat
        self.seat_tokens += seat.num_context_tokens
        insort(self.left_tokens, seat.left_tokens)

    def free_seat(self, trajectory_id: str) -> Seat | None:
        """Expect a trajectory no more; returns the seat that it had, if any."""
        seat = self.seats.pop(trajectory_id, None)
        if seat is not None:
            self.seat_tokens -= seat.num_context_tokens
            self.no_longer_left(seat.left_tokens)
        return seat

    def no_longer_left(self, left_tokens: float) -> None:
        """Take one of the ``left_tokens`` out."""
        del self.left_tokens[bisect_left(self.left_tokens, left_tokens)]

    def note_reading(self, reading: EngineSnapshot, now_s: float) -> None:
        """Take a newer reading; it may move the number of slots."""
        self.reading = reading
        self.kv_used_fraction = reading.kv_used_tokens / max(1, reading.kv_total_tokens)
        num_tokens, self._num_tokens_read = self._num_tokens_read, self.account.num_tokens
        seen = KvReading(
            kv_used_fraction=self.kv_used_fraction,
            age_s=now_s - reading.read_at_s,
            num_in_flight=len(self.held),
            has_progress=self.account.num_tokens > num_tokens,
        )
        self.slots.read(seen, now_s)


class Membership:
    """All members, the routing index that mirrors them, and the accounts.

    Attributes:
        members: The engines now in the pool, the lost ones that nobody removed included.
        index: What the routing policy decides on.
        version: The latest version that an engine acknowledged to this pool (or brought along as the first), or ``None``.
        has_synced: An engine acknowledged an activation to this pool.
        pace: How long tokens take where.
        returns: Whether trajectories come back with a next turn.
        ended_loans_s: How long borrowed engines were here that left or were lost, the last few hundred.
        num_own_serving: Dedicated engines that take turns, now or after the activation that they are in.
        num_lent_serving: Borrowed ones.
    """

    def __init__(self, config: PoolConfig, rng: Random) -> None:
        self.members: dict[EngineId, Member] = {}
        self.index = RoutingIndex(config.routing)
        self.version: WeightVersion | None = None
        self.has_synced = False
        self.ended_loans_s: deque[float] = deque(maxlen=_MAX_LOANS)
        self.num_own_serving = self.num_lent_serving = 0
        self._config = config
        self._rng = rng
        self._accounts: dict[EngineId, EngineAccount] = {}
        self._freed: list[Member] = []
        self._has_made_tokens = False
        self.pace = PaceModel(config.routing.pace)
        self.returns = ReturnModel()
        self._context_tokens: int | None = None
        self._is_context_known = True

    @property
    def max_context_tokens(self) -> int | None:
        """Return the longest context of the engines that are not lost; ``None`` when one of them may take any."""
        if not self._is_context_known:
            readings = [m.reading for m in self.members.values() if m.state is not EngineState.LOST]
            limits = [reading.max_context_tokens for reading in readings if reading is not None]
            known = [limit for limit in limits if limit is not None]
            self._context_tokens = max(known) if known and len(known) == len(limits) else None
            self._is_context_known = True
        return self._context_tokens

    def get(self, engine_id: EngineId) -> Member:
        """Return a member.

        Raises:
            EngineLostError: No engine of that id is in the pool.
        """
        member = self.members.get(engine_id)
        if member is None:
            message = f"engine {engine_id!r} is not in the pool; its engines are {sorted(self.members)}"
            raise EngineLostError(message)
        return member

    def is_present(self, member: Member) -> bool:
        """Tell whether this very member is in the pool and not lost."""
        return self.members.get(member.engine_id) is member and member.state is not EngineState.LOST

    def has_dedicated(self) -> bool:
        """Tell whether an engine of the job's own is in the pool and not lost."""
        return any(m.kind is EngineKind.DEDICATED and m.state is not EngineState.LOST for m in self.members.values())

    def add(self, engine: ServingEngine, kind: EngineKind, lease_id: LeaseId | None) -> Member:
        """Take an engine in, in state joining. The id of a lost engine may be used again.

        Raises:
            ValueError: An engine of that id is in the pool and not lost.
        """
        engine_id = engine.engine_id
        old = self.members.get(engine_id)
        if old is not None and old.state is not EngineState.LOST:
            message = f"engine {engine_id!r} is in the pool already, {old.state.value}; remove it first"
            raise ValueError(message)
        account = self._accounts.setdefault(engine_id, EngineAccount(kind=kind))
        circuit = CircuitBreaker(self._config, self._rng)
        slots = SlotLimit(self._config.concurrency, self._config.routing.cap_per_engine)
        member = Member(engine=engine, kind=kind, lease_id=lease_id, circuit=circuit, account=account, slots=slots)
        member.num_shown = 0 if self._has_made_tokens else slots.cap
        self.members[engine_id] = member
        self.refresh(member)
        return member

    def remove(self, member: Member) -> None:
        """Let a member go; nothing happens when another one has taken its id."""
        if self.members.get(member.engine_id) is member:
            del self.members[member.engine_id]
            self.pace.forget(member.engine_id)
            self.index.drop(member.engine_id)
            self._count_serving(member, -member.is_serving)
            self._is_context_known = False

    def move(self, member: Member, state: EngineState) -> bool:
        """Change a member's state if its life cycle allows it; returns whether it changed."""
        if state not in _ALLOWED[member.state]:
            return False
        was_serving, member.state = member.is_serving, state
        self._count_serving(member, member.is_serving - was_serving)
        self._is_context_known = False
        self.refresh(member)
        return True

    def _count_serving(self, member: Member, by: int) -> None:
        if member.kind is EngineKind.DEDICATED:
            self.num_own_serving += by
        else:
            self.num_lent_serving += by

    def note_reading(self, member: Member, reading: EngineSnapshot, now_s: float) -> None:
        """Take a newer reading of a member's load."""
        if member.reading is None or member.reading.max_context_tokens != reading.max_context_tokens:
            self._is_context_known = False
        member.note_reading(reading, now_s)
        self.pace.now_s = now_s
        self.refresh(member)
        self._keep_seats()

    def acknowledge(self, member: Member, version: WeightVersion) -> None:
        """Note that the engine holds ``version``; the pool's own version and run follow and never go back within a run."""
        member.version = version
        if self.version is None or self.version.run != version.run or self.version.n < version.n:
            self.version = version
            self.index.run = version.run
        self.refresh(member)

    def refresh(self, member: Member) -> None:
        """Bring the routing index up to date with a member that changed."""
        if self.members.get(member.engine_id) is member:
            self._forget_absent(member)
            self.index.put(self.view(member))

    def _refresh_load(self, member: Member) -> None:
        """Do the same where nothing but the member's load changed."""
        if self.members.get(member.engine_id) is member:
            self._forget_absent(member)
            self.index.put_load(member.engine_id, self._load(member))

    def view(self, member: Member) -> EngineView:
        """Return what the routing policy sees of a member."""
        reading = member.reading
        return EngineView(
            engine_id=member.engine_id,
            kind=member.kind,
            state=member.state,
            version=member.version,
            circuit=member.circuit.state,
            num_slots=0 if member.is_emptied else member.slots.num_slots,
            is_kept_free=member.is_kept_free,
            kv_total_tokens=None if reading is None else reading.kv_total_tokens,
            kv_used_fraction=member.kv_used_fraction,
            num_shown=member.num_shown if member.is_new else None,
            **self._load(member)._asdict(),
        )

    def _load(self, member: Member) -> EngineLoad:
        num_probing, pace_s, slope_s, slowdown, idle_s = 0, None, 0.0, 1.0, 0.0
        if member.circuit.state is Circuit.HALF_OPEN:
            num_probing = sum(attempt.is_open and attempt.num_tokens == 0 for attempt in member.held.values())
        estimate = self.pace.estimate(member.engine_id, member.kind, member.load_tokens + member.seat_tokens)
        if estimate is not None:
            pace_s, slope_s, slowdown, idle_s = estimate
        left_tokens = member.left_tokens
        return EngineLoad(
            len(member.held),
            num_probing,
            member.kv_reserved_tokens,
            member.num_waiting_prompt_tokens,
            left_tokens[-1] if left_tokens else 0.0,
            len(member.seats),
            member.seat_tokens,
            pace_s,
            slope_s,
            idle_s,
            self.pace.prefill_s,
            slowdown > self._config.routing.max_slowdown,
        )

    def _forget_absent(self, member: Member) -> None:
        """Expect those no more that did not come back in time."""
        seats, now_s = member.seats, self.pace.now_s
        while seats and seats[first := next(iter(seats))].expected_s <= now_s:
            member.free_seat(first)
            self.returns.observe_absence()

    def keep_seat(
        self, engine_id: EngineId, trajectory_id: str, now_s: float, *, num_context_tokens: int, left_tokens: float
    ) -> None:
        """Expect a trajectory back whose turn ended."""
        member = self.members.get(engine_id)
        if member is not None:
            member.keep_seat(trajectory_id, Seat(now_s + self.returns.seat_s, num_context_tokens, left_tokens))
            self._refresh_load(member)

    def take_seat(self, trajectory_id: str, known: Known, now_s: float) -> bool:
        """Note that a trajectory is back with its next turn; returns whether it was expected."""
        engine_id = known.last_engine
        if engine_id is None:
            return False
        member = self.members.get(engine_id)
        seat = None if member is None else member.free_seat(trajectory_id)
        self.returns.observe(
            now_s - known.ended_s, known.num_context_tokens, self.pace.prefill_s, is_expected=seat is not None
        )
        if member is not None and seat is not None:
            self._refresh_load(member)
        self._keep_seats()
        return seat is not None

    def _keep_seats(self) -> None:
        returns = self.returns
        self.index.keep_seats(returns.context_tokens if returns.is_worth_it else None)

    def still_stalled(self, stalls: dict[EngineId, float]) -> set[EngineId]:
        """Return the engines of ``stalls`` that made no token since the time given there; the others are deleted from it."""
        for engine_id, stalled_s in list(stalls.items()):
            member = self.members.get(engine_id)
            if member is None or member.last_token_s > stalled_s:
                del stalls[engine_id]
        return set(stalls)

    def note_tokens(self, attempt: Attempt, taken: int, now_s: float) -> bool:
        """Count tokens that an open attempt made; returns whether the first one opened its engine to more turns."""
        member, is_first = attempt.member, not attempt.num_tokens
        attempt.num_tokens += taken
        member.load_tokens += taken
        member.account.num_tokens += taken
        attempt.last_progress_s = member.last_token_s = now_s
        if not is_first:
            return False
        self._has_made_tokens = True
        was_new = member.is_new
        member.num_shown += 1
        member.num_waiting_prompt_tokens -= attempt.num_fresh_tokens  # its prompt was computed
        has_opened = member.circuit.succeed() or was_new
        if has_opened:
            self.refresh(member)
        elif attempt.num_fresh_tokens:
            self._refresh_load(member)
        return has_opened

    def learn(self, attempt: Attempt, now_s: float) -> None:
        """Learn an engine's pace from a turn that finished: from one that found its prefix there, or computed it anew."""
        member, pace = attempt.member, self.pace
        pace.now_s = now_s
        load = (attempt.load_tokens + member.load_tokens + member.seat_tokens) / 2
        duration_s = now_s - attempt.assigned_s
        if attempt.reason is RouteReason.AFFINITY:
            pace.observe(
                member.engine_id,
                member.kind,
                load_tokens=load,
                num_tokens=attempt.num_tokens,
                duration_s=duration_s,
            )
        elif attempt.reason is RouteReason.MIGRATED and (
            estimate := pace.estimate(member.engine_id, member.kind, load)
        ):
            extra_s = duration_s - estimate.pace_s * attempt.num_tokens
            pace.observe_prefill(num_prompt_tokens=len(attempt.request.prompt_ids), extra_s=extra_s)

    def hold(self, member: Member, attempt: Attempt, now_s: float) -> None:
        """Reserve a slot and KV room for an attempt."""
        if not member.held:
            member.busy_since_s = now_s
        request, record = attempt.request, attempt.record
        num_prompt_tokens = num_fresh_tokens = len(request.prompt_ids)
        attempt.num_prompt_tokens, attempt.left_tokens = num_prompt_tokens, record.progress.left_tokens
        attempt.kv_tokens = num_prompt_tokens + request.sampling.max_tokens
        member.held[attempt.number] = attempt
        member.kv_reserved_tokens += attempt.kv_tokens
        insort(member.left_tokens, attempt.left_tokens)
        if record.affinity == member.engine_id:
            num_fresh_tokens = max(0, num_prompt_tokens - record.progress.num_context_tokens)
        member.load_tokens += num_prompt_tokens
        member.num_waiting_prompt_tokens += num_fresh_tokens
        attempt.load_tokens, attempt.num_fresh_tokens = member.load_tokens + member.seat_tokens, num_fresh_tokens
        if attempt.reason in _MOVES:
            member.account.num_moved_in += 1
            member.account.num_moved_prompt_tokens += num_prompt_tokens
        member.account.num_attempts += 1
        self._refresh_load(member)

    def let_go(self, member: Member, attempt: Attempt, now_s: float) -> None:
        """Free what an attempt had reserved."""
        del member.held[attempt.number]
        member.kv_reserved_tokens -= attempt.kv_tokens
        member.no_longer_left(attempt.left_tokens)
        member.load_tokens -= attempt.num_prompt_tokens + attempt.num_tokens
        if not attempt.num_tokens:
            member.num_waiting_prompt_tokens -= attempt.num_fresh_tokens
        if not member.held:
            member.account.busy_s += now_s - member.busy_since_s
            self._freed.append(member)
        self._refresh_load(member)

    def take_freed(self) -> list[Member]:
        """Return the members whose last request ended since the last call."""
        freed, self._freed = self._freed, []
        return freed

    def open_attempts(self, member: Member) -> list[Attempt]:
        """Return the member's attempts that have not ended, oldest first."""
        return [attempt for attempt in member.held.values() if attempt.is_open]

    def accounts(self, now_s: float) -> dict[EngineId, EngineAccount]:
        """Return copies of all accounts, the running busy time included."""
        copies = {engine_id: account.copy() for engine_id, account in self._accounts.items()}
        for engine_id, member in self.members.items():
            if member.held:
                copies[engine_id].busy_s += now_s - member.busy_since_s
            if member.state is not EngineState.LOST:
                copies[engine_id].present_s += now_s - member.joined_s
        return copies

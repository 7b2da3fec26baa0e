"""The engines that a job may borrow, the leases it holds for them, and what came of their last loans."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import attrs

from rose.interfaces import ServingEngine
from rose.policies.demand import LoanYield, poor_loans
from rose.policies.lending import Lease
from rose.pool.membership import EngineAccount
from rose.types import DeviceId, EngineKind, HopEnd, LeaseId

EngineFactory = Callable[[DeviceId], ServingEngine | None]
"""Gives the rollout engine that waits on a device; ``None`` where the job has none."""
Engines = Mapping[DeviceId, ServingEngine] | Mapping[DeviceId | tuple[DeviceId, ...], ServingEngine] | EngineFactory
_MOST_BACKOFF = 8
_NO_ACCOUNT = EngineAccount(kind=EngineKind.BORROWED)


@attrs.define(eq=False)
class Loan:
    """One engine and the devices that it needs.

    Attributes:
        leases: Of its devices; all of them or none.
        is_joined: It is in the pool under them.
        is_leaving: It is being given back.
        num_failures: How often in a row it did not answer, or was lost.
        retry_s: It is not asked for before.
        asked_s: When its devices were granted.
        used_s: When it was last seen with a turn; when it joined, as long as it had none.
        is_ready: It was seen ready for turns since it joined.
        account: The pool's account of it as last seen.
        start: And before it joined.
        last: What came of its loan so far, or of the last one.
    """

    device_ids: tuple[DeviceId, ...]
    engine: ServingEngine
    leases: tuple[Lease, ...] = ()
    is_joined: bool = False
    is_leaving: bool = False
    num_failures: int = 0
    retry_s: float = -math.inf
    asked_s: float = 0.0
    used_s: float = 0.0
    is_ready: bool = False
    account: EngineAccount = _NO_ACCOUNT
    start: EngineAccount = _NO_ACCOUNT
    last: LoanYield | None = None

    @property
    def is_gang(self) -> bool:
        """Whether it needs several devices."""
        return len(self.device_ids) > 1

    @property
    def expires_s(self) -> float:
        """When the first of its leases ends."""
        return min((lease.expires_s for lease in self.leases), default=math.inf)

    @property
    def is_revoking(self) -> bool:
        """Whether the lender asked a device of it back."""
        return any(lease.is_revoking for lease in self.leases)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The fencing tokens of its leases, in the order of its devices."""
        tokens = {lease.device_id: lease.fencing_token for lease in self.leases}
        return tuple(tokens[device_id] for device_id in self.device_ids)

    def join(self, now_s: float) -> None:
        """Note that its engine is in the pool."""
        self.is_joined, self.is_ready, self.used_s = True, False, now_s
        self.num_failures, self.start = 0, self.account

    def note(self, account: EngineAccount, now_s: float, *, is_ready: bool, has_turns: bool) -> None:
        """Take in what the pool knows of it at a look."""
        self.is_ready = self.is_ready or is_ready
        if has_turns or account.num_attempts > self.account.num_attempts:
            self.used_s = now_s
        self.account, start = account, self.start
        self.last = LoanYield(
            num_attempts=account.num_attempts - start.num_attempts,
            num_stalled=account.num_ended[HopEnd.STALLED] - start.num_ended[HopEnd.STALLED],
            num_tokens=account.num_tokens - start.num_tokens,
            busy_s=account.busy_s - start.busy_s,
        )

    def fail(self, now_s: float, wait_s: float) -> None:
        """Note that it did not answer: it is left alone for ``wait_s``, twice as long each time."""
        self.retry_s = now_s + wait_s * min(_MOST_BACKOFF, 2**self.num_failures)
        self.num_failures += 1

    def let_go(self) -> list[LeaseId]:
        """Forget the leases; returns which they were."""
        lease_ids = [lease.lease_id for lease in self.leases]
        self.leases, self.is_joined, self.is_leaving = (), False, False
        return lease_ids


class Loans:
    """All engines that a job may borrow: known from the beginning, or made for the devices that are granted."""

    def __init__(self, engines: Engines) -> None:
        """Begin without leases."""
        self._factory = None if isinstance(engines, Mapping) else engines
        known = engines if isinstance(engines, Mapping) else {}
        self._all = [Loan(key if isinstance(key, tuple) else (key,), engine) for key, engine in known.items()]
        self._single = {loan.device_ids[0]: loan for loan in self._all if not loan.is_gang}
        self._refused: set[DeviceId] = set()

    def __iter__(self) -> Iterator[Loan]:
        """Iterate over all that are known by now."""
        return iter(self._all)

    @property
    def is_open(self) -> bool:
        """Whether there may be more than those known."""
        return self._factory is not None

    @property
    def held(self) -> list[Loan]:
        """Those with leases."""
        return [loan for loan in self._all if loan.leases]

    @property
    def leases(self) -> list[Lease]:
        """All leases held."""
        return [lease for loan in self._all for lease in loan.leases]

    @property
    def num_kept(self) -> int:
        """Engines that are held and not about to be given back."""
        return sum(bool(loan.leases) and not (loan.is_leaving or loan.is_revoking) for loan in self._all)

    def on(self, device_id: DeviceId) -> Loan | None:
        """Return the engine on one device; ``None``, and never asked for again, where the job has none."""
        loan = self._single.get(device_id)
        if loan is None:
            engine = self._factory(device_id) if self._factory is not None else None
            if engine is None:
                self._refused.add(device_id)
                return None
            loan = self._single[device_id] = Loan((device_id,), engine)
            self._all.append(loan)
        return loan

    def gangs(self, now_s: float) -> list[Loan]:
        """Return the engines over several devices that can be asked for, the poor ones last."""
        poor = self._poor()
        return sorted((loan for loan in self._unheld(now_s) if loan.is_gang), key=lambda loan: loan in poor)

    def choices(self, now_s: float) -> Iterator[tuple[Collection[DeviceId] | None, Collection[DeviceId]]]:
        """Yield what to ask for, one after the other until there is enough: devices (``None``: all), and which of them not."""
        poor = {loan.device_ids[0] for loan in self._poor()}
        if self._factory is not None:
            shunned = {device_id for device_id, loan in self._single.items() if loan.retry_s > now_s}
            yield None, self._refused | shunned | poor
            if poor - shunned:
                yield None, self._refused | shunned
            return
        unheld = [loan.device_ids[0] for loan in self._unheld(now_s) if not loan.is_gang]
        good = [device_id for device_id in unheld if device_id not in poor]
        if good:
            yield good, ()
        if len(good) < len(unheld):
            yield unheld, ()

    def _unheld(self, now_s: float) -> list[Loan]:
        return [loan for loan in self._all if not loan.leases and loan.retry_s <= now_s]

    def _poor(self) -> set[Loan]:
        flags = poor_loans([loan.last for loan in self._all])
        return {loan for loan, is_poor in zip(self._all, flags, strict=True) if is_poor}

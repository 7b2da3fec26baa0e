"""The lender: who may borrow which device, until when. In process, on an injected clock.

Invariants:

* At most one lease a device; a device's fencing token grows with every grant and every end of a lease, so a borrower with
  an outdated lease is refused by the ledger whatever its clock says.
* What allows work is kept in the store before the ledger is written; what forbids it is written to the ledger first. So after a
  crash in between the ledger allows no more than the store knows, and ``Lender(...)`` puts both right.
* The ledger is written before anybody is told: once ``revoke`` or ``stop`` returns, the rollout engine starts no further device
  turn and evicts its requests at its next look, at most one turn plus the governor's ``max_hold_s`` later.
* A kill switch stays thrown until it is lifted, over restarts too.
* Decisions are ``rose.policies.lending``, by the monotonic clock alone; this class keeps the state and writes the ledgers.
* ``_leases`` has exactly the leases in force, which their devices have too; each has an entry in the heap ``_ends``, the first
  never later than its end. So renewing takes the same time for any number of devices.
* Every method is atomic: threads may share a lender.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import attrs

from rose.coserving import lender_devices
from rose.coserving.lease_store import DeviceRecord, LeaseStore, SavedState, Switch, SwitchKind
from rose.coserving.lender_audit import Entry, LeaseChange, LeaseEvent
from rose.coserving.lender_books import LENDER, LenderBooks
from rose.coserving.lender_devices import DeviceTerms, LenderLedger, LentDevice, kv_use_fraction, resume, token_in
from rose.coserving.lender_queue import WaitingJobs
from rose.errors import LeaseError, LedgerError
from rose.interfaces.clock import Clock
from rose.policies.admission import Mode
from rose.policies.lending import Ask, DeviceUse, Lease, LendingConfig, plan_expiry, plan_grants
from rose.types import DeviceId, JobId, LeaseId

__all__ = ["DeviceTerms", "LeaseChange", "LeaseEvent", "Lender", "LenderLedger", "Switch", "SwitchKind"]


Listener = Callable[[LeaseEvent], None]


class Lender:
    """Grants, renews and ends leases of the devices of one serving cluster."""

    def __init__(
        self,
        ledgers: Mapping[DeviceId, LenderLedger],
        clock: Clock,
        config: LendingConfig | None = None,
        mode: Mode = Mode.SLO,
        *,
        store: LeaseStore | None = None,
        terms: Mapping[DeviceId, DeviceTerms] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Lend the devices whose ledgers are given. The lender is the one writer of their budget sections.

        Tokens continue from what the ledgers and the store hold. Leases that the store knows go on if they are of this boot and
        neither over nor fenced in the ledger meanwhile; all others found anywhere are ended.

        Args:
            ledgers: The devices' ledgers.
            clock: Decides; the engines' ledgers are on the same one.
            config: The terms.
            mode: How much of serving's slack is lent, unless the store knows better.
            store: Where the state outlives the process; ``None``: nowhere.
            terms: What devices are good for, where that is known.
            wall: Time of day for the audit ledger. Nothing is decided by it.
        """
        self._clock = clock
        self._config = config or LendingConfig()
        self._books = LenderBooks(store, self._config, clock, wall)
        self._lock = threading.RLock()
        self._listeners: list[Listener] = []
        self._leases: dict[LeaseId, LentDevice] = {}
        self._ends: list[tuple[float, LeaseId]] = []
        self._waiting = WaitingJobs(self._config)
        saved = SavedState() if store is None else store.load()
        self._mode = mode if saved.mode is None else saved.mode
        self._switches = saved.switches
        self._devices = {
            device_id: LentDevice(
                device_id=device_id,
                number=number,
                ledger=ledger,
                terms=(terms or {}).get(device_id, DeviceTerms()),
                last_token=token_in(ledger),
            )
            for number, (device_id, ledger) in enumerate(ledgers.items())
        }
        self._resume(saved)

    @property
    def config(self) -> LendingConfig:
        """The terms of leases."""
        return self._config

    @property
    def mode(self) -> Mode:
        """How much of serving's slack is lent on all devices."""
        return self._mode

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases in force."""
        return tuple(device.lease for device in self._devices.values() if device.lease is not None)

    @property
    def switches(self) -> frozenset[Switch]:
        """The kill switches that are thrown."""
        return self._switches

    def is_in_force(self, lease_id: LeaseId) -> bool:
        """Tell whether a lease was granted and not ended since; one that is over but not yet ended still counts."""
        return lease_id in self._leases

    def uses(self) -> tuple[DeviceUse, ...]:
        """Return what the lender knows of each device; ``kv_use_fraction`` is ``None`` for those that cannot be lent now."""
        with self._lock:
            now_s = self._clock.now()
            return tuple(self._use(device, now_s) for device in self._devices.values())

    def closed_reason(self, device_id: DeviceId) -> str:
        """Return in a few words why a device that is not lent cannot be lent now; nothing where it can."""
        return lender_devices.closed_reason(self._find(device_id), self._switches, self._config, self._clock.now())

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener`` after every change, on the caller's thread. It must not call the lender back."""
        self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Call ``listener`` no more. A no-op when it was not subscribed."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    # Of the jobs.

    def grant(
        self,
        job: JobId,
        num_devices: int,
        *,
        model: str | None = None,
        devices: Collection[DeviceId] | None = None,
        but: Collection[DeviceId] = (),
        is_whole: bool = False,
    ) -> tuple[Lease, ...]:
        """Lend up to ``num_devices`` more devices to ``job``, those with the lowest recent KV use first.

        What could not be granted counts as the job's wish for one time to live: others that are above their fair share get no
        more meanwhile, and are asked back devices by ``tick``. So a job that lacks devices asks again now and then.

        Args:
            job: Who asks.
            num_devices: How many more; 0 takes back what the job still wished for.
            model: What would run there.
            devices: Those that are of use to the job; ``None``: all.
            but: Those that are of none.
            is_whole: All ``num_devices`` or none.

        Returns:
            The new leases, fewer than asked (down to none) when devices are busy, silent, or the quota is used up.
        """
        chosen = None if devices is None else frozenset(devices)
        ask = Ask(job=job, num_devices=num_devices, model=model, devices=chosen, but=frozenset(but), is_whole=is_whole)
        return self.grant_all([ask])

    def grant_all(self, asks: Sequence[Ask]) -> tuple[Lease, ...]:
        """Serve several asks at once, planned together by fair shares; see ``grant``."""
        with self._lock:
            self.expire()
            now_s = self._clock.now()
            allowed = [ask for ask in asks if Switch(SwitchKind.MODEL, ask.model or "") not in self._switches]
            leases: tuple[Lease, ...] = ()
            if any(ask.num_devices for ask in allowed) and Switch() not in self._switches:
                self._waiting.settle(self._held(), now_s)
                wishes = self._waiting.wishes(now_s, but=[ask.job for ask in allowed])
                deficits = self._waiting.deficits
                leases = plan_grants(self._config, self.uses(), allowed, now_s, wishes=wishes, deficits=deficits)
            self._waiting.note(allowed, leases, now_s)
            if leases:
                self._enter(leases)
            return leases

    def renew(self, lease_id: LeaseId) -> Lease:
        """Extend a lease by the full time to live from now.

        Raises:
            LeaseError: The lease is unknown, over, or asked back.
        """
        with self._lock:
            leases = self.renew_all([lease_id])
            if not leases:
                message = f"lease {lease_id} is not in force (never granted, expired or revoked), its calls are fenced; ask for a new one"
                raise LeaseError(message)
            if leases[0].is_revoking:
                left_s = leases[0].expires_s - self._clock.now()
                message = f"lease {lease_id} is asked back and ends in {left_s:.3f} s; finish there and release it"
                raise LeaseError(message)
            return leases[0]

    def renew_all(self, lease_ids: Sequence[LeaseId]) -> tuple[Lease, ...]:
        """Extend leases; returns those of them that are in force. Those that are asked back are not extended."""
        with self._lock:
            self.expire()
            expires_s = self._clock.now() + self._config.ttl_s
            devices = [self._leases[lease_id] for lease_id in dict.fromkeys(lease_ids) if lease_id in self._leases]
            renewed = [
                (device, attrs.evolve(device.lease, expires_s=expires_s))
                for device in devices
                if device.lease is not None and not device.lease.is_revoking
            ]
            self._change(renewed, LeaseChange.RENEWED)
            return tuple(device.lease for device in devices if device.lease is not None)

    def release(self, lease_ids: Iterable[LeaseId]) -> tuple[Lease, ...]:
        """Give devices back; returns the leases that were still in force."""
        with self._lock:
            devices = [self._leases[lease_id] for lease_id in lease_ids if lease_id in self._leases]
            return self._end(devices, LeaseChange.RELEASED)

    # Of serving.

    def set_mode(self, mode: Mode, *, who: str = "") -> None:
        """Change how much is lent, at once, on all devices.

        Raises:
            LedgerError: It cannot be kept. A mode that lends less is in force all the same, until a restart; one that lends more is not.
        """
        with self._lock:
            entries = [self._books.entry("mode", who, reason=mode.value)]
            lends_more = mode.lends_more_than(self._mode)
            if lends_more:
                self._books.commit(entries=entries, mode=mode)
            self._mode = mode
            for device in self._devices.values():
                self._publish(device)
            if not lends_more:
                self._books.commit(entries=entries, mode=mode)

    def revoke(
        self, device_id: DeviceId | None = None, *, grace_s: float = 0.0, who: str = "", reason: str = ""
    ) -> tuple[Lease, ...]:
        """End the lease of one device, or of all when none is named. A device without a lease is left alone.

        Args:
            device_id: Which device.
            grace_s: The leases are not renewed any more and end this much later.
            who: For the audit ledger.
            reason: For the audit ledger.

        Raises:
            LeaseError: There is no such device.
        """
        with self._lock:
            chosen = list(self._devices.values()) if device_id is None else [self._find(device_id)]
            held = [device for device in chosen if device.lease is not None]
            if grace_s > 0:
                return self._ask_back(held, grace_s, who, reason)
            for device in held:
                device.rests_until_s = self._clock.now() + self._config.rest_s
            return self._end(held, LeaseChange.REVOKED, who=who, reason=reason)

    def stop(self, switch: Switch | None = None, *, who: str = "", reason: str = "") -> tuple[Lease, ...]:
        """Throw one of serving's kill switches: end the leases that it concerns, at once, and grant none until ``allow``.

        Args:
            switch: What to stop; everything unless given.
            who: For the audit ledger.
            reason: For the audit ledger.

        Raises:
            LeaseError: There is no such device.
            LedgerError: It is stopped, but a restart would not know.
        """
        switch = switch or Switch()
        with self._lock:
            if switch.kind is SwitchKind.DEVICE:
                self._find(DeviceId(switch.name))
            self._switches |= {switch}
            held = [device for device in self._devices.values() if device.lease and device.is_concerned(switch)]
            entry = self._books.entry("switch_thrown", who, reason=f"{switch}: {reason}".rstrip(": "))
            return self._end(held, LeaseChange.REVOKED, who=who, reason=f"kill switch: {switch}", first=entry)

    def allow(self, switch: Switch | None = None, *, who: str = "", reason: str = "") -> None:
        """Lift a kill switch. Without one all are lifted.

        Raises:
            LedgerError: It stays thrown, since a restart would not know.
        """
        with self._lock:
            lifted = self._switches if switch is None else self._switches & {switch}
            entries = [
                self._books.entry("switch_lifted", who, reason=f"{each}: {reason}".rstrip(": ")) for each in lifted
            ]
            self._books.commit(entries=entries, switches=self._switches - lifted)
            self._switches -= lifted

    # Of time.

    def expire(self) -> tuple[Lease, ...]:
        """End the leases whose time is over; call it now and then. Engines refuse expired leases by themselves."""
        with self._lock:
            now_s = self._clock.now()
            due = {device.device_id: device for device in self._pop_due(now_s)}
            if not due:
                return ()
            devices = sorted(due.values(), key=lambda device: device.number)
            over = {lease.lease_id for lease in plan_expiry([device.use() for device in devices], now_s)}
            ended = [device for device in devices if device.lease is not None and device.lease.lease_id in over]
            return self._end(ended, LeaseChange.EXPIRED)

    def tick(self) -> None:
        """End what is over and ask devices back for jobs that wait; call it about once a second where jobs compete."""
        with self._lock:
            self.expire()
            if self._waiting.is_idle:
                return
            now_s = self._clock.now()
            self._waiting.settle(self._held(), now_s)
            recalled = [self._devices[lease.device_id] for lease in self._waiting.recalls(self.uses(), now_s)]
            self._ask_back(recalled, self._config.grace_s, LENDER, "another job is behind its fair share")

    def check_ledgers(self) -> tuple[DeviceId, ...]:
        """Write again what a ledger does not say, as after another program overwrote it; returns whose it was.

        As with ``attach``, one with a larger token than was ever given out ends the lease.
        """
        with self._lock:
            wrong = []
            for device in self._devices.values():
                with contextlib.suppress(LedgerError):
                    if device.ledger.budget() == device.budget(self._mode):
                        continue
                wrong.append(device.device_id)
                self.attach(device.device_id, device.ledger)
            return tuple(wrong)

    def attach(self, device_id: DeviceId, ledger: LenderLedger) -> None:
        """Go on with another ledger of a device, whose file was made anew.

        Raises:
            LeaseError: There is no such device.
        """
        with self._lock:
            device = self._find(device_id)
            device.ledger, token = ledger, token_in(ledger)
            if token <= device.last_token:
                self._publish(device)
                return
            device.last_token = token + (device.lease is None)  # another lender was here; an end counts on by itself
            self._end([device] if device.lease else [], LeaseChange.REVOKED, who=LENDER, reason="its ledger is fenced")
            self._publish(device)

    # Within.

    def _resume(self, saved: SavedState) -> None:
        """Take over what the store knows, ending what cannot go on, and write all ledgers."""
        gone, ended = resume(self._devices, saved, self._clock.now())
        for device in self._devices.values():
            if device.lease is not None:
                self._leases[device.lease.lease_id] = device
                heapq.heappush(self._ends, (device.lease.expires_s, device.lease.lease_id))
        entries = [self._books.entry("started", LENDER)]
        entries += [
            self._books.entry(each.change.value, LENDER, each.lease, reason=each.reason).closing(each.lease, each.used)
            for each in ended
        ]
        self._books.commit([*gone, *(device.record() for device in self._devices.values())], entries)
        for device in self._devices.values():
            self._publish(device)

    def _find(self, device_id: DeviceId) -> LentDevice:
        if device_id not in self._devices:
            message = f"no device {device_id!r} is lent here; known are {', '.join(sorted(self._devices))}"
            raise LeaseError(message)
        return self._devices[device_id]

    def _held(self) -> Iterator[Lease]:
        return (device.lease for device in self._leases.values() if device.lease is not None)

    def _pop_due(self, now_s: float) -> Iterator[LentDevice]:
        """Take the devices whose leases may be over out of the heap; those renewed since they were put there go back into it."""
        while self._ends and self._ends[0][0] <= now_s:
            lease_id = heapq.heappop(self._ends)[1]
            device = self._leases.get(lease_id)
            if device is None or device.lease is None:
                continue
            if device.lease.expires_s > now_s:
                heapq.heappush(self._ends, (device.lease.expires_s, lease_id))
            else:
                yield device

    def _enter(self, leases: Sequence[Lease]) -> None:
        """Begin leases: kept first, then written, then told."""
        starts = {lease.device_id: self._books.counters(self._devices[lease.device_id]) for lease in leases}
        records = [
            DeviceRecord(
                device_id=lease.device_id,
                last_token=lease.fencing_token,
                lease=lease,
                start=starts[lease.device_id],
            )
            for lease in leases
        ]
        self._books.commit(
            records, [self._books.entry(LeaseChange.GRANTED.value, f"job {lease.job}", lease) for lease in leases]
        )
        for lease in leases:
            device = self._devices[lease.device_id]
            device.lease, device.last_token, device.start = lease, lease.fencing_token, starts[lease.device_id]
            self._leases[lease.lease_id] = device
            heapq.heappush(self._ends, (lease.expires_s, lease.lease_id))
            self._publish(device)
            self._tell(LeaseChange.GRANTED, lease)

    def _change(
        self,
        changed: Sequence[tuple[LentDevice, Lease]],
        change: LeaseChange,
        *,
        who: str = "",
        reason: str = "",
    ) -> None:
        """Put other terms in place of leases in force."""
        if not changed:
            return
        if self._books.are_kept:
            is_entered = change is not LeaseChange.RENEWED or self._config.audits_renewals
            leases = [lease for _, lease in changed] if is_entered else []
            self._books.commit(
                [attrs.evolve(device.record(), lease=lease) for device, lease in changed],
                [self._books.entry(change.value, who or f"job {lease.job}", lease, reason=reason) for lease in leases],
                is_urgent=change is not LeaseChange.RENEWED,
            )
        for device, lease in changed:
            device.lease = lease
            self._publish(device)
            self._tell(change, lease)

    def _ask_back(self, devices: Sequence[LentDevice], grace_s: float, who: str, reason: str) -> tuple[Lease, ...]:
        ends_s = self._clock.now() + grace_s
        changed = [
            (device, attrs.evolve(device.lease, is_revoking=True, expires_s=min(ends_s, device.lease.expires_s)))
            for device in devices
            if device.lease is not None and not device.lease.is_revoking
        ]
        for _, lease in changed:
            heapq.heappush(self._ends, (lease.expires_s, lease.lease_id))
        self._change(changed, LeaseChange.REVOKING, who=who or "serving", reason=reason)
        return tuple(lease for _, lease in changed)

    def _end(
        self,
        devices: Sequence[LentDevice],
        change: LeaseChange,
        *,
        who: str = "",
        reason: str = "",
        first: Entry | None = None,
    ) -> tuple[Lease, ...]:
        """End leases: written first, so that whatever fails later the device is free of rollouts; then told, then kept."""
        if devices:
            self._waiting.settle(self._held(), self._clock.now())
        ended = []
        for device in devices:
            lease = device.lease
            if lease is None:
                continue
            del self._leases[lease.lease_id]
            device.lease, device.last_token = None, device.last_token + 1
            self._publish(device)
            ended.append((device, lease))
        for _, lease in ended:
            self._tell(change, lease)
        self._books.owe(ended, change, who, reason, None if first is None else (first, self._switches))
        self._books.commit()
        return tuple(lease for _, lease in ended)

    def _publish(self, device: LentDevice) -> None:
        device.ledger.publish_budget(device.budget(self._mode))

    def _tell(self, change: LeaseChange, lease: Lease) -> None:
        for listener in tuple(self._listeners):
            listener(LeaseEvent(change, lease))

    def _use(self, device: LentDevice, now_s: float) -> DeviceUse:
        """Describe a device; serving is asked only where nothing is lent yet."""
        kv_use = None
        if device.lease is None and now_s >= device.rests_until_s:
            is_stopped = any(device.is_concerned(switch) for switch in self._switches)
            kv_use = None if is_stopped else kv_use_fraction(device.ledger, now_s, self._config.stale_after_s)
        return device.use(kv_use)

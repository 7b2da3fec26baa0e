"""What a lender writes into its store, and what it still owes it.

Invariant: an end or a thrown switch that could not be kept is kept with the next change that can be, before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rose.coserving.lease_store import DeviceRecord, LeaseStore, Switch
from rose.coserving.lender_audit import Counters, Entry, LeaseChange, read_counters
from rose.coserving.lender_devices import LentDevice
from rose.interfaces.clock import Clock
from rose.policies.admission import Mode
from rose.policies.lending import Lease, LendingConfig
from rose.types import DeviceId

LENDER = "lender"
_CAUSES = {LeaseChange.EXPIRED: LENDER, LeaseChange.REVOKED: "serving"}


class LenderBooks:
    """The store of one lender, if it has one, and the entries that go there."""

    def __init__(
        self, store: LeaseStore | None, config: LendingConfig, clock: Clock, wall: Callable[[], float]
    ) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._wall = wall
        self._owed: list[Entry] = []
        self._owing: dict[DeviceId, LentDevice] = {}
        self._switches: frozenset[Switch] | None = None

    @property
    def are_kept(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def entry(self, change: str, who: str = "", lease: Lease | None = None, *, reason: str = "") -> Entry:
        """Return an entry of now."""
        now_s = self._clock.now()
        entry = Entry(change=change, who=who or "serving", at_s=now_s, wall_s=self._wall(), reason=reason)
        return entry if lease is None else entry.about(lease, self._config.tenant_of(lease.job))

    def counters(self, device: LentDevice) -> Counters:
        """Return a device's counters, where anybody will ask for them."""
        return device.start if self._store is None else read_counters(device.ledger)

    def owe(
        self,
        ended: Sequence[tuple[LentDevice, Lease]],
        change: LeaseChange,
        who: str,
        reason: str,
        thrown: tuple[Entry, frozenset[Switch]] | None = None,
    ) -> None:
        """Note ends of leases, and the switch that ended them, to be kept with the next commit."""
        if self._store is None:
            return
        if thrown is not None:
            entry, self._switches = thrown
            self._owed.append(entry)
        for device, lease in ended:
            by = who or _CAUSES.get(change, f"job {lease.job}")
            used = read_counters(device.ledger).since(device.start)
            self._owed.append(self.entry(change.value, by, lease, reason=reason).closing(lease, used))
            self._owing[device.device_id] = device

    def commit(
        self,
        records: Sequence[DeviceRecord] = (),
        entries: Sequence[Entry] = (),
        *,
        switches: frozenset[Switch] | None = None,
        mode: Mode | None = None,
        is_urgent: bool = True,
    ) -> None:
        """Keep what is owed, then these; see ``LeaseStore.commit``. Without anything to keep, a no-op.

        Raises:
            LedgerError: Nothing was kept, and what was owed still is.
        """
        if self._store is None or not (records or entries or self._owed):
            return
        self._store.commit(
            [*(device.record() for device in self._owing.values()), *records],
            [*self._owed, *entries],
            switches=self._switches if switches is None else switches,
            mode=mode,
            is_urgent=is_urgent or bool(self._owed),
        )
        self._owed, self._owing, self._switches = [], {}, None

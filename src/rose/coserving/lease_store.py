"""What a lender keeps: leases, tokens, kill switches. The port to where it keeps them; ``rose.coserving.lease_sqlite`` is one."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs

from rose.coserving.lender_audit import Counters, Entry
from rose.policies.admission import Mode
from rose.policies.lending import Lease
from rose.types import DeviceId


class SwitchKind(enum.Enum):
    """How much one kill switch stops."""

    ALL = "all"
    DEVICE = "device"
    MODEL = "model"


@attrs.frozen
class Switch:
    """A kill switch: everything, one device, or one model, be it serving's own or what a job runs."""

    kind: SwitchKind = SwitchKind.ALL
    name: str = ""

    def __str__(self) -> str:
        """Return what it stops."""
        return f"{self.kind.value} {self.name}".rstrip()


@attrs.frozen(kw_only=True)
class DeviceRecord:
    """What is kept of one device.

    Attributes:
        last_token: The largest fencing token that was ever given out or written for it.
        lease: The lease in force.
        start: The device's counters when that was granted.
    """

    device_id: DeviceId
    last_token: int
    lease: Lease | None = None
    start: Counters = attrs.field(factory=Counters)


@attrs.frozen(kw_only=True)
class SavedState:
    """What a store held when it was opened. ``mode`` is ``None`` unless one was set while lending."""

    devices: Mapping[DeviceId, DeviceRecord] = attrs.field(factory=dict)
    switches: frozenset[Switch] = frozenset()
    mode: Mode | None = None
    is_same_boot: bool = True


class LeaseStore(Protocol):
    """Where a lender keeps its state."""

    def load(self) -> SavedState:
        """Return what was kept."""

    def commit(
        self,
        records: Sequence[DeviceRecord],
        entries: Sequence[Entry],
        *,
        switches: frozenset[Switch] | None = None,
        mode: Mode | None = None,
        is_urgent: bool = True,
    ) -> None:
        """Keep all of it, or nothing.

        Args:
            records: Devices that changed.
            entries: For the audit ledger.
            switches: All switches that are thrown, where that changed.
            mode: The mode, where it was set.
            is_urgent: It must outlive a loss of power too.

        Raises:
            LedgerError: Nothing was kept.
        """

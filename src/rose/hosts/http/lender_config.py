"""The lender's configuration, and the lender that it describes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs
from attrs import validators as v

from rose import checks
from rose.backends.paced import PacedClock
from rose.clocks import MonotonicClock
from rose.coserving.lease_sqlite import SqliteStore, read_boot_id
from rose.coserving.ledger import Ledger, RolloutState, UsageState
from rose.coserving.lender import DeviceTerms, Lender
from rose.coserving.locks import lock_ledger
from rose.errors import LedgerError
from rose.hosts.http.auth import TokenConfig
from rose.interfaces import Clock
from rose.policies.admission import Budget, Mode, ServingState
from rose.policies.lending import LendingConfig
from rose.types import DeviceId

_logger = logging.getLogger(__name__)
NO_LEDGER = "no ledger"
_NUM_FAILED_TO_TELL = 2  # once a file may be in the making


@attrs.frozen(kw_only=True)
class LentDeviceConfig:
    """One device that may be lent.

    Attributes:
        ledger: The path of its ledger on this machine. The device is not lent as long as that is missing.
        models: What its rollout engine can serve; anything unless given.
        serving_model: What its serving engine serves; a kill switch may name it.
    """

    ledger: Path
    models: tuple[str, ...] | None = None
    serving_model: str | None = None


@attrs.frozen(kw_only=True)
class LenderConfig:
    """What ``rose lend`` reads.

    Attributes:
        state: The file of the lender's state, on a disk of this machine; made if missing.
        devices: By name.
        listen: ``HOST:PORT``.
        mode: How much of serving's slack is lent until serving sets another mode, which is kept.
        lending: The terms of leases.
        tokens: Who may call: jobs (each by its name), ``read`` for dashboards, ``control`` for the serving team. Without any
            everybody on this machine may everything.
        clock: File of the paced clock on which the devices run; the machine's monotonic clock unless given.
        tick_s: How often leases are ended, ledgers checked and fair shares restored; seconds of this machine.
    """

    state: Path
    devices: Mapping[str, LentDeviceConfig] = attrs.field(validator=v.min_len(1))
    listen: str = "127.0.0.1:7077"
    mode: Mode = Mode.SLO
    lending: LendingConfig = attrs.field(factory=LendingConfig)
    tokens: Sequence[TokenConfig] = ()
    clock: Path | None = None
    tick_s: float = attrs.field(default=0.25, validator=checks.number(above=0))

    def __attrs_post_init__(self) -> None:
        """Check the names of devices, which stand in addresses and tables, and that none is there under two names."""
        if wrong := [name for name in self.devices if not re.fullmatch(r"[^\s/\\]+", name)]:
            message = f"devices: names are without spaces and slashes and not empty, which {', '.join(map(repr, wrong))} is not"
            raise ValueError(message)
        owners: dict[Path, str] = {}
        for name, device in self.devices.items():
            owner = owners.setdefault(device.ledger.resolve(), name)
            if owner != name:
                message = (
                    f"devices: {owner} and {name} have one ledger, {device.ledger}; a ledger is that of one device"
                )
                raise ValueError(message)


class FollowedLedger:
    """The ledger of a device in whatever file is at its path now. Without one nothing can be read, and nobody reads what is written.

    Invariant: while there is a ledger, no other lender follows it, whatever its state or the name of the file.

    Attributes:
        problem: Why there is none; empty where there is one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ledger: Ledger | None = None
        self._inode = self._lock = -1
        self._num_failed = 0
        self.problem = ""
        self.follow()

    def follow(self) -> bool:
        """Look whether another file took the place; returns whether there is a new ledger."""
        try:
            inode = self.path.stat().st_ino
        except OSError:
            self.close()
            self._num_failed, self.problem = 0, NO_LEDGER
            return False
        if inode == self._inode:
            return False
        self.close()
        try:
            ledger = Ledger.attach(self.path)
            self._lock = lock_ledger(self.path)
            self._ledger, self._inode = ledger, inode
        except LedgerError as error:
            self.problem = str(error)
            self._num_failed += 1
            if self._num_failed == _NUM_FAILED_TO_TELL:
                _logger.warning("not lent: %s", error)
            return False
        self._num_failed, self.problem = 0, ""
        return True

    def close(self) -> None:
        """Let go of the ledger, and let another lender have it. Idempotent."""
        self._ledger, self._inode = None, -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def is_there(self) -> bool:
        """Whether there is a ledger."""
        return self._ledger is not None

    def publish_budget(self, budget: Budget) -> None:
        """Write what is allowed on the device, if anybody could read it."""
        if self._ledger is not None:
            self._ledger.publish_budget(budget)

    def budget(self) -> Budget:
        """Read what was written last."""
        return self._found().budget()

    def serving(self) -> ServingState:
        """Read serving's state."""
        return self._found().serving()

    def usage(self) -> UsageState:
        """Read serving's recent past."""
        return self._found().usage()

    def rollout(self) -> RolloutState:
        """Read the rollout engine's state."""
        return self._found().rollout()

    def _found(self) -> Ledger:
        if self._ledger is None:
            message = f"there is no ledger at {self.path} yet; the executor of the device makes it"
            raise LedgerError(message)
        return self._ledger


def place_problems(config: LenderConfig) -> list[str]:
    """Return what is wrong with the files that a configuration names, each with its key; nothing is opened for writing or made."""
    problems = []
    if config.state == Path() or config.state.is_dir():
        problems.append(f"state: {config.state} is a folder, or nothing is given; name a file")
    elif not config.state.absolute().parent.is_dir():
        problems.append(f"state: there is no folder {config.state.absolute().parent}; make it first")
    for name, device in config.devices.items():
        problems += ledger_problems(f"devices.{name}.ledger", device.ledger)
    return problems


def ledger_problems(key: str, path: Path) -> list[str]:
    """Return what is wrong with the path of a ledger, which an executor may have yet to make."""
    if path == Path():
        return [f"{key}: no path is given; name a file"]
    if not path.exists():
        return []
    try:
        Ledger.attach(path)
    except LedgerError as error:
        return [f"{key}: {error}"]
    return []


@attrs.frozen
class OpenLender:
    """A lender with what it stands on."""

    lender: Lender
    store: SqliteStore
    ledgers: Mapping[DeviceId, FollowedLedger]
    clock: Clock

    def follow(self) -> None:
        """Go on with ledgers that were made anew, and write again what others overwrote."""
        for device_id, ledger in self.ledgers.items():
            if ledger.follow():
                self.lender.attach(device_id, ledger)
        self.lender.check_ledgers()


@contextlib.contextmanager
def open_lender(config: LenderConfig) -> Iterator[OpenLender]:
    """Open the lender that a configuration describes; no other can use its state meanwhile. Leases outlive it.

    Raises:
        ConfigError: The state cannot be used, or another lender does.
        LedgerError: There is no paced clock in ``clock``.
    """
    clock: Clock = MonotonicClock()
    boot_id = read_boot_id()
    if config.clock is not None:
        paced = PacedClock(config.clock)
        clock, boot_id = paced, f"{boot_id}/{paced.born_s}"
    terms = {
        DeviceId(name): DeviceTerms(
            models=None if device.models is None else frozenset(device.models), serving_model=device.serving_model
        )
        for name, device in config.devices.items()
    }
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(SqliteStore(config.state, boot_id=boot_id))
        ledgers = {DeviceId(name): FollowedLedger(device.ledger) for name, device in config.devices.items()}
        for ledger in ledgers.values():
            stack.callback(ledger.close)
        lender = Lender(ledgers, clock, config.lending, config.mode, store=store, terms=terms)
        yield OpenLender(lender, store, ledgers, clock)

"""The lender's state on disk: leases, tokens, kill switches and the audit ledger, in one SQLite file.

Invariants:

* Every change is one transaction with its audit entries: all of it is there after a crash, or nothing.
* Grants, ends and switches are on disk when ``commit`` returns; a renewal survives the process, and after a loss of power leases end anyway.
* One lender a file, whatever names it has: a lock is held from opening to closing, and lost with the process, however that ends.
* Times of leases are of the monotonic clock of one boot. Leases of another boot are over; tokens and switches are not.
* Any text can be kept: what is no Unicode, as in words of a shell in another encoding, is kept as escapes.
* Audit entries cannot be changed or deleted: triggers refuse it. What leases came to is summed as their ends are entered.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from rose.coserving.lease_store import DeviceRecord, SavedState, Switch, SwitchKind
from rose.coserving.lender_audit import Counters, Entry
from rose.coserving.locks import lock_file
from rose.errors import ConfigError, LedgerError
from rose.policies.admission import Mode
from rose.policies.lending import Lease
from rose.types import DeviceId, JobId, LeaseId

_SCHEMA_VERSION = 1
_BUSY_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_COUNTERS = tuple(field.name for field in attrs.fields(Counters))
_ENTRY = tuple(field.name for field in attrs.fields(Entry) if field.name not in ("seq", "used"))
_USED = ("rollout_s", "num_requests", "num_broken", "debt_s", "delay_s")
_COLUMNS = ", ".join(f"{name} {'INTEGER' if name.startswith('num_') else 'REAL'} NOT NULL" for name in _USED)
_LEASE = ("lease_id", "job", "fencing_token", "expires_s", "granted_s", "model", "is_revoking")

_SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE devices (device_id TEXT PRIMARY KEY, last_token INTEGER NOT NULL,
    lease_id TEXT UNIQUE, job TEXT, fencing_token INTEGER, expires_s REAL, granted_s REAL, model TEXT, is_revoking INTEGER,
    serving TEXT, rollout TEXT, {_COLUMNS});
CREATE TABLE switches (kind TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (kind, name));
CREATE TABLE audit (seq INTEGER PRIMARY KEY AUTOINCREMENT, change TEXT NOT NULL, who TEXT NOT NULL, at_s REAL NOT NULL,
    wall_s REAL NOT NULL, boot_id TEXT NOT NULL, reason TEXT NOT NULL, job TEXT NOT NULL, tenant TEXT NOT NULL,
    device_id TEXT NOT NULL, lease_id TEXT NOT NULL, fencing_token INTEGER NOT NULL, expires_s REAL NOT NULL, held_s REAL,
    {_COLUMNS});
CREATE TABLE totals (tenant TEXT NOT NULL, job TEXT NOT NULL, num_leases INTEGER NOT NULL, lent_s REAL NOT NULL, {_COLUMNS},
    PRIMARY KEY (tenant, job));
CREATE TRIGGER audit_summed AFTER INSERT ON audit WHEN NEW.held_s IS NOT NULL BEGIN
    INSERT INTO totals VALUES (NEW.tenant, NEW.job, 1, NEW.held_s, {", ".join(f"NEW.{name}" for name in _USED)})
    ON CONFLICT DO UPDATE SET num_leases = num_leases + 1, lent_s = lent_s + NEW.held_s,
    {", ".join(f"{name} = {name} + NEW.{name}" for name in _USED)}; END;
CREATE TRIGGER audit_kept BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit ledger is append-only'); END;
CREATE TRIGGER audit_whole BEFORE DELETE ON audit BEGIN SELECT RAISE(ABORT, 'the audit ledger is append-only'); END;
"""  # noqa: S608 - names of columns


class SqliteStore:
    """A ``LeaseStore`` in one file. Use it as a context manager, or ``close`` it."""

    def __init__(self, path: Path | str, *, boot_id: str | None = None) -> None:
        """Open or make the file, and lock it.

        Args:
            path: Of the file; beside it (where a link leads) come ``PATH.lock`` and SQLite's own two.
            boot_id: Names the boot whose monotonic clock the times are of; the machine's own unless given.

        Raises:
            ConfigError: Another lender has it, or it cannot be opened, or is none.
        """
        self.path = Path(path)
        self.boot_id = read_boot_id() if boot_id is None else boot_id
        self._lock = lock_file(Path(f"{self.path.resolve()}.lock"), f"the lender state {self.path}")
        self._is_urgent: bool | None = None
        try:
            _make_private(self.path)
            self._database = _open(self.path, "rwc")
            self._prepare()
        except BaseException:
            os.close(self._lock)
            raise

    def _prepare(self) -> None:
        database = self._database
        try:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("PRAGMA synchronous=FULL")
            if _version(database, self.path) == 0:
                database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version={_SCHEMA_VERSION}; COMMIT;")
        except BaseException as error:
            database.close()
            if isinstance(error, sqlite3.Error):
                raise _unusable(self.path, error) from error
            raise

    def load(self) -> SavedState:
        """Return what was kept.

        Raises:
            ConfigError: The file is damaged.
        """
        with _readable(self.path):
            facts = dict(self._database.execute("SELECT name, value FROM facts"))
            rows = self._database.execute(_GET_DEVICES)
            devices = {record.device_id: record for record in map(_record, rows)}
            switches = self._database.execute("SELECT kind, name FROM switches").fetchall()
            return SavedState(
                devices=devices,
                switches=frozenset(Switch(SwitchKind(kind), name) for kind, name in switches),
                mode=Mode(facts["mode"]) if "mode" in facts else None,
                is_same_boot=facts.get("boot_id", self.boot_id) == self.boot_id,
            )

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

        Raises:
            LedgerError: Nothing was kept: the disk is full or broken.
        """
        run = self._database.execute
        try:
            if is_urgent is not self._is_urgent:
                run(f"PRAGMA synchronous={'FULL' if is_urgent else 'NORMAL'}")
                self._is_urgent = is_urgent
            run("BEGIN IMMEDIATE")
            self._database.executemany(_PUT_DEVICE, map(_device_row, records))
            self._database.executemany(_PUT_ENTRY, [_entry_row(entry, self.boot_id) for entry in entries])
            if switches is not None:
                run("DELETE FROM switches")
                rows = [(switch.kind.value, _storable(switch.name)) for switch in switches]
                self._database.executemany("INSERT INTO switches VALUES (?, ?)", rows)
            if mode is not None:
                run("INSERT OR REPLACE INTO facts VALUES ('mode', ?)", (mode.value,))
            if is_urgent:
                run("INSERT OR REPLACE INTO facts VALUES ('boot_id', ?)", (self.boot_id,))
            run("COMMIT")
        except sqlite3.Error as error:
            message = f"the lender state {self.path} cannot be written: {error}; make room, then try again"
            raise LedgerError(message) from error
        finally:
            if self._database.in_transaction:  # whatever went wrong, the next change begins anew
                with contextlib.suppress(sqlite3.Error):
                    run("ROLLBACK")

    def entries(self, after: int = 0, limit: int = -1) -> Iterator[Entry]:
        """Give the audit entries with numbers above ``after``, oldest first, at most ``limit`` of them."""
        return _entries(self._database, self.path, after, limit)

    def totals(self) -> list[dict[str, Any]]:
        """Return what the leases that ended came to, one row a tenant and job."""
        return _totals(self._database, self.path)

    def close(self) -> None:
        """Close the file and let other lenders have it. Idempotent."""
        if self._lock >= 0:
            self._database.close()
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


class AuditReader:
    """The audit ledger of a lender that may be running, to read only."""

    def __init__(self, path: Path | str) -> None:
        """Open the lender's state file.

        Raises:
            ConfigError: There is none, or it is of another kind.
        """
        self.path = Path(path)
        self._database = _open(self.path, "ro")
        if _version(self._database, self.path) == 0:
            message = f"{path} is no lender's state: it is empty"
            raise ConfigError(message)

    def entries(self, after: int = 0, limit: int = -1) -> Iterator[Entry]:
        """Give the entries with numbers above ``after``, oldest first, at most ``limit`` of them."""
        return _entries(self._database, self.path, after, limit)

    def totals(self) -> list[dict[str, Any]]:
        """Return what the leases that ended came to, one row a tenant and job."""
        return _totals(self._database, self.path)

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._database.close()


def read_boot_id() -> str:
    """Return what names the present boot of this machine, ``""`` where there is no such thing."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _make_private(path: Path) -> None:
    """Make the file, if missing, for this user alone; SQLite gives those beside it the same rights."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise _unusable(path, error) from error


def _open(path: Path, how: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={how}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=_BUSY_S,
        )
    except sqlite3.Error as error:
        raise _unusable(path, error) from error


def _version(database: sqlite3.Connection, path: Path) -> int:
    try:
        version: int = database.execute("PRAGMA user_version").fetchone()[0]
        num_tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    except sqlite3.Error as error:
        raise _unusable(path, error) from error
    if version not in (0, _SCHEMA_VERSION) or (version == 0 and num_tables):
        message = f"{path} is no lender's state of version {_SCHEMA_VERSION} (found {version}); name another file"
        raise ConfigError(message)
    return version


def _unusable(path: Path, error: sqlite3.Error | OSError) -> ConfigError:
    return ConfigError(f"cannot use {path} as a lender's state: {error}; name a file of its own that can be written")


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the file in what goes wrong while its tables are read: bytes that SQLite or this program cannot make sense of."""
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        message = f"the lender's state {path} is damaged: {error}; put a copy of it back, or name another file"
        raise ConfigError(message) from error


def _storable(value: Any) -> Any:
    """Return what SQLite can keep: text that is no Unicode is escaped, not refused, since an end of a lease has to be kept."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _names(names: Sequence[str]) -> str:
    return ", ".join(names)


_GET_DEVICES = f"SELECT device_id, last_token, {_names(_LEASE)}, {_names(_COUNTERS)} FROM devices"  # noqa: S608
_PUT_DEVICE = (
    f"INSERT OR REPLACE INTO devices (device_id, last_token, {_names(_LEASE)}, {_names(_COUNTERS)}) "  # noqa: S608
    f"VALUES ({_names('?' * (2 + len(_LEASE) + len(_COUNTERS)))})"
)
_PUT_ENTRY = f"INSERT INTO audit ({_names((*_ENTRY, *_USED))}) VALUES ({_names('?' * (len(_ENTRY) + len(_USED)))})"  # noqa: S608


def _device_row(record: DeviceRecord) -> tuple[Any, ...]:
    lease = record.lease
    values = (None,) * len(_LEASE) if lease is None else tuple(getattr(lease, name) for name in _LEASE)
    row = (record.device_id, record.last_token, *values, *(getattr(record.start, name) for name in _COUNTERS))
    return tuple(map(_storable, row))


def _record(row: tuple[Any, ...]) -> DeviceRecord:
    device_id, last_token, *rest = row
    lease_id, job, token, expires_s, granted_s, model, is_revoking = rest[: len(_LEASE)]
    lease = None
    if lease_id is not None:
        lease = Lease(
            lease_id=LeaseId(lease_id),
            job=JobId(job),
            device_id=DeviceId(device_id),
            fencing_token=token,
            expires_s=expires_s,
            granted_s=granted_s,
            model=model,
            is_revoking=bool(is_revoking),
        )
    start = Counters(**dict(zip(_COUNTERS, rest[len(_LEASE) :], strict=True)))
    return DeviceRecord(device_id=DeviceId(device_id), last_token=last_token, lease=lease, start=start)


def _entry_row(entry: Entry, boot_id: str) -> tuple[Any, ...]:
    entry = attrs.evolve(entry, boot_id=boot_id)
    row = (*(getattr(entry, name) for name in _ENTRY), *(getattr(entry.used, name) for name in _USED))
    return tuple(map(_storable, row))


def _entries(database: sqlite3.Connection, path: Path, after: int, limit: int) -> Iterator[Entry]:
    query = f"SELECT seq, {_names((*_ENTRY, *_USED))} FROM audit WHERE seq > ? ORDER BY seq LIMIT ?"  # noqa: S608
    with _readable(path):
        for seq, *values in database.execute(query, (after, limit)):
            fields = dict(zip(_ENTRY, values[: len(_ENTRY)], strict=True))
            used = dict(zip(_USED, values[len(_ENTRY) :], strict=True))
            yield Entry(seq=seq, used=Counters(**used), **fields)


def _totals(database: sqlite3.Connection, path: Path) -> list[dict[str, Any]]:
    with _readable(path):
        cursor = database.execute("SELECT * FROM totals ORDER BY tenant, job")
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

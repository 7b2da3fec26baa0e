"""Locks that keep a second lender out, of its state and of each ledger that it writes.

Invariant: a lock is its holder's until its descriptor is closed or the process ends, however that ends; the kernel gives it back.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from rose.errors import ConfigError, LedgerError

_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # C's struct flock


def lock_file(path: Path, what: str) -> int:
    """Lock a file, made if missing, until the returned descriptor is closed or the process ends.

    Raises:
        ConfigError: Another process has the lock, or the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        message = f"cannot open {path}: {error.strerror}; choose a folder that exists and that you may write to"
        raise ConfigError(message) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        message = f"another lender uses {what}; end it first (its lock is {path})"
        raise ConfigError(message) from error
    return descriptor


def lock_ledger(path: Path) -> int:
    """Become the one lender of a ledger, until the returned descriptor is closed or the process ends.

    The lock is on the file itself, whatever names it has, and on its bytes: the executor of the device has the lock on the file as a whole.

    Raises:
        LedgerError: Another lender has it, or the file cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        message = f"cannot open ledger {path}: {error.strerror}; name a file that you may read and write"
        raise LedgerError(message) from error
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except OSError as error:
        os.close(descriptor)
        message = f"another lender lends by ledger {path}; end it, or take the device out of one of the configurations"
        raise LedgerError(message) from error
    return descriptor

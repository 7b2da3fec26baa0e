"""Where the ranks of one publish meet: the keys of an attempt, and bounded waits that notice another rank's failure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import attrs

from rose.errors import (
    BlobNotFoundError,
    DeadlineExceededError,
    TransferError,
    TransportError,
    VersionConflictError,
)
from rose.interfaces.transport import Transport
from rose.transfer.parts import Part
from rose.transfer.relay import manifest_key
from rose.types import WeightVersion

_POLL_MIN_S = 0.002
_POLL_MAX_S = 0.05


@attrs.frozen(kw_only=True)
class Attempt:
    """One attempt at a version, seen alike by every rank.

    Attributes:
        version: The version it would make.
        number: How many publishes each rank has begun before, failed ones included; the same on every rank.
        pointer_before: What the pointer held at the start.
        base_key: Manifest key of the version that changes are taken against; ``None`` for the first of a run.
        is_anchor_due: Whether this rank puts full weights beside the changes.
        is_anchor_asked: Whether the caller asked for them, so that the attempt fails where a rank puts none.
        deadline_s: When it must be done, on the monotonic clock.
    """

    version: WeightVersion
    number: int
    pointer_before: str | None
    base_key: str | None
    is_anchor_due: bool
    deadline_s: float
    is_anchor_asked: bool = False

    @property
    def prefix(self) -> str:
        """Return what every key of the attempt begins with."""
        return f"{self.version.run}/{self.version.n}/{self.number}"

    @property
    def manifest_key(self) -> str:
        """Return the key of the manifest."""
        return manifest_key(self.version, self.number)

    @property
    def anchor_key(self) -> str:
        """Return the key of the anchor that is put beside changes."""
        return f"{self.prefix}/anchor"

    @property
    def failure_key(self) -> str:
        """Return the key under which a failing rank says why."""
        return f"{self.prefix}/failed"

    @property
    def decision_key(self) -> str:
        """Return the key under which rank 0 says what goes."""
        return decision_key(self.manifest_key)

    def part_key(self, rank: int) -> str:
        """Return the key of a rank's part record."""
        return f"{self.prefix}/part-{rank}"


def decision_key(visible_key: str) -> str:
    """Return the key of the decision that was made with the version of a manifest key."""
    return f"{visible_key.rsplit('/', 1)[0]}/keep"


def gather_parts(transport: Transport, attempt: Attempt, world_size: int) -> list[Part]:
    """Wait for the part of every rank; returns them by rank. Blocking.

    Raises:
        DeadlineExceededError: Some did not come in time; names the ranks.
        TransferError: A rank failed.
        CorruptUpdateError: A part is damaged.
    """
    parts: dict[int, Part] = {}

    def look() -> bool:
        for rank in range(world_size):
            if rank not in parts:
                with contextlib.suppress(BlobNotFoundError):
                    parts[rank] = Part.from_bytes(transport.get(attempt.part_key(rank)))
        return len(parts) == world_size

    def missing() -> str:
        return f"parts of ranks {[rank for rank in range(world_size) if rank not in parts]}"

    _wait(transport, attempt, look, missing)
    _check_failure(transport, attempt)  # parts of an attempt that was given up may be another launch's
    return [parts[rank] for rank in range(world_size)]


def await_pointer(transport: Transport, attempt: Attempt, pointer: str) -> None:
    """Wait until the pointer shows the attempt. Blocking.

    Raises:
        VersionConflictError: It moved to something else.
        DeadlineExceededError: It did not move in time.
        TransferError: A rank failed.
    """

    def look() -> bool:
        found = transport.read_pointer(pointer)
        if found == attempt.manifest_key:
            return True
        if found != attempt.pointer_before:
            message = f"pointer {pointer!r} moved to {found!r} while {attempt.manifest_key!r} was being published"
            raise VersionConflictError(message)
        return False

    _wait(transport, attempt, look, lambda: f"pointer {pointer!r} to show it")


def announce_failure(transport: Transport, attempt: Attempt, rank: int, error: BaseException) -> None:
    """Tell the other ranks, as far as the transport still works and no other rank was first."""
    with contextlib.suppress(TransportError, TransferError):
        transport.put(attempt.failure_key, f"rank {rank}: {type(error).__name__}: {error}".encode())


def _wait(transport: Transport, attempt: Attempt, look: Callable[[], bool], what: Callable[[], str]) -> None:
    pause_s = _POLL_MIN_S
    while not look():
        _check_failure(transport, attempt)
        if time.monotonic() >= attempt.deadline_s:
            message = f"version {attempt.version} (attempt {attempt.number}): gave up waiting for {what()}"
            raise DeadlineExceededError(message)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _POLL_MAX_S)


def _check_failure(transport: Transport, attempt: Attempt) -> None:
    with contextlib.suppress(BlobNotFoundError):
        reason = bytes(transport.get(attempt.failure_key)).decode(errors="replace")
        message = f"version {attempt.version} (attempt {attempt.number}) was given up by {reason}"
        raise TransferError(message)

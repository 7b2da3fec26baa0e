"""What engines have acknowledged, told to publishers through the transport, so that they know what is still being read.

One writer, the pool's weight sync; any number of readers, the trainer's ranks. The record is one JSON text in a pointer, moved by
compare-and-set: a second writer is noticed, a reader sees one whole record or none. Times are Unix seconds, since writer and
readers are on different machines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from rose.errors import CorruptUpdateError, VersionConflictError
from rose.interfaces.transport import Transport
from rose.policies.retention import VersionLease
from rose.types import EngineId, WeightVersion

ACKS_POINTER = "acks"
SCHEMA = "rose.acks/1"


@attrs.frozen(kw_only=True)
class Ack:
    """What one engine has, and until when it is promised what it needs to go on from there.

    Attributes:
        version: The newest version that it acknowledged; ``None`` when it has none, or is fenced.
        expires_unix_s: When the promise ends unless it is renewed.
    """

    version: WeightVersion | None
    expires_unix_s: float


class AckBoard:
    """The writer's end. Blocking.

    Args:
        transport: Where the publishers look.
        pointer: Name of the pointer.
    """

    def __init__(self, transport: Transport, *, pointer: str = ACKS_POINTER) -> None:
        self._transport, self._pointer = transport, pointer
        self._written: str | None = None
        self._has_read = False

    def write(self, acks: Mapping[EngineId, Ack]) -> None:
        """Replace the record; what the first call finds is an earlier writer's and is replaced too.

        Raises:
            VersionConflictError: Another writer is at work.
            TransportError: The transport failed.
        """
        text = _to_text(acks)
        if not self._has_read:
            self._written, self._has_read = self._transport.read_pointer(self._pointer), True
        if not self._transport.compare_and_set(self._pointer, self._written, text):
            found = self._transport.read_pointer(self._pointer)
            if found is not None or not self._transport.compare_and_set(self._pointer, None, text):
                self._has_read = False
                message = (
                    f"pointer {self._pointer!r} was moved by another; only one pool may acknowledge a run's weights"
                )
                raise VersionConflictError(message)
        self._written = text


def read_acks(transport: Transport, *, pointer: str = ACKS_POINTER) -> dict[EngineId, Ack]:
    """Return the record, empty before the first. Blocking.

    Raises:
        CorruptUpdateError: It is not one.
    """
    text = transport.read_pointer(pointer)
    if text is None:
        return {}
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            message = f"schema {data['schema']!r}"
            raise ValueError(message)  # noqa: TRY301 - one message for all that can be wrong
        return {EngineId(name): _ack(*row) for name, row in data["engines"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"pointer {pointer!r} holds no record of acknowledgements: {error!r}"
        raise CorruptUpdateError(message) from error


def known_versions(acks: Mapping[EngineId, Ack], run: str) -> dict[str, int]:
    """Return engine -> number of the version that it acknowledged, of those that are at one of ``run``."""
    return {name: ack.version.n for name, ack in acks.items() if ack.version is not None and ack.version.run == run}


def leases_of(acks: Mapping[EngineId, Ack], run: str, newest_anchor_n: int) -> tuple[VersionLease, ...]:
    """Return what each engine may still read: what comes after its version, or from the newest anchor on for one that has none."""
    known = known_versions(acks, run)
    return tuple(
        VersionLease(holder=name, n=known[name] + 1 if name in known else newest_anchor_n, expires_s=ack.expires_unix_s)
        for name, ack in acks.items()
    )


def _to_text(acks: Mapping[EngineId, Ack]) -> str:
    rows = {
        name: [None if ack.version is None else str(ack.version), round(ack.expires_unix_s, 3)]
        for name, ack in acks.items()
    }
    return json.dumps({"schema": SCHEMA, "engines": rows}, separators=(",", ":"))


def _ack(version: Any, expires_unix_s: Any) -> Ack:
    return Ack(version=None if version is None else WeightVersion.parse(version), expires_unix_s=float(expires_unix_s))

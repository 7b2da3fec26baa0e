"""Fault injection for any transport."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence

import attrs
from attrs import validators as v

from rose.errors import BlobNotFoundError, TransportError
from rose.interfaces.transport import Payload, Transport
from rose.types import TransportAddress


class TransportFaultKind(enum.Enum):
    """What goes wrong with one call."""

    FAIL = "fail"
    """The call raises ``TransportError`` and has no effect."""
    DROP = "drop"
    """A ``put`` returns as if it had worked, a ``get`` finds nothing."""
    CORRUPT = "corrupt"
    """One bit of the payload is flipped on its way."""
    TRUNCATE = "truncate"
    """The payload loses its second half on its way."""
    TEAR = "tear"
    """The second half of the payload arrives as zeros; its length is right."""
    DUPLICATE = "duplicate"
    """The call is handed on twice."""
    REORDER = "reorder"
    """A ``put`` returns as if it had worked, but has its effect only after the next ``put``, or at ``flush``."""
    LOSE_ANSWER = "lose_answer"
    """The call has its effect, and then raises ``TransportError``."""
    DELAY = "delay"
    """The call takes ``delay_s`` longer."""


@attrs.frozen(kw_only=True)
class TransportFault:
    """One thing that goes wrong in a ``FaultyTransport``.

    Attributes:
        kind: What goes wrong.
        method: The call that it happens to: ``put``, ``get``, ``delete``, ``read_pointer`` or ``compare_and_set``.
        call_index: Only to the n-th such call whose key matches, counted from 0; ``None`` is every one.
        key: Only for keys (or pointer names) that contain this text.
        delay_s: How long a delay lasts, in real seconds.
    """

    kind: TransportFaultKind
    method: str = attrs.field(validator=v.in_(("put", "get", "delete", "read_pointer", "compare_and_set")))
    call_index: int | None = attrs.field(default=None, validator=v.optional(v.ge(0)))
    key: str = ""
    delay_s: float = attrs.field(default=0.0, validator=v.ge(0))


class FaultyTransport(Transport):
    """A transport that hands every call on to another one, except where a fault says otherwise.

    Args:
        inner: The transport that does the work.
        faults: What goes wrong, and when.
        sleep: How delays wait; tests may pass one of their own.
    """

    def __init__(
        self, inner: Transport, faults: Sequence[TransportFault] = (), *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.inner = inner
        self._sleep = sleep
        self._lock = threading.Lock()
        self._held_back: list[tuple[str, Payload]] = []
        self.faults = tuple(faults)

    @property
    def faults(self) -> tuple[TransportFault, ...]:
        """What goes wrong; setting it counts calls anew."""
        return self._faults

    @faults.setter
    def faults(self, faults: Sequence[TransportFault]) -> None:
        with self._lock:
            self._faults = tuple(faults)
            self._num_calls = [0] * len(self._faults)
            self._num_met = [0] * len(self._faults)

    @property
    def num_met(self) -> tuple[int, ...]:
        """Return how often each fault has happened."""
        with self._lock:
            return tuple(self._num_met)

    def put(self, key: str, payload: Payload) -> None:
        """Write a blob, or drop, spoil, repeat, reorder or delay it."""
        kinds = self._meet("put", key)
        if TransportFaultKind.DROP in kinds:
            return
        sent = _spoil(bytes(payload), kinds) if kinds else payload
        if TransportFaultKind.REORDER in kinds:
            with self._lock:
                self._held_back.append((key, sent))
            return
        for _ in range(1 + (TransportFaultKind.DUPLICATE in kinds)):
            self.inner.put(key, sent)
        self.flush()
        self._lose_answer("put", key, kinds)

    def flush(self) -> None:
        """Write what was held back."""
        with self._lock:
            late, self._held_back = self._held_back, []
        for key, payload in late:
            self.inner.put(key, payload)

    def get(self, key: str) -> Payload:
        """Read a blob, or lose, spoil or delay it."""
        kinds = self._meet("get", key)
        if TransportFaultKind.DROP in kinds:
            message = f"no blob {key!r} (injected fault)"
            raise BlobNotFoundError(message)
        found = self.inner.get(key)
        self._lose_answer("get", key, kinds)
        return _spoil(bytes(found), kinds) if kinds else found

    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs, or do not."""
        kinds_by_key = {key: self._meet("delete", key) for key in keys}
        self.inner.delete([key for key, kinds in kinds_by_key.items() if TransportFaultKind.DROP not in kinds])
        for key, kinds in kinds_by_key.items():
            self._lose_answer("delete", key, kinds)

    def read_pointer(self, name: str) -> str | None:
        """Read a pointer, late or not at all."""
        return None if TransportFaultKind.DROP in self._meet("read_pointer", name) else self.inner.read_pointer(name)

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Move a pointer, late or not at all; a dropped call loses."""
        kinds = self._meet("compare_and_set", name)
        if TransportFaultKind.DROP in kinds:
            return False
        was_set = self.inner.compare_and_set(name, expected, value)
        if TransportFaultKind.DUPLICATE in kinds:
            was_set = self.inner.compare_and_set(name, expected, value)
        self._lose_answer("compare_and_set", name, kinds)
        return was_set

    def address(self) -> TransportAddress:
        """Return the inner transport's address: whoever opens it meets no faults."""
        return self.inner.address()

    def close(self) -> None:
        """Close the inner transport."""
        self.inner.close()

    def _meet(self, method: str, key: str) -> set[TransportFaultKind]:
        """Count the call, wait or fail if a fault says so, and return what is to go wrong with the payload."""
        met = []
        with self._lock:
            for i, fault in enumerate(self._faults):
                if fault.method != method or fault.key not in key:
                    continue
                if fault.call_index in (None, self._num_calls[i]):
                    met.append(fault)
                    self._num_met[i] += 1
                self._num_calls[i] += 1
        for fault in met:
            if fault.kind is TransportFaultKind.DELAY:
                self._sleep(fault.delay_s)
        kinds = {fault.kind for fault in met}
        if TransportFaultKind.FAIL in kinds:
            message = f"{method}({key!r}) failed (injected fault)"
            raise TransportError(message)
        return kinds

    def _lose_answer(self, method: str, key: str, kinds: set[TransportFaultKind]) -> None:
        if TransportFaultKind.LOSE_ANSWER in kinds:
            message = f"the answer to {method}({key!r}) was lost (injected fault)"
            raise TransportError(message)


def _spoil(payload: bytes, kinds: set[TransportFaultKind]) -> bytes:
    if TransportFaultKind.TRUNCATE in kinds:
        payload = payload[: len(payload) // 2]
    if TransportFaultKind.TEAR in kinds:
        half = len(payload) // 2
        payload = payload[:half] + bytes(len(payload) - half)
    if TransportFaultKind.CORRUPT in kinds and payload:
        middle = len(payload) // 2
        payload = payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]
    return payload

"""Injected transport faults happen to the call that was named, and to no other."""

from __future__ import annotations

import pytest

from rose.errors import BlobNotFoundError, TransportError
from rose.testing import FaultyTransport, InMemoryTransport, TransportFault, TransportFaultKind

Kind = TransportFaultKind


def faulty(*faults, **options):
    return FaultyTransport(InMemoryTransport(), faults, **options)


def test_the_nth_matching_call_fails():
    store = faulty(TransportFault(kind=Kind.FAIL, method="put", call_index=1, key="delta"))
    store.put("delta/0", b"a")
    store.put("other", b"b")
    with pytest.raises(TransportError, match=r"put\('delta/1'\) failed"):
        store.put("delta/1", b"c")
    store.put("delta/1", b"c")
    assert store.get("delta/1") == b"c"


def test_dropped_calls_have_no_effect():
    store = faulty(*(TransportFault(kind=Kind.DROP, method=method, key="x") for method in ("put", "get", "delete")))
    store.put("x", b"1")
    with pytest.raises(BlobNotFoundError):
        store.inner.get("x")
    store.inner.put("x", b"1")
    with pytest.raises(BlobNotFoundError):
        store.get("x")
    store.delete(["x"])
    assert store.inner.get("x") == b"1"


def test_dropped_pointer_calls_lose():
    calls = [
        TransportFault(kind=Kind.DROP, method=method, call_index=0) for method in ("compare_and_set", "read_pointer")
    ]
    store = faulty(*calls)
    assert not store.compare_and_set("p", None, "1")
    assert store.compare_and_set("p", None, "1")
    assert store.read_pointer("p") is None
    assert store.read_pointer("p") == "1"


def test_payloads_are_spoilt_on_the_way():
    store = faulty(TransportFault(kind=Kind.CORRUPT, method="get"), TransportFault(kind=Kind.TRUNCATE, method="put"))
    store.put("x", bytes(64))
    assert store.inner.get("x") == bytes(32)
    got = store.get("x")
    assert len(got) == 32
    assert sum(byte.bit_count() for byte in got) == 1


def test_delays_wait():
    waited = []
    store = faulty(TransportFault(kind=Kind.DELAY, method="read_pointer", delay_s=3.0), sleep=waited.append)
    assert store.read_pointer("p") is None
    assert waited == [3.0]


def test_a_fault_of_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="method"):
        TransportFault(kind=Kind.FAIL, method="putt")

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


def test_torn_payloads_keep_their_length():
    store = faulty(TransportFault(kind=Kind.TEAR, method="put"))
    store.put("x", b"\xff" * 9)
    assert store.get("x") == b"\xff" * 4 + bytes(5)


def test_a_held_back_put_comes_after_the_next_one():
    store = faulty(TransportFault(kind=Kind.REORDER, method="put", call_index=0))
    store.put("first", b"1")
    with pytest.raises(BlobNotFoundError):
        store.inner.get("first")
    store.put("second", b"2")
    assert (store.inner.get("first"), store.inner.get("second")) == (b"1", b"2")


def test_what_is_held_back_can_be_let_go():
    store = faulty(TransportFault(kind=Kind.REORDER, method="put"))
    store.put("x", b"1")
    store.flush()
    assert store.inner.get("x") == b"1"


def test_a_lost_answer_comes_after_the_effect():
    methods = ("put", "get", "delete", "compare_and_set")
    store = faulty(*(TransportFault(kind=Kind.LOSE_ANSWER, method=method) for method in methods))
    with pytest.raises(TransportError, match=r"answer to put\('x'\) was lost"):
        store.put("x", b"1")
    assert store.inner.get("x") == b"1"
    with pytest.raises(TransportError):
        store.get("x")
    with pytest.raises(TransportError):
        store.compare_and_set("p", None, "1")
    assert store.inner.read_pointer("p") == "1"
    with pytest.raises(TransportError):
        store.delete(["x"])
    with pytest.raises(BlobNotFoundError):
        store.inner.get("x")


def test_a_call_that_comes_twice_is_one_for_blobs_and_none_for_pointers():
    store = faulty(
        TransportFault(kind=Kind.DUPLICATE, method="put"), TransportFault(kind=Kind.DUPLICATE, method="compare_and_set")
    )
    store.put("x", b"1")
    assert store.get("x") == b"1"
    assert not store.compare_and_set("p", None, "1"), "the answer is that of the second call"
    assert store.read_pointer("p") == "1"


def test_faults_can_be_changed_and_are_counted_anew():
    store = faulty()
    store.put("x", b"1")
    store.faults = [TransportFault(kind=Kind.FAIL, method="get", call_index=0)]
    with pytest.raises(TransportError):
        store.get("x")
    assert store.get("x") == b"1"
    assert store.num_met == (1,)

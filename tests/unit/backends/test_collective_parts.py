"""The parts of the collective that need no second process."""

from __future__ import annotations

import socket
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[collective]'")

from rose.backends.collective import CollectiveMember, CollectiveMirror, FanOutCounts, member_address, messages
from rose.backends.collective.cache import BlobCache
from rose.backends.collective.group import Group, host_store
from rose.backends.collective.messages import RootAddress
from rose.backends.memory import MemoryTransport
from rose.errors import BackendUnavailableError, BlobNotFoundError, ConfigError, TransportError
from rose.testing import FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer.delta import digest


def test_the_cache_lets_go_of_old_versions_then_of_the_oldest_bytes() -> None:
    cache = BlobCache(max_bytes=25, keep=2)
    for n in range(4):
        cache.deliver(f"run/{n}/0/blob", bytes(5))
    assert [n for n in range(4) if cache.find(f"run/{n}/0/blob", 0) is not None] == [2, 3]
    cache.deliver("other/0/0/blob", bytes(5))
    assert cache.find("run/2/0/blob", 0) is not None, "another run's versions do not count"
    cache.deliver("no version", bytes(15))
    assert cache.find("run/2/0/blob", 0) is None
    assert cache.find("other/0/0/blob", 0) is not None
    cache.deliver("huge", bytes(1000))
    assert cache.find("huge", 0) == bytes(1000)
    assert cache.find("no version", 0) is None


def test_a_reader_waits_for_what_is_on_its_way_and_no_longer() -> None:
    cache = BlobCache(max_bytes=100, keep=2)
    started = time.monotonic()
    assert cache.find("k", 5.0) is None, "nobody announced it"
    assert time.monotonic() - started < 1.0
    cache.expect("k")
    assert cache.find("k", 0.05) is None
    later = threading.Timer(0.05, cache.deliver, ("k", b"v"))
    later.start()
    assert cache.find("k", 5.0) == b"v"
    cache.expect("lost")
    later = threading.Timer(0.05, cache.fail, ("lost",))
    later.start()
    started = time.monotonic()
    assert cache.find("lost", 5.0) is None
    assert time.monotonic() - started < 2.0
    assert cache.counts() == FanOutCounts(num_delivered=1, num_failed=1, num_from_collective=1, num_from_origin=3)


def test_a_damaged_copy_is_forgotten_unless_it_is_another_by_now() -> None:
    cache = BlobCache(max_bytes=100, keep=2)
    cache.deliver("k", b"v")
    cache.drop(["k", "never"], damaged=digest(b"other"))
    assert cache.find("k", 0) == b"v"
    cache.drop(["k"], damaged=digest(b"v"))
    assert cache.find("k", 0) is None


def test_a_root_is_written_and_read() -> None:
    root = RootAddress(host="::1", port=5, store_port=6, token="a-b_c")  # noqa: S106 - not a secret
    assert RootAddress.parse(str(root)) == root
    for text in ("", "a/b/c/d", "h/1/2"):
        with pytest.raises(ConfigError, match=r"is no root of a collective; take CollectiveMirror\.root"):
            RootAddress.parse(text)


def test_unknown_and_absent_backends_are_named() -> None:
    with pytest.raises(ConfigError, match="'gloo' or 'nccl', not 'smoke'"):
        CollectiveMirror(MemoryTransport(), backend="smoke")
    if not torch.distributed.is_nccl_available():
        with pytest.raises(BackendUnavailableError, match="has no nccl"):
            CollectiveMirror(MemoryTransport(), backend="nccl")


def test_a_group_that_does_not_meet_is_given_up_in_time() -> None:
    store, _ = host_store("127.0.0.1", 1.0)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"group lonely of 2 did not meet within 1\.0 s"):
        Group(store, "lonely", rank=0, size=2, backend="gloo", host="127.0.0.1", timeout_s=1.0)
    assert time.monotonic() - started < 10.0


def test_everything_listens_on_the_named_address_only() -> None:
    mirror = CollectiveMirror(MemoryTransport(), host="127.0.0.2")
    root = RootAddress.parse(mirror.root)
    for port in (root.port, root.store_port):
        socket.create_connection(("127.0.0.2", port), timeout=5.0).close()
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", port), timeout=5.0)
    mirror.close()


def test_a_wrong_token_and_a_missing_root_leave_the_origin(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryTransport()
    store.serve()
    mirror = CollectiveMirror(store)
    root = RootAddress.parse(mirror.root)
    wrong = RootAddress(host=root.host, port=root.port, store_port=root.store_port, token="wrong")  # noqa: S106
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    absent = RootAddress(host="127.0.0.1", port=port, store_port=port, token="x")  # noqa: S106
    members = [CollectiveMember(**dict(member_address(store.address(), [str(r)]).options)) for r in (wrong, absent)]
    mirror.put("k", b"v")
    assert mirror.regroup() == 0
    for member in members:
        assert member.get("k") == b"v"
        assert member.counts().num_delivered == 0
        member.close()
    assert "does not take this member" in caplog.text
    assert "Connection refused" in caplog.text
    mirror.close()
    store.close()


def test_what_the_origin_refuses_no_member_serves() -> None:
    store = MemoryTransport()
    store.serve()
    faulty = FaultyTransport(store, [TransportFault(kind=TransportFaultKind.FAIL, method="put", key="bad")])
    mirror = CollectiveMirror(faulty)
    member = CollectiveMember(**dict(member_address(store.address(), [mirror.root]).options))
    assert mirror.regroup() == 1
    with pytest.raises(TransportError, match="injected"):
        mirror.put("bad", b"v")
    mirror.put("good", b"v")
    assert member.get("good") == b"v"
    with pytest.raises(BlobNotFoundError):
        member.get("bad")
    assert member.counts().num_failed == 1
    for part in (member, mirror, store):
        part.close()


def test_bytes_that_changed_on_the_way_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryTransport()
    store.serve()
    mirror = CollectiveMirror(store)
    member = CollectiveMember(**dict(member_address(store.address(), [mirror.root]).options))
    assert mirror.regroup() == 1
    monkeypatch.setattr("rose.backends.collective.mirror.digest", lambda _data: digest(b"what was meant"))
    mirror.put("k", b"what was sent")
    assert member.get("k") == b"what was sent"
    _wait_until(lambda: member.counts().num_failed == 1)
    assert member.counts().num_delivered == 0
    for part in (member, mirror, store):
        part.close()


def test_a_peer_that_talks_nonsense_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        messages.send(theirs, "ping", number=3)
        assert messages.receive(ours) == {"kind": "ping", "number": 3}
        for nonsense in (b"no json", b"[1]"):
            messages.wire.send_frame(theirs, nonsense)
            with pytest.raises(TransportError):
                messages.receive(ours)
        theirs.close()
        assert messages.receive(ours) is None


def _wait_until(is_true: object, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)

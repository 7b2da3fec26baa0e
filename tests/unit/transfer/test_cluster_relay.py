"""One copy per cluster: transfers that are shared, counted, repeated and forgotten."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest

from rose.backends.memory import MemoryTransport, StoreServer
from rose.errors import BlobNotFoundError, TransportError
from rose.testing import FaultyTransport, TransportFault, TransportFaultKind
from rose.testing.links import LinkProxy
from rose.transfer.cluster import ClusterRelay
from rose.transfer.cluster_memory import RelayFullError
from rose.transfer.cluster_retry import RetryPolicy
from rose.transfer.delta import digest

FAST = RetryPolicy(first_pause_s=0.001, max_pause_s=0.01)


class CountedOrigin(MemoryTransport):
    """Counts what is asked of it; each blob takes ``delay_s`` before it is looked up, each pointer after it."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.calls: Counter[str] = Counter()
        self._calls_lock = threading.Lock()

    def _count(self, what: str) -> None:
        with self._calls_lock:
            self.calls[what] += 1
        time.sleep(self.delay_s)

    def get_when_ready(self, key, timeout_s):
        self._count(key)
        return super().get_when_ready(key, timeout_s)

    def get(self, key):
        self._count(key)
        return super().get(key)

    def read_pointer(self, name):
        value = super().read_pointer(name)
        self._count(f"pointer {name}")
        return value


def put_version(origin, n: int, *, ranks: int = 2, blobs: int = 4, size: int = 1000, run: str = "r") -> list[str]:
    """Put a version's blobs and manifest; returns their keys."""
    keys = [f"{run}/{n}/0/rank-{rank}/blob-{i}" for rank in range(ranks) for i in range(blobs)]
    for key in keys:
        origin.put(key, (key.encode() * (size // len(key) + 1))[:size])
    origin.put(f"{run}/{n}/0/manifest", b"m" * 100)
    return [*keys, f"{run}/{n}/0/manifest"]


@pytest.mark.parametrize("num_readers", [1, 4, 16])
def test_each_byte_crosses_once_however_many_read(num_readers: int) -> None:
    origin = CountedOrigin(delay_s=0.005)
    keys = put_version(origin, 0)
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    server = StoreServer(relay, "127.0.0.1", 0, is_public=False)
    engines = [MemoryTransport(**dict(server.address().options)) for _ in range(num_readers)]

    def read(number: int) -> bool:
        mine = keys if number % 2 == 0 else keys[number % len(keys) :]  # overlapping, not alike
        return all(engines[number].get(key) == MemoryTransport.get(origin, key) for key in mine)

    with ThreadPoolExecutor(num_readers) as threads:
        assert all(threads.map(read, range(num_readers)))
    stats = relay.stats
    assert stats.redundancy == 1.0
    assert stats.link_bytes == stats.distinct_bytes == 8 * 1000 + 100
    assert stats.num_hits + stats.link_objects == sum(
        len(keys) if i % 2 == 0 else len(keys) - i % len(keys) for i in range(num_readers)
    )
    for engine in engines:
        engine.close()
    server.close()


def test_concurrent_readers_share_one_transfer() -> None:
    origin = CountedOrigin(delay_s=0.1)
    origin.put("r/0/0/rank-0/blob-0", b"x" * 5000)
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    with ThreadPoolExecutor(32) as threads:
        got = list(threads.map(lambda _: relay.get("r/0/0/rank-0/blob-0"), range(32)))
    assert got == [b"x" * 5000] * 32
    assert origin.calls["r/0/0/rank-0/blob-0"] == 1
    assert relay.stats.num_hits == 31


def test_waiting_and_plain_readers_share_one_transfer_too() -> None:
    origin = CountedOrigin()
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(relay.get_when_ready, "r/0/0/rank-0/blob-0", 10.0) for _ in range(3)]
        time.sleep(0.05)
        origin.put("r/0/0/rank-0/blob-0", b"y" * 100)
        assert relay.get("r/0/0/rank-0/blob-0") == b"y" * 100
        assert [wait.result(timeout=5) for wait in waits] == [b"y" * 100] * 3
    assert relay.stats.link_objects == 1


def test_a_miss_is_told_to_all_and_not_remembered() -> None:
    origin = CountedOrigin(delay_s=0.05)
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    with ThreadPoolExecutor(4) as threads:
        reads = [threads.submit(relay.get, "r/0/0/rank-0/blob-0") for _ in range(4)]
        for read in reads:
            with pytest.raises(BlobNotFoundError, match="blob-0"):
                read.result(timeout=5)
    origin.put("r/0/0/rank-0/blob-0", b"now")
    assert relay.get("r/0/0/rank-0/blob-0") == b"now"


def test_a_hundred_pollers_do_not_cross_a_hundred_times() -> None:
    origin = CountedOrigin(delay_s=0.03)
    assert origin.compare_and_set("current", None, "r/0/0/manifest")
    relay = ClusterRelay(origin, max_bytes=1 << 20, pointer_age_s=0.02)
    started_s = time.monotonic()
    with ThreadPoolExecutor(100) as threads:
        assert set(threads.map(lambda _: relay.read_pointer("current"), range(300))) == {"r/0/0/manifest"}
    assert origin.calls["pointer current"] <= (time.monotonic() - started_s) / origin.delay_s + 1, "one at a time"


def test_a_pointer_set_through_the_relay_is_seen_at_once() -> None:
    origin = CountedOrigin()
    relay = ClusterRelay(origin, max_bytes=1 << 20, pointer_age_s=60.0)
    for number in range(50):
        before = relay.read_pointer("ack")
        assert relay.compare_and_set("ack", before, str(number))
        assert relay.read_pointer("ack") == str(number)
    assert origin.compare_and_set("ack", "49", "elsewhere")
    assert relay.read_pointer("ack") == "49", "within its age"
    assert not relay.compare_and_set("ack", "49", "late"), "the origin decides"
    assert relay.read_pointer("ack") == "elsewhere"


def test_a_read_that_began_before_the_set_is_not_kept() -> None:
    origin = CountedOrigin(delay_s=0.2)
    relay = ClusterRelay(origin, max_bytes=1 << 20, pointer_age_s=60.0)
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(relay.read_pointer, "p")
        time.sleep(0.05)
        assert relay.compare_and_set("p", None, "new")
        assert relay.read_pointer("p") == "new"
        slow.result(timeout=5)
    assert relay.read_pointer("p") == "new"


def test_failures_of_the_link_are_met_by_trying_again() -> None:
    faults = [TransportFault(kind=TransportFaultKind.FAIL, method="get", call_index=i) for i in (0, 1, 2)]
    inner = MemoryTransport()
    put_version(inner, 0)
    relay = ClusterRelay(FaultyTransport(inner, faults), max_bytes=1 << 20, retry=FAST)
    assert len(relay.get("r/0/0/rank-0/blob-0")) == 1000
    assert relay.stats.num_retries == 3
    assert relay.stats.redundancy == 1.0


def test_a_link_that_stays_down_is_an_error_and_later_calls_work() -> None:
    fault = TransportFault(kind=TransportFaultKind.FAIL, method="get")
    origin = FaultyTransport(MemoryTransport(), [fault])
    origin.put("r/0/0/rank-0/blob-0", b"x")
    relay = ClusterRelay(origin, max_bytes=1 << 20, retry=FAST)
    with pytest.raises(TransportError, match="injected"):
        relay.get("r/0/0/rank-0/blob-0")
    assert relay.stats.num_retries == FAST.num_tries - 1
    origin.faults = ()
    assert relay.get("r/0/0/rank-0/blob-0") == b"x"


class DownOrigin(MemoryTransport):
    """Fails in whatever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def _fail(self, *_: object) -> NoReturn:
        self.asked.set()
        message = "the origin is down"
        raise TransportError(message)

    put = get = get_when_ready = delete = read_pointer = compare_and_set = invalidate = _fail


def test_an_interrupt_ends_the_pauses_between_two_tries() -> None:
    origin = DownOrigin()
    relay = ClusterRelay(origin, max_bytes=1 << 20, retry=RetryPolicy(first_pause_s=60.0, max_pause_s=60.0))
    has_failed = threading.Event()

    def ask() -> None:
        with pytest.raises(TransportError, match="down"):
            relay.get("k")
        has_failed.set()

    threading.Thread(target=ask, daemon=True).start()
    assert origin.asked.wait(10)
    relay.interrupt()
    assert has_failed.wait(10)
    assert relay.stats.num_retries == 0


def test_nothing_begins_at_the_origin_after_an_interrupt() -> None:
    origin = DownOrigin()
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    relay._memory.admit("held", b"x")
    relay.interrupt()
    for begin in (
        lambda: relay.get("k"),
        lambda: relay.get_when_ready("k", 5.0),
        lambda: relay.read_pointer("p"),
        lambda: relay.put("k", b"y"),
        lambda: relay.delete(["k"]),
        lambda: relay.compare_and_set("p", None, "v"),
        lambda: relay.invalidate("k"),
        relay.follow,
    ):
        with pytest.raises(TransportError, match="the relay is stopping"):
            begin()
    assert not origin.asked.is_set()
    assert not relay._followers
    assert relay.get("held") == b"x", "what is here is given"


def test_many_engines_that_meet_one_damage_cause_one_more_transfer() -> None:
    """Case V05: a byte flips on the link; the engines' checksums find it, and what they say is compared with the copy."""
    origin = MemoryTransport()
    payload = bytes(range(256)) * 400
    origin.put("r/0/0/rank-0/blob-0", payload)
    options = dict(origin.serve().options)
    with LinkProxy("127.0.0.1", int(options["port"])) as link:
        far = MemoryTransport(**{**options, "port": link.port})
        assert far.read_pointer("current") is None
        link.corrupt_byte(50_000)
        relay = ClusterRelay(far, max_bytes=1 << 20)
        server = StoreServer(relay, "127.0.0.1", 0, is_public=False)
        engines = [MemoryTransport(**dict(server.address().options)) for _ in range(4)]
        first = [engine.get("r/0/0/rank-0/blob-0") for engine in engines]
        assert len({*first}) == 1
        assert first[0] != payload
        for engine, damaged in zip(engines, first, strict=True):
            engine.invalidate("r/0/0/rank-0/blob-0", digest(damaged))
            assert engine.get("r/0/0/rank-0/blob-0") == payload
        assert relay.stats.link_objects == 2
        assert relay.stats.redundancy == 2.0
        for transport in (*engines, server, far):
            transport.close()
    origin.close()


def test_an_invalidated_transfer_on_its_way_is_not_kept() -> None:
    origin = CountedOrigin(delay_s=0.1)
    origin.put("r/0/0/rank-0/blob-0", b"x")
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    with ThreadPoolExecutor(1) as threads:
        read = threads.submit(relay.get, "r/0/0/rank-0/blob-0")
        time.sleep(0.03)
        relay.invalidate("r/0/0/rank-0/blob-0")
        assert read.result(timeout=5) == b"x"
    assert relay.stats.held_objects == 0


def test_a_cut_in_the_middle_of_a_blob_costs_that_blob_only() -> None:
    origin = MemoryTransport()
    keys = put_version(origin, 0, size=1 << 20)
    options = dict(origin.serve().options)
    with LinkProxy("127.0.0.1", int(options["port"])) as link:
        far = MemoryTransport(**{**options, "port": link.port})
        relay = ClusterRelay(far, max_bytes=64 << 20, retry=FAST)
        for key in keys[:3]:
            relay.get(key)
        link.cut_after_bytes(700_000)
        for key in keys:
            assert relay.get(key) == origin.get(key)
        stats = relay.stats
        assert stats.redundancy == 1.0
        assert link.num_connections == 2
        assert stats.link_bytes + 700_000 <= link.bytes_down <= stats.link_bytes + 700_000 + 20_000
        far.close()
    origin.close()


def test_a_relay_that_restarts_is_cold_and_its_engines_go_on() -> None:
    origin = MemoryTransport()
    keys = put_version(origin, 0)
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    server = StoreServer(relay, "127.0.0.1", 0, is_public=False)
    engine = MemoryTransport(**dict(server.address().options))
    half = len(keys) // 2
    assert [engine.get(key) for key in keys[:half]] == [origin.get(key) for key in keys[:half]]
    server.close()
    relay.close()
    with pytest.raises(TransportError, match="is its process alive"):
        engine.get(keys[half])
    again = ClusterRelay(origin, max_bytes=1 << 20)
    restarted = StoreServer(again, "127.0.0.1", server.port, is_public=False, token=server.token)
    assert [engine.get(key) for key in keys] == [origin.get(key) for key in keys]
    assert again.stats.redundancy == 1.0
    assert again.stats.link_objects == len(keys)
    engine.close()
    restarted.close()


def test_memory_is_bounded_and_the_newest_version_stays() -> None:
    origin = MemoryTransport()
    relay = ClusterRelay(origin, max_bytes=2 * 8_100)
    for n in range(6):
        for key in put_version(origin, n):
            relay.get(key)
        assert relay.stats.held_bytes <= 2 * 8_100
    before = relay.stats.link_objects
    for key in put_version(origin, 5):
        relay.get(key)
    assert relay.stats.link_objects == before, "the newest is held whole"
    relay.get("r/0/0/rank-0/blob-0")
    assert relay.stats.link_objects == before + 1, "the oldest is not"
    assert relay.stats.redundancy > 1.0


def test_a_version_that_does_not_fit_is_refused_with_the_sizes() -> None:
    origin = MemoryTransport()
    keys = put_version(origin, 0)
    relay = ClusterRelay(origin, max_bytes=3_000)
    assert origin.compare_and_set("current", None, "r/0/0/manifest")
    assert relay.read_pointer("current") == "r/0/0/manifest"
    for key in keys[:3]:
        relay.get(key)
    with pytest.raises(RelayFullError, match=r"a single version does not fit: 3000 bytes of it are held.*max_bytes"):
        relay.get(keys[3])


def test_two_clusters_take_one_copy_each_and_the_same_site_none() -> None:
    origin = MemoryTransport()
    keys = put_version(origin, 0, size=100_000)
    options = dict(origin.serve().options)
    links = [LinkProxy("127.0.0.1", int(options["port"])) for _ in range(2)]
    fars = [MemoryTransport(**{**options, "port": link.port}) for link in links]
    relays = [ClusterRelay(far, max_bytes=16 << 20) for far in fars]
    engines = [(relay, number) for relay in relays for number in range(4)]
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(lambda engine: all(engine[0].get(key) == origin.get(key) for key in keys), engines))
    version_bytes = 8 * 100_000 + 100
    for relay, link in zip(relays, links, strict=True):
        assert relay.stats.redundancy == 1.0
        assert relay.stats.link_bytes == version_bytes
        assert version_bytes < link.bytes_down < version_bytes * 1.01
    near = MemoryTransport(**options)
    crossed = [link.bytes_down for link in links]
    assert all(near.get(key) == origin.get(key) for key in keys)
    assert [link.bytes_down for link in links] == crossed, "engines beside the origin use no link"
    for closing in (near, *fars, *links, origin):
        closing.close()

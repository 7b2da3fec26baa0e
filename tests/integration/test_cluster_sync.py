"""Real publishers and subscribers with relays between them: bits, bytes over the links, and a bad moment for everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rose.backends.memory import MemoryTransport, StoreServer
from rose.errors import CorruptUpdateError
from rose.interfaces.trainer import TensorSpec
from rose.testing import FakeTrainer
from rose.testing.links import LinkProxy
from rose.transfer.cluster import ClusterRelay
from rose.transfer.cluster_follow import FollowConfig
from rose.transfer.cluster_retry import RetryPolicy
from rose.transfer.publisher import Publisher
from rose.transfer.relay import POINTER, plan_update
from rose.transfer.subscriber import ArraySink, Subscriber

SPECS = (
    TensorSpec(name="w", shape=(400, 700), dtype="bfloat16"),
    TensorSpec(name="norm", shape=(700,), dtype="float32"),
)


class Cluster:
    """A serving cluster: its link to the origin, its relay, its engines."""

    def __init__(self, origin: MemoryTransport, num_engines: int) -> None:
        self.origin = origin
        options = dict(origin.address().options)
        self.link = LinkProxy("127.0.0.1", int(options["port"]))
        self.far = MemoryTransport(
            **{**options, "port": self.link.port, "timeout_s": 2.0}
        )  # a damaged length is waited for
        self.engines = [
            (Subscriber(sink), sink) for sink in (ArraySink({s.name: s for s in SPECS}) for _ in range(num_engines))
        ]
        self.port, self.token = 0, None
        self.start()

    def start(self) -> None:
        """Start the relay, cold."""
        self.relay = ClusterRelay(
            self.far, max_bytes=64 << 20, pointer_age_s=0.005, retry=RetryPolicy(first_pause_s=0.01)
        )
        self.server = StoreServer(self.relay, "127.0.0.1", self.port, is_public=False, token=self.token)
        self.port, self.token = self.server.port, self.server.token
        self.relay.advertise(self.server.address())
        self.relay.follow(config=FollowConfig(poll_s=0.005))

    def stop(self) -> None:
        self.server.close()
        self.relay.close()

    def sync(self) -> None:
        """Bring all engines to the newest version, side by side."""
        errors: list[BaseException] = []
        while self.relay.read_pointer(POINTER) != self.origin.read_pointer(POINTER):
            time.sleep(0.001)  # pointers may be a little old

        def one(subscriber: Subscriber) -> None:
            try:
                transport = MemoryTransport(**dict(self.relay.address().options))
                self._sync_one(subscriber, transport)
                transport.close()
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=one, args=(subscriber,)) for subscriber, _ in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors

    def _sync_one(self, subscriber: Subscriber, transport: MemoryTransport) -> None:
        for _ in range(3):
            try:
                update = plan_update(transport, subscriber.version)
                if update is not None:
                    subscriber.stage(update, transport)
                    assert subscriber.activate(verify=True).is_verified
            except CorruptUpdateError:  # of a manifest; a damaged payload is fetched again by itself
                transport.invalidate(str(self.origin.read_pointer(POINTER)))
            else:
                return
        pytest.fail("an engine met damage three times")

    def close(self) -> None:
        self.stop()
        self.far.close()
        self.link.close()


class Site:
    """The trainer's side: two ranks and their store."""

    def __init__(self) -> None:
        self.origin = MemoryTransport()
        self.origin.serve()
        self.trainers = FakeTrainer.group(2, SPECS, 0)
        self.publishers = [Publisher(trainer, self.origin, run="run", timeout_s=30.0) for trainer in self.trainers]

    def publish(self) -> None:
        threads = [threading.Thread(target=publisher.publish_sync) for publisher in self.publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({publisher.version for publisher in self.publishers}) == 1

    def step(self) -> None:
        for trainer in self.trainers:
            trainer.step(0.05)

    def holds(self, sink: ArraySink) -> bool:
        """Return whether a sink has the trainers' bits."""
        for trainer in self.trainers:
            for name, box in trainer.layout().items():
                if not np.array_equal(sink.read(name, box), np.asarray(trainer.shards()[name])):
                    return False
        return True


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.origin.close()


@pytest.mark.parametrize("num_engines", [1, 4, 16])
def test_each_cluster_takes_one_copy_however_many_engines(site: Site, num_engines: int) -> None:
    clusters = [Cluster(site.origin, num_engines) for _ in range(2)]
    try:
        for _ in range(3):
            site.publish()
            for cluster in clusters:
                cluster.sync()
                assert all(site.holds(sink) for _, sink in cluster.engines)
            site.step()
        for cluster in clusters:
            stats = cluster.relay.stats
            assert stats.redundancy == 1.0
            assert stats.link_bytes <= cluster.link.bytes_down <= stats.link_bytes * 1.02 + 40_000, "and pointers"
        assert clusters[0].relay.stats.link_bytes == clusters[1].relay.stats.link_bytes
    finally:
        for cluster in clusters:
            cluster.close()


def test_most_of_a_version_is_here_when_it_becomes_visible(site: Site) -> None:
    cluster = Cluster(site.origin, 1)
    try:
        site.publish()
        deadline_s = time.monotonic() + 10
        follower = cluster.relay._followers[0]
        while (follower._attempt is None or not follower._attempt.is_over) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        before = cluster.relay.stats.link_bytes
        cluster.sync()
        assert site.holds(cluster.engines[0][1])
        assert cluster.relay.stats.link_bytes - before < 0.05 * before, "at most a cell map was left to fetch"
    finally:
        cluster.close()


def test_cuts_damage_and_restarts_never_make_other_bits(site: Site) -> None:
    cluster = Cluster(site.origin, 3)
    try:
        for number in range(6):
            trouble = (
                lambda: cluster.link.cut_after_bytes(20_000),
                lambda: cluster.link.corrupt_byte(5_000),
                lambda: (cluster.stop(), cluster.start()),
            )[number % 3]
            trouble()
            site.publish()
            cluster.link.cut()
            cluster.sync()
            assert all(site.holds(sink) for _, sink in cluster.engines)
            site.step()
    finally:
        cluster.close()

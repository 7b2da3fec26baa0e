"""Following a version while it is being published."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from rose.backends.memory import MemoryTransport
from rose.errors import BlobNotFoundError
from rose.testing import FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer.cluster import ClusterRelay
from rose.transfer.cluster_claims import Announcement, Claim, Claims
from rose.transfer.cluster_follow import FollowConfig
from rose.transfer.cluster_retry import RetryPolicy


def eventually(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


class Rig:
    """An origin, and a relay that follows it."""

    def __init__(self, *, max_bytes: int = 1 << 20, config: FollowConfig | None = None) -> None:
        self.origin = MemoryTransport()
        self.relay = ClusterRelay(self.origin, max_bytes=max_bytes, pointer_age_s=0.005)
        self.relay.follow(config=config or FollowConfig(poll_s=0.005))

    def announce(self, prefix: str, world_size: int) -> None:
        before = self.origin.read_pointer("current.open")
        assert self.origin.compare_and_set("current.open", before, f"{prefix} {world_size}")

    def put(self, key: str, size: int = 1000) -> None:
        self.origin.put(key, bytes(size))

    def publish(self, prefix: str) -> None:
        self.origin.put(f"{prefix}/manifest", b"manifest")
        assert self.origin.compare_and_set("current", self.origin.read_pointer("current"), f"{prefix}/manifest")

    def held(self) -> list[str]:
        with self.relay._lock:
            return self.relay._memory.keys()


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.relay.close()


@pytest.mark.parametrize("world_size", [1, 3, 9])
def test_blobs_are_here_before_the_pointer_moves(rig: Rig, world_size: int) -> None:
    rig.announce("r/0/0", world_size)
    keys = []
    for i in range(3):
        for rank in range(world_size):
            keys.append(f"r/0/0/rank-{rank}/blob-{i}")
            rig.put(keys[-1])
        eventually(lambda: rig.relay.stats.held_objects == len(keys), f"round {i} is fetched while it is written")
    assert sorted(rig.held()) == sorted(keys)
    rig.publish("r/0/0")
    eventually(lambda: "r/0/0/manifest" in rig.held(), "the manifest follows")
    for key in keys:
        rig.relay.get(key)
    assert rig.relay.stats.redundancy == 1.0
    assert rig.relay.stats.link_objects == len(keys) + 1
    assert rig.relay.stats.link_bytes == 1000 * len(keys) + 8, "nothing but blobs and the manifest"


def test_ranks_of_unequal_length_and_empty_ones(rig: Rig) -> None:
    rig.announce("r/0/0", 3)
    for i in range(7):
        rig.put(f"r/0/0/rank-0/blob-{i}")
    rig.put("r/0/0/rank-2/blob-0")
    rig.publish("r/0/0")
    eventually(lambda: rig.relay.stats.held_objects == 9, "all of it is fetched, also after the pointer moved")
    eventually(lambda: rig.relay._followers[0]._attempt.is_over, "and the end of every rank is found")


def test_a_trainer_that_pauses_is_waited_for(rig: Rig) -> None:
    rig.announce("r/0/0", 2)
    for i in range(2):
        time.sleep(0.6)  # longer than any one wait
        rig.put(f"r/0/0/rank-0/blob-{i}")
        eventually(lambda: rig.relay.stats.held_objects == i + 1, "not ended by a miss before the pointer moved")  # noqa: B023 - used at once


def test_versions_follow_each_other(rig: Rig) -> None:
    for n in range(4):
        rig.announce(f"r/{n}/{n}", 2)
        for rank in range(2):
            rig.put(f"r/{n}/{n}/rank-{rank}/blob-0")
        rig.publish(f"r/{n}/{n}")
        eventually(lambda: rig.relay.stats.held_objects == 3 * (n + 1), f"version {n}")  # noqa: B023 - used at once
    assert rig.relay.stats.redundancy == 1.0


def test_a_failed_attempt_is_freed(rig: Rig) -> None:
    rig.announce("r/1/3", 1)
    rig.put("r/1/3/rank-0/blob-0")
    eventually(lambda: rig.relay.stats.held_objects == 1, "followed")
    rig.put("r/1/3/failed", 10)
    eventually(lambda: rig.held() == [], "given up, so forgotten")


def test_an_attempt_that_is_repeated_is_freed(rig: Rig) -> None:
    rig.announce("r/1/3", 1)
    rig.put("r/1/3/rank-0/blob-0")
    eventually(lambda: rig.relay.stats.held_objects == 1, "followed")
    rig.announce("r/1/4", 1)
    rig.put("r/1/4/rank-0/blob-0")
    eventually(
        lambda: rig.held() == ["r/1/4/rank-0/blob-0"], "the version's number is used again: the first try is forgotten"
    )


def test_a_published_version_is_kept_when_the_next_begins_at_once(rig: Rig) -> None:
    """Between two looks the pointer may move and the next version be announced; that is no reason to forget."""
    rig.announce("r/0/0", 1)
    rig.put("r/0/0/rank-0/blob-0")
    eventually(lambda: rig.relay.stats.held_objects == 1, "followed")
    rig.publish("r/0/0")
    rig.announce("r/1/1", 1)
    rig.put("r/1/1/rank-0/blob-0")
    eventually(lambda: "r/1/1/rank-0/blob-0" in rig.held(), "the next is followed")
    assert "r/0/0/rank-0/blob-0" in rig.held()


def test_following_does_not_push_out_the_newest_version() -> None:
    rig = Rig(max_bytes=4_500)
    try:
        for n in range(2):
            rig.announce(f"r/{n}/{n}", 1)
            for i in range(3):
                rig.put(f"r/{n}/{n}/rank-0/blob-{i}")
            if n == 0:
                rig.publish("r/0/0")
                eventually(lambda: rig.relay.stats.held_objects == 4, "the first version is here")
        eventually(lambda: rig.relay.stats.held_objects == 5, "one more fits beside it")
        time.sleep(0.1)
        assert sum(key.startswith("r/0/0") for key in rig.held()) == 4
        assert rig.relay.stats.redundancy == 1.0, "what does not fit is not fetched to be thrown away"
        rig.publish("r/1/1")
        eventually(
            lambda: sum(key.startswith("r/1/1") for key in rig.held()) == 4, "visible: now the old one makes room"
        )
        assert rig.relay.stats.redundancy == 1.0
    finally:
        rig.relay.close()


def test_a_link_that_fails_holds_following_up_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    origin = FaultyTransport(MemoryTransport(), [TransportFault(kind=TransportFaultKind.FAIL, method="read_pointer")])
    relay = ClusterRelay(origin, max_bytes=1 << 20, retry=RetryPolicy(num_tries=2, first_pause_s=0.001))
    relay.follow(config=FollowConfig(poll_s=0.005))
    origin.inner.compare_and_set("current.open", None, "r/0/0 1")
    origin.put("r/0/0/rank-0/blob-0", b"x")
    try:
        eventually(lambda: "is held up" in caplog.text, "it says so")
        assert relay.stats.held_objects == 0
        origin.faults = ()
        eventually(lambda: relay.stats.held_objects == 1, "it goes on")
        assert caplog.text.count("is held up") == 1, "and says so once"
    finally:
        relay.close()


def test_closing_stops_every_thread(rig: Rig) -> None:
    rig.announce("r/0/0", 4)
    time.sleep(0.05)
    rig.relay.close()
    rig.put("r/0/0/rank-0/blob-0")
    assert not any(thread.is_alive() for thread in rig.relay._followers[0]._threads)
    with pytest.raises(BlobNotFoundError):
        rig.relay.get("r/0/0/rank-0/blob-1")


def test_an_interrupt_ends_every_thread_of_a_follower(rig: Rig) -> None:
    rig.announce("r/0/0", 4)
    rig.relay.interrupt()
    for thread in rig.relay._followers[0]._threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_look_that_an_interrupt_meets_asks_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    """The origin is closed after an interrupt; a second question of the same look would open it again."""

    class Paused(MemoryTransport):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[str] = []
            self.is_asked, self.may_answer = threading.Event(), threading.Event()

        def read_pointer(self, name):
            self.asked.append(name)
            self.is_asked.set()
            assert self.may_answer.wait(10)
            return super().read_pointer(name)

    origin = Paused()
    assert origin.compare_and_set("current.open", None, "r/0/0 1")
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    follower = relay.follow()
    assert origin.is_asked.wait(10)
    relay.interrupt()
    origin.may_answer.set()
    relay.close()
    assert origin.asked == ["current.open"]
    assert follower._attempt is not None, "the look went on as far as it could without the origin"
    assert "held up" not in caplog.text, "nobody is to be told"


@pytest.mark.parametrize("text", [None, "", "r/0/0", "r/0 2", "r/0/0/manifest 2", "r/x/0 2", "r/0/0 -1", "r/0/0 two"])
def test_a_malformed_announcement_is_none(text: str | None) -> None:
    assert Announcement.parse(text) is None


def test_which_attempts_another_one_repeats() -> None:
    first = Announcement("r/3/5", 2)
    for later, is_repeat in (("r/3/6", True), ("r/2/6", True), ("r/4/6", False), ("q/0/0", False)):
        assert first.is_repeated_by(Announcement(later, 2)) is is_repeat


def test_claims_go_round_the_ranks_and_a_few_ahead() -> None:
    claims = Claims(2, 2)
    taken = [claims.take() for _ in range(5)]
    assert taken == [Claim(0, 0), Claim(1, 0), Claim(0, 1), Claim(1, 1), None]
    claims.give_back(Claim(0, 0))
    claims.fetched(Claim(1, 0))
    assert claims.take() == Claim(0, 0), "what was given back comes first"
    assert claims.take() == Claim(1, 2)
    claims.end_at(Claim(0, 1))
    claims.end_at(Claim(1, 2))
    assert not claims.is_finished
    claims.fetched(Claim(0, 0))
    claims.fetched(Claim(1, 1))
    assert claims.is_finished
    assert claims.take() is None


def test_a_later_claim_ends_with_an_earlier_end() -> None:
    claims = Claims(1, 3)
    one, two, three = claims.take(), claims.take(), claims.take()
    claims.give_back(three)
    claims.end_at(two)
    claims.fetched(one)
    assert claims.is_finished

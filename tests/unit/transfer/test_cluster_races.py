"""A relay when things come between a question and its answer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rose.backends.memory import MemoryTransport
from rose.errors import BlobNotFoundError
from rose.transfer.cluster import ClusterRelay
from rose.transfer.cluster_claims import Announcement
from rose.transfer.cluster_follow import FollowConfig

KEY = "r/0/0/rank-0/blob-0"


class HeldBack(MemoryTransport):
    """Looks a blob up at once; the first answer is on its way until ``arrive`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.looked, self.arrive = threading.Event(), threading.Event()
        self.num_looks = 0

    def get(self, key):
        self.num_looks += 1
        is_first = self.num_looks == 1
        try:
            return super().get(key)
        finally:
            if is_first:
                self.looked.set()
                self.arrive.wait(10)


@pytest.mark.parametrize("num_late", [1, 5])
def test_who_asks_after_a_blob_came_gets_it_though_another_asked_before(num_late: int) -> None:
    """A miss that is on its way says nothing about what was put since; an engine would be sent to full weights for it."""
    origin = HeldBack()
    relay = ClusterRelay(origin, max_bytes=1 << 20)
    with ThreadPoolExecutor(1 + num_late) as threads:
        early = threads.submit(relay.get, KEY)
        assert origin.looked.wait(5)
        origin.put(KEY, b"it came")
        late = [threads.submit(relay.get, KEY) for _ in range(num_late)]
        time.sleep(0.05)
        assert not any(read.done() for read in late), "all share the early one's end"
        origin.arrive.set()
        with pytest.raises(BlobNotFoundError):
            early.result(timeout=5)
        assert [read.result(timeout=5) for read in late] == [b"it came"] * num_late
    assert relay.stats.redundancy == 1.0
    assert relay.stats.link_objects == 1


def test_following_goes_on_after_a_manifest_that_is_gone(caplog) -> None:
    """A slow relay sees a version that was retired meanwhile, or one that a store has lost."""
    origin = MemoryTransport()
    relay = ClusterRelay(origin, max_bytes=1 << 20, pointer_age_s=0.001)
    relay.follow(config=FollowConfig(poll_s=0.005))
    try:
        assert origin.compare_and_set("current.open", None, "r/0/0 1")
        assert origin.compare_and_set("current", None, "r/0/0/manifest")
        deadline_s = time.monotonic() + 10
        while "held up" not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        assert origin.compare_and_set("current.open", "r/0/0 1", "r/1/1 1")
        origin.put("r/1/1/rank-0/blob-0", b"x")
        while relay.stats.held_objects == 0:
            assert time.monotonic() < deadline_s, "the next version is followed"
            time.sleep(0.005)
    finally:
        relay.close()


def test_an_announcement_of_more_ranks_than_there_can_be_is_none() -> None:
    assert Announcement.parse("r/0/0 999999") is not None
    assert Announcement.parse("r/0/0 1000000000") is None

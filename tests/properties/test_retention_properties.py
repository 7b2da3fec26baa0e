"""After any history of publishes, acknowledgements and leases the newest version can be reached, and what is held is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.policies.retention import (
    RetentionConfig,
    RetentionSnapshot,
    StoredVersion,
    VersionLease,
    Way,
    find_way,
    plan_retention,
)

ANCHOR = 100
ENGINES = ("a", "b", "c")

events = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 60)),
        st.tuples(st.just("ack"), st.sampled_from(ENGINES)),
        st.tuples(st.just("lease"), st.sampled_from(ENGINES), st.integers(1, 20)),
        st.tuples(st.just("wait"), st.integers(1, 10)),
    ),
    max_size=60,
)
configs = st.builds(
    RetentionConfig,
    keep=st.integers(1, 4),
    max_bytes=st.one_of(st.none(), st.integers(250, 600)),
    anchor_every=st.sampled_from((0, 0, 3)),
    max_chain=st.integers(1, 8),
    hold_s=st.just(5.0),
)


class Store:
    """A publisher that does what the plan says."""

    def __init__(self, config: RetentionConfig) -> None:
        self.config = config
        self.versions: list[StoredVersion] = []
        self.acknowledged: dict[str, int] = {}
        self.leases: dict[str, VersionLease] = {}
        self.now_s = 0.0
        self.holding_since_s: float | None = None
        self.published = 0

    def snapshot(self, next_bytes: int = 0) -> RetentionSnapshot:
        return RetentionSnapshot(
            versions=self.versions,
            acknowledged=self.acknowledged,
            leases=tuple(self.leases.values()),
            next_bytes=next_bytes,
            now_s=self.now_s,
            holding_since_s=self.holding_since_s,
        )

    def publish(self, num_bytes: int) -> None:
        before = plan_retention(self.config, self.snapshot(num_bytes))
        if before.hold is not None:
            assert before.hold.until_s <= self.now_s + self.config.hold_s
            if self.holding_since_s is None:
                self.holding_since_s = self.now_s
            return
        self.holding_since_s = None
        self.obey(before.delete, before.broken)
        n = self.published
        self.published += 1
        self.versions.append(
            StoredVersion(
                n=n,
                bytes_delta=num_bytes if n else None,
                bytes_anchor=ANCHOR if before.is_anchor_due else None,
            )
        )
        self.tidy()

    def tidy(self) -> None:
        plan = plan_retention(self.config, self.snapshot())
        self.obey(plan.delete, plan.broken)
        kept = self.versions
        for name, known in self.acknowledged.items():
            assert (name in plan.gone) == (find_way(kept, known) is Way.GONE)

    def obey(self, delete: tuple[int, ...], broken: tuple[str, ...]) -> None:
        live = {name: lease for name, lease in self.leases.items() if lease.expires_s > self.now_s}
        for name in broken:
            del self.leases[name]
            live.pop(name, None)
        held = {version.n for version in self.versions}
        for name, lease in live.items():
            pinned = range(max(lease.n, self.acknowledged.get(name, -1) + 1), self.published)
            assert not set(pinned) & set(delete) & held, "a live lease was not honoured"
        self.versions = [version for version in self.versions if version.n not in delete]

    def check(self) -> None:
        if not self.versions:
            return
        newest = self.versions[-1].n
        assert newest == self.published - 1
        assert {version.n for version in self.versions} >= set(range(max(0, newest - self.config.keep + 1), newest + 1))
        anchors = [version.n for version in self.versions if version.is_anchor]
        assert anchors, "who has nothing cannot start"
        assert find_way(self.versions, anchors[-1]) in (Way.CHAIN, Way.CURRENT)


@given(configs, events)
def test_the_newest_version_is_always_within_reach(config, history) -> None:
    store = Store(config)
    for event in history:
        match event:
            case ("publish", num_bytes):
                store.publish(num_bytes)
            case ("ack", name) if store.published:
                store.acknowledged[name] = store.published - 1
            case ("lease", name, duration_s) if store.published:
                oldest = store.versions[0].n
                n = max(oldest, store.acknowledged.get(name, -1) + 1)
                store.leases[name] = VersionLease(holder=name, n=n, expires_s=store.now_s + duration_s)
            case ("wait", duration_s):
                store.now_s += duration_s
            case _:
                continue
        store.check()


@given(st.integers(1, 5), st.integers(1, 5), st.lists(st.integers(0, 200), min_size=1, max_size=60))
def test_without_leases_what_is_held_is_bounded(keep, max_chain, sizes) -> None:
    store = Store(RetentionConfig(keep=keep, max_chain=max_chain))
    for size in sizes:
        store.publish(size)
        assert len(store.versions) <= max(keep, max_chain) + 1
        newest = store.versions[-1].n
        old = [version for version in store.versions if version.n <= newest - keep]
        largest = max(size, *(version.bytes_delta or 0 for version in store.versions))
        assert sum(version.num_bytes for version in old) <= 2 * ANCHOR + largest


@given(st.integers(0, 40), st.integers(1, 100))
def test_a_publisher_never_waits_longer_than_it_is_told(reader_n, hold_s) -> None:
    config = RetentionConfig(keep=1, max_bytes=ANCHOR + 50, hold_s=float(hold_s))
    store = Store(config)
    for n in range(40):
        store.leases["slow"] = VersionLease(holder="slow", n=min(reader_n, n), expires_s=1e9)
        waited_s = 0
        while store.published == n:
            store.publish(20)
            if store.published == n:
                store.now_s += 1
                waited_s += 1
                assert waited_s <= hold_s

"""What a publisher may delete."""

from __future__ import annotations

import attrs
import pytest

from rose.policies.retention import (
    HoldReason,
    RetentionConfig,
    RetentionSnapshot,
    StoredVersion,
    VersionLease,
    Way,
    find_way,
    plan_retention,
)

ANCHOR, DELTA = 1000, 10


def first(n: int = 0) -> StoredVersion:
    return StoredVersion(n=n, bytes_anchor=ANCHOR)


def delta(n: int, num_bytes: int = DELTA) -> StoredVersion:
    return StoredVersion(n=n, bytes_delta=num_bytes)


def both(n: int) -> StoredVersion:
    return StoredVersion(n=n, bytes_delta=DELTA, bytes_anchor=ANCHOR)


def chain(last: int) -> list[StoredVersion]:
    return [first(), *(delta(n) for n in range(1, last + 1))]


def lease(holder: str, n: int, expires_s: float = 100.0) -> VersionLease:
    return VersionLease(holder=holder, n=n, expires_s=expires_s)


def snapshot(versions, **fields) -> RetentionSnapshot:
    return RetentionSnapshot(versions=versions, **fields)


KEEP_2 = RetentionConfig(keep=2)


def test_nothing_after_the_newest_anchor_goes() -> None:
    assert plan_retention(KEEP_2, snapshot(chain(9))).delete == ()


def test_what_an_anchor_supersedes_goes_but_not_the_newest_ones() -> None:
    versions = [*chain(4), both(5), delta(6)]
    assert plan_retention(KEEP_2, snapshot(versions)).delete == (0, 1, 2, 3, 4)
    assert plan_retention(RetentionConfig(keep=4), snapshot(versions)).delete == (0, 1, 2)


def test_the_order_of_the_versions_does_not_matter() -> None:
    versions = [*chain(4), both(5)]
    assert plan_retention(KEEP_2, snapshot(versions[::-1])) == plan_retention(KEEP_2, snapshot(versions))


def test_a_leased_version_and_the_chain_from_it_stay_until_the_lease_ends() -> None:
    held = snapshot([*chain(4), both(5), delta(6)], leases=[lease("slow", 2, expires_s=10.0)], now_s=9.9)
    assert plan_retention(KEEP_2, held).delete == (0, 1)
    assert plan_retention(KEEP_2, attrs.evolve(held, now_s=10.0)).delete == (0, 1, 2, 3, 4)


def test_an_acknowledgement_lets_go_what_came_before() -> None:
    held = snapshot([*chain(4), both(5), delta(6)], leases=[lease("slow", 2)], acknowledged={"slow": 3})
    assert plan_retention(KEEP_2, held).delete == (0, 1, 2, 3)
    assert plan_retention(KEEP_2, attrs.evolve(held, acknowledged={"slow": 6})).delete == (0, 1, 2, 3, 4)


def test_who_fell_out_of_the_window_is_gone_and_is_told_so_once() -> None:
    versions = [*chain(4), both(5), delta(6)]
    plan = plan_retention(KEEP_2, snapshot(versions, acknowledged={"old": 2, "near": 4, "now": 6}))
    assert plan.gone == ("old",)
    kept = [version for version in versions if version.n not in plan.delete]
    ways = {n: find_way(kept, n) for n in (None, 2, 4, 5, 6, 7)}
    assert ways == {
        None: Way.GONE,
        2: Way.GONE,
        4: Way.CHAIN,
        5: Way.CHAIN,
        6: Way.CURRENT,
        7: Way.GONE,
    }


def test_full_weights_in_the_middle_break_a_chain() -> None:
    assert find_way([first(), delta(1), first(2), delta(3)], 1) is Way.GONE
    assert find_way([first(), delta(1), both(2), delta(3)], 1) is Way.CHAIN


def test_an_anchor_is_due_once_the_changes_cost_as_much() -> None:
    config = RetentionConfig(keep=2, max_chain=10_000)
    assert not plan_retention(config, snapshot(chain(100))).is_anchor_due
    assert plan_retention(config, snapshot(chain(101))).is_anchor_due
    assert plan_retention(config, snapshot(chain(100), next_bytes=DELTA)).is_anchor_due


def test_an_anchor_is_due_before_a_window_of_small_versions_grows_for_ever() -> None:
    empty = [first(), *(delta(n, 0) for n in range(1, 200))]
    assert not plan_retention(RetentionConfig(), snapshot(empty[:64])).is_anchor_due
    assert plan_retention(RetentionConfig(), snapshot(empty[:65])).is_anchor_due


def test_anchors_at_fixed_intervals() -> None:
    config = RetentionConfig(anchor_every=5)
    due = [n for n in range(12) if plan_retention(config, snapshot(chain(n))).is_anchor_due]
    assert due[0] == 4, "version 5 is to carry one"
    assert not plan_retention(config, snapshot([*chain(4), both(5)])).is_anchor_due


def test_an_anchor_is_due_when_there_is_none_to_start_from() -> None:
    assert plan_retention(KEEP_2, snapshot([])).is_anchor_due
    plan = plan_retention(KEEP_2, snapshot([delta(3), delta(4), delta(5), delta(6)]))
    assert (plan.is_anchor_due, plan.delete) == (True, ())


def test_an_anchor_is_due_when_it_would_make_room() -> None:
    config = RetentionConfig(keep=2, max_bytes=ANCHOR + 50 * DELTA)
    assert not plan_retention(config, snapshot(chain(50))).is_anchor_due
    assert plan_retention(config, snapshot(chain(51))).is_anchor_due
    useless = RetentionConfig(keep=2, max_bytes=1)
    assert not plan_retention(useless, snapshot([first(), delta(1)])).is_anchor_due


def test_no_room_for_leases_holds_the_publisher_for_a_bounded_time() -> None:
    config = RetentionConfig(keep=2, max_bytes=ANCHOR + 3 * DELTA, hold_s=5.0)
    versions = [*chain(4), both(5), delta(6)]
    leases = [lease("b", 3), lease("a", 1), lease("c", 6)]
    held = snapshot(versions, leases=leases, now_s=20.0)

    plan = plan_retention(config, held)
    assert plan.hold is not None
    assert (plan.hold.reason, plan.hold.until_s, plan.hold.holders) == (HoldReason.LEASES, 25.0, ("a", "b"))
    assert (plan.delete, plan.broken) == ((0,), ())

    later = plan_retention(config, attrs.evolve(held, now_s=24.9, holding_since_s=20.0))
    assert (later.hold, later.broken) == (attrs.evolve(plan.hold, until_s=25.0), ())

    over = plan_retention(config, attrs.evolve(held, now_s=25.0, holding_since_s=20.0))
    assert (over.hold, over.broken, over.delete) == (None, ("a", "b"), (0, 1, 2, 3, 4))


def test_only_as_many_leases_are_broken_as_make_room_the_oldest_first() -> None:
    config = RetentionConfig(keep=2, max_bytes=ANCHOR + 5 * DELTA, hold_s=0.0)
    leases = [lease("b", 3), lease("a", 1)]
    versions = [*chain(4), both(5), delta(6)]
    plan = plan_retention(config, snapshot(versions, leases=leases, acknowledged={"a": 0, "b": 2}))
    assert (plan.hold, plan.broken, plan.delete) == (None, ("a",), (0, 1, 2))
    assert plan.gone == ("a",)


def test_what_is_to_come_counts_as_held() -> None:
    config = RetentionConfig(keep=2, max_bytes=ANCHOR + 4 * DELTA)
    held = snapshot([*chain(4), both(5), delta(6)], leases=[lease("a", 3)])
    assert plan_retention(config, held).hold is None
    assert plan_retention(config, attrs.evolve(held, next_bytes=1)).hold is not None


def test_one_slow_engine_of_three_with_two_versions_kept() -> None:
    """Engine 2 begins late: what it reads stays as long as its lease, and memory is bounded by the window and one anchor."""
    config = RetentionConfig(keep=2, max_chain=2)
    versions: list[StoredVersion] = []
    acknowledged = {"0": -1, "1": -1, "2": -1}
    counts = []
    for n in range(20):
        is_due = plan_retention(config, snapshot(versions)).is_anchor_due
        versions.append((both(n) if n else first()) if is_due else delta(n))
        acknowledged |= {"0": n, "1": n}
        leases = [lease("2", 3, expires_s=7.0)]
        plan = plan_retention(config, snapshot(versions, leases=leases, acknowledged=acknowledged, now_s=float(n)))
        versions = [version for version in versions if version.n not in plan.delete]
        counts.append(len(versions))
        if 3 <= n < 7:
            assert versions[0].n <= 3
    assert find_way(versions, acknowledged["2"]) is Way.GONE
    assert max(counts[7:]) <= config.keep + 1
    assert sum(version.is_anchor for version in versions) == 1


def test_a_version_has_a_size() -> None:
    with pytest.raises(ValueError, match="version 3 needs a size"):
        StoredVersion(n=3)

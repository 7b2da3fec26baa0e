"""What a publisher may delete, when it must put full weights again, and when it has to wait for a slow reader. Pure.

Invariants of a plan, for any snapshot:

* The newest version stays, and so do the ``keep`` newest ones, the newest anchor and every version after it: whoever has
  nothing can always start.
* What a live lease names stays, with all versions after it, unless the plan breaks that lease. A holder that has acknowledged
  newer versions pins only what comes after those.
* ``is_anchor_due`` depends on versions and settings alone, never on engines: trainer ranks that are given the same sizes decide alike.
* A hold ends: after ``hold_s`` the leases that pin the oldest versions are broken, one after the other, until there is room.

With ``max_chain = keep`` and no leases at most ``keep`` + 1 versions are held once the deletions are done.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import attrs

from rose import checks


@attrs.frozen(kw_only=True)
class StoredVersion:
    """One version that is held.

    Attributes:
        n: Its number.
        bytes_delta: Size of the changes from version ``n`` - 1; ``None`` where there are only full weights.
        bytes_anchor: Size of the full weights; ``None`` where there are only changes.
    """

    n: int = attrs.field(validator=checks.integer(0))
    bytes_delta: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(0)))
    bytes_anchor: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(0)))

    def __attrs_post_init__(self) -> None:
        if self.bytes_delta is None and self.bytes_anchor is None:
            message = f"version {self.n} needs a size: bytes_delta, bytes_anchor or both"
            raise ValueError(message)

    @property
    def is_anchor(self) -> bool:
        """Return whether an engine can start here."""
        return self.bytes_anchor is not None

    @property
    def num_bytes(self) -> int:
        """Return all that it holds."""
        return (self.bytes_delta or 0) + (self.bytes_anchor or 0)


@attrs.frozen(kw_only=True)
class VersionLease:
    """The promise to keep version ``n`` and those after it for ``holder`` until ``expires_s``."""

    holder: str
    n: int
    expires_s: float


@attrs.frozen(kw_only=True)
class RetentionConfig:
    """What a publisher keeps.

    Attributes:
        keep: Newest versions that always stay.
        max_bytes: Most that may be held; ``None`` for no limit.
        anchor_every: Full weights again after this many versions; 0: when the changes since the last ones cost as much.
        max_chain: With ``anchor_every`` 0, full weights again after this many versions at the latest, however small these are.
            Bounds how many updates a late joiner applies, and how many versions are held.
        hold_s: How long a publisher waits for leases to end when ``max_bytes`` leaves no room.
    """

    keep: int = attrs.field(default=4, validator=checks.integer(1))
    max_bytes: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(1)))
    anchor_every: int = attrs.field(default=0, validator=checks.integer(0))
    max_chain: int = attrs.field(default=64, validator=checks.integer(1))
    hold_s: float = attrs.field(default=30.0, validator=checks.number(at_least=0))


@attrs.frozen(kw_only=True)
class RetentionSnapshot:
    """What is held and who still reads it. All times are on one clock.

    Attributes:
        versions: Held versions of one run, in any order.
        acknowledged: Engine -> the newest version that it acknowledged.
        leases: Given to engines; those that are over are ignored.
        next_bytes: What the next version will add; 0 when there is none to come.
        now_s: The time.
        holding_since_s: When the publisher began to wait for room; ``None`` while it does not.
    """

    versions: Sequence[StoredVersion]
    acknowledged: Mapping[str, int] = attrs.field(factory=dict)
    leases: Sequence[VersionLease] = ()
    next_bytes: int = 0
    now_s: float = 0.0
    holding_since_s: float | None = None


class HoldReason(enum.Enum):
    """Why a publisher waits."""

    LEASES = "leases pin versions beyond max_bytes"


@attrs.frozen(kw_only=True)
class Hold:
    """Wait with the next version, at most until ``until_s``; ``holders`` pin what is too much, the oldest first."""

    reason: HoldReason
    until_s: float
    holders: tuple[str, ...]


@attrs.frozen(kw_only=True)
class RetentionPlan:
    """What to do.

    Attributes:
        delete: Versions to delete, oldest first.
        is_anchor_due: The next version should carry full weights.
        hold: Wait before the next version; ``None``: go on.
        broken: Holders whose leases are not honoured any more, the oldest first.
        gone: Engines that no chain of changes reaches after the deletions: they get full weights.
    """

    delete: tuple[int, ...]
    is_anchor_due: bool
    hold: Hold | None = None
    broken: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class Way(enum.Enum):
    """How an engine gets from what it has to the newest version."""

    CURRENT = "it has it"
    CHAIN = "by the changes since its own version"
    GONE = "its version left the window, or it has none: by full weights"


def find_way(versions: Sequence[StoredVersion], known_n: int | None) -> Way:
    """Return how an engine at ``known_n`` reaches the newest of the held versions; ``None`` for an engine that has nothing."""
    if not versions or known_n is None:
        return Way.GONE
    newest_n = max(version.n for version in versions)
    if known_n == newest_n:
        return Way.CURRENT
    if known_n > newest_n:
        return Way.GONE
    deltas = {version.n for version in versions if version.bytes_delta is not None}
    return Way.CHAIN if all(n in deltas for n in range(known_n + 1, newest_n + 1)) else Way.GONE


def plan_retention(config: RetentionConfig, snapshot: RetentionSnapshot) -> RetentionPlan:
    """Return what may be deleted now, whether an anchor is due, and whether to wait.

    Without any version nothing is deleted and an anchor is due.
    """
    versions = sorted(snapshot.versions, key=lambda version: version.n)
    if not versions:
        return RetentionPlan(delete=(), is_anchor_due=True)
    floor_n = _floor(config, versions)
    pins = _pins(snapshot, floor_n)
    hold, num_broken = _relieve(config, snapshot, versions, floor_n, pins)
    kept_pins, broken = pins[num_broken:], pins[:num_broken]
    lowest_n = min([floor_n, *(n for n, _, _ in kept_pins)])
    kept = [version for version in versions if version.n >= lowest_n]
    return RetentionPlan(
        delete=tuple(version.n for version in versions if version.n < lowest_n),
        is_anchor_due=_is_anchor_due(config, versions, floor_n, snapshot.next_bytes),
        hold=hold,
        broken=tuple(holder for _, _, holder in broken),
        gone=tuple(name for name, n in snapshot.acknowledged.items() if find_way(kept, n) is Way.GONE),
    )


def _newest_anchor(versions: Sequence[StoredVersion]) -> StoredVersion:
    """Return the newest anchor; the oldest version where there is none, since then nothing may go."""
    return next((version for version in reversed(versions) if version.is_anchor), versions[0])


def _floor(config: RetentionConfig, versions: Sequence[StoredVersion]) -> int:
    """Return the oldest version that stays whatever the leases."""
    return min(_newest_anchor(versions).n, versions[-1].n - config.keep + 1)


def _pins(snapshot: RetentionSnapshot, floor_n: int) -> list[tuple[int, float, str]]:
    """Return (version, end, holder) of the live leases that keep more than stays anyhow, the oldest version first."""
    pins = [
        (max(lease.n, snapshot.acknowledged.get(lease.holder, lease.n - 1) + 1), lease.expires_s, lease.holder)
        for lease in snapshot.leases
        if lease.expires_s > snapshot.now_s
    ]
    return sorted(pin for pin in pins if pin[0] < floor_n)


def _relieve(
    config: RetentionConfig,
    snapshot: RetentionSnapshot,
    versions: Sequence[StoredVersion],
    floor_n: int,
    pins: Sequence[tuple[int, float, str]],
) -> tuple[Hold | None, int]:
    """Return the hold, or how many of the pins to break; (``None``, 0) while there is room."""
    if config.max_bytes is None:
        return None, 0
    room = config.max_bytes - snapshot.next_bytes
    num_broken = 0
    while num_broken < len(pins) and _bytes_from(versions, min(floor_n, pins[num_broken][0])) > room:
        num_broken += 1
    if not num_broken:
        return None, 0
    since_s = snapshot.now_s if snapshot.holding_since_s is None else snapshot.holding_since_s
    until_s = since_s + config.hold_s
    if snapshot.now_s >= until_s:
        return None, num_broken
    holders = tuple(holder for _, _, holder in pins[:num_broken])
    return Hold(reason=HoldReason.LEASES, until_s=until_s, holders=holders), 0


def _bytes_from(versions: Iterable[StoredVersion], lowest_n: int) -> int:
    return sum(version.num_bytes for version in versions if version.n >= lowest_n)


def _is_anchor_due(config: RetentionConfig, versions: Sequence[StoredVersion], floor_n: int, next_bytes: int) -> bool:
    anchor = _newest_anchor(versions)
    if anchor.bytes_anchor is None:
        return True
    num_next = versions[-1].n + 1 - anchor.n
    if config.anchor_every:
        return num_next >= config.anchor_every
    chain_bytes = sum(version.bytes_delta or 0 for version in versions if version.n > anchor.n) + next_bytes
    if num_next > config.max_chain or chain_bytes > anchor.bytes_anchor:
        return True
    held_bytes = _bytes_from(versions, floor_n) + next_bytes
    window_bytes = _bytes_from(versions, versions[-1].n - config.keep + 2) + next_bytes + anchor.bytes_anchor
    return config.max_bytes is not None and held_bytes > config.max_bytes and window_bytes < held_bytes

"""What is announced, and which of its blobs to fetch next. Plain state, no I/O and no locks."""

from __future__ import annotations

import attrs

from rose.transfer.cluster_memory import attempt_prefix

_MAX_SIZE_DIGITS = 6
"""Of a number of ranks; a larger one is no trainer's, and would take its memory before anything is fetched."""


@attrs.frozen
class Announcement:
    """What ``<pointer>.open`` says."""

    prefix: str
    world_size: int

    @classmethod
    def parse(cls, text: str | None) -> Announcement | None:
        """Read a pointer's value; ``None`` where it is none or malformed, since following is only a help."""
        prefix, _, size = (text or "").partition(" ")
        if attempt_prefix(f"{prefix}/") != prefix or not size.isdecimal() or len(size) > _MAX_SIZE_DIGITS:
            return None
        return cls(prefix, int(size))

    def is_repeated_by(self, later: Announcement) -> bool:
        """Return whether a later attempt shows that this one was given up: a failed version's number is used again."""
        run, n, _ = self.prefix.split("/")
        later_run, later_n, _ = later.prefix.split("/")
        return run == later_run and int(later_n) <= int(n)


@attrs.frozen
class Claim:
    """One blob that one stream is after."""

    rank: int
    index: int


@attrs.define
class Claims:
    """Which blobs of an attempt are to be fetched next.

    Args:
        world_size: How many ranks put blobs.
        ahead: How many blobs of one rank may be claimed at a time.
    """

    world_size: int
    ahead: int
    _next: list[int] = attrs.field(init=False)
    _open: list[set[int]] = attrs.field(init=False)
    _returned: list[set[int]] = attrs.field(init=False)
    _ends: list[int | None] = attrs.field(init=False)
    _turn: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        """Begin at the first blob of every rank."""
        self._next = [0] * self.world_size
        self._open = [set() for _ in range(self.world_size)]
        self._returned = [set() for _ in range(self.world_size)]
        self._ends = [None] * self.world_size

    @property
    def is_finished(self) -> bool:
        """Return whether every rank's end is known and everything before it was fetched."""
        return all(end is not None for end in self._ends) and not any(self._open) and not any(self._returned)

    def take(self) -> Claim | None:
        """Claim a blob: ranks in turn, of each the first one that nobody is after."""
        for step in range(self.world_size):
            rank = (self._turn + step) % self.world_size
            index = self._take_of(rank)
            if index is not None:
                self._turn = rank + 1
                self._open[rank].add(index)
                return Claim(rank, index)
        return None

    def fetched(self, claim: Claim) -> None:
        """Note that a blob is here."""
        self._open[claim.rank].discard(claim.index)

    def give_back(self, claim: Claim) -> None:
        """Let another one try."""
        self._open[claim.rank].discard(claim.index)
        end = self._ends[claim.rank]
        if end is None or claim.index < end:
            self._returned[claim.rank].add(claim.index)

    def end_at(self, claim: Claim) -> None:
        """Note that a rank has no such blob, nor later ones."""
        self._open[claim.rank].discard(claim.index)
        end = self._ends[claim.rank]
        end = claim.index if end is None else min(end, claim.index)
        self._ends[claim.rank] = end
        self._returned[claim.rank] = {index for index in self._returned[claim.rank] if index < end}

    def _take_of(self, rank: int) -> int | None:
        if len(self._open[rank]) >= self.ahead:
            return None
        if self._returned[rank]:
            index = min(self._returned[rank])
            self._returned[rank].remove(index)
            return index
        if self._ends[rank] is not None:
            return None
        self._next[rank] += 1
        return self._next[rank] - 1

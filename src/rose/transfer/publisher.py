"""The sending side: one publisher a trainer rank.

Invariants:

* The pointer moves from version to version of one run by compare-and-set and never goes back.
* A version becomes visible only whole: every rank's part is there and together they cover every tensor exactly once.
* A rank compares with the bits of the last *visible* version. After a failed or uncertain publish it finds out from the
  pointer which that is, and sends whole cells when it does not have them; the version number of a failed publish is reused.
* Keys are written once: an attempt has its number in its keys. It counts the calls of ``publish``, so that the ranks meet
  again after any one of them failed, wherever it failed.

Life cycle of one version (the subscriber has steps 5 to 7). All ranks call ``publish`` together, like a collective, but
none runs inside: ranks meet only through the transport.

1. [EVERY RANK] read the pointer: it gives the base and the next number. [RANK 0] announce the attempt, so that relays may follow it.
2. [EVERY RANK] compare bit by bit, encode this rank's cells, put its blobs, then its part record.
3. [RANK 0] wait for every part, check coverage, put the cell map (once), the manifest (and an anchor beside it when due), move the pointer.
4. [EVERY RANK] once the pointer shows the version: keep its bits as the new base, retire what no engine can need, audit now and then.

A rank that fails after step 1 says so under a key that the others watch, so that they fail at once too. A run name stands for one
launch of the trainer; a restarted trainer takes a new name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import attrs
import numpy as np

from rose.errors import (
    BlobNotFoundError,
    CorruptUpdateError,
    LayoutMismatchError,
    TransferError,
    VersionConflictError,
)
from rose.interfaces.trainer import ShardBits, ShardSpec, Trainer
from rose.interfaces.transport import Transport
from rose.policies.retention import RetentionConfig
from rose.transfer.attempt import Attempt, announce_failure, await_pointer, decision_key, gather_parts
from rose.transfer.cells import CellMap, Columns
from rose.transfer.delta import digest
from rose.transfer.encoder import RankEncoder
from rose.transfer.geometry import Geometry, PlacedCell
from rose.transfer.housekeeping import Housekeeper
from rose.transfer.layout import TargetLayout, bits_dtype
from rose.transfer.manifest import Manifest, codec_elements
from rose.transfer.parts import Part, Share
from rose.transfer.plan import check_sources, check_targets, plan_source
from rose.transfer.relay import POINTER, announce_pointer, map_key, read_manifest, version_of_key
from rose.types import WeightVersion

_logger = logging.getLogger(__name__)
_MAX_THREADS = 8
_RETENTION = RetentionConfig()
_MAX_MAP_PUTS = 3
_GRACE_S = 2.0
"""How much longer the other ranks wait, so that rank 0 is the one to time out and can say whose part is missing."""


@attrs.frozen(kw_only=True)
class PublishReport:
    """What one publish did.

    Attributes:
        version: The version that is now visible.
        is_anchor: Whether engines can start from it.
        is_whole_model: Whether the figures are the whole model's (rank 0) or this rank's share (the others).
        bytes_dense: Size of the full weights.
        bytes_sent: Size of the payloads that lead from the base to this version (all of it for the first).
        bytes_anchor: Size of the anchor put beside the changes; 0 without one.
        num_changed: Elements whose bits changed since the base (all of them for the first).
        num_elements: Elements.
        codec_elements: Codec (``none``, ``dense``, ``sparse``, ``overwrite``) -> elements of the cells sent with it.
        publish_s: Wall time, waiting for the other ranks included.
        is_gathered: Whether the framework handed over gathered tensors, so that cutting and coding came after a gather.
    """

    version: WeightVersion
    is_anchor: bool
    is_whole_model: bool
    bytes_dense: int
    bytes_sent: int
    bytes_anchor: int
    num_changed: int
    num_elements: int
    codec_elements: Mapping[str, int]
    publish_s: float
    is_gathered: bool = False

    @property
    def changed_fraction(self) -> float:
        """Return the share of elements that changed."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0


@attrs.frozen(kw_only=True, eq=False)
class _Outcome:
    """What a publish made visible, as far as this rank knows it."""

    changes: Share
    anchor: Share | None
    cell_elements: np.ndarray[tuple[int], np.dtype[np.int64]]
    is_full: bool


class Publisher:
    """Publishes the weights of one trainer rank. Not re-entrant: one publish at a time.

    Args:
        trainer: This rank's weights.
        transport: Where they go.
        run: Name of this launch of the trainer.
        targets: Layouts of the engines, the same on every rank; cells are cut along them.
        retention: What stays in the store, and how often full weights are put beside changes.
        timeout_s: How long one publish may take.
        pointer: Name of the pointer to move.
        num_threads: How many cells this rank works on at a time; 0 takes this machine's cores shared by the ranks, at most 8.
        is_overwrite: Send new patterns instead of differences: more bytes, but no base is needed to apply them.
        audit_every: Sum the kept bits anew after every so many versions; 0 never.

    Raises:
        LayoutMismatchError: A target does not fit the trainer; names all tensors.
    """

    def __init__(
        self,
        trainer: Trainer,
        transport: Transport,
        *,
        run: str,
        targets: Sequence[TargetLayout] = (),
        retention: RetentionConfig = _RETENTION,
        timeout_s: float = 300.0,
        pointer: str = POINTER,
        num_threads: int = 0,
        is_overwrite: bool = False,
        audit_every: int = 64,
    ) -> None:
        self._trainer, self._transport, self._run = trainer, transport, WeightVersion(run, 0).run  # checks the name
        self._timeout_s, self._pointer = timeout_s, pointer
        self._housekeeper = Housekeeper(transport, retention, run=run)
        self._tensors = dict(trainer.tensors())
        self._aliases = dict(trainer.aliases())
        check_targets(self._tensors, targets, self._aliases)
        self._layout = dict(trainer.layout())
        cells = plan_source(trainer.rank, self._layout, targets, self._aliases, tensors=self._tensors)
        placed = [PlacedCell(tensor=cell.tensor, box=cell.box) for cell in cells]
        self._cells = Geometry.of(placed, list(self._tensors))
        self._encoder = RankEncoder(
            self._tensors,
            self._layout,
            cells,
            num_threads=num_threads or _default_threads(trainer.world_size),
            is_overwrite=is_overwrite,
        )
        self._audit_every = audit_every
        self._cell_map: CellMap | None = None
        self._map_key = ""
        self._tensors_hash = digest(
            json.dumps([[attrs.astuple(s) for s in self._tensors.values()], self._aliases]).encode()
        )
        self._published_key: str | None = None
        self._anchor_key: str | None = None
        self._num_attempts = 0
        self._highest_n = -1  # versions up to it may have been visible, as every rank that saw the pointer knows
        self._checked_layouts: list[Mapping[str, ShardSpec]] = []

    @property
    def version(self) -> WeightVersion | None:
        """Return the last version that this publisher made visible."""
        return None if self._published_key is None else version_of_key(self._published_key)

    def close(self) -> None:
        """End the threads. The transport stays its owner's to close. Idempotent."""
        self._encoder.close()

    async def publish(self, *, anchor: bool = False) -> PublishReport:
        """Do ``publish_sync`` in a thread. The weights must not change until it returns, so a cancelled call ends only with it."""
        work = asyncio.ensure_future(asyncio.to_thread(self.publish_sync, anchor=anchor))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            work.exception()
            raise

    def publish_sync(self, *, anchor: bool = False) -> PublishReport:
        """Publish the weights as the next version; returns when it is visible. Call it on every rank.

        Args:
            anchor: Put full weights beside the changes, for late joiners; pass the same on every rank.

        Returns:
            Figures, the whole model's on rank 0.

        Raises:
            LayoutMismatchError: Shards are not what the layout promised, or the ranks do not cover a tensor exactly once.
            VersionConflictError: Another run or publisher moved the pointer.
            DeadlineExceededError: A rank's part or the pointer did not come in time.
            TransferError: Another rank failed; the message has its reason.
            TransportError: The transport failed.
        """
        started = time.monotonic()
        grace_s = _GRACE_S if self._trainer.rank else 0.0
        attempt = self._begin(anchor=anchor, deadline_s=started + self._timeout_s + grace_s)
        try:
            shards = self._trainer.shards()
            part = self._put_part(attempt, shards)
            if self._trainer.rank == 0:
                outcome = self._make_visible(attempt)
            else:
                await_pointer(self._transport, attempt, self._pointer)
                outcome = _Outcome(
                    changes=part.changes,
                    anchor=part.anchor,
                    cell_elements=self._encoder.cell_elements,
                    is_full=part.is_full,
                )
        except BaseException as error:
            announce_failure(self._transport, attempt, self._trainer.rank, error)
            raise
        self._encoder.commit(shards)
        self._published_key = attempt.manifest_key
        self._highest_n = max(self._highest_n, attempt.version.n)
        self._follow(attempt.manifest_key)
        if self._audit_every and attempt.version.n % self._audit_every == self._audit_every - 1:
            self._audit()
        return self._report(attempt, outcome, time.monotonic() - started)

    def _begin(self, *, anchor: bool, deadline_s: float) -> Attempt:
        """Read the pointer and decide what is attempted; every rank decides alike."""
        number = self._num_attempts
        self._num_attempts += 1
        found = self._transport.read_pointer(self._pointer)
        newest = None if found is None else version_of_key(found)
        is_own = newest is not None and newest.run == self._run
        if newest is not None and not is_own and self._published_key is not None:
            message = f"pointer {self._pointer!r} was at {self.version}, now at {newest}: another run took it over"
            raise VersionConflictError(message)
        if found != self._published_key:
            self._encoder.forget()
        if newest is not None and is_own:
            version = WeightVersion(self._run, newest.n + 1)
            self._highest_n = version.n
        else:  # a store that has lost everything does not make versions go back
            version = WeightVersion(self._run, self._highest_n + 1)
        attempt = Attempt(
            version=version,
            number=number,
            pointer_before=found,
            base_key=found if is_own else None,
            is_anchor_due=self._follow(found if is_own else None) or anchor,
            is_anchor_asked=anchor,
            deadline_s=deadline_s,
        )
        if self._trainer.rank == 0:
            announce_pointer(self._transport, self._pointer, attempt.prefix, self._trainer.world_size)
        return attempt

    def _put_part(self, attempt: Attempt, shards: Mapping[str, ShardBits]) -> Part:
        self._encoder.check(shards)
        rank, is_full = self._trainer.rank, not self._encoder.has_base
        note = partial(self._housekeeper.note, attempt.version.n)
        note(attempt.part_key(rank))
        note(attempt.failure_key)

        def encode(name: str, *, is_whole: bool) -> Share:
            prefix = f"{attempt.prefix}/{name}-{rank}"
            return self._encoder.encode(shards, self._transport.put, prefix, is_full=is_whole, on_key=note)

        changes = encode("rank", is_whole=False)
        anchor = encode("anchor-rank", is_whole=True) if attempt.is_anchor_due and not is_full else None
        part = Part(
            rank=rank,
            is_full=is_full,
            tensors_hash=self._tensors_hash,
            layout=self._layout,
            cells=self._cells,
            changes=changes,
            anchor=anchor,
        )
        self._transport.put(attempt.part_key(rank), part.to_bytes())
        return part

    def _make_visible(self, attempt: Attempt) -> _Outcome:
        """Rank 0: gather the parts, check them, write the manifests and move the pointer."""
        parts = gather_parts(self._transport, attempt, self._trainer.world_size)
        self._check_parts(parts)
        self._put_map(parts, is_due=attempt.is_anchor_due)
        changes, anchor = _joined(parts, [part.changes for part in parts]), None
        is_full = all(part.is_full for part in parts)
        if is_full:
            anchor_key = attempt.manifest_key
        elif (whole := _whole_shares(parts, is_asked=attempt.is_anchor_asked)) is not None:
            anchor_key, anchor = attempt.anchor_key, _joined(parts, whole)
            self._put_manifest(attempt, anchor_key, anchor, anchor_key=anchor_key, base_key=None)
        else:
            anchor_key = self._newest_anchor(attempt)
        base_key = None if is_full else attempt.base_key
        self._put_manifest(attempt, attempt.manifest_key, changes, anchor_key=anchor_key, base_key=base_key)
        self._put_decision(attempt, changes, anchor, is_full=base_key is None)
        self._move_pointer(attempt)
        self._anchor_key = anchor_key
        sizes = np.concatenate([part.cells.num_elements for part in parts])
        return _Outcome(changes=changes, anchor=anchor, cell_elements=sizes, is_full=is_full)

    def _put_map(self, parts: Sequence[Part], *, is_due: bool) -> None:
        """Write the map of all ranks' cells: when it is new, with every anchor, and when the store may have lost it.

        Without it nobody can read any version, so it is read back, and replaced where it came to harm.
        """
        cells = Geometry.join([part.cells for part in parts])
        is_new = self._cell_map is None
        if self._cell_map is not None and not self._cell_map.geometry.is_same(cells):
            message = f"the ranks' cells are others than before in run {self._run!r}; a trainer with other shards takes a new run name"
            raise LayoutMismatchError(message)
        if self._cell_map is None:
            self._cell_map = CellMap(tensors=tuple(self._tensors.values()), aliases=self._aliases, cells=cells)
            self._map_key = map_key(self._run, self._cell_map.to_bytes())
        if not (is_new or is_due or not self._encoder.has_base):
            return
        content = self._cell_map.to_bytes()
        for _ in range(_MAX_MAP_PUTS):
            try:
                self._transport.put(self._map_key, content)
                if self._transport.get(self._map_key) == content:
                    return
            except (VersionConflictError, BlobNotFoundError):
                _logger.warning("cell map %r came to harm in the store and is written anew", self._map_key)
            self._transport.delete([self._map_key])
        message = f"cell map {self._map_key!r} of {len(content)} bytes came back damaged {_MAX_MAP_PUTS} times in a row"
        raise CorruptUpdateError(message)

    def _check_parts(self, parts: Sequence[Part]) -> None:
        differing = [part.rank for part in parts if part.tensors_hash != self._tensors_hash]
        if differing:
            message = f"ranks {differing} list other tensors or tied names than rank 0"
            raise LayoutMismatchError(message)
        layouts = [part.layout for part in parts]
        if layouts != self._checked_layouts:
            check_sources(self._tensors, layouts)
            self._checked_layouts = layouts

    def _newest_anchor(self, attempt: Attempt) -> str:
        if attempt.base_key is None:
            message = f"some ranks sent changes for {attempt.version}, which has no base"
            raise TransferError(message)
        if self._anchor_key is not None and attempt.base_key == self._published_key:
            return self._anchor_key
        return read_manifest(
            self._transport, attempt.base_key
        ).anchor_key  # the base has one that this rank did not see succeed

    def _put_manifest(self, attempt: Attempt, key: str, share: Share, *, anchor_key: str, base_key: str | None) -> None:
        manifest = Manifest(
            version=attempt.version,
            base=None if base_key is None else version_of_key(base_key),
            base_key=base_key,
            anchor_key=anchor_key,
            map_key=self._map_key,
            blobs=share.blobs,
            columns=share.columns,
        )
        self._housekeeper.note(attempt.version.n, key)
        self._transport.put(key, manifest.to_bytes())

    def _put_decision(self, attempt: Attempt, changes: Share, anchor: Share | None, *, is_full: bool) -> None:
        whole = changes if is_full else anchor
        decision = self._housekeeper.decide(
            attempt,
            bytes_delta=None if is_full else changes.bytes_sent,
            bytes_anchor=None if whole is None else whole.bytes_sent,
        )
        self._housekeeper.note(attempt.version.n, attempt.decision_key)
        self._transport.put(attempt.decision_key, decision.to_bytes())

    def _move_pointer(self, attempt: Attempt) -> None:
        if not self._transport.compare_and_set(self._pointer, attempt.pointer_before, attempt.manifest_key):
            found = self._transport.read_pointer(self._pointer)
            if found == attempt.manifest_key:
                return
            message = f"pointer {self._pointer!r} moved to {found!r} while {attempt.version} was being published"
            raise VersionConflictError(message)

    def _follow(self, visible_key: str | None) -> bool:
        """Delete what was decided with a visible version; returns whether the next one should carry full weights."""
        return self._housekeeper.follow(visible_key, None if visible_key is None else decision_key(visible_key))

    def _audit(self) -> None:
        """Compare the kept bits with their sums; the version is visible by now, so what is wrong costs a full version, no more."""
        try:
            self._encoder.audit()
        except CorruptUpdateError as error:
            _logger.error("rank %d: %s", self._trainer.rank, error)  # noqa: TRY400 - the message is all there is to say

    def _report(self, attempt: Attempt, outcome: _Outcome, publish_s: float) -> PublishReport:
        is_whole_model = self._trainer.rank == 0
        boxes = {name: prod(spec.shape) for name, spec in self._tensors.items()}
        if not is_whole_model:
            boxes = {name: box.num_elements for name, box in self._layout.items()}
        num_dense = sum(size * bits_dtype(self._tensors[name].dtype).itemsize for name, size in boxes.items())
        return PublishReport(
            version=attempt.version,
            is_anchor=outcome.is_full or outcome.anchor is not None,
            is_whole_model=is_whole_model,
            bytes_dense=num_dense,
            bytes_sent=outcome.changes.bytes_sent,
            bytes_anchor=0 if outcome.anchor is None else outcome.anchor.bytes_sent,
            num_changed=int(outcome.changes.columns.num_changed.sum()),
            num_elements=int(outcome.cell_elements.sum()),
            codec_elements=codec_elements(outcome.cell_elements, outcome.changes.columns),
            publish_s=publish_s,
            is_gathered=self._trainer.is_gathered,
        )


def _joined(parts: Sequence[Part], shares: Sequence[Share]) -> Share:
    """Return the rows and blobs of all ranks as one, the cells numbered through."""
    firsts = np.cumsum([0, *(len(part.cells) for part in parts)])[:-1].tolist()
    blobs = tuple(
        attrs.evolve(blob, first_cell=first)
        for share, first in zip(shares, firsts, strict=True)
        for blob in share.blobs
    )
    columns = Columns.join([share.columns for share in shares], [len(share.blobs) for share in shares])
    return Share(columns=columns, blobs=blobs)


def _whole_shares(parts: Sequence[Part], *, is_asked: bool) -> list[Share] | None:
    """Return the full weights of all ranks, ``None`` where some put none: a rank that could not read the last decision, say.

    Raises:
        TransferError: Some put none though the caller asked for an anchor.
    """
    whole = [part.full for part in parts if part.full is not None]
    if len(whole) == len(parts):
        return whole
    lacking = [part.rank for part in parts if part.full is None]
    if is_asked:
        message = f"ranks {lacking} put no full weights; pass the same anchor on every rank"
        raise TransferError(message)
    if whole:
        _logger.warning("no anchor this time: ranks %s put no full weights", lacking)
    return None


def _default_threads(world_size: int) -> int:
    return max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // world_size))

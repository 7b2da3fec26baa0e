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

1. [EVERY RANK] read the pointer: it gives the base and the next number.
2. [EVERY RANK] compare bit by bit, encode this rank's cells, put its blobs, then its part record.
3. [RANK 0] wait for every part, check coverage, put the manifest (and an anchor beside it when due), move the pointer.
4. [EVERY RANK] once the pointer shows the version: keep its bits as the new base, retire what no engine can need.

A rank that fails after step 1 says so under a key that the others watch, so that they fail at once too. A run name stands for one
launch of the trainer; a restarted trainer takes a new name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence

import attrs

from rose.errors import LayoutMismatchError, TransferError, TransportError, VersionConflictError
from rose.interfaces.trainer import ShardSpec, Trainer
from rose.interfaces.transport import Transport
from rose.transfer.attempt import Attempt, announce_failure, await_pointer, gather_parts
from rose.transfer.delta import Bits, digest
from rose.transfer.encoder import BlobWriter, RankEncoder
from rose.transfer.layout import TargetLayout, bits_dtype
from rose.transfer.manifest import CellRecord, Manifest, count_codec_elements
from rose.transfer.parts import Part
from rose.transfer.plan import check_sources, check_targets, plan_source
from rose.transfer.relay import POINTER, read_manifest, version_of_key
from rose.types import WeightVersion

_logger = logging.getLogger(__name__)
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
        codec_elements: Codec (``none``, ``dense``, ``sparse``) -> elements of the cells sent with it.
        publish_s: Wall time, waiting for the other ranks included.
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

    @property
    def changed_fraction(self) -> float:
        """Return the share of elements that changed."""
        return self.num_changed / self.num_elements if self.num_elements else 0.0


@attrs.frozen(kw_only=True)
class _Outcome:
    """The cells that a publish made visible, as far as this rank knows them."""

    cells: tuple[CellRecord, ...]
    anchor_cells: tuple[CellRecord, ...] | None
    is_full: bool


class Publisher:
    """Publishes the weights of one trainer rank. Not re-entrant: one publish at a time.

    Args:
        trainer: This rank's weights.
        transport: Where they go.
        run: Name of this launch of the trainer.
        targets: Layouts of the engines, the same on every rank; cells are cut along them.
        anchor_every: Put full weights beside every n-th version; 0 never after the first. Without anchors no blob
            is ever retired.
        keep: How many of the newest versions are never retired.
        timeout_s: How long one publish may take.
        pointer: Name of the pointer to move.

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
        anchor_every: int = 0,
        keep: int = 4,
        timeout_s: float = 300.0,
        pointer: str = POINTER,
    ) -> None:
        self._trainer, self._transport, self._run = trainer, transport, WeightVersion(run, 0).run  # checks the name
        self._anchor_every, self._keep, self._timeout_s, self._pointer = anchor_every, keep, timeout_s, pointer
        self._tensors = dict(trainer.tensors())
        self._aliases = dict(trainer.aliases())
        check_targets(self._tensors, targets, self._aliases)
        self._layout = dict(trainer.layout())
        cells = plan_source(trainer.rank, self._layout, targets, self._aliases)
        self._encoder = RankEncoder(self._tensors, self._layout, cells)
        self._tensors_hash = digest(
            json.dumps([[attrs.astuple(s) for s in self._tensors.values()], self._aliases]).encode()
        )
        self._published_key: str | None = None
        self._anchor_n = -1
        self._anchor_key: str | None = None
        self._num_attempts = 0
        self._checked_layouts: list[Mapping[str, ShardSpec]] = []
        self._keys_by_n: dict[int, list[str]] = {}

    @property
    def version(self) -> WeightVersion | None:
        """Return the last version that this publisher made visible."""
        return None if self._published_key is None else version_of_key(self._published_key)

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
                outcome = _Outcome(cells=part.cells, anchor_cells=part.anchor_cells, is_full=part.is_full)
        except BaseException as error:
            announce_failure(self._transport, attempt, self._trainer.rank, error)
            raise
        self._encoder.commit(shards)
        self._published_key = attempt.manifest_key
        if attempt.base_key is None or attempt.is_anchor_due:
            self._anchor_n = attempt.version.n
        self._retire(attempt.version.n)
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
        last = newest if is_own else self.version  # a store that has lost everything does not make versions go back
        version = WeightVersion(self._run, 0 if last is None else last.n + 1)
        return Attempt(
            version=version,
            number=number,
            pointer_before=found,
            base_key=found if is_own else None,
            is_anchor_due=anchor or (self._anchor_every > 0 and version.n % self._anchor_every == 0),
            deadline_s=deadline_s,
        )

    def _put_part(self, attempt: Attempt, shards: Mapping[str, Bits]) -> Part:
        self._encoder.check(shards)
        rank, is_full = self._trainer.rank, not self._encoder.has_base
        keys = self._keys_by_n.setdefault(attempt.version.n, [])
        keys += [attempt.part_key(rank), attempt.failure_key]
        changes = BlobWriter(self._transport, f"{attempt.prefix}/rank-{rank}", keys)
        cells = self._encoder.encode(shards, changes, is_full=False)
        changes.finish()
        anchor_cells = None
        if attempt.is_anchor_due and not is_full:
            whole = BlobWriter(self._transport, f"{attempt.prefix}/anchor-rank-{rank}", keys)
            anchor_cells = self._encoder.encode(shards, whole, is_full=True)
            whole.finish()
        part = Part(
            rank=rank,
            is_full=is_full,
            tensors_hash=self._tensors_hash,
            layout=self._layout,
            cells=cells,
            anchor_cells=anchor_cells,
        )
        self._transport.put(attempt.part_key(rank), part.to_bytes())
        return part

    def _make_visible(self, attempt: Attempt) -> _Outcome:
        """Rank 0: gather the parts, check them, write the manifests and move the pointer."""
        parts = gather_parts(self._transport, attempt, self._trainer.world_size)
        self._check_parts(parts)
        cells = tuple(cell for part in parts for cell in part.cells)
        is_full = all(part.is_full for part in parts)
        anchor_cells = None
        if is_full:
            anchor_key = attempt.manifest_key
        elif attempt.is_anchor_due:
            anchor_key, anchor_cells = attempt.anchor_key, _whole_cells(parts)
            self._put_manifest(attempt, anchor_key, anchor_cells, anchor_key=anchor_key, base_key=None)
        else:
            anchor_key = self._newest_anchor(attempt)
        base_key = None if is_full else attempt.base_key
        self._put_manifest(attempt, attempt.manifest_key, cells, anchor_key=anchor_key, base_key=base_key)
        self._move_pointer(attempt)
        self._anchor_key = anchor_key
        return _Outcome(cells=cells, anchor_cells=anchor_cells, is_full=is_full)

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
        return self._anchor_key or read_manifest(self._transport, attempt.base_key).anchor_key

    def _put_manifest(
        self, attempt: Attempt, key: str, cells: tuple[CellRecord, ...], *, anchor_key: str, base_key: str | None
    ) -> None:
        manifest = Manifest(
            version=attempt.version,
            base=None if base_key is None else version_of_key(base_key),
            base_key=base_key,
            anchor_key=anchor_key,
            tensors=tuple(self._tensors.values()),
            aliases=self._aliases,
            cells=cells,
        )
        self._keys_by_n[attempt.version.n].append(key)
        self._transport.put(key, manifest.to_bytes())

    def _move_pointer(self, attempt: Attempt) -> None:
        if not self._transport.compare_and_set(self._pointer, attempt.pointer_before, attempt.manifest_key):
            found = self._transport.read_pointer(self._pointer)
            if found == attempt.manifest_key:
                return
            message = f"pointer {self._pointer!r} moved to {found!r} while {attempt.version} was being published"
            raise VersionConflictError(message)

    def _retire(self, newest_n: int) -> None:
        """Delete this rank's blobs of versions that an anchor supersedes and that are older than the kept ones.

        The version is visible by now: what cannot be deleted is left for the next time.
        """
        old = [n for n in self._keys_by_n if n < self._anchor_n and n <= newest_n - self._keep]
        try:
            for n in old:
                self._transport.delete(self._keys_by_n[n])
                del self._keys_by_n[n]
        except TransportError as error:
            _logger.warning("versions before %d could not be deleted: %s", self._anchor_n, error)

    def _report(self, attempt: Attempt, outcome: _Outcome, publish_s: float) -> PublishReport:
        item_bytes = {name: bits_dtype(spec.dtype).itemsize for name, spec in self._tensors.items()}
        cells = outcome.cells
        return PublishReport(
            version=attempt.version,
            is_anchor=outcome.is_full or outcome.anchor_cells is not None,
            is_whole_model=self._trainer.rank == 0,
            bytes_dense=sum(cell.box.num_elements * item_bytes[cell.tensor] for cell in cells),
            bytes_sent=sum(cell.length_bytes for cell in cells),
            bytes_anchor=sum(cell.length_bytes for cell in outcome.anchor_cells or ()),
            num_changed=sum(cell.num_changed for cell in cells),
            num_elements=sum(cell.box.num_elements for cell in cells),
            codec_elements=count_codec_elements(cells),
            publish_s=publish_s,
        )


def _whole_cells(parts: Sequence[Part]) -> tuple[CellRecord, ...]:
    lacking = [part.rank for part in parts if part.full_cells is None]
    if lacking:
        message = f"ranks {lacking} put no full weights; pass the same anchor and anchor_every on every rank"
        raise TransferError(message)
    return tuple(cell for part in parts for cell in part.full_cells or ())

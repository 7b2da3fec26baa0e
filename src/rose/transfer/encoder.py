"""One trainer rank's side of the codec: compare with what was last published, encode, pack into blobs.

Invariants: the kept bits are those of the last *committed* version, or there are none; encoding never changes them; a
state checksum is taken over only when the cell's bits did not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.interfaces.transport import Transport
from rose.transfer import delta
from rose.transfer.layout import bits_dtype, slices_in
from rose.transfer.manifest import CellRecord
from rose.transfer.plan import Cell

MAX_BLOB_BYTES = 64 << 20


class BlobWriter:
    """Packs payloads for the same engine ranks into blobs of about ``MAX_BLOB_BYTES`` and puts them.

    Args:
        transport: Where they go.
        prefix: What their keys begin with.
        keys: Takes every key before it is written, so that a failed attempt can be cleaned up.
    """

    def __init__(self, transport: Transport, prefix: str, keys: list[str]) -> None:
        self._transport = transport
        self._prefix = prefix
        self._keys = keys
        self._num_blobs = 0
        self._open: dict[tuple[str, ...], tuple[str, list[bytes | memoryview], int]] = {}

    def add(self, targets: tuple[str, ...], payload: bytes | memoryview) -> tuple[str, int]:
        """Queue a payload; returns its blob's key and its offset there, in bytes."""
        if targets not in self._open:
            key = f"{self._prefix}/blob-{self._num_blobs}"
            self._num_blobs += 1
            self._keys.append(key)
            self._open[targets] = (key, [], 0)
        key, payloads, size = self._open[targets]
        payloads.append(payload)
        self._open[targets] = (key, payloads, size + len(payload))
        if size + len(payload) >= MAX_BLOB_BYTES:
            self._put(targets)
        return key, size

    def finish(self) -> None:
        """Put what is still queued."""
        for targets in list(self._open):
            self._put(targets)

    def _put(self, targets: tuple[str, ...]) -> None:
        key, payloads, _ = self._open.pop(targets)
        self._transport.put(key, payloads[0] if len(payloads) == 1 else b"".join(payloads))


class RankEncoder:
    """Encodes the cells of one rank against the bits of the last committed version.

    Args:
        tensors: Every tensor of the model.
        layout: The boxes this rank holds.
        cells: This rank's cells.
    """

    def __init__(
        self, tensors: Mapping[str, TensorSpec], layout: Mapping[str, ShardSpec], cells: Sequence[Cell]
    ) -> None:
        self._dtypes = {name: bits_dtype(tensors[name].dtype) for name in layout}
        self._layout = dict(layout)
        self._cells = tuple(cells)
        self._last: dict[str, delta.Bits] | None = None
        self._state_hashes: dict[Cell, str] = {}
        self._new_hashes: dict[Cell, str] = {}

    @property
    def has_base(self) -> bool:
        """Return whether there are committed bits to compare with."""
        return self._last is not None

    def check(self, shards: Mapping[str, delta.Bits]) -> None:
        """Check that the shards are what the layout promised.

        Raises:
            LayoutMismatchError: They are not; names every such tensor.
        """
        problems = [f"{name} is not in the layout" for name in shards if name not in self._layout]
        for name, box in self._layout.items():
            bits = shards.get(name)
            if bits is None:
                if box.num_elements:
                    problems.append(f"{name} is missing")
            elif (bits.shape, bits.dtype) != (box.shape, self._dtypes[name]):
                problems.append(f"{name} is {bits.dtype}{bits.shape}, promised {self._dtypes[name]}{box.shape}")
        if problems:
            message = f"the trainer's shards are not what its layout promised: {'; '.join(problems)}"
            raise LayoutMismatchError(message)

    def encode(self, shards: Mapping[str, delta.Bits], writer: BlobWriter, *, is_full: bool) -> tuple[CellRecord, ...]:
        """Encode every cell and hand the payloads to the writer.

        Args:
            shards: This rank's bits now; they must not change until ``commit``.
            writer: Takes the payloads.
            is_full: Send whole cells instead of changes. Without committed bits all cells are sent whole.
        """
        return tuple(self._encode_cell(cell, shards, writer, is_full=is_full) for cell in self._cells)

    def commit(self, shards: Mapping[str, delta.Bits]) -> None:
        """Take the bits as published."""
        if self._last is None:
            self._last = {name: bits.copy() for name, bits in shards.items()}
        else:
            for name, bits in shards.items():
                np.copyto(self._last[name], bits)
        self._state_hashes.update(self._new_hashes)
        self._new_hashes = {}

    def forget(self) -> None:
        """Drop the committed bits: what is published is no longer known to be them."""
        self._last = None
        self._state_hashes = {}

    def _encode_cell(
        self, cell: Cell, shards: Mapping[str, delta.Bits], writer: BlobWriter, *, is_full: bool
    ) -> CellRecord:
        index = slices_in(cell.box, self._layout[cell.tensor])
        new = np.ascontiguousarray(shards[cell.tensor][index])
        old = None if is_full or self._last is None else self._last[cell.tensor][index]
        encoded = delta.encode(new, old)
        record = CellRecord(
            tensor=cell.tensor,
            box=cell.box,
            codec=encoded.codec,
            blob="",
            offset_bytes=0,
            length_bytes=0,
            payload_hash="",
            state_hash=self._state_hash(cell, new, is_unchanged=encoded.codec == delta.NONE),
            num_changed=encoded.num_changed,
        )
        if encoded.codec == delta.NONE:
            return record
        key, offset = writer.add(cell.targets, encoded.payload)
        return attrs.evolve(
            record,
            blob=key,
            offset_bytes=offset,
            length_bytes=len(encoded.payload),
            payload_hash=record.state_hash if encoded.codec == delta.DENSE else delta.digest(encoded.payload),
        )

    def _state_hash(self, cell: Cell, new: delta.Bits, *, is_unchanged: bool) -> str:
        known = self._state_hashes.get(cell)
        if not is_unchanged or known is None:
            known = delta.digest(new)
        self._new_hashes[cell] = known
        return known

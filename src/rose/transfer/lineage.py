"""From a version to what it was made of: its manifest, the versions it builds on, and the checksum of every tensor's bits.

The checksums are those that the trainer published (``rose.transfer.manifest``) and that engines verify before they activate, so
they say which bits made a token that carries the version. Blocking, as transports are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from rose.errors import BlobNotFoundError
from rose.interfaces.trainer import TensorSpec
from rose.interfaces.transport import Transport
from rose.transfer.kernels import Sum
from rose.transfer.manifest import tensor_sums
from rose.transfer.relay import POINTER, ManifestReader, keys_back, read_map, version_of_key
from rose.types import WeightVersion

_NUM_KEPT = 256


@attrs.frozen(kw_only=True)
class Lineage:
    """What one version was made of.

    Attributes:
        version: The version.
        manifest_key: Where its manifest is.
        chain: The versions that lead to it, from full weights on, itself the last; empty where that start was deleted.
        sent_bytes: Size of what was sent for it.
        num_changed: Elements that were sent as changed.
        tensors: Every tensor, in the trainer's order.
        checksums: Tensor -> the checksum of its whole state, 32 hex digits.
    """

    version: WeightVersion
    manifest_key: str
    chain: tuple[WeightVersion, ...]
    sent_bytes: int
    num_changed: int
    tensors: tuple[TensorSpec, ...]
    checksums: Mapping[str, str]


def sum_text(total: Sum) -> str:
    """Return a tensor's sum as text: its two words of 64 bits in hex, the first one first."""
    return "".join(f"{word & (1 << 64) - 1:016x}" for word in total)


class LineageReader:
    """Looks versions up in a store. Manifests are read once, from the newest one back, and only as far as is asked for.

    Args:
        transport: Where the versions were published.
        pointer: Name of the publisher's pointer.
    """

    def __init__(self, transport: Transport, *, pointer: str = POINTER) -> None:
        self._transport, self._pointer = transport, pointer
        self._reader = ManifestReader(transport, num_kept=_NUM_KEPT)
        self._keys: dict[WeightVersion, str] = {}
        self._back: Iterator[str] | None = None

    def trace(self, version: WeightVersion) -> Lineage:
        """Return what a version was made of.

        Raises:
            BlobNotFoundError: It was deleted by retention, or was never published here; says which.
            CorruptUpdateError: Its manifest is damaged.
        """
        key = self._find(version)
        if key is None:
            raise BlobNotFoundError(self._why_not(version))
        manifest = self._reader.read(key)
        cell_map = read_map(self._transport, manifest.map_key)
        sums = tensor_sums(cell_map, manifest.columns)
        return Lineage(
            version=version,
            manifest_key=key,
            chain=self._chain(version, version_of_key(manifest.anchor_key)),
            sent_bytes=manifest.bytes_sent,
            num_changed=manifest.num_changed,
            tensors=cell_map.tensors,
            checksums={name: sum_text(total) for name, total in sums.items()},
        )

    def _find(self, version: WeightVersion) -> str | None:
        """Return the key of a version's manifest, walking back as far as that takes."""
        while version not in self._keys:
            key = next(self._walk(), None)
            if key is None:
                return None
            found = version_of_key(key)
            self._keys[found] = key
            if found.run == version.run and found < version:
                break  # further back are only older ones
        return self._keys.get(version)

    def _walk(self) -> Iterator[str]:
        if self._back is None:
            key = self._transport.read_pointer(self._pointer)
            self._back = iter(()) if key is None else keys_back(self._reader.read, key)
        return self._back

    def _chain(self, version: WeightVersion, anchor: WeightVersion) -> tuple[WeightVersion, ...]:
        if self._find(anchor) is None:
            return ()
        return tuple(sorted(each for each in self._keys if each.run == version.run and anchor <= each <= version))

    def _why_not(self, version: WeightVersion) -> str:
        key = self._transport.read_pointer(self._pointer)
        if key is None:
            return f"nothing is published under pointer {self._pointer!r}, so there is nothing to lead {version} to"
        newest = version_of_key(key)
        if newest.run != version.run:
            return f"the store holds run {newest.run!r} now; what run {version.run!r} published was deleted when that one began, or is elsewhere"
        if newest < version:
            return f"version {version} was never published here: the newest is {newest}"
        kept = ", ".join(str(each) for each in sorted(each for each in self._keys if each.run == version.run))
        return (
            f"the manifest of version {version} was deleted by retention; kept are {kept} (RetentionConfig says how many are kept; "
            "`rose export` writes a version to disk while it is there)"
        )

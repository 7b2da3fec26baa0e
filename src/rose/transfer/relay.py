"""Reading what is published: the pointer, the manifests, and the cheapest way for an engine to catch up."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TypeVar

from rose.errors import BlobNotFoundError, CorruptUpdateError, TransportError
from rose.interfaces.transport import Payload, SupportsInvalidate, Transport
from rose.transfer.blobs import checksum_of
from rose.transfer.cells import CellMap
from rose.transfer.delta import digest
from rose.transfer.manifest import Manifest
from rose.types import WeightUpdate, WeightVersion

POINTER = "current"

_Record = TypeVar("_Record", Manifest, CellMap)


def read_manifest(transport: Transport, key: str) -> Manifest:
    """Fetch and check one manifest. Blocking.

    Raises:
        BlobNotFoundError: It is not, or no longer, there.
        CorruptUpdateError: It is damaged, or another version's.
    """

    def parse(payload: Payload) -> Manifest:
        manifest = Manifest.from_bytes(payload)
        _check_place(manifest, key)
        return manifest

    return _read(transport, key, parse)


def read_map(transport: Transport, key: str) -> CellMap:
    """Fetch and check a cell map. Blocking.

    Raises:
        BlobNotFoundError: It is not, or no longer, there.
        CorruptUpdateError: It is damaged.
    """
    return _read(transport, key, CellMap.from_bytes)


def _read(transport: Transport, key: str, parse: Callable[[Payload], _Record]) -> _Record:
    """Read a record; a damaged copy is read once more from where it came."""
    payload = transport.get(key)
    try:
        return parse(payload)
    except CorruptUpdateError:
        if not isinstance(transport, SupportsInvalidate):
            raise
        transport.invalidate(key, digest(payload))
    return parse(transport.get(key))


def current_version(transport: Transport, *, pointer: str = POINTER) -> WeightVersion | None:
    """Return the newest published version, or ``None`` before the first. Blocking."""
    key = transport.read_pointer(pointer)
    return None if key is None else version_of_key(key)


def manifest_key(version: WeightVersion, attempt: int) -> str:
    """Return the key under which the manifest of one attempt at a version is put."""
    return f"{version.run}/{version.n}/{attempt}/manifest"


def map_key(run: str, content: Payload) -> str:
    """Return the key under which a cell map is put: its content names it."""
    return f"{run}/cells/{checksum_of(content)}"


def announce_pointer(transport: Transport, pointer: str, prefix: str, world_size: int) -> None:
    """Say which attempt begins, so that relays may fetch its blobs while they are made; best effort. Blocking."""
    name = f"{pointer}.open"
    with contextlib.suppress(TransportError):
        transport.compare_and_set(name, transport.read_pointer(name), f"{prefix} {world_size}")


def version_of_key(key: str) -> WeightVersion:
    """Return the version that a manifest key names.

    Raises:
        CorruptUpdateError: It is no manifest key.
    """
    try:
        run, n, _, _ = key.split("/")
        return WeightVersion(run, int(n))
    except ValueError as error:
        message = f"{key[:200]!r} is no key of a manifest (run/n/attempt/name); does something else move this pointer?"
        raise CorruptUpdateError(message) from error


def _check_place(manifest: Manifest, key: str) -> None:
    """Check that a manifest is that of its key and starts from an earlier version, so that a walk back along bases ends."""
    version, base, base_key = manifest.version, manifest.base, manifest.base_key
    is_before = base is None or (base.run == version.run and base.n < version.n)
    is_named = base_key is None or version_of_key(base_key) == base
    if version != version_of_key(key) or not (is_before and is_named):
        message = f"the manifest under {key!r} says {version} from {base} at {base_key!r}, which cannot be there"
        raise CorruptUpdateError(message)


class ManifestReader:
    """Manifests of a transport by key, the newest few kept: keys are written once, so they cannot change. Thread-safe."""

    def __init__(self, transport: Transport, *, num_kept: int = 64) -> None:
        self.transport = transport
        self._read = lru_cache(maxsize=num_kept)(self._fetch)

    def read(self, key: str) -> Manifest:
        """Do what ``read_manifest`` does, once a key."""
        return self._read(key)

    def _fetch(self, key: str) -> Manifest:
        return read_manifest(self.transport, key)


def keys_back(read: Callable[[str], Manifest], key: str) -> Iterator[str]:
    """Yield the keys of the retained versions, newest first."""
    found: str | None = key
    while found is not None:
        try:
            manifest = read(found)
        except BlobNotFoundError:
            return
        yield found
        found = manifest.base_key


def plan_update(
    transport: Transport, known: WeightVersion | None, *, pointer: str = POINTER, reader: ManifestReader | None = None
) -> WeightUpdate | None:
    """Choose how an engine reaches the newest version: by deltas from ``known``, or by an anchor and the deltas after it.

    Whichever is fewer bytes; an engine of another run, or one that fell behind the retained deltas, gets the anchor.
    Blocking.

    Args:
        transport: Where the versions are published.
        known: The version the engine acknowledged last.
        pointer: Name of the pointer that the publisher moves.
        reader: Keeps manifests between calls.

    Returns:
        The update, or ``None`` when nothing is published or the engine is current.

    Raises:
        BlobNotFoundError: A version was retired during the look-up, or what leads on is gone or damaged; ask again.
        CorruptUpdateError: The newest manifest itself is damaged; the next version will do.
    """
    key = transport.read_pointer(pointer)
    if key is None or version_of_key(key) == known:
        return None
    read = (reader or ManifestReader(transport)).read
    newest = read(key)
    anchor = newest if newest.is_anchor else _read_if_sound(read, newest.anchor_key)
    start = known if known is not None and known.run == newest.version.run else None
    starts = [version for version in (start, None if anchor is None else anchor.version) if version is not None]
    oldest_n = min((version.n for version in starts), default=newest.version.n)
    deltas = _deltas_back_to(oldest_n, read, key, newest)
    paths = []
    if start is not None and (tail := _after(start, deltas)):
        paths.append((sum(size for _, size in tail.values()), tuple(tail)))
    if anchor is not None and ((tail := _after(anchor.version, deltas)) or anchor.version == newest.version):
        paths.append((anchor.bytes_sent + sum(size for _, size in tail.values()), (newest.anchor_key, *tail)))
    if not paths:
        message = (
            f"what leads from {known} to {newest.version} (anchor {newest.anchor_key!r} and the deltas after it) was "
            "retired during the look-up, or is damaged; ask again"
        )
        raise BlobNotFoundError(message)
    return WeightUpdate(target=newest.version, manifest_keys=min(paths)[1], address=transport.address())


def _deltas_back_to(
    oldest_n: int, read: Callable[[str], Manifest], key: str, newest: Manifest
) -> dict[str, tuple[WeightVersion, int]]:
    """Return manifest key -> (base, bytes) of the deltas after version ``oldest_n``, oldest first, as far as retained."""
    found: dict[str, tuple[WeightVersion, int]] = {}
    manifest = newest
    while manifest.base is not None and manifest.base_key is not None:
        found[key] = (manifest.base, manifest.bytes_sent)
        if manifest.base.n <= oldest_n:
            break
        key = manifest.base_key
        before = _read_if_sound(read, key)
        if before is None:
            break
        manifest = before
    return dict(reversed(found.items()))


def _read_if_sound(read: Callable[[str], Manifest], key: str) -> Manifest | None:
    """Return a manifest that may be dispensable, or ``None`` when it is gone or damaged."""
    try:
        return read(key)
    except (BlobNotFoundError, CorruptUpdateError):
        return None


def _after(
    start: WeightVersion | None, deltas: dict[str, tuple[WeightVersion, int]]
) -> dict[str, tuple[WeightVersion, int]]:
    """Return the deltas that lead on from ``start``; empty when they do not reach back to it."""
    keys = list(deltas)
    first = next((i for i, key in enumerate(keys) if deltas[key][0] == start), len(keys))
    return {key: deltas[key] for key in keys[first:]}

"""Reading what is published: the pointer, the manifests, and the cheapest way for an engine to catch up."""

from __future__ import annotations

from rose.errors import BlobNotFoundError
from rose.interfaces.transport import Transport
from rose.transfer.manifest import Manifest
from rose.types import WeightUpdate, WeightVersion

POINTER = "current"


def read_manifest(transport: Transport, key: str) -> Manifest:
    """Fetch and check one manifest. Blocking.

    Raises:
        BlobNotFoundError: It is not, or no longer, there.
        CorruptUpdateError: It is damaged.
    """
    return Manifest.from_bytes(transport.get(key))


def current_version(transport: Transport, *, pointer: str = POINTER) -> WeightVersion | None:
    """Return the newest published version, or ``None`` before the first. Blocking."""
    key = transport.read_pointer(pointer)
    return None if key is None else version_of_key(key)


def manifest_key(version: WeightVersion, attempt: int) -> str:
    """Return the key under which the manifest of one attempt at a version is put."""
    return f"{version.run}/{version.n}/{attempt}/manifest"


def version_of_key(key: str) -> WeightVersion:
    """Return the version that a manifest key names."""
    run, n, _, _ = key.split("/")
    return WeightVersion(run, int(n))


def plan_update(transport: Transport, known: WeightVersion | None, *, pointer: str = POINTER) -> WeightUpdate | None:
    """Choose how an engine reaches the newest version: by deltas from ``known``, or by an anchor and the deltas after it.

    Whichever is fewer bytes; an engine of another run, or one that fell behind the retained deltas, gets the anchor.
    Blocking.

    Args:
        transport: Where the versions are published.
        known: The version the engine acknowledged last.
        pointer: Name of the pointer that the publisher moves.

    Returns:
        The update, or ``None`` when nothing is published or the engine is current.

    Raises:
        BlobNotFoundError: A version was retired during the look-up; ask again.
    """
    key = transport.read_pointer(pointer)
    if key is None or version_of_key(key) == known:
        return None
    newest = read_manifest(transport, key)
    anchor = newest if newest.is_anchor else read_manifest(transport, newest.anchor_key)
    is_same_run = known is not None and known.run == newest.version.run
    oldest_n = min(anchor.version.n, known.n) if known is not None and is_same_run else anchor.version.n
    deltas = _deltas_back_to(oldest_n, transport, key, newest)
    paths = []
    if is_same_run and (tail := _after(known, deltas)):
        paths.append((sum(size for _, size in tail.values()), tuple(tail)))
    if (tail := _after(anchor.version, deltas)) or anchor.version == newest.version:
        paths.append((anchor.bytes_sent + sum(size for _, size in tail.values()), (newest.anchor_key, *tail)))
    if not paths:
        message = f"deltas between {anchor.version} and {newest.version} were retired during the look-up; ask again"
        raise BlobNotFoundError(message)
    return WeightUpdate(target=newest.version, manifest_keys=min(paths)[1], address=transport.address())


def _deltas_back_to(
    oldest_n: int, transport: Transport, key: str, newest: Manifest
) -> dict[str, tuple[WeightVersion, int]]:
    """Return manifest key -> (base, bytes) of the deltas after version ``oldest_n``, oldest first, as far as retained."""
    found: dict[str, tuple[WeightVersion, int]] = {}
    manifest = newest
    while manifest.base is not None and manifest.base_key is not None:
        found[key] = (manifest.base, manifest.bytes_sent)
        if manifest.base.n <= oldest_n:
            break
        key = manifest.base_key
        try:
            manifest = read_manifest(transport, key)
        except BlobNotFoundError:
            break
    return dict(reversed(found.items()))


def _after(
    start: WeightVersion | None, deltas: dict[str, tuple[WeightVersion, int]]
) -> dict[str, tuple[WeightVersion, int]]:
    """Return the deltas that lead on from ``start``; empty when they do not reach back to it."""
    keys = list(deltas)
    first = next((i for i, key in enumerate(keys) if deltas[key][0] == start), len(keys))
    return {key: deltas[key] for key in keys[first:]}

"""Digests of a published version, as engines give them of their live weights: xxh3_128 of each tensor's bytes, by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import xxhash

from rose.errors import LayoutMismatchError
from rose.interfaces import Transport
from rose.transfer.export import export_version
from rose.transfer.layout import TargetLayout
from rose.types import WeightVersion


def published_sums(
    store: Transport, folder: Path, layout: TargetLayout, version: WeightVersion | None = None
) -> tuple[WeightVersion, dict[str, str]]:
    """Rebuild a version from the store, checked against its manifest, and digest the tensors that an engine holds. Blocking.

    Args:
        store: Where it is published.
        folder: To make, for the tensors.
        layout: What an engine holds, and which names are tied.
        version: Which; the newest by default.

    Raises:
        BlobNotFoundError: Nothing is published, or that version is not there.
        LayoutMismatchError: A tensor that an engine holds is not published.
    """
    report = export_version(store, folder, version=version)
    found: dict[str, str] = {}
    for name in report.files:
        found |= file_sums(folder / name)
    return report.version, held_sums(found, layout)


def file_sums(path: Path) -> dict[str, str]:
    """Return tensor name -> digest, of a file in the format of safetensors."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    start = 8 + length
    entries = json.loads(raw[8:start])
    entries.pop("__metadata__", None)
    digests = {}
    for name, entry in entries.items():
        first, end = entry["data_offsets"]
        digests[name] = xxhash.xxh3_128_hexdigest(memoryview(raw)[start + first : start + end])
    return digests


def held_sums(found: Mapping[str, str], layout: TargetLayout) -> dict[str, str]:
    """Return the digests of what an engine holds, by its names; a tied tensor may be published under either name.

    Raises:
        LayoutMismatchError: One was published under neither.
    """
    by_held: dict[str, str] = {held: alias for alias, held in layout.aliases.items()}
    held: dict[str, str] = {}
    for spec in layout.tensors:
        digest = found.get(spec.name, found.get(by_held.get(spec.name, spec.name)))
        if digest is None:
            message = f"tensor {spec.name!r}, which engines hold, was not published"
            raise LayoutMismatchError(message)
        held[spec.name] = digest
    return held

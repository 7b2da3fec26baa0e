"""A published version as a checkpoint: sharded safetensors under checkpoint names, which any engine or framework loads.

Memory stays bounded by two files and the blobs under way: tensors are fetched, verified and written a file at a time, and each
file is summed again as it lies on disk. The index comes last, so that a folder with an index is whole.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from rose.errors import BlobNotFoundError, ConfigError, CorruptUpdateError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.interfaces.transport import Transport
from rose.transfer import kernels
from rose.transfer.delta import as_rows, byte_view
from rose.transfer.kernels import Sum
from rose.transfer.layout import bits_dtype, num_bytes, rows_of, whole_box
from rose.transfer.manifest import Manifest, tensor_sums
from rose.transfer.relay import POINTER, ManifestReader, keys_back, plan_update, read_map, version_of_key
from rose.transfer.sink import ArraySink
from rose.transfer.subscriber import Subscriber
from rose.types import WeightUpdate, WeightVersion

INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 2 << 30

_SAFETENSORS_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "float32": "F32",
    "int32": "I32",
    "float64": "F64",
    "int64": "I64",
}
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
_ALIGNMENT = 8


@attrs.frozen(kw_only=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        version: The version.
        files: Names of the weight files, in order.
        copied: Names of the files taken from the other checkpoint.
        num_tensors: Tensors.
        num_bytes: Of their bits.
        fetched_bytes: Read from the transport.
    """

    version: WeightVersion
    files: tuple[str, ...]
    copied: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    fetched_bytes: int


def export_version(
    transport: Transport,
    out: Path,
    *,
    version: WeightVersion | None = None,
    config_from: Path | None = None,
    pointer: str = POINTER,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> ExportReport:
    """Write a version as a checkpoint. Blocking.

    Args:
        transport: Where it is published.
        out: Folder to make; it must not hold weights yet.
        version: Which; the newest by default. An older one must still be retained.
        config_from: A checkpoint whose other files (config, tokenizer) are copied.
        pointer: Name of the publisher's pointer.
        max_file_bytes: Size of a weight file; a larger tensor has a file of its own.

    Raises:
        ConfigError: The folders cannot be used.
        BlobNotFoundError: The version is not, or no longer, there.
        CorruptUpdateError: What was fetched or written is damaged.
    """
    _check_out(out)
    if config_from is not None and config_from.resolve() == out.resolve():
        message = f"{out} is the folder that the other files come from; choose another one for the checkpoint"
        raise ConfigError(message)
    extra = () if config_from is None else _config_files(config_from)
    update = find_update(transport, version, pointer=pointer)
    reader = ManifestReader(transport)
    manifest = reader.read(update.manifest_keys[-1])
    cell_map = read_map(transport, manifest.map_key)
    sums = tensor_sums(cell_map, manifest.columns)
    groups = list(_groups(cell_map.tensors, max_file_bytes))
    names = tuple(f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups)))
    out.mkdir(parents=True, exist_ok=True)
    fetched_bytes = 0
    for name, specs in zip(names, groups, strict=True):
        sink, num_fetched = _fetch(transport, update, cell_map.tensors, specs)
        fetched_bytes += num_fetched
        _write_file(out / name, specs, sink, {"format": "pt", "rose_version": str(update.target)})
        _check_file(out / name, specs, sums)
    for path in extra:
        shutil.copyfile(path, out / path.name)
    total_bytes = sum(num_bytes(spec) for spec in cell_map.tensors)
    _write_index(out, dict(zip(names, groups, strict=True)), total_bytes)
    return ExportReport(
        version=update.target,
        files=names,
        copied=tuple(path.name for path in extra),
        num_tensors=len(cell_map.tensors),
        num_bytes=total_bytes,
        fetched_bytes=fetched_bytes,
    )


def find_update(transport: Transport, version: WeightVersion | None, *, pointer: str = POINTER) -> WeightUpdate:
    """Return how to make a retained version from nothing: its anchor and the changes since. Blocking.

    Raises:
        BlobNotFoundError: Nothing is published, or that version is not there; says which are.
    """
    key = transport.read_pointer(pointer)
    if key is None:
        message = f"nothing is published under pointer {pointer!r}"
        raise BlobNotFoundError(message)
    if version is None or version_of_key(key) == version:
        newest = plan_update(transport, None, pointer=pointer)
        assert newest is not None  # noqa: S101 - the pointer names it
        return newest
    read = ManifestReader(transport).read
    keys = [each for each in keys_back(read, key) if _has_anchor(read, each)]
    place = next((i for i, each in enumerate(keys) if version_of_key(each) == version), None)
    if place is None:
        retained = ", ".join(str(version_of_key(each)) for each in reversed(keys))
        message = f"version {version} is not there; retained are {retained}"
        raise BlobNotFoundError(message)
    anchor_key = read(keys[place]).anchor_key
    chain = [each for each in keys[place:] if version_of_key(each).n > version_of_key(anchor_key).n]
    return WeightUpdate(target=version, manifest_keys=(anchor_key, *reversed(chain)), address=transport.address())


def _has_anchor(read: Callable[[str], Manifest], key: str) -> bool:
    try:
        read(read(key).anchor_key)
    except BlobNotFoundError:
        return False
    return True


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        message = f"{out} is no folder; choose another one for the checkpoint"
        raise ConfigError(message)
    found = sorted(path.name for path in out.glob("*.safetensors*")) if out.exists() else []
    if found:
        message = f"{out} holds {found[0]} already; choose an empty folder for the checkpoint"
        raise ConfigError(message)


def _config_files(folder: Path) -> tuple[Path, ...]:
    """Return the files of a checkpoint that are no weights."""
    if not (folder / "config.json").is_file():
        message = f"{folder} has no config.json; name the folder of the model's checkpoint"
        raise ConfigError(message)
    return tuple(
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES and not path.name.endswith(".index.json")
    )


def _groups(tensors: Sequence[TensorSpec], max_file_bytes: int) -> Iterator[list[TensorSpec]]:
    """Yield the tensors of one file after the other, in the trainer's order."""
    group: list[TensorSpec] = []
    size = 0
    for spec in tensors:
        if group and size + num_bytes(spec) > max_file_bytes:
            yield group
            group, size = [], 0
        group.append(spec)
        size += num_bytes(spec)
    if group:
        yield group


def _fetch(
    transport: Transport, update: WeightUpdate, tensors: Sequence[TensorSpec], wanted: Sequence[TensorSpec]
) -> tuple[ArraySink, int]:
    """Return the bits of some tensors at the update's target, and how many bytes were read for them."""
    boxes: dict[str, Sequence[ShardSpec]] = {spec.name: (whole_box(spec.shape),) for spec in wanted}
    sink = ArraySink({spec.name: spec for spec in tensors}, boxes)
    subscriber = Subscriber(sink)
    subscriber.stage(update, transport)
    return sink, subscriber.activate(verify=False).fetched_bytes


def _write_file(path: Path, specs: Sequence[TensorSpec], sink: ArraySink, metadata: Mapping[str, str]) -> None:
    """Write a file under another name first, so that a half-written one is never taken for whole."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for spec in specs:
        end = start + num_bytes(spec)
        header[spec.name] = {
            "dtype": _SAFETENSORS_DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for spec in specs:
            if num_bytes(spec):
                file.write(byte_view(sink.array(spec.name)))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def _check_file(path: Path, specs: Sequence[TensorSpec], sums: Mapping[str, Sum]) -> None:
    """Sum every tensor as it lies in the file and compare with what the trainer published."""
    loops = kernels.load()
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(struct.unpack("<Q", raw[:8].tobytes())[0])
    wrong = []
    for spec in specs:
        end = start + num_bytes(spec)
        if end > start:
            bits = raw[start:end].view(bits_dtype(spec.dtype)).reshape(spec.shape)
            rows = rows_of(whole_box(spec.shape), spec.shape)
            if loops.state_sum(as_rows(bits, rows), rows) != sums[spec.name]:
                wrong.append(spec.name)
        start = end
    if wrong:
        message = f"{path} does not hold the published bits of {', '.join(wrong)}; is the disk full or damaged?"
        raise CorruptUpdateError(message)


def _write_index(out: Path, files: Mapping[str, Sequence[TensorSpec]], total_bytes: int) -> None:
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {spec.name: name for name, specs in files.items() for spec in specs},
    }
    partial = out / f".{INDEX}.partial"
    partial.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    partial.rename(out / INDEX)

"""Speed and size of the weight delta codec beside its peers, on bfloat16 weights that move by one ulp.

Run with ``python benchmarks/codec.py [--out FILE]``; under a minute on one core. ``benchmarks/README.md`` says what the
figures mean. Every codec's result is checked bit for bit before it is timed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rose.transfer import delta

Bits = np.ndarray[Any, np.dtype[Any]]
Payload = tuple[Any, Any]  # bytes-like, and what the receiver learns from the manifest

FRACTIONS = (0.001, 0.01, 0.1, 0.6, 1.0)
SEED = 1
MIN_RUNS = 5
MIN_TIME_S = 0.2

ONE_LARGE = ((1 << 15, 1 << 10),)  # 64 MiB
_LAYER = (
    *((128,), (128, 128), (64, 128), (64, 128), (32,), (32,), (128, 128)),
    *((128,), (256, 128), (256, 128), (128, 256)),
)
MANY_SMALL = (*_LAYER, *_LAYER, (128,))  # 0.6 MB
DATA = {"one tensor of 64 MiB": ONE_LARGE, "0.6 MB in 23 tensors": MANY_SMALL}


@attrs.frozen(kw_only=True)
class Codec:
    """One way to send a tensor.

    Attributes:
        encode: ``(new, old, staging)`` to a payload; compares too. ``staging`` is a ready buffer of the tensor's size.
        apply: ``(payload, target)``: turns the old bits in ``target`` into the new ones.
    """

    encode: Callable[[Bits, Bits, Bits], Payload]
    apply: Callable[[Payload, Bits], None]


def _rose_encode(new: Bits, old: Bits, _: Bits) -> Payload:
    cell = delta.encode(new, old)
    return cell.payload, cell


def _rose_apply(payload: Payload, target: Bits) -> None:
    content, cell = payload
    if cell.codec == delta.NONE:
        return
    change = delta.decode(
        content, codec=cell.codec, dtype=target.dtype, shape=target.shape, num_changed=cell.num_changed
    )
    if isinstance(change, delta.Dense):
        np.copyto(target, change.bits)
    else:
        target.reshape(-1)[change.positions] = change.values


def _coo_encode(new: Bits, old: Bits, _: Bits) -> Payload:
    positions = np.flatnonzero(new != old)
    return b"".join([positions.astype(np.int32).data, new.reshape(-1)[positions].data]), None


def _coo_apply(payload: Payload, target: Bits) -> None:
    content = payload[0]
    num_changed = len(content) // (4 + target.itemsize)
    positions = np.frombuffer(content, dtype=np.int32, count=num_changed)
    target.reshape(-1)[positions] = np.frombuffer(content, dtype=target.dtype, offset=4 * num_changed)


def _dense_encode(new: Bits, _: Bits, staging: Bits) -> Payload:
    np.copyto(staging, new)
    return delta.byte_view(staging), None


def _dense_apply(payload: Payload, target: Bits) -> None:
    np.copyto(target, np.frombuffer(payload[0], dtype=target.dtype).reshape(target.shape))


def _zstd_codec() -> Codec:
    import zstandard  # noqa: PLC0415 - an optional peer

    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def encode(new: Bits, old: Bits, staging: Bits) -> Payload:
        np.bitwise_xor(new, old, out=staging)
        return compressor.compress(delta.byte_view(staging)), None

    def apply(payload: Payload, target: Bits) -> None:
        changed = np.frombuffer(decompressor.decompress(payload[0]), dtype=target.dtype)
        np.bitwise_xor(target, changed.reshape(target.shape), out=target)

    return Codec(encode=encode, apply=apply)


def codecs() -> dict[str, Codec]:
    """Return ROSE's codec and the peers that are installed, by name."""
    found = {
        "rose": Codec(encode=_rose_encode, apply=_rose_apply),
        "coo_int32": Codec(encode=_coo_encode, apply=_coo_apply),
        "dense_copy": Codec(encode=_dense_encode, apply=_dense_apply),
    }
    if importlib.util.find_spec("zstandard") is not None:
        found["xor_zstd1"] = _zstd_codec()
    return found


def weights(rng: np.random.Generator, shape: tuple[int, ...]) -> Bits:
    """Return the bfloat16 bits of normal weights of deviation 0.02, rounded to the nearest."""
    floats = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
    return ((floats.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def step(rng: np.random.Generator, old: Bits, fraction: float) -> Bits:
    """Return the bits after a step that moves a random ``fraction`` of the weights one ulp up or down."""
    is_changed = rng.random(old.shape, dtype=np.float32) < fraction
    ulp = 2 * rng.integers(2, size=old.shape, dtype=np.uint16) - 1  # 1 or, wrapping, -1
    new: Bits = old + np.where(is_changed, ulp, np.uint16(0))
    return new


def seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of ``work``, after one run to warm up: other load on the machine only adds."""
    work()
    times: list[float] = []
    while len(times) < MIN_RUNS or sum(times) < MIN_TIME_S:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(codec: Codec, new: Sequence[Bits], old: Sequence[Bits], num_changed: int) -> dict[str, float]:
    """Check and time one codec on the tensors of one model."""
    staging = [np.zeros_like(bits) for bits in new]

    def encode() -> list[Payload]:
        return [codec.encode(*tensors) for tensors in zip(new, old, staging, strict=True)]

    def apply() -> None:
        for payload, target in zip(payloads, targets, strict=True):
            codec.apply(payload, target)

    payloads, targets = encode(), [bits.copy() for bits in old]
    apply()
    if not all(np.array_equal(target, bits) for target, bits in zip(targets, new, strict=True)):
        message = "the receiver's bits differ from the sender's"
        raise SystemExit(message)
    num_bytes = sum(len(content) for content, _ in payloads)
    dense_bytes = sum(bits.nbytes for bits in new)
    return {
        "num_bytes": num_bytes,
        "share_of_dense": num_bytes / dense_bytes,
        "bytes_per_changed_element": num_bytes / num_changed,
        "encode_gb_per_s": dense_bytes / seconds(encode) / 1e9,
        "decode_gb_per_s": dense_bytes / seconds(apply) / 1e9,
    }


def results() -> Iterator[dict[str, Any]]:
    """Measure every codec on every kind of data at every fraction."""
    for data, shapes in DATA.items():
        rng = np.random.default_rng(SEED)
        old = [weights(rng, shape) for shape in shapes]
        for fraction in FRACTIONS:
            new = [step(rng, bits, fraction) for bits in old]
            num_changed = sum(int(np.count_nonzero(a != b)) for a, b in zip(new, old, strict=True))
            found = {name: measure(codec, new, old, num_changed) for name, codec in codecs().items()}
            yield {
                "data": data,
                "num_tensors": len(new),
                "dense_bytes": sum(bits.nbytes for bits in new),
                "changed_fraction": fraction,
                "num_changed": num_changed,
                "codecs": found,
                "rose_over": {name: ratios(found["rose"], peer) for name, peer in found.items() if name != "rose"},
            }


def ratios(ours: dict[str, float], peer: dict[str, float]) -> dict[str, float]:
    """Return our figures divided by the peer's."""
    return {key: ours[key] / peer[key] for key in ("num_bytes", "encode_gb_per_s", "decode_gb_per_s")}


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_1min": os.getloadavg()[0],
    }


def commit() -> str:
    """Return the commit that was measured, with ``-dirty`` where the codec's source differs from it."""
    source = Path(delta.__file__)
    git = ["git", "-C", str(source.parent)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run([*git, "status", "--porcelain", source.name], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description="Speed and size of the delta codec beside its peers, as JSON.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there too")
    arguments = parser.parse_args()
    start = time.perf_counter()
    names = ("rose-rl", "numpy", *(["zstandard"] if "xor_zstd1" in codecs() else []))
    report = {
        "benchmark": "codec",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in names}},
        "num_threads": 1,
        "results": list(results()),
    }
    report["wall_s"] = round(time.perf_counter() - start, 1)
    text = json.dumps(_rounded(report), indent=2)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()

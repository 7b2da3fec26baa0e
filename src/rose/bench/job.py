"""The parts that a measured sync is made of: engine layouts, a trainer of drawn bits, engines of plain arrays."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rose.bench.model_shapes import Shapes
from rose.errors import ConfigError, LayoutMismatchError, RoseError
from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.interfaces.transport import Transport
from rose.transfer.cluster_wait import wait_for_blob
from rose.transfer.engine_tables import table_layout
from rose.transfer.layout import TargetLayout, slices_in, split_evenly, whole_box
from rose.transfer.sink import ArraySink
from rose.transfer.subscriber import Subscriber
from rose.types import TransportAddress, WeightVersion

Array = np.ndarray[Any, np.dtype[Any]]
Bits = Mapping[str, Array]

RUN = "bench"
_TARGET = re.compile(r"tp([1-9]\d{0,2})(?:x([1-9]\d{0,2}))?")
_MAX_TP, _MAX_ENGINES = 64, 64
_DEFAULT_TPS = (4, 2, 1)


@attrs.frozen(kw_only=True)
class Target:
    """Engines of one kind: how many ranks each has (tensor parallel), and how many engines there are."""

    tp: int
    num_engines: int = 1

    def __str__(self) -> str:
        """Return the form that ``parse_targets`` reads."""
        return f"tp{self.tp}" + (f"x{self.num_engines}" if self.num_engines > 1 else "")


def parse_targets(text: str) -> tuple[Target, ...]:
    """Read ``tp4,tp8x2``.

    Raises:
        ConfigError: It is not of that form.
    """
    targets = []
    for part in text.split(","):
        found = _TARGET.fullmatch(part.strip())
        tp, num_engines = (int(number or 1) for number in found.groups()) if found is not None else (0, 0)
        if not (1 <= tp <= _MAX_TP and num_engines <= _MAX_ENGINES):
            message = (
                f"--targets: {part!r} is no target; write tpK or tpKxM, such as tp4,tp8x2, "
                f"with K from 1 to {_MAX_TP} and M from 1 to {_MAX_ENGINES}"
            )
            raise ConfigError(message)
        targets.append(Target(tp=tp, num_engines=num_engines))
    return tuple(targets)


def layouts_of(shapes: Shapes, targets: Sequence[Target]) -> tuple[TargetLayout, ...]:
    """Return the layout of each kind of engine, each once.

    Raises:
        LayoutMismatchError: A tensor is unknown, or heads do not divide.
    """
    widths = dict.fromkeys(target.tp for target in targets)
    return tuple(
        table_layout(shapes.tensors, shapes.config, engine="vllm", tp=tp, layout_id=f"tp{tp}") for tp in widths
    )


def choose_targets(shapes: Shapes, asked: Sequence[Target]) -> tuple[Target, ...]:
    """Return the engines that were asked for; without any, one of the largest usual width that can hold the model.

    Raises:
        ConfigError: One of them cannot hold the model; names the widths that can.
        LayoutMismatchError: None can: a tensor is unknown, or a number of the model is missing.
    """
    if not asked:
        fitting = [tp for tp in _DEFAULT_TPS if _find_problem(shapes, tp) is None]
        return (Target(tp=fitting[0] if fitting else 1),)
    problems = {str(target): problem for target in asked if (problem := _find_problem(shapes, target.tp)) is not None}
    if problems and _find_problem(shapes, 1) is None:
        allowed = ", ".join(str(tp) for tp in range(1, _MAX_TP + 1) if _find_problem(shapes, tp) is None)
        message = "; ".join(f"--targets {target}: {problem}" for target, problem in problems.items())
        message = f"{message}; {shapes.model} can be held with a tp of {allowed}"
        raise ConfigError(message)
    return tuple(asked)


def _find_problem(shapes: Shapes, tp: int) -> str | None:
    """Say why an engine of so many ranks cannot hold the tensors, or return ``None``."""
    try:
        table_layout(shapes.tensors, shapes.config, engine="vllm", tp=tp)
    except LayoutMismatchError as error:
        return str(error)
    return None


class BitsTrainer(Trainer):
    """One rank of a trainer whose weights are given bit patterns, cut along the first axis as FSDP2 cuts.

    Args:
        tensors: All tensors.
        bits: Their patterns; ``bits`` of the object may be set to others.
        rank: This rank.
        world_size: How many ranks there are.
    """

    def __init__(self, tensors: Sequence[TensorSpec], bits: Bits, *, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size, self.bits = rank, world_size, bits
        self._specs = {spec.name: spec for spec in tensors}

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return all tensors."""
        return self._specs

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return this rank's rows of each tensor."""
        if self.world_size == 1:
            return {name: whole_box(spec.shape) for name, spec in self._specs.items()}
        boxes = {}
        for name, spec in self._specs.items():
            first, count = split_evenly(spec.shape[0], self.world_size)[self.rank]
            rest = spec.shape[1:]
            boxes[name] = ShardSpec(offset=(first, *(0 for _ in rest)), shape=(count, *rest))
        return boxes

    def shards(self) -> Mapping[str, Array]:
        """Return views of this rank's rows."""
        return {
            name: self.bits[name][slices_in(box, whole_box(self._specs[name].shape))]
            for name, box in self.layout().items()
        }


def make_ranks(layout: TargetLayout, old: Bits, *, version: WeightVersion) -> list[tuple[ArraySink, Subscriber]]:
    """Return the ranks of one engine of plain arrays that is at ``version`` with the bits ``old``."""
    tensors = {spec.name: spec for spec in layout.tensors}
    ranks = []
    for held in layout.ranks:
        sink = ArraySink(tensors, held)
        for name, boxes in held.items():
            for box in boxes:
                sink.write_dense(name, box, old[name][slices_in(box, whole_box(tensors[name].shape))])
        ranks.append((sink, Subscriber(sink, aliases=layout.aliases, version=version)))
    return ranks


def check_exact(ranks: Sequence[tuple[ArraySink, Subscriber]], layout: TargetLayout, new: Bits) -> None:
    """Compare all bits that the ranks hold with the trainer's.

    Raises:
        RoseError: They differ; names the tensor.
    """
    shapes = {spec.name: spec.shape for spec in layout.tensors}
    for (sink, _), held in zip(ranks, layout.ranks, strict=True):
        for name, boxes in held.items():
            for box in boxes:
                if not np.array_equal(sink.read(name, box), new[name][slices_in(box, whole_box(shapes[name]))]):
                    message = f"an engine's {name} at {box.offset} differs from the trainer's bits"
                    raise RoseError(message)


@attrs.frozen
class Transfer:
    """One blob that was read: its key, its size, and when, on the monotonic clock."""

    key: str
    num_bytes: int
    began_s: float
    ended_s: float


@attrs.define
class Traffic:
    """What went through a transport: sizes of what was written, by key, every read, and when pointers moved last."""

    put_bytes: dict[str, int] = attrs.field(factory=dict)
    reads: list[Transfer] = attrs.field(factory=list)
    moved_s: dict[str, float] = attrs.field(factory=dict)

    def bytes_read(self, *, is_blob: bool | None = None) -> int:
        """Return the bytes of all reads, or those of blobs or of records only."""
        return sum(one.num_bytes for one in self.reads if is_blob is None or ("/blob-" in one.key) is is_blob)


class CountingTransport(Transport):
    """Another transport, counted; weights of a first version are counted and dropped, since every engine starts with them.

    Args:
        inner: Where everything else goes.
        is_dropping: Drop blobs of version 0.
    """

    def __init__(self, inner: Transport, *, is_dropping: bool = False) -> None:
        self._inner, self._is_dropping = inner, is_dropping
        self._lock = threading.Lock()
        self.traffic = Traffic()

    def put(self, key: str, payload: Any) -> None:
        """Write, or count only."""
        with self._lock:
            self.traffic.put_bytes[key] = len(payload)
        if not (self._is_dropping and key.startswith(f"{RUN}/0/") and "/blob-" in key):
            self._inner.put(key, payload)

    def get(self, key: str) -> Any:
        """Read."""
        return self._counted(key, lambda: self._inner.get(key))

    def get_when_ready(self, key: str, timeout_s: float) -> Any:
        """Read as soon as it is there."""
        return self._counted(key, lambda: wait_for_blob(self._inner, key, timeout_s))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove."""
        self._inner.delete(keys)

    def read_pointer(self, name: str) -> str | None:
        """Read a pointer."""
        return self._inner.read_pointer(name)

    def compare_and_set(self, name: str, expected: str | None, value: str) -> bool:
        """Move a pointer."""
        is_set = self._inner.compare_and_set(name, expected, value)
        self.traffic.moved_s[name] = time.monotonic()
        return is_set

    def address(self) -> TransportAddress:
        """Return the inner transport's address."""
        return self._inner.address()

    def close(self) -> None:
        """Close the inner transport."""
        self._inner.close()

    def _counted(self, key: str, read: Callable[[], Any]) -> Any:
        began_s = time.monotonic()
        payload = read()
        one = Transfer(key, len(payload), began_s, time.monotonic())
        with self._lock:
            self.traffic.reads.append(one)
        return payload

    def bytes_of(self, version: WeightVersion, *, is_blob: bool) -> int:
        """Return the bytes written for a version: its blobs, or all its records."""
        prefix = f"{version.run}/{version.n}/"
        sizes = self.traffic.put_bytes.items()
        return sum(size for key, size in sizes if key.startswith(prefix) and ("/blob-" in key) is is_blob)


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[int]:
    """Keep this thread, and those that it starts meanwhile, on the first ``count`` cores it may use; gives how many there are."""
    allowed = os.sched_getaffinity(0)
    chosen = set(sorted(allowed)[:count])
    os.sched_setaffinity(0, chosen)
    try:
        yield len(chosen)
    finally:
        os.sched_setaffinity(0, allowed)

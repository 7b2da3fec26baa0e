"""A few fake trainer ranks publishing into memory, and sinks that follow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rose.backends.memory import MemoryTransport
from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.interfaces.transport import Transport
from rose.policies.retention import RetentionConfig
from rose.testing import FakeTrainer
from rose.transfer.cells import PlacedCell
from rose.transfer.layout import bits_dtype, slices_in, whole_box
from rose.transfer.manifest import Manifest
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import plan_update, read_manifest, read_map
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import Activation

SPECS = (
    TensorSpec(name="w", shape=(10, 40), dtype="bfloat16"),
    TensorSpec(name="norm", shape=(7,), dtype="float32"),
    TensorSpec(name="scale", shape=(), dtype="bfloat16"),
    TensorSpec(name="none", shape=(0, 4), dtype="bfloat16"),
)

NEVER = 1 << 30
"""So many versions come between anchors that there is none after the first."""
HEADER_BYTES = 600
"""What a blob takes beyond its payload, at most."""


class ArrayTrainer(Trainer):
    """One rank that publishes what ``arrays`` holds, all of one dtype or each of its own."""

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        aliases: Mapping[str, str] | None = None,
        dtype: str | Mapping[str, str] = "bfloat16",
    ) -> None:
        self.rank, self.world_size = 0, 1
        self.arrays = arrays
        self._aliases = dict(aliases or {})
        self._dtypes = dict.fromkeys(arrays, dtype) if isinstance(dtype, str) else dict(dtype)

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {n: TensorSpec(name=n, shape=a.shape, dtype=self._dtypes[n]) for n, a in self.arrays.items()}

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def layout(self) -> Mapping[str, ShardSpec]:
        return {n: whole_box(a.shape) for n, a in self.arrays.items()}

    def shards(self) -> Mapping[str, np.ndarray]:
        return self.arrays


def publish_together(publishers: Sequence[Publisher], *, anchor: bool = False) -> list[PublishReport | BaseException]:
    """Publish on every rank at once; return each rank's report or error."""

    def one(publisher: Publisher) -> PublishReport | BaseException:
        try:
            return publisher.publish_sync(anchor=anchor)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(publishers)) as threads:
        return list(threads.map(one, publishers))


class Rig:
    """Ranks of one fake model and their publishers over one memory store."""

    def __init__(
        self,
        world_size: int = 2,
        specs: Sequence[TensorSpec] = SPECS,
        *,
        transports: Sequence[Transport] | None = None,
        store: MemoryTransport | None = None,
        run: str = "run",
        seed: int = 0,
        timeout_s: float = 10.0,
        **options: object,
    ) -> None:
        self.store = store or MemoryTransport()
        self.trainers = FakeTrainer.group(world_size, specs, seed)
        paths = transports or [self.store] * world_size
        kept = {key: options.pop(key) for key in ("anchor_every", "keep", "max_bytes", "hold_s") if key in options}
        options["retention"] = RetentionConfig(**{"anchor_every": NEVER, **kept})
        self.publishers = [
            Publisher(trainer, path, run=run, timeout_s=timeout_s, **options)
            for trainer, path in zip(self.trainers, paths, strict=True)
        ]

    def step(self, fraction: float = 0.1) -> None:
        for trainer in self.trainers:
            trainer.step(fraction)

    def publish(self, *, anchor: bool = False) -> PublishReport:
        """Publish on all ranks, which must succeed; return rank 0's report."""
        reports = publish_together(self.publishers, anchor=anchor)
        for report in reports:
            assert isinstance(report, PublishReport), report
        return reports[0]

    def follow(self, boxes: Mapping[str, Sequence[ShardSpec]] | None = None) -> Follower:
        return Follower(self, ArraySink(self.trainers[0].tensors(), boxes))


class Follower:
    """A subscriber over arrays."""

    def __init__(self, rig: Rig, sink: ArraySink, aliases: Mapping[str, str] | None = None) -> None:
        self.rig, self.sink = rig, sink
        self.subscriber = Subscriber(sink, aliases=aliases)

    def sync(self, *, verify: bool = True) -> Activation:
        """Catch up with what is published."""
        update = plan_update(self.rig.store, self.subscriber.version)
        assert update is not None
        self.subscriber.stage(update, self.rig.store)
        return self.subscriber.activate(verify=verify)

    def assert_current(self) -> None:
        """The sink's bits are the trainers' bits."""
        for name, bits in self.rig.trainers[0].full().items():
            for box in self.sink.boxes().get(name, ()):
                np.testing.assert_array_equal(
                    self.sink.read(name, box), bits[(*slices_in(box, whole_box(bits.shape)), ...)], err_msg=name
                )


def manifest_of(rig: Rig, n: int, name: str = "manifest", run: str = "run") -> Manifest:
    """Return what was published as version n by its n-th attempt."""
    return read_manifest(rig.store, f"{run}/{n}/{n}/{name}")


def cells_of(rig: Rig, manifest: Manifest) -> tuple[PlacedCell, ...]:
    """Return the cells that the manifest has a row for."""
    return read_map(rig.store, manifest.map_key).cells


def is_bits_and_headers(report: PublishReport, num_blobs: int) -> bool:
    """Say whether what was sent beyond the bits is no more than the headers of so many blobs."""
    return 0 <= report.bytes_sent - report.bytes_dense <= HEADER_BYTES * num_blobs


def bf16(*shape: int) -> np.ndarray:
    """Return zeros in bfloat16 bits."""
    return np.zeros(shape, dtype=bits_dtype("bfloat16"))

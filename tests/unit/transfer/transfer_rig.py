"""A few fake trainer ranks publishing into memory, and sinks that follow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rose.backends.memory import MemoryTransport
from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.interfaces.transport import Transport
from rose.testing import FakeTrainer
from rose.transfer.layout import bits_dtype, slices_in, whole_box
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import plan_update
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import Activation

SPECS = (
    TensorSpec(name="w", shape=(10, 40), dtype="bfloat16"),
    TensorSpec(name="norm", shape=(7,), dtype="float32"),
    TensorSpec(name="scale", shape=(), dtype="bfloat16"),
    TensorSpec(name="none", shape=(0, 4), dtype="bfloat16"),
)


class ArrayTrainer(Trainer):
    """One rank that publishes what ``arrays`` holds."""

    def __init__(
        self, arrays: dict[str, np.ndarray], aliases: Mapping[str, str] | None = None, dtype: str = ""
    ) -> None:
        self.rank, self.world_size = 0, 1
        self.arrays = arrays
        self._aliases = dict(aliases or {})
        self._dtype = dtype or "bfloat16"

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {n: TensorSpec(name=n, shape=a.shape, dtype=self._dtype) for n, a in self.arrays.items()}

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


def bf16(*shape: int) -> np.ndarray:
    """Return zeros in bfloat16 bits."""
    return np.zeros(shape, dtype=bits_dtype("bfloat16"))

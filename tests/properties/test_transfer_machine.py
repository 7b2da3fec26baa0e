"""Publishers and subscribers under faults, in any order: an engine is at one published version, bit for bit, or fenced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rose.backends.memory import MemoryTransport
from rose.errors import RoseError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.policies.retention import RetentionConfig
from rose.testing import FakeTrainer, FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import current_version, plan_update
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import WeightVersion

SPECS = (
    TensorSpec(name="w", shape=(5, 8), dtype="bfloat16"),
    TensorSpec(name="n", shape=(3,), dtype="float32"),
    TensorSpec(name="s", shape=(), dtype="bfloat16"),
)
TP2 = TargetLayout.tensor_parallel("tp2", SPECS, num_ranks=2, split_dims={"w": 1})
BOXES = (None, TP2.ranks[0], TP2.ranks[1])
KINDS = st.sampled_from([TransportFaultKind.FAIL, TransportFaultKind.CORRUPT, TransportFaultKind.TRUNCATE])


class BreakingSink(ArraySink):
    """Fails a write when told to."""

    writes_left: int | None = None

    def write_dense(self, name: str, box: ShardSpec, bits: np.ndarray) -> None:
        self._count()
        super().write_dense(name, box, bits)

    def write_sparse(self, name: str, box: ShardSpec, positions: np.ndarray, values: np.ndarray) -> None:
        self._count()
        super().write_sparse(name, box, positions, values)

    def _count(self) -> None:
        if self.writes_left is not None:
            self.writes_left -= 1
            if self.writes_left < 0:
                message = "injected"
                raise RuntimeError(message)


class TransferMachine(RuleBasedStateMachine):
    """Two ranks publish with anchors now and then; one whole engine and two halves follow when they like."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryTransport()
        self.trainers = FakeTrainer.group(2, SPECS)
        self.paths = [FaultyTransport(self.store) for _ in self.trainers]
        self.publishers = [
            Publisher(
                trainer, path, run="r", targets=[TP2], retention=RetentionConfig(anchor_every=4, keep=2), timeout_s=5.0
            )
            for trainer, path in zip(self.trainers, self.paths, strict=True)
        ]
        self.sinks = [BreakingSink(self.trainers[0].tensors(), boxes) for boxes in BOXES]
        self.engines = [Subscriber(sink) for sink in self.sinks]
        self.truth: dict[WeightVersion, dict[str, np.ndarray]] = {}

    @rule(fraction=st.sampled_from([0.0, 0.05, 0.9]))
    def step(self, fraction: float) -> None:
        for trainer in self.trainers:
            trainer.step(fraction)

    def _publish(self) -> list[PublishReport | RoseError]:
        def one(publisher: Publisher) -> PublishReport | RoseError:
            try:
                return publisher.publish_sync()
            except RoseError as error:
                return error

        with ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(one, self.publishers))
        version = current_version(self.store)
        if version is not None and version not in self.truth:
            self.truth[version] = dict(self.trainers[0].full())
        return outcomes

    @rule()
    def publish(self) -> None:
        before = current_version(self.store)
        outcomes = self._publish()
        assert all(isinstance(outcome, PublishReport) for outcome in outcomes), outcomes
        assert outcomes[0].version.n == (0 if before is None else before.n + 1)

    @rule(rank=st.integers(0, 1), call=st.integers(0, 3))
    def publish_with_a_failing_put(self, rank: int, call: int) -> None:
        self.paths[rank].faults = (TransportFault(kind=TransportFaultKind.FAIL, method="put", call_index=call),)
        before = current_version(self.store)
        outcomes = self._publish()
        self.paths[rank].faults = ()
        if not all(isinstance(outcome, PublishReport) for outcome in outcomes):
            assert current_version(self.store) == before

    @rule(engine=st.integers(0, 2))
    def follow(self, engine: int) -> None:
        update = plan_update(self.store, self.engines[engine].version)
        if update is not None:
            self.engines[engine].stage(update, self.store)
            assert self.engines[engine].activate(verify=True).is_verified
            assert self.engines[engine].version == current_version(self.store)

    @rule(engine=st.integers(0, 2), kind=KINDS, call=st.integers(0, 3))
    def follow_over_a_bad_link(self, engine: int, kind: TransportFaultKind, call: int) -> None:
        subscriber = self.engines[engine]
        before = (subscriber.version, subscriber.is_fenced)
        update = plan_update(self.store, subscriber.version)
        link = FaultyTransport(self.store, [TransportFault(kind=kind, method="get", call_index=call)])
        if update is None:
            return
        try:
            subscriber.stage(update, link)
        except RoseError:
            assert (subscriber.version, subscriber.is_fenced) == before
        else:
            subscriber.activate(verify=True)

    @rule(engine=st.integers(0, 2), writes=st.integers(0, 4))
    def follow_with_a_failing_write(self, engine: int, writes: int) -> None:
        subscriber, sink = self.engines[engine], self.sinks[engine]
        update = plan_update(self.store, subscriber.version)
        if update is None:
            return
        subscriber.stage(update, self.store)
        sink.writes_left = writes
        try:
            subscriber.activate(verify=False)
        except RuntimeError:
            assert subscriber.is_fenced
            assert subscriber.version is None
        finally:
            sink.writes_left = None

    @invariant()
    def every_engine_is_at_a_published_version_or_fenced(self) -> None:
        for subscriber, sink in zip(self.engines, self.sinks, strict=True):
            if subscriber.version is None:
                continue
            for name, boxes in sink.boxes().items():
                for box in boxes:
                    index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                    want = self.truth[subscriber.version][name][(*index, ...)]
                    np.testing.assert_array_equal(sink.read(name, box), want)


TransferMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTransferMachine = TransferMachine.TestCase

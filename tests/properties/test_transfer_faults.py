"""Fifty versions over a relay on which everything goes wrong: every engine is at one published version, bit for bit, or at none.

Two trainer ranks publish; a whole engine, one of two tensor-parallel ranks, and one of a layout that the publisher does not know
follow them. After every step the bits of every engine rank are compared with what the trainer held when the version that the rank claims
was published. After one clean version in the end all of them hold it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rose.backends.memory import MemoryTransport
from rose.errors import (
    BlobNotFoundError,
    CorruptUpdateError,
    EngineFencedError,
    RoseError,
    VersionConflictError,
)
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.interfaces.transport import Transport
from rose.policies.retention import RetentionConfig
from rose.testing import FakeTrainer, FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer.layout import TargetLayout, slices_in, whole_box
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import current_version, plan_update
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import WeightUpdate, WeightVersion

SPECS = (
    TensorSpec(name="w", shape=(12, 40), dtype="bfloat16"),
    TensorSpec(name="experts", shape=(4, 3, 20), dtype="bfloat16"),
    TensorSpec(name="scales", shape=(7,), dtype="float32"),
    TensorSpec(name="q", shape=(9, 5), dtype="float8_e4m3fn"),
    TensorSpec(name="s", shape=(), dtype="bfloat16"),
    TensorSpec(name="none", shape=(0, 3), dtype="bfloat16"),
)
TP1 = TargetLayout.whole("tp1", SPECS)
TP2 = TargetLayout.tensor_parallel("tp2", SPECS, num_ranks=2, split_dims={"w": 1, "experts": 0, "q": 0})
ODD = TargetLayout.tensor_parallel("odd", SPECS, num_ranks=3, split_dims={"w": 1, "experts": 2, "q": 1, "scales": 0})
NUM_VERSIONS = 50

Kind = TransportFaultKind
_REPLAN = (VersionConflictError, BlobNotFoundError, CorruptUpdateError, EngineFencedError)


class Move(enum.Enum):
    """What one engine does after a version was published."""

    FOLLOW = "follow"
    SKIP = "skip"
    BAD_LINK = "follow over a bad link"
    DUPLICATE = "get the same update twice"
    LATE = "get an old update after a newer one"
    GAP = "get an update that leaves a version out"
    HOLD = "plan now and stage several versions later"
    RESTART_STAGED = "restart between stage and activation"
    RESTART_HALF_ACTIVE = "restart when some ranks have activated"
    BROKEN_WRITE = "fail in the middle of an activation"


class Upset(enum.Enum):
    """What happens to the trainer or the relay before a version is published."""

    RESTART = "the publisher restarts under the same name"
    NEW_RUN = "the publisher restarts under a new name"
    WIPE = "the relay restarts and has lost everything"


@attrs.frozen(kw_only=True)
class Step:
    """One version.

    Attributes:
        fraction: Share of elements that change before it.
        upset: What happens before it.
        fault: What goes wrong when it is published first; it is published again without fault if that fails.
        rank: The trainer rank that meets the fault.
        moves: What the engines do then.
        link: What goes wrong on the bad links of engines.
        is_anchor: Full weights are asked for.
    """

    fraction: float = 0.1
    upset: Upset | None = None
    fault: TransportFault | None = None
    rank: int = 0
    moves: tuple[Move, ...] = (Move.FOLLOW,) * 3
    link: TransportFault | None = None
    is_anchor: bool = False


class BreakingSink(ArraySink):
    """Fails the write that it is told to, and every one after it."""

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
                message = "the device is gone"
                raise RuntimeError(message)


class Engine:
    """The ranks of one engine; it serves a version when all of its ranks are at that one."""

    def __init__(self, layout: TargetLayout) -> None:
        self.layout = layout
        self.held: list[tuple[int, WeightUpdate]] = []
        self.old: WeightUpdate | None = None
        self.num_activations = 0
        self.restart()

    def restart(self) -> None:
        """Be a new process with weights of no version."""
        tensors = {spec.name: spec for spec in self.layout.tensors}
        self.sinks = [BreakingSink(tensors, boxes) for boxes in self.layout.ranks]
        self.ranks = [Subscriber(sink, num_threads=1, audit_every=5) for sink in self.sinks]

    @property
    def version(self) -> WeightVersion | None:
        versions = {rank.version for rank in self.ranks}
        return versions.pop() if len(versions) == 1 else None

    def stage(self, update: WeightUpdate, link: Transport) -> None:
        for rank in self.ranks:
            rank.stage(update, link)

    def activate(self, ranks: Sequence[Subscriber] | None = None) -> None:
        for rank in self.ranks if ranks is None else ranks:
            rank.activate(verify=False)
            self.num_activations += 1

    def plan_and_stage(self, link: Transport) -> WeightUpdate | None:
        """Do what a pool does: plan from what is known; when that is refused, from nothing."""
        try:
            update = plan_update(link, self.version)
            if update is None:
                return None
            try:
                self.stage(update, link)
            except _REPLAN:
                update = plan_update(link, None)
                if update is None:
                    return None
                self.stage(update, link)
        except RoseError:
            return None
        return update

    def follow(self, link: Transport) -> None:
        update = self.plan_and_stage(link)
        if update is not None:
            self.activate()
            self.old = update


class World:
    """Everything at once, and what was true at every version."""

    def __init__(self) -> None:
        self.store = MemoryTransport()
        self.trainers = FakeTrainer.group(2, SPECS)
        self.paths = [FaultyTransport(self.store) for _ in self.trainers]
        self.num_runs = 0
        self.engines = [Engine(layout) for layout in (TP1, TP2, ODD)]
        self.truth: dict[WeightVersion, Mapping[str, np.ndarray]] = {}
        self.num_versions = 0
        self.num_met = self.num_gaps = 0
        self.start_publishers()

    def start_publishers(self) -> None:
        self.publishers = [
            Publisher(
                trainer,
                path,
                run=f"run{self.num_runs}",
                targets=[TP1, TP2],
                retention=RetentionConfig(anchor_every=4, keep=2),
                timeout_s=0.5,
                num_threads=1,
                audit_every=7,
            )
            for trainer, path in zip(self.trainers, self.paths, strict=True)
        ]

    def take(self, step: Step) -> None:
        for trainer in self.trainers:
            trainer.step(step.fraction)
        self.upset(step.upset)
        if step.fault is not None:
            self.paths[step.rank].faults = (step.fault,)
        before = self.num_versions
        self.publish(is_anchor=step.is_anchor)
        self.num_met += sum(self.paths[step.rank].num_met)
        self.paths[step.rank].faults = ()
        outcomes: list[PublishReport | RoseError] = []
        for _ in range(20):
            if self.num_versions > before:
                break
            outcomes = self.publish(is_anchor=step.is_anchor)
        assert self.num_versions > before, f"a publish without faults goes through in the end, not {outcomes}"
        link = FaultyTransport(self.store, [step.link] if step.link else [])
        for engine, move in zip(self.engines, step.moves, strict=True):
            self.move(engine, move, link)
            self.check()

    def upset(self, upset: Upset | None) -> None:
        if upset is Upset.WIPE:
            self.store._store._blobs.clear()
            self.store._store._pointers.clear()
        elif upset is not None:
            self.num_runs += upset is Upset.NEW_RUN or self.store.read_pointer("current") is None
            self.start_publishers()

    def publish(self, *, is_anchor: bool) -> list[PublishReport | RoseError]:
        def one(publisher: Publisher) -> PublishReport | RoseError:
            try:
                return publisher.publish_sync(anchor=is_anchor)
            except RoseError as error:
                return error

        with ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(one, self.publishers))
        version = current_version(self.store)
        if version is not None and version not in self.truth:
            self.truth[version] = self.trainers[0].full()
            self.num_versions += 1
        for outcome in outcomes:
            assert not isinstance(outcome, PublishReport) or outcome.version in self.truth
        return outcomes

    def move(self, engine: Engine, move: Move, bad_link: Transport) -> None:
        old = engine.old
        if move in (Move.FOLLOW, Move.DUPLICATE, Move.LATE):
            engine.follow(self.store)
        late = {Move.DUPLICATE: engine.old, Move.LATE: old}.get(move)
        if late is not None:
            self.deliver(engine, late)
        others = {
            Move.BAD_LINK: lambda: engine.follow(bad_link),
            Move.GAP: lambda: self.deliver_with_a_gap(engine),
            Move.HOLD: lambda: self.hold(engine),
            Move.RESTART_STAGED: lambda: self.restart(engine, num_active=0),
            Move.RESTART_HALF_ACTIVE: lambda: self.restart(engine, num_active=len(engine.ranks) // 2),
            Move.BROKEN_WRITE: lambda: self.break_a_write(engine),
        }
        others.get(move, lambda: None)()

    def restart(self, engine: Engine, *, num_active: int) -> None:
        """End an engine when so many of its ranks have activated what all of them have staged."""
        if engine.plan_and_stage(self.store) is not None:
            engine.activate(engine.ranks[:num_active])
            self.check()
        engine.restart()

    def deliver(self, engine: Engine, update: WeightUpdate) -> None:
        """Hand over an update whether it fits or not; a refused one changes nothing."""
        before = [(rank.version, rank.is_fenced) for rank in engine.ranks]
        try:
            engine.stage(update, self.store)
        except RoseError:
            after = [(rank.version, rank.is_fenced) for rank in engine.ranks]
            assert all(one == other or other[1] for one, other in zip(before, after, strict=True))
            for rank in engine.ranks:
                rank.drop_staged()
            return
        self.check()
        engine.activate()

    def deliver_with_a_gap(self, engine: Engine) -> None:
        try:
            update = plan_update(self.store, engine.version)
        except RoseError:
            return
        if update is not None and len(update.manifest_keys) > 1:
            before = [rank.version for rank in engine.ranks]
            self.num_gaps += 1
            self.deliver(engine, attrs.evolve(update, manifest_keys=update.manifest_keys[1:]))
            assert all(rank.version in (one, None) for rank, one in zip(engine.ranks, before, strict=True))

    def hold(self, engine: Engine) -> None:
        """A slow reader: what it planned four versions ago has left the window by now."""
        try:
            update = plan_update(self.store, engine.version)
        except RoseError:
            return
        if update is not None:
            engine.held.append((self.num_versions, update))
        if engine.held and engine.held[0][0] <= self.num_versions - 4:
            self.deliver(engine, engine.held.pop(0)[1])
            engine.follow(self.store)

    def break_a_write(self, engine: Engine) -> None:
        if engine.plan_and_stage(self.store) is None:
            return
        engine.sinks[-1].writes_left = 1
        try:
            engine.activate()
        except RuntimeError:
            assert engine.ranks[-1].is_fenced
            assert engine.version is None
        finally:
            engine.sinks[-1].writes_left = None

    def check(self) -> None:
        """No rank of any engine shows a mixture."""
        for engine in self.engines:
            for rank, sink in zip(engine.ranks, engine.sinks, strict=True):
                if rank.version is None:
                    continue
                true = self.truth[rank.version]
                for name, boxes in sink.boxes().items():
                    for box in boxes:
                        want = true[name][(*slices_in(box, whole_box(true[name].shape)), ...)]
                        np.testing.assert_array_equal(sink.read(name, box), want, err_msg=f"{rank.version} {name}")

    def end(self) -> None:
        """After one clean version every engine holds it."""
        for path in self.paths:
            path.flush()
        self.take(Step(is_anchor=True))
        version = current_version(self.store)
        for engine in self.engines:
            engine.follow(self.store)
            assert engine.version == version, engine.layout.layout_id
            for rank in engine.ranks:
                rank.audit()
        self.check()


def _puts(kind: Kind, key: str, call_index: int | None = 0) -> TransportFault:
    return TransportFault(kind=kind, method="put", key=key, call_index=call_index)


PUT_FAULTS = {
    "torn blob": _puts(Kind.TEAR, "blob"),
    "short blob": _puts(Kind.TRUNCATE, "blob"),
    "flipped byte in a blob": _puts(Kind.CORRUPT, "blob", 1),
    "lost blob": _puts(Kind.DROP, "blob"),
    "every blob lost": _puts(Kind.DROP, "blob", None),
    "blob after its manifest": _puts(Kind.REORDER, "blob", None),
    "duplicate puts": _puts(Kind.DUPLICATE, "", None),
    "failing put": _puts(Kind.FAIL, "blob", 1),
    "lost answer to a put": _puts(Kind.LOSE_ANSWER, "blob"),
    "lost part": _puts(Kind.DROP, "part-"),
    "torn part": _puts(Kind.TEAR, "part-"),
    "flipped byte in a part": _puts(Kind.CORRUPT, "part-"),
    "torn manifest": _puts(Kind.TEAR, "/manifest"),
    "lost manifest": _puts(Kind.DROP, "/manifest"),
    "manifest after the pointer": _puts(Kind.REORDER, "/manifest"),
    "lost anchor": _puts(Kind.DROP, "/anchor"),
    "torn map": _puts(Kind.TEAR, "/cells/"),
    "torn decision": _puts(Kind.TEAR, "/keep"),
    "lost decision": _puts(Kind.DROP, "/keep"),
    "decision out of reach": TransportFault(kind=Kind.FAIL, method="get", key="/keep", call_index=0),
    "decision not found by one rank": TransportFault(kind=Kind.DROP, method="get", key="/keep", call_index=0),
    "lost answer to the pointer": TransportFault(kind=Kind.LOSE_ANSWER, method="compare_and_set", key="current"),
    "pointer moved twice": TransportFault(kind=Kind.DUPLICATE, method="compare_and_set", key="current"),
    "pointer out of reach": TransportFault(kind=Kind.FAIL, method="read_pointer", call_index=0),
    "parts out of reach": TransportFault(kind=Kind.DROP, method="get", key="part-", call_index=0),
    "failing deletions": TransportFault(kind=Kind.FAIL, method="delete"),
}
SLOW = {"lost part", "pointer out of reach"}  # found out at the time-out
LINK_FAULTS = [
    TransportFault(kind=kind, method="get", key=key, call_index=call)
    for kind in (Kind.TEAR, Kind.CORRUPT, Kind.TRUNCATE, Kind.DROP, Kind.FAIL)
    for key in ("blob", "manifest", "cells", "anchor")
    for call in (0, 1, None)
]

STEPS = st.builds(
    Step,
    fraction=st.sampled_from([0.0, 0.02, 0.02, 0.1, 0.9]),
    upset=st.sampled_from([None] * 12 + list(Upset)),
    fault=st.sampled_from([None] * 12 + [fault for name, fault in PUT_FAULTS.items() if name not in SLOW]),
    rank=st.integers(0, 1),
    moves=st.tuples(*[st.sampled_from([Move.FOLLOW] * 5 + list(Move))] * 3),
    link=st.sampled_from(LINK_FAULTS),
    is_anchor=st.sampled_from([False] * 9 + [True]),
)


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(st.lists(STEPS, min_size=NUM_VERSIONS, max_size=NUM_VERSIONS))
def test_fifty_versions_with_random_faults_end_bit_equal(steps: list[Step]) -> None:
    world = World()
    for step in steps:
        world.take(step)
    assert world.num_versions >= NUM_VERSIONS
    assert all(engine.num_activations >= NUM_VERSIONS // 4 for engine in world.engines), "or nothing was tried"
    world.end()


def _run(*changes: Step) -> World:
    """Three sound versions, the given ones, each followed by a sound one, and the end."""
    world = World()
    for step in (Step(), Step(), Step(), *(one for change in changes for one in (change, Step()))):
        world.take(step)
    world.end()
    return world


@pytest.mark.parametrize("name", PUT_FAULTS)
def test_a_publish_fault(name: str) -> None:
    fault = PUT_FAULTS[name]
    ranks = [1] if name in SLOW else [0, 1] if fault.key in ("", "blob", "part-") and fault.method != "get" else [0]
    steps = [Step(fault=fault, rank=rank, is_anchor=is_anchor) for rank in ranks for is_anchor in (False, True)]
    assert _run(*steps).num_met >= len(ranks), "the fault must have been met"


@pytest.mark.parametrize("upset", Upset)
def test_an_upset(upset: Upset) -> None:
    _run(Step(upset=upset), Step(upset=upset, fraction=0.9), Step(upset=upset, moves=(Move.SKIP,) * 3))


def test_ranks_agree_after_a_lost_answer_and_a_lost_store() -> None:
    """Rank 0 never learned that its version was visible, rank 1 did; then the store loses the pointer that would tell."""
    world = World()
    for step in (Step(), Step(upset=Upset.RESTART, fault=PUT_FAULTS["lost answer to the pointer"])):
        world.take(step)
    world.take(Step(upset=Upset.WIPE))
    world.end()


@pytest.mark.parametrize("move", Move)
def test_a_move(move: Move) -> None:
    """Right after the engines followed, after a version that none of them took, and several times in a row."""
    world = World()
    moves = [Move.FOLLOW, Move.FOLLOW, move, Move.FOLLOW, Move.SKIP, move, Move.SKIP, Move.SKIP, move, move, move, move]
    for one in moves:
        world.take(Step(moves=(one,) * 3))
    if move is Move.GAP:
        assert world.num_gaps >= len(world.engines), "or nothing was left out"
    world.end()


@pytest.mark.parametrize("kind", [Kind.TEAR, Kind.CORRUPT, Kind.TRUNCATE, Kind.DROP, Kind.FAIL])
def test_a_bad_link(kind: Kind) -> None:
    """Each kind of blob, the first and every one; between them nobody follows, so that there is something to fetch."""
    faults = [fault for fault in LINK_FAULTS if fault.kind is kind and fault.call_index != 1]
    _run(*[Step(moves=(Move.BAD_LINK,) * 3, link=fault, is_anchor=fault.key == "anchor") for fault in faults])


def test_a_mixture_would_be_seen() -> None:
    """The check itself: one element of one rank of one engine from another version."""
    world = _run(Step())
    world.engines[1].sinks[1].array("q").reshape(-1)[-1] ^= 1
    with pytest.raises(AssertionError, match="q"):
        world.check()

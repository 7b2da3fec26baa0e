"""The two processes of a measured link: a trainer's side that publishes, and a serving cluster's side with a relay and its engines.

Each reads commands, one JSON object a line, and answers with one line each; the first command is the set-up. Times are those of the
machine's monotonic clock, which both share.

1. [BOTH] set-up: draw the same bits; the engines start at version 0 with the old ones.
2. [SERVING] ``sync``: follow the pointer through the relay, stage and activate every rank, say when what happened.
3. [TRAINER] ``publish``: the next version, with the other bits in turn.
4. [BOTH] ``paper`` and ``take_paper``: COO32 of whole tensors in buckets, over the same store.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np

from rose.backends.memory import MemoryTransport
from rose.bench.job import (
    RUN,
    BitsTrainer,
    CountingTransport,
    check_exact,
    layouts_of,
    make_ranks,
    parse_targets,
)
from rose.bench.model_shapes import Shapes, load_shapes, only_tensors
from rose.bench.peers import BUCKET_BYTES, coo32_apply, coo32_encode
from rose.bench.weights import Drawn, draw
from rose.errors import BlobNotFoundError, DeadlineExceededError, TransferError
from rose.transfer.cluster import ClusterRelay
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher
from rose.transfer.relay import POINTER, plan_update, version_of_key
from rose.types import WeightVersion

_TIMEOUT_S = 120.0
_POLL_S = 0.001
_PROBE_BYTES = 64 << 20
_RELAY_BYTES = 1 << 30


@attrs.frozen(kw_only=True)
class WorkerSetup:
    """What both processes must know.

    Attributes:
        model: Name or table file.
        tensors: Names of the sampled tensors; empty for all.
        lr: Learning rate of the step.
        seed: Of the weights.
        targets: Engines, as on the command line.
        num_sources: Trainer ranks, all in the trainer's process.
        host: Where the trainer's store listens.
    """

    model: str
    tensors: tuple[str, ...]
    lr: float
    seed: int
    targets: str
    num_sources: int
    host: str

    def shapes(self) -> Shapes:
        """Return the tensors."""
        whole = load_shapes(self.model)
        return only_tensors(whole, self.tensors) if self.tensors else whole


class TrainerSide:
    """Publishes; every command is a method."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._shapes = setup.shapes()
        self._drawn = draw(self._shapes.tensors, lr=setup.lr, seed=setup.seed)
        self._layouts = layouts_of(self._shapes, parse_targets(setup.targets))
        self._store = MemoryTransport()
        self._address = self._store.serve(setup.host, is_public=setup.host != "127.0.0.1")
        self._counted = CountingTransport(self._store, is_dropping=True)
        self._trainers = [
            BitsTrainer(self._shapes.tensors, self._drawn.old, rank=rank, world_size=setup.num_sources)
            for rank in range(setup.num_sources)
        ]
        self._publishers = [
            Publisher(trainer, self._counted, run=RUN, targets=self._layouts) for trainer in self._trainers
        ]
        self._pool = ThreadPoolExecutor(setup.num_sources)
        self._publish()
        self._store.put("probe", bytes(_PROBE_BYTES))
        self._num_papers = 0

    def setup(self) -> dict[str, Any]:
        """Return where the store is, and what was drawn."""
        return {
            "address": dict(self._address.options),
            "num_elements": self._drawn.num_elements,
            "num_changed": self._drawn.num_changed,
        }

    def publish(self) -> dict[str, Any]:
        """Publish the other bits; returns begin, end and sizes."""
        is_old = self._trainers[0].bits is self._drawn.old
        for trainer in self._trainers:
            trainer.bits = self._drawn.new if is_old else self._drawn.old
        began_s = time.monotonic()
        self._publish()
        ended_s = time.monotonic()
        version = self._publishers[0].version
        assert version is not None  # noqa: S101 - it was just published
        return {
            "began_s": began_s,
            "visible_s": self._counted.traffic.moved_s[POINTER],
            "ended_s": ended_s,
            "blob_bytes": self._counted.bytes_of(version, is_blob=True),
            "record_bytes": self._counted.bytes_of(version, is_blob=False),
        }

    def paper(self) -> dict[str, Any]:
        """Send COO32 of every tensor in buckets, each as soon as it is full."""
        prefix = f"paper/{self._num_papers}"
        self._num_papers += 1
        began_s = time.monotonic()
        sizes: list[list[int]] = []
        waiting: list[bytes] = []
        for name, new in self._drawn.new.items():
            waiting.append(coo32_encode(new.reshape(-1), self._drawn.old[name].reshape(-1)))
            if sum(map(len, waiting)) >= BUCKET_BYTES:
                self._put_bucket(prefix, sizes, waiting)
        self._put_bucket(prefix, sizes, waiting)
        self._store.put(f"{prefix}/end", json.dumps(sizes).encode())
        return {"began_s": began_s, "encoded_s": time.monotonic(), "bytes": sum(map(sum, sizes))}

    def close(self) -> None:
        """Stop serving."""
        self._pool.shutdown()
        self._store.close()

    def _put_bucket(self, prefix: str, sizes: list[list[int]], waiting: list[bytes]) -> None:
        if waiting:
            self._store.put(f"{prefix}/{len(sizes)}", b"".join(waiting))
            sizes.append([len(payload) for payload in waiting])
            waiting.clear()

    def _publish(self) -> None:
        for _ in self._pool.map(lambda publisher: publisher.publish_sync(), self._publishers):
            pass


class ServingSide:
    """A relay and the ranks of all engines; every command is a method."""

    def __init__(self, setup: WorkerSetup, address: Mapping[str, Any]) -> None:
        shapes = setup.shapes()
        targets = parse_targets(setup.targets)
        self._drawn: Drawn = draw(shapes.tensors, lr=setup.lr, seed=setup.seed)
        self._link = MemoryTransport(**address)
        self._counted = CountingTransport(self._link)
        self._relay = ClusterRelay(self._counted, max_bytes=_RELAY_BYTES)
        self._relay.follow()
        by_width: dict[int, TargetLayout] = {len(layout.ranks): layout for layout in layouts_of(shapes, targets)}
        self._engines = [
            (by_width[target.tp], make_ranks(by_width[target.tp], self._drawn.old, version=WeightVersion(RUN, 0)))
            for target in targets
            for _ in range(target.num_engines)
        ]
        self._ranks = [rank for _, ranks in self._engines for rank in ranks]
        self._pool = ThreadPoolExecutor(min(4, len(self._ranks)))
        self._flat: dict[str, np.ndarray[Any, Any]] | None = None

    def setup(self) -> dict[str, Any]:
        """Return how many ranks there are."""
        return {"num_ranks": len(self._ranks)}

    def probe(self) -> dict[str, Any]:
        """Read one large blob over the link; returns the rate in Gbps."""
        began_s = time.monotonic()
        size = len(self._link.get("probe"))
        return {"gbps": size * 8 / (time.monotonic() - began_s) / 1e9}

    def sync(self, n: int) -> dict[str, Any]:
        """Wait for version ``n``, stage and activate it everywhere."""
        self._counted.traffic.reads.clear()
        target = WeightVersion(RUN, n)
        self._wait_for(target)
        seen_s = time.monotonic()
        found = self._stage()
        staged_s = time.monotonic()
        pauses = self._activate()
        ended_s = time.monotonic()
        self._check(n)
        reads = [attrs.astuple(one) for one in self._counted.traffic.reads]
        return {
            "seen_s": seen_s,
            "staged_s": staged_s,
            "ended_s": ended_s,
            "pause_s": max(pauses),
            "ranks_stage_s": found,
            "reads": reads,
        }

    def local(self, n: int) -> dict[str, Any]:
        """Stage version ``n``, which is published, twice, the second time from the relay's memory; activate. Returns the local part."""
        self._wait_for(WeightVersion(RUN, n))
        self._stage()
        began_s = time.monotonic()
        self._stage()
        staged_s = time.monotonic()
        self._activate()
        ended_s = time.monotonic()
        self._check(n)
        return {"stage_s": staged_s - began_s, "activate_s": ended_s - staged_s}

    def take_paper(self, index: int) -> dict[str, Any]:
        """Take the buckets of one paper run as they come and apply them to whole tensors."""
        prefix = f"paper/{index}"
        flat = self._flat or {name: bits.reshape(-1).copy() for name, bits in self._drawn.old.items()}
        buckets: list[Any] = []
        sizes: list[list[int]] | None = None
        while sizes is None or len(buckets) < len(sizes):
            try:
                buckets.append(self._link.get_when_ready(f"{prefix}/{len(buckets)}", 0.002 if sizes is None else 60.0))
            except BlobNotFoundError:
                sizes = self._paper_end(prefix)
        taken_s = time.monotonic()
        names = iter(flat)
        for bucket, lengths in zip(buckets, sizes, strict=True):
            at = 0
            for length in lengths:
                coo32_apply(memoryview(bucket)[at : at + length], flat[next(names)])
                at += length
        ended_s = time.monotonic()
        self._flat = {name: bits.reshape(-1).copy() for name, bits in self._drawn.old.items()}
        is_exact = all(np.array_equal(flat[name], self._drawn.new[name].reshape(-1)) for name in flat)
        return {"taken_s": taken_s, "ended_s": ended_s, "bit_exact": is_exact}

    def close(self) -> None:
        """Let go of the link."""
        self._pool.shutdown()
        self._relay.close()
        self._link.close()

    def _paper_end(self, prefix: str) -> list[list[int]] | None:
        try:
            return list(json.loads(bytes(self._link.get(f"{prefix}/end"))))
        except BlobNotFoundError:
            return None

    def _wait_for(self, target: WeightVersion) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while True:
            found = self._relay.read_pointer(POINTER)
            if found is not None and version_of_key(found) == target:
                return
            if time.monotonic() > deadline_s:
                message = f"version {target} did not come within {_TIMEOUT_S:g} s; the pointer is at {found}"
                raise DeadlineExceededError(message)
            time.sleep(_POLL_S)

    def _stage(self) -> list[float]:
        update = plan_update(self._relay, self._ranks[0][1].version)
        if update is None:
            message = "the engines are at the newest version already"
            raise TransferError(message)

        def stage(rank: tuple[Any, Any]) -> float:
            began_s = time.monotonic()
            rank[1].stage(update, self._relay)
            return time.monotonic() - began_s

        return list(self._pool.map(stage, self._ranks))

    def _activate(self) -> list[float]:
        """Activate the ranks one after the other, since here they share cores; returns how long each paused."""
        return [subscriber.activate(verify=False).pause_s for _, subscriber in self._ranks]

    def _check(self, n: int) -> None:
        for layout, ranks in self._engines:
            check_exact(ranks, layout, self._drawn.new if n % 2 else self._drawn.old)


def _serve(make: Callable[[Mapping[str, Any]], Any]) -> None:
    """Answer commands until the input ends."""
    side: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        if side is None:
            side = make(command)
            command = {}
        answer = getattr(side, name)(**command)
        print(json.dumps(answer), flush=True)  # noqa: T201 - the answer to the process that asked


def _make_trainer(command: Mapping[str, Any]) -> TrainerSide:
    return TrainerSide(WorkerSetup(**{**command, "tensors": tuple(command["tensors"])}))


def _make_serving(command: Mapping[str, Any]) -> ServingSide:
    fields = {**command, "tensors": tuple(command["tensors"])}
    address = fields.pop("address")
    return ServingSide(WorkerSetup(**fields), address)


if __name__ == "__main__":
    _serve(_make_trainer if sys.argv[1] == "trainer" else _make_serving)

"""This library's own row among the peers: a whole version from one publisher to the ranks of one engine, on one core.

A version before it has been through both sides, so that each knows the sums of its base, as in a long run.
"""

from __future__ import annotations

import time
from statistics import median

from rose.backends.memory import MemoryTransport
from rose.bench.job import RUN, BitsTrainer, CountingTransport, check_exact, make_ranks, on_cores
from rose.bench.model_shapes import Shapes
from rose.bench.peers import PeerFigures
from rose.bench.weights import Drawn
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.types import WeightVersion

_NUM_VERSIONS = 4
"""The first warms both sides up; the bits of every other one are the new ones."""


def measure_ours(shapes: Shapes, drawn: Drawn, layout: TargetLayout) -> PeerFigures:
    """Publish, stage and activate; returns the bytes of all blobs and records, and the medians of both sides.

    Raises:
        RoseError: An engine's bits differ from the trainer's.
    """
    with on_cores(1):
        transport = CountingTransport(MemoryTransport(), is_dropping=True)
        trainer = BitsTrainer(shapes.tensors, drawn.old)
        publisher = Publisher(trainer, transport, run=RUN, targets=[layout], num_threads=1)
        publisher.publish_sync()
        ranks = make_ranks(layout, drawn.old, version=WeightVersion(RUN, 0))
        encode_s, decode_s, sizes = [], [], []
        for n in range(1, _NUM_VERSIONS + 1):
            trainer.bits = drawn.new if n % 2 else drawn.old
            encode_s.append(publisher.publish_sync().publish_s)
            update = plan_update(transport, WeightVersion(RUN, n - 1))
            assert update is not None  # noqa: S101 - a version was just published
            began_s = time.perf_counter()
            for _, subscriber in ranks:
                subscriber.stage(update, transport)
                subscriber.activate(verify=False)
            decode_s.append(time.perf_counter() - began_s)
            check_exact(ranks, layout, trainer.bits)
            version = WeightVersion(RUN, n)
            sizes.append(transport.bytes_of(version, is_blob=True) + transport.bytes_of(version, is_blob=False))
    return PeerFigures(bytes=sizes[-2], encode_s=median(encode_s[1:]), decode_s=median(decode_s[1:]))

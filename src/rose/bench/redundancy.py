"""How often a byte crosses the thin link, and how much one rank fetches: counted, not timed.

One version is published for engines of one kind; 1, 4 and 16 of them stage it at once through one relay of their cluster. What the
relay read upstream is divided by what was published, each blob once. Engines after the first share its arrays, since staging never
writes; the first one activates and is compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np

from rose.backends.memory import MemoryTransport
from rose.bench.job import (
    RUN,
    BitsTrainer,
    CountingTransport,
    Target,
    check_exact,
    layouts_of,
    make_ranks,
)
from rose.bench.model_shapes import Shapes
from rose.bench.weights import Drawn
from rose.interfaces.transport import Transport
from rose.transfer.cluster import ClusterRelay
from rose.transfer.layout import TargetLayout, slices_in, whole_box
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.transfer.subscriber import Subscriber
from rose.types import WeightUpdate, WeightVersion

NUM_ENGINES = (1, 4, 16)
WIDTHS = (1, 2, 4, 8)
_BASE = WeightVersion(RUN, 0)
_THREADS = 4
_RELAY_BYTES = 1 << 30


@attrs.frozen(kw_only=True)
class RankShare:
    """The largest share of a version's blob bytes that one rank of an engine fetched, and what its share of the changes is.

    ``needed`` is the share of the changed elements that lie in the rank's own boxes, replicated tensors included.
    """

    fetched: float
    needed: float


@attrs.frozen(kw_only=True)
class Redundancy:
    """Counted bytes.

    Attributes:
        by_engines: Number of engines -> bytes read upstream over bytes published, the largest over all widths.
        by_width: Ranks of an engine (tensor parallel) -> number of engines -> the same.
        shares: Ranks of an engine -> what one rank fetches.
        skipped: Widths that the model's heads do not allow, with the reason.
    """

    by_engines: Mapping[int, float]
    by_width: Mapping[int, Mapping[int, float]]
    shares: Mapping[int, RankShare]
    skipped: Mapping[int, str]


@attrs.frozen(kw_only=True)
class _Published:
    """A version in a store, ready to be staged any number of times."""

    layout: TargetLayout
    origin: CountingTransport
    update: WeightUpdate

    @property
    def num_bytes(self) -> int:
        return self.origin.bytes_of(self.update.target, is_blob=True)


def measure_redundancy(
    shapes: Shapes, drawn: Drawn, *, widths: Sequence[int] = WIDTHS, num_engines: Sequence[int] = NUM_ENGINES
) -> Redundancy:
    """Publish for engines of each width, let engines stage, count.

    Raises:
        RoseError: An engine's bits differ from the trainer's.
    """
    by_width: dict[int, dict[int, float]] = {}
    shares: dict[int, RankShare] = {}
    skipped: dict[int, str] = {}
    for width in widths:
        try:
            (layout,) = layouts_of(shapes, [Target(tp=width)])
        except ValueError as error:
            skipped[width] = str(error)
            continue
        published = _publish(shapes, drawn, layout)
        by_width[width] = {}
        fetched: list[int] = []
        for count in num_engines:
            upstream, fetched = _stage(published, drawn, count)
            by_width[width][count] = upstream / published.num_bytes
        shares[width] = RankShare(
            fetched=max(fetched) / published.num_bytes, needed=max(_needed(layout, drawn)) / drawn.num_changed
        )
    by_engines = {count: max(found[count] for found in by_width.values()) for count in num_engines if by_width}
    return Redundancy(by_engines=by_engines, by_width=by_width, shares=shares, skipped=skipped)


def _publish(shapes: Shapes, drawn: Drawn, layout: TargetLayout) -> _Published:
    origin = CountingTransport(MemoryTransport(), is_dropping=True)
    trainer = BitsTrainer(shapes.tensors, drawn.old)
    publisher = Publisher(trainer, origin, run=RUN, targets=[layout])
    publisher.publish_sync()
    trainer.bits = drawn.new
    publisher.publish_sync()
    update = plan_update(origin, _BASE)
    assert update is not None  # noqa: S101 - a version was just published
    return _Published(layout=layout, origin=origin, update=update)


def _stage(published: _Published, drawn: Drawn, num_engines: int) -> tuple[int, list[int]]:
    """Let engines stage through one relay; returns blob bytes read upstream, and bytes fetched by each rank of the first engine."""
    published.origin.traffic.reads.clear()
    relay = ClusterRelay(published.origin, max_bytes=_RELAY_BYTES)
    ranks = make_ranks(published.layout, drawn.old, version=_BASE)
    views = [CountingTransport(relay) for _ in ranks]
    others = [Subscriber(sink, version=_BASE) for _ in range(num_engines - 1) for sink, _ in ranks]
    jobs: list[tuple[Subscriber, Transport]] = [(one, view) for (_, one), view in zip(ranks, views, strict=True)]
    jobs += [(other, relay) for other in others]
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda job: job[0].stage(published.update, job[1]), jobs):
            pass
    for other in others:
        other.drop_staged()
    for _, subscriber in ranks:
        subscriber.activate(verify=True)
    check_exact(ranks, published.layout, drawn.new)
    upstream = published.origin.traffic.bytes_read(is_blob=True)
    return upstream, [view.traffic.bytes_read(is_blob=True) for view in views]


def _needed(layout: TargetLayout, drawn: Drawn) -> list[int]:
    """Return how many changed elements lie in the boxes of each rank."""
    changed: dict[str, Any] = {name: drawn.new[name] != drawn.old[name] for name in drawn.new}
    return [
        sum(
            int(np.count_nonzero(changed[name][slices_in(box, whole_box(changed[name].shape))]))
            for name, boxes in held.items()
            for box in boxes
        )
        for held in layout.ranks
    ]

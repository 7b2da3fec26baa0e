"""What ``rose bench transfer`` is asked to measure."""

from __future__ import annotations

import attrs
from attrs import validators as v

from rose.bench.job import Target
from rose.bench.weights import LR_RANGE

SECTIONS = ("bytes", "codec", "peers", "apply", "redundancy", "links", "life-cycle")
"""The parts of the benchmark, in the order in which they run."""

MAX_SOURCES = 64
"""Trainer ranks; they are threads of one process."""
_Fraction = v.and_(v.gt(0.0), v.le(1.0))


@attrs.frozen(kw_only=True)
class BenchSettings:
    """One run.

    Attributes:
        model: Name or table file.
        changed: Share of the elements that change, unless ``lr`` is given.
        lr: Learning rate of the step that changes them.
        link_gbps: Emulated links; 0 is a link without a limit.
        num_sources: Trainer ranks, of the section ``links`` alone.
        targets: Engines; without any, one of the largest of 4, 2 and 1 ranks that can hold the model.
        sample: Share of the decoder layers; ``None`` takes what ``sample_bytes`` allow.
        sample_bytes: Dense bytes of a sample when no share is given.
        seed: Of the weights.
        only: Sections to run.
    """

    model: str = "Qwen3-8B"
    changed: float = attrs.field(default=0.01, validator=_Fraction)
    lr: float | None = attrs.field(default=None, validator=v.optional(v.and_(v.ge(LR_RANGE[0]), v.le(LR_RANGE[1]))))
    link_gbps: tuple[float, ...] = (1.0, 2.0, 0.0)
    num_sources: int = attrs.field(default=1, validator=v.and_(v.ge(1), v.le(MAX_SOURCES)))
    targets: tuple[Target, ...] = ()
    sample: float | None = attrs.field(default=None, validator=v.optional(_Fraction))
    sample_bytes: int = attrs.field(default=800_000_000, validator=v.gt(0))
    seed: int = attrs.field(default=0, validator=v.ge(0))
    only: tuple[str, ...] = attrs.field(default=SECTIONS, validator=v.deep_iterable(v.in_(SECTIONS)))

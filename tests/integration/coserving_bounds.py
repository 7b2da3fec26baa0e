"""What a pair of engines on one paced device must show, whatever serves and whatever rolls out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import attrs

from rose.policies.admission import Mode


@attrs.define
class Latency:
    """What serving's requests saw in one arm, in modelled seconds."""

    ttft_s: list[float] = attrs.field(factory=list)
    tpot_s: list[float] = attrs.field(factory=list)


def assert_slo_is_kept(arms: Mapping[Mode, Latency], tokens_per_s: Mapping[Mode, float]) -> None:
    """Serving alone is quick, its slack is lent under ``slo``, and both promises hold; ungated it is no better off."""
    alone, slo, ungated = arms[Mode.CLOSED], arms[Mode.SLO], arms[Mode.UNGATED]
    assert tokens_per_s[Mode.CLOSED] == 0.0
    assert tokens_per_s[Mode.SLO] > 200, "tokens a second of borrowed work"
    assert statistics.median(alone.tpot_s) < 0.015
    assert statistics.median(slo.tpot_s) > 2 * statistics.median(alone.tpot_s), "no slack was lent"
    assert max(slo.tpot_s) < 0.150
    assert max(slo.ttft_s) < 0.5
    assert statistics.mean(slo.ttft_s) - statistics.mean(alone.ttft_s) < 0.030
    assert statistics.mean(slo.ttft_s) < statistics.mean(ungated.ttft_s) + 0.010

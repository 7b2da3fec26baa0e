"""What a study's figures are judged by: the floor, the SLO, and which strategy stands for the study. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from rose.simulation.report.data import FIXED, POLICY, Strategy, Study, SweepPoint

LIMITED = ("ttft_p99_ms", "tpot_p99_ms")

_ASYNC = "async"
_ALIKE = 0.02
_FAR_APART = 8.0


def has_floor(study: Study) -> bool:
    """Return whether the longest trajectory bounds a step: its length is known and the loop waits for it."""
    loop = study.config.get("loop")
    algorithm = loop.get("algorithm") if isinstance(loop, Mapping) else None
    return study.floor_s is not None and algorithm != _ASYNC


def floor_step_s(study: Study) -> float | None:
    """Return what a step takes if its rollout takes no longer than the longest trajectory alone."""
    fixed = study.fixed
    step_s, rollout_s = (fixed.get("step_s"), fixed.get("rollout_s")) if fixed else (None, None)
    if not has_floor(study) or study.floor_s is None or step_s is None or rollout_s is None:
        return None
    return step_s - rollout_s + study.floor_s


def floor_gain(study: Study) -> float | None:
    """Return the end-to-end gain at the floor, as the result tells it or as it follows from ``floor_s``."""
    if study.floor_gain is not None:
        return study.floor_gain
    floor_s = floor_step_s(study)
    step_s = study.fixed.get("step_s") if study.fixed else None
    return step_s / floor_s if floor_s and step_s else None


def measured(strategies: Sequence[Strategy], *figures: str) -> list[Strategy]:
    """Return the strategies that have all these figures, in order of display."""
    return [strategy for strategy in strategies if all(strategy.get(figure) is not None for figure in figures)]


def rivals(study: Study, *figures: str) -> list[Strategy]:
    """Return the strategies but ``fixed`` that have all these figures."""
    return [strategy for strategy in measured(study.strategies, *figures) if strategy.name != FIXED]


def broken(study: Study, strategy: Strategy) -> list[str]:
    """Return which P99 figures of a strategy are over the SLO."""
    pairs = [(figure, strategy.get(figure), study.slo_ms(figure)) for figure in LIMITED]
    return [figure for figure, value, limit in pairs if value is not None and limit is not None and value > limit]


def headline(study: Study) -> Strategy | None:
    """Return the strategy that stands for the study: of the policies that keep the SLO the one with the greatest gain.

    Where there is none, the best of all policies, then of all strategies.
    """
    known = rivals(study, "end_to_end_gain")
    policies = [strategy for strategy in known if strategy.kind == POLICY]
    keeping = [strategy for strategy in policies if not broken(study, strategy)]
    return max(keeping or policies or known, key=_gain, default=None)


def reach(strategy: Strategy, figure: str, value: float) -> tuple[float, float]:
    """Return the ends of the whisker, which hold the mean."""
    low, high = strategy.ranges.get(figure, (value, value))
    return min(low, value), max(high, value)


def ordered(strategies: Sequence[Strategy], figure: str) -> list[Strategy]:
    """Return the strategies that have a figure, least first; equal ones in order of display."""
    return sorted(measured(strategies, figure), key=lambda strategy: strategy.values[figure])


def allocating(study: Study) -> list[Strategy]:
    """Return the strategies that held GPUs for which allocation could take time."""
    return [strategy for strategy in rivals(study, "overhead_fraction") if strategy.get("borrowed_gpu_s") != 0]


def syncing(study: Study) -> list[Strategy]:
    """Return the strategies whose sync time is known for each of several versions; none where there was one version only."""
    return [strategy for strategy in study.strategies if len(strategy.sync_by_version_s) > 1]


def mean_sync_s(strategy: Strategy) -> float | None:
    """Return the mean time of a weight sync, over the versions where they are known."""
    times = strategy.sync_by_version_s
    return sum(times) / len(times) if times else strategy.get("sync_s")


def are_far_apart(values: Sequence[float]) -> bool:
    """Return whether values span so much that only a logarithmic axis shows the small ones."""
    return min(values) > 0 and max(values) >= _FAR_APART * min(values)


def are_alike(times_s: Sequence[float]) -> bool:
    """Return whether times are so near to each other that a figure of them has nothing to show."""
    return bool(times_s) and min(times_s) >= (1 - _ALIKE) * max(times_s)


@attrs.frozen(kw_only=True)
class SlotUse:
    """How the fixed baseline's slots were used over a rollout.

    Attributes:
        idle_fraction: Share of the slots' time that was empty.
        queued_fraction: Share of the unfinished trajectories' time that was spent without a slot.
    """

    idle_fraction: float
    queued_fraction: float


def slot_use(study: Study, point: SweepPoint) -> SlotUse | None:
    """Return the slots' use at one number of dedicated GPUs; ``None`` where the result does not tell.

    Figures ``idle_fraction`` and ``queued_fraction`` of ``fixed`` are taken as they are. Without them they follow from its
    completion curve: unfinished trajectories hold the slots (``rollout.cap_per_gpu`` a GPU) as far as these go.
    """
    fixed = point.get(FIXED)
    if fixed is None or not isinstance(point.value, float):
        return None
    idle, queued = fixed.get("idle_fraction"), fixed.get("queued_fraction")
    if idle is not None and queued is not None:
        return SlotUse(idle_fraction=idle, queued_fraction=queued)
    count, cap = study.setting("rollout", "num_trajectories"), study.setting("rollout", "cap_per_gpu")
    if not fixed.completion or not count or not cap:
        return None
    return _slot_use(fixed.completion, count * fixed.values.get("demand", 1.0), cap * point.value)


def _slot_use(completion: Sequence[tuple[float, float]], count: float, slots: float) -> SlotUse | None:
    used_s = waited_s = lived_s = 0.0
    before_s, done = 0.0, 0.0
    for at_s, share in completion:
        live = count * (1.0 - done)
        used_s += min(live, slots) * (at_s - before_s)
        waited_s += max(live - slots, 0.0) * (at_s - before_s)
        lived_s += live * (at_s - before_s)
        before_s, done = at_s, share
    if before_s <= 0 or lived_s <= 0 or slots <= 0:
        return None
    return SlotUse(idle_fraction=1.0 - used_s / (slots * before_s), queued_fraction=waited_s / lived_s)


def _gain(strategy: Strategy) -> float:
    return strategy.values["end_to_end_gain"]

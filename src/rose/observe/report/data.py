"""What a report shows. Plain data: build it from anything, on any machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from rose.observe.summary import VersionRecord


@attrs.frozen(kw_only=True)
class DeviceStrip:
    """What one device did over a window of one arm.

    Attributes:
        arm: ``fixed`` or ``rose``.
        device: Name of the device.
        has_serving: Whether a serving engine lives on it, so that its rollout time is borrowed.
        start_s: Start of the window in the arm, modelled seconds.
        bin_s: Length of a bin.
        serving: Share of each bin that serving's steps took, 0 to 1.
        rollout: Share of each bin that rollout steps took, as long as ``serving``.
    """

    arm: str
    device: str
    has_serving: bool
    start_s: float
    bin_s: float
    serving: tuple[float, ...]
    rollout: tuple[float, ...]


@attrs.frozen(kw_only=True)
class BusyShare:
    """How much of one device's time serving and rollouts took over a whole arm; the rest was idle."""

    arm: str
    device: str
    serving_fraction: float
    rollout_fraction: float


@attrs.frozen(kw_only=True)
class LatencySeries:
    """One serving arm's requests, in any order: time to the first token and mean time of a further token (ms)."""

    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]


@attrs.frozen(kw_only=True)
class StepFigures:
    """One RL step of one arm. Step 0 is the state before the first step (an evaluation, no rollout).

    Attributes:
        step: Number of the step.
        phase: ``learn`` or ``sparse``.
        reward: Mean reward of the step's trajectories, ``None`` for step 0.
        success: Success on the held-out maps after the step, where it was measured.
    """

    step: int
    phase: str
    reward: float | None = None
    success: float | None = None


@attrs.frozen(kw_only=True)
class ReportData:
    """Everything that a report shows.

    Attributes:
        title: Heading, such as ``FrozenLake GRPO on 2 dedicated and 2 borrowed GPUs``.
        subtitle: One line about the load and the models.
        summary: The object of ``summary.json`` (``rose.observe.summary.build_summary``); all figures in text and tables.
        strips: What each device did, one window of each arm; the same devices in the same order.
        busy: The same over whole arms.
        latency: Requests of the serving arms ``alone``, ``shared`` and, where measured, ``ungated``.
        steps: Steps of ``fixed`` and ``rose``, ascending.
        reference_success: Success of the best policy that ignores the observation, the line to clear; ``None``: no line.
        versions: The rose arm's published versions, ascending.
        completion_s: Of one step of ``fixed`` and of ``rose``: when each trajectory ended, seconds from the step's start.
        completion_step: Number of that step.
        assumptions: What was modelled or assumed, one sentence each.
    """

    title: str
    subtitle: str
    summary: Mapping[str, Any]
    strips: tuple[DeviceStrip, ...]
    busy: tuple[BusyShare, ...]
    latency: Mapping[str, LatencySeries]
    steps: Mapping[str, tuple[StepFigures, ...]]
    reference_success: float | None
    versions: tuple[VersionRecord, ...]
    completion_s: Mapping[str, tuple[float, ...]]
    completion_step: int
    assumptions: tuple[str, ...]

"""What a simulation found, as plain frozen values: picklable, comparable, the same bytes for the same seed.

``None`` stands for "nothing to measure", never for zero. Milliseconds where the name says so, seconds otherwise.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ServingOutcome:
    """Latency of the serving side's requests; a TPOT is a request's mean, an ITL a single gap between two tokens.

    ``violations_fraction``: requests over the TTFT or the TPOT SLO. ``busy_fraction``: share of device time in serving's steps.
    """

    num_requests: int
    ttft_mean_ms: float | None
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p90_ms: float | None
    tpot_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    violations_fraction: float
    busy_fraction: float


@attrs.frozen(kw_only=True)
class StepOutcome:
    """One step of the loop. ``demand``: trajectories that were run over those that the batch needed.

    ``own_p75_fraction`` and ``end_p75_fraction``: P75 of the trajectories' own durations, and of their end times counted from the
    step's start, over the rollout time.
    """

    rollout_s: float
    train_s: float
    sync_s: float
    demand: float
    own_p75_fraction: float
    end_p75_fraction: float

    @property
    def step_s(self) -> float:
        """The whole step, phases one after the other."""
        return self.rollout_s + self.train_s + self.sync_s


@attrs.frozen(kw_only=True)
class Outcome:
    """One strategy on one scenario with one seed.

    Attributes:
        strategy: Its name.
        seed: Of everything random.
        steps: Step by step; for an asynchronous loop ``rollout_s`` of a step is the time for which training waits for a batch, and
            fractions are of the time between two updates.
        step_s: Mean time of a step.
        rollout_s: Mean rollout time of a step.
        floor_s: The longest trajectory alone on an idle engine, mean over steps.
        completion: ``(seconds from the step's start, share of trajectories done)`` of the first step, at most 64 points.
        num_turns, num_tokens, num_trajectories: Done; tokens are modelled ones.
        made_tokens: By all engines, those of trajectories that were not counted included.
        num_hops: Attempts of turns beyond the first.
        num_evicted, num_stalled, num_lost: Of those, by why.
        reprefill_tokens: Prompt tokens computed again because a prefix was not where the turn went.
        borrowed_tokens: Generated on engines that are not the job's own.
        borrowed_gpu_s: GPU seconds for which such engines were held.
        overhead_fraction: Share of the held time that allocation took (boot, load, cold start, activation).
        cost_dollars: Of one step, by the scenario's prices.
        alone_ttft_p50_ms, alone_ttft_p99_ms, alone_tpot_p50_ms, alone_tpot_p99_ms: Of serving alone, over the requests that arrived in
            the same phases as those of ``serving``.
        serving: Latency of serving beside it; ``None`` where the strategy runs on no serving device.
        num_events: Steps of the event loop, for judging speed.
        link_bytes: Of weights that crossed the thin link.
    """

    strategy: str
    seed: int
    steps: tuple[StepOutcome, ...]
    step_s: float
    rollout_s: float
    floor_s: float
    completion: tuple[tuple[float, float], ...]
    num_turns: int
    num_tokens: int
    num_trajectories: int
    num_hops: int
    num_evicted: int
    num_stalled: int
    num_lost: int
    reprefill_tokens: int
    borrowed_tokens: int
    borrowed_gpu_s: float
    overhead_fraction: float
    cost_dollars: float
    made_tokens: int
    alone_ttft_p50_ms: float | None
    alone_ttft_p99_ms: float | None
    alone_tpot_p50_ms: float | None
    alone_tpot_p99_ms: float | None
    serving: ServingOutcome | None
    num_events: int
    link_bytes: int = 0

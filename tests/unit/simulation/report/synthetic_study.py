"""Made-up results in the shape that a study writes: what tests and eyes look at reports with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

# name, kind, speed of rollouts over fixed, TTFT P99, TPOT P99, overhead, dollars; no latency: it runs beside no serving.
STRATEGIES = (
    ("paper", "policy", 1.40, 338.1, 136.1, 0.004, 118.0),
    ("default", "policy", 1.72, 321.0, 128.4, 0.003, 104.0),
    ("quiet", "policy", 1.21, 315.9, 118.1, 0.003, 121.0),
    ("spot", "baseline", 1.18, None, None, 0.071, 131.0),
    ("serverless", "baseline", 1.09, None, None, 0.206, 164.0),
    ("static", "baseline", 1.16, 611.0, 171.0, 0.002, 122.0),
    ("serverlessllm", "baseline", 1.06, 1166.0, 135.6, 0.112, 127.0),
    ("prism", "baseline", 0.97, 973.0, 115.4, 0.013, 133.0),
    ("lyra", "baseline", 1.11, 420.0, 122.0, 0.034, 128.0),
    ("ekya", "baseline", 1.13, 467.0, 148.0, 0.021, 125.0),
    ("fixed-uncapped", "baseline", 0.99, None, None, None, 127.0),
)
FIXED_ROLLOUT_S, REST_S = 696.0, 105.0
CONFIG = {
    "name": "frozenlake-8b-grpo",
    "cluster": {"rollout_gpus": 8, "training_gpus": 8, "borrowed_gpus": 16, "kv_memory_fraction": 0.9},
    "serving": {
        "profile": "h100-qwen2.5-7b",
        "load_fraction": 0.3,
        "ttft_slo_s": 0.5,
        "tpot_slo_s": 0.15,
        "trace": None,
    },
    "rollout": {"num_trajectories": 256, "group_size": 16, "cap_per_gpu": 16, "workload": "frozenlake"},
    "loop": {"algorithm": "grpo", "rollout_share": 0.869},
}


def strategy(name: str, seed: int = 0, *, speed: float | None = None, extra_ms: float = 1.0) -> dict[str, object]:
    """One strategy's figures, means and spread over made-up seeds; ``speed`` is that of its rollouts over fixed."""
    _, kind, own_speed, ttft_ms, tpot_ms, overhead, dollars = next(row for row in STRATEGIES if row[0] == name)
    rollout_s = FIXED_ROLLOUT_S / (own_speed if speed is None else speed)
    step_s = rollout_s + REST_S
    figures = {
        "step_s": step_s,
        "rollout_s": rollout_s,
        "rollout_share": rollout_s / step_s,
        "p75_fraction": 0.3,
        "end_to_end_gain": (FIXED_ROLLOUT_S + REST_S) / step_s,
        "ttft_p50_ms": ttft_ms and ttft_ms * extra_ms / 4,
        "ttft_p99_ms": ttft_ms and ttft_ms * extra_ms,
        "tpot_p50_ms": tpot_ms and tpot_ms * extra_ms / 2,
        "tpot_p99_ms": tpot_ms and tpot_ms * extra_ms,
        "itl_p99_ms": tpot_ms and tpot_ms * extra_ms * 1.1,
        "violations_fraction": ttft_ms and (0.031 if ttft_ms * extra_ms > 500 else 0.0002),
        "borrowed_tokens": 4.1e6,
        "borrowed_gpu_s": 7210.0,
        "overhead_fraction": overhead,
        "cost_dollars": dollars,
        "num_turns": 3130,
        "reprefill_tokens": 120_000,
    }
    return {
        **figures,
        "kind": kind,
        "summary": f"What {name} does, in one line.",
        "completion": curve(rollout_s, seed),
        "spread": spread(figures),
    }


def fixed(rollout_s: float = FIXED_ROLLOUT_S, seed: int = 9) -> dict[str, object]:
    """The baseline's figures."""
    figures = {
        "step_s": rollout_s + REST_S,
        "rollout_s": rollout_s,
        "rollout_share": rollout_s / (rollout_s + REST_S),
        "p75_fraction": 0.3,
        "end_to_end_gain": 1.0,
        "cost_dollars": 126.0,
    }
    return {**figures, "kind": "baseline", "completion": curve(rollout_s, seed), "spread": spread(figures)}


def curve(end_s: float, seed: int) -> list[list[float]]:
    """A long-tailed completion curve of 64 points."""
    rng = random.Random(seed)
    ends = sorted(min(end_s, end_s * 0.17 * rng.lognormvariate(0, 0.9)) for _ in range(63))
    return [[at_s, (index + 1) / 64] for index, at_s in enumerate([*ends, end_s])]


def spread(figures: dict[str, float | None], by: float = 0.03) -> dict[str, object]:
    """A spread of a few percent around each figure, as over ten seeds."""
    return {
        name: {"min": value * (1 - by), "max": value * (1 + by), "sd": value * by / 2}
        for name, value in figures.items()
        if value is not None
    }


def alone(extra_ms: float = 1.0) -> dict[str, object]:
    """Serving's latency without rollouts beside it."""
    return {"ttft_p50_ms": 71.0 * extra_ms, "ttft_p99_ms": 314.8 * extra_ms, "tpot_p99_ms": 117.8 * extra_ms}


def study_result(
    names: Sequence[str] | None = None, *, name: str = "frozenlake-8b-grpo", seeds: int = 10
) -> dict[str, object]:
    """A whole result of the named strategies, of all by default."""
    chosen = [row[0] for row in STRATEGIES] if names is None else list(names)
    return {
        "scenario": {"name": name, "config": {**CONFIG, "name": name}},
        "seeds": list(range(seeds)),
        "assumptions": ["Turns of one trajectory come 1.5 s apart.", "P75 is read as each trajectory's own duration."],
        "strategies": ["fixed", *chosen],
        "fixed": fixed(),
        **{one: strategy(one, index) for index, one in enumerate(chosen)},
        "serving_alone": alone(),
        "floor_s": 372.0,
        "amdahl_gain": 7.63,
        "simulated_turns": 412_000,
        "published": {"end_to_end_gain": 1.31, "rollout_s": 496.3, "ttft_p99_ms": 338.1, "rollout_share": 0.869,
                      "spot.overhead_fraction": 0.07, "serving_alone.ttft_p99_ms": 314.8},
    }  # fmt: skip


def sweep(axis: str, unit: str, values: Iterable[float | str], names: Sequence[str] | None = None) -> dict[str, object]:
    """A sweep: gains grow over the values towards each strategy's own, and latencies too."""
    chosen = [row[0] for row in STRATEGIES] if names is None else list(names)
    listed = list(values)
    points = []
    for index, value in enumerate(listed):
        part = (index + 1) / len(listed)
        point: dict[str, object] = {"value": value, "fixed": fixed(), "serving_alone": alone(0.6 + 0.4 * part)}
        for order, one in enumerate(chosen):
            own = next(row[2] for row in STRATEGIES if row[0] == one)
            point[one] = strategy(one, order, speed=1 + (own - 1) * part, extra_ms=0.5 + part / 2)
        points.append({**point, "floor_s": 372.0, "amdahl_gain": 2.2})
    return {"axis": axis, "unit": unit, "points": points}


def problem_sweep(gpus: Sequence[int] = (4, 8, 12, 16, 24, 32)) -> dict[str, object]:
    """The fixed baseline with more and more GPUs for rollouts."""
    points = [{"value": n, "fixed": fixed(420.0 + 2200.0 / n, seed=n), "floor_s": 372.0} for n in gpus]
    return {"axis": "cluster.rollout_gpus", "unit": "GPUs", "points": points}

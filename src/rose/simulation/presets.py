"""Named scenarios: the set-ups of the paper (arXiv 2605.06534), with what it states and what had to be assumed.

Stated: GPUs and how they are split, models, groups of 16, batches of 256 and 1,024, contexts of 32k, SLOs, 16 trajectories a GPU,
rollout shares of a step, the tail ("P75 of trajectories are done by 30 % of the rollout time"), DAPO's demand, mean use of the
serving GPUs. Everything else is an assumption and is listed with the scenario. ``PUBLISHED`` has the figures to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

import attrs

from rose.errors import ConfigError
from rose.simulation.scenario import (
    Algorithm,
    ClusterConfig,
    DapoMode,
    LinkConfig,
    LoopConfig,
    RolloutConfig,
    Scenario,
    ServingConfig,
    Tail,
)

ASSUMPTIONS = (
    "step times are a roofline of an H800 (+-20 %), not measured on one",
    "serving runs at 19 % of its capacity: the paper states a mean SM use of 18.9 %; its trace is not public, so a bursty load with "
    "its peaks (4.2 x in a second, 1.7 x in a minute) and lengths like Azure's conversations is generated",
    "of the 16 and 48 dedicated GPUs, 8 and 16 roll out: the share of training follows from the paper's bounds",
    "turns, observations and environment delays are those of the named workload; lengths are fitted to the paper's tail",
    "training takes a constant time, so that the fixed baseline has the paper's share of rollouts",
    "the thin link has 100 Gbps, 2 % of the weights' values change in a step",
    "a trajectory keeps its slot while its environment works, as frameworks with one worker an environment have it",
)


@attrs.frozen
class Fit:
    """The tail's two numbers and the training time, fitted by ``benchmarks/fit_tail.py``."""

    median_tokens: float
    sigma: float
    train_s: float


FITS: Mapping[tuple[str, Tail], Fit] = {
    ("frozenlake", Tail.OWN_DURATION): Fit(3500.0, 0.9, 48.7),
    ("frozenlake", Tail.END_TIME): Fit(2500.0, 1.3, 54.3),
    ("alfworld", Tail.OWN_DURATION): Fit(2500.0, 0.6, 254.6),
    ("alfworld", Tail.END_TIME): Fit(150.0, 3.0, 249.5),
}


@attrs.frozen(kw_only=True)
class _SetUp:
    workload: str
    cluster: ClusterConfig
    serving: ServingConfig
    rollout_profile: str
    num_trajectories: int
    max_turn_tokens: int
    rollout_share: float


_SET_UPS = {
    "frozenlake-8b": _SetUp(
        workload="frozenlake",
        cluster=ClusterConfig(rollout_gpus=8, training_gpus=8, borrowed_gpus=16),
        serving=ServingConfig(profile="h800:qwen2.5-7b", load_fraction=0.19, ttft_slo_s=0.5, tpot_slo_s=0.15),
        rollout_profile="h800:qwen3-8b",
        num_trajectories=256,
        max_turn_tokens=2048,
        rollout_share=0.869,
    ),
    "alfworld-32b": _SetUp(
        workload="alfworld",
        cluster=ClusterConfig(rollout_gpus=16, training_gpus=32, borrowed_gpus=64),
        serving=ServingConfig(profile="h800x4:qwen2.5-32b", load_fraction=0.19, ttft_slo_s=1.0, tpot_slo_s=0.45),
        rollout_profile="h800x4:qwen3-32b",
        num_trajectories=1024,
        max_turn_tokens=512,
        rollout_share=0.705,
    ),
}

_LOOPS = {
    "grpo": LoopConfig(algorithm=Algorithm.GRPO),
    "dapo": LoopConfig(algorithm=Algorithm.DAPO, dapo=DapoMode.INFLIGHT, max_demand=5.7),
    "async": LoopConfig(algorithm=Algorithm.ASYNC, num_steps=3, max_staleness=1),
}

PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "frozenlake-8b-grpo": {
        "end_to_end_gain": 1.31,
        "rollout_s": 496.3,
        "ttft_p99_ms": 338.1,
        "tpot_p99_ms": 136.1,
        "alone_ttft_p99_ms": 314.8,
        "alone_tpot_p99_ms": 117.8,
        "rollout_share": 0.869,
        "p75_fraction": 0.30,
        "over_spot_rollout_gain": 1.20,
    },
    "frozenlake-8b-dapo": {"end_to_end_gain": 1.42},
    "frozenlake-8b-async": {"end_to_end_gain": 1.44},
    "alfworld-32b-grpo": {
        "end_to_end_gain": 1.46,
        "rollout_s": 960.1,
        "ttft_p99_ms": 837.5,
        "tpot_p99_ms": 398.1,
        "alone_ttft_p99_ms": 716.1,
        "alone_tpot_p99_ms": 312.8,
        "rollout_share": 0.705,
        "p75_fraction": 0.30,
        "over_spot_rollout_gain": 1.26,
    },
    "alfworld-32b-dapo": {"end_to_end_gain": 3.31},
    "alfworld-32b-async": {"end_to_end_gain": 2.69},
}
"""What the paper reports for its own system, by preset."""


def with_tail(scenario: Scenario, tail: Tail) -> Scenario:
    """Return a preset's scenario under the other reading of the tail.

    Raises:
        ConfigError: There is no fit for its workload.
    """
    fit = FITS.get((scenario.rollout.workload, tail))
    if fit is None:
        message = f"rollout.tail = {tail.value!r} has no fit for workload {scenario.rollout.workload!r}; set median_tokens and sigma"
        raise ConfigError(message)
    rollout = attrs.evolve(scenario.rollout, tail=tail, median_tokens=fit.median_tokens, sigma=fit.sigma)
    return attrs.evolve(scenario, rollout=rollout, loop=attrs.evolve(scenario.loop, train_s=fit.train_s))


def _preset(set_up: str, loop: str) -> Scenario:
    base = _SET_UPS[set_up]
    scenario = Scenario(
        name=f"{set_up}-{loop}",
        cluster=base.cluster,
        serving=base.serving,
        rollout=RolloutConfig(
            profile=base.rollout_profile,
            workload=base.workload,
            num_trajectories=base.num_trajectories,
            group_size=16,
            max_turn_tokens=base.max_turn_tokens,
        ),
        loop=attrs.evolve(_LOOPS[loop], rollout_share=base.rollout_share),
        link=LinkConfig(gbps=100.0),
        assumptions=ASSUMPTIONS,
    )
    return with_tail(scenario, Tail.OWN_DURATION)


PRESETS: Mapping[str, Scenario] = {f"{set_up}-{loop}": _preset(set_up, loop) for set_up in _SET_UPS for loop in _LOOPS}


def preset_named(name: str) -> Scenario:
    """Return a preset by name.

    Raises:
        ConfigError: There is none of that name.
    """
    scenario = PRESETS.get(name)
    if scenario is None:
        close = get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        message = f"unknown preset {name!r}; {hint}known are {', '.join(PRESETS)}; or give --config FILE"
        raise ConfigError(message)
    return scenario

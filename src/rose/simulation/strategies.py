"""The named strategies: policies that ROSE has, and baselines to compare them with. A new one is one entry here.

A strategy says where more engines come from and what limits apply; the pool, its routing and everything beneath are the same
live code for all. Baselines carry the rule of a published system, not its code; their docstrings say what is assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal

import attrs

from rose.errors import ConfigError
from rose.policies.admission import Mode
from rose.policies.routing import RoutingRule
from rose.simulation.guest_memory import MemoryRule
from rose.simulation.scenario import Algorithm
from rose.simulation.shared_supply import CoservingSupply, PartitionSupply, SwitchSupply, WholeSupply
from rose.simulation.supply import NoSupply, RentedSupply, Supply


@attrs.frozen(kw_only=True)
class Strategy:
    """One way to run the job.

    Attributes:
        name: In commands, tables and plots.
        kind: A policy is ROSE's own; a baseline stands for what others do.
        summary: One line.
        supply: Makes the way to more engines; called once a run.
        price: Which price of the scenario the extra engines have.
        is_capped: Turns in flight are limited by ``rollout.cap_per_gpu``.
        looks_at_kv: The router knows the engines' KV memory; otherwise engines preempt when it runs out.
        algorithm: The outer loop, where it is not the scenario's.
        starts_early: DAPO: more groups are started as soon as there is room, not in rounds.
        routing: How the pool compares engines.
    """

    name: str
    kind: Literal["policy", "baseline"]
    summary: str
    supply: Callable[[], Supply] = NoSupply
    price: Literal["borrowed", "spot", "serverless"] = "borrowed"
    is_capped: bool = True
    looks_at_kv: bool = True
    algorithm: Algorithm | None = None
    starts_early: bool = False
    routing: RoutingRule = RoutingRule.PAPER


def _policy(name: str, summary: str, supply: Callable[[], Supply], *, starts_early: bool = False) -> Strategy:
    return Strategy(
        name=name,
        kind="policy",
        summary=summary,
        supply=supply,
        starts_early=starts_early,
        routing=RoutingRule.VALUE,
    )


def _baseline(
    name: str,
    summary: str,
    supply: Callable[[], Supply] = NoSupply,
    *,
    price: Literal["borrowed", "spot", "serverless"] = "borrowed",
    algorithm: Algorithm | None = None,
) -> Strategy:
    return Strategy(name=name, kind="baseline", summary=summary, supply=supply, price=price, algorithm=algorithm)


# Boot times are such that allocation takes about the share of the held time that the paper reports (7 % and 15 to 26 %) on rollouts of
# some 300 s; spot instances are to be had three quarters of the time and live for 20 minutes.
_SPOT = RentedSupply(name="spot", boot_s=20.0, mean_up_s=1200.0, mean_down_s=400.0, warning_s=5.0)
_SERVERLESS = RentedSupply(name="function", boot_s=60.0, limit_s=900.0)

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        _baseline("fixed", "the job's own engines only, capped (ROLL- and veRL-like)"),
        Strategy(
            name="fixed-uncapped",
            kind="baseline",
            summary="the job's own engines only, every turn sent at once; engines preempt when KV memory runs out",
            is_capped=False,
            looks_at_kv=False,
        ),
        Strategy(
            name="paper",
            kind="policy",
            summary="the published rules: start while both slacks are positive, a fifth of KV memory kept free, one cut to half",
            supply=lambda: CoservingSupply(
                mode=Mode.PAPER, memory_rule=MemoryRule.PUBLISHED, headroom_fraction=0.2, has_whole_chunks=True
            ),
        ),
        _policy("default", "ROSE as it ships: admission up to the SLO with an arrival reserve", CoservingSupply),
        _policy("quiet", "ROSE with admission that serving hardly feels", lambda: CoservingSupply(mode=Mode.QUIET)),
        _policy(
            "eager-groups",
            "as default; DAPO starts groups early, which prefers short ones (a bias)",
            CoservingSupply,
            starts_early=True,
        ),
        _baseline(
            "ungated",
            "co-serving without any gate, first come first served",
            lambda: CoservingSupply(mode=Mode.UNGATED),
        ),
        _baseline("spot", "whole spot GPUs that come and go (RLBoost-like)", lambda: _SPOT, price="spot"),
        _baseline(
            "serverless",
            "whole GPUs of functions with a cold start and a life of 15 minutes (ServerlessRL-like)",
            lambda: _SERVERLESS,
            price="serverless",
        ),
        _baseline("static", "a fixed half of each serving GPU", PartitionSupply),
        _baseline(
            "ekya",
            "a split of each serving GPU found by a micro-profile (Ekya-like)",
            lambda: PartitionSupply(is_profiled=True),
        ),
        _baseline(
            "serverlessllm", "one model on a GPU at a time, switched by demand (ServerlessLLM-like)", SwitchSupply
        ),
        _baseline(
            "prism",
            "both models in one pool of memory, serving's weights leave when it is idle (Prism-like)",
            lambda: SwitchSupply(is_resident=True),
        ),
        _baseline("lyra", "whole idle serving GPUs, lent and taken back (Lyra-like)", WholeSupply),
        _baseline(
            "areal",
            "the job's own engines only, asynchronous with bounded staleness (AReaL-like)",
            algorithm=Algorithm.ASYNC,
        ),
    )
}

FIXED = "fixed"
"""What every gain is measured against."""


def strategy_named(name: str) -> Strategy:
    """Return a strategy by name.

    Raises:
        ConfigError: There is none of that name.
    """
    strategy = STRATEGIES.get(name)
    if strategy is None:
        close = get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        message = f"unknown policy or baseline {name!r}; {hint}known are {', '.join(STRATEGIES)}"
        raise ConfigError(message)
    return strategy

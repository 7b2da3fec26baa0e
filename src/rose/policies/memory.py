"""How one pool of KV memory is split between a serving engine and a borrowed rollout engine. Pure; modelled bytes.

Invariants: serving's head-room is free ahead of its need; the rollout budget is cut at once and grows slowly; the two
uses together never exceed the pool once a cut is carried out.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import attrs
from attrs import validators as v


@attrs.frozen(kw_only=True)
class MemoryConfig:
    """One device's KV pool and how it is shared.

    Attributes:
        pool_bytes: All KV memory of the device.
        headroom_bytes: Kept free for serving's next allocations, beyond what it uses. 1-2 GB is enough when eviction is
            immediate; a fifth of the pool, as published, costs rollouts much and protects no better.
        granule_bytes: Budgets are multiples of this, so that serving's growth by a block does not move the budget.
        growth_fraction: A budget grows by at most this share of the pool at a time, ...
        growth_interval_s: ... not more often than this, ...
        growth_margin_bytes: ... and only when at least this much more is free (hysteresis).
    """

    pool_bytes: int = attrs.field(validator=v.gt(0))
    headroom_bytes: int = attrs.field(default=2 << 30, validator=v.ge(0))
    granule_bytes: int = attrs.field(default=256 << 20, validator=v.ge(1))
    growth_fraction: float = attrs.field(default=0.05, validator=[v.gt(0), v.le(1)])
    growth_interval_s: float = attrs.field(default=0.25, validator=v.ge(0))
    growth_margin_bytes: int = attrs.field(default=0, validator=v.ge(0))


@attrs.frozen(kw_only=True)
class BudgetChange:
    """The budget from now on, and whether it grew (the caller notes when)."""

    budget_bytes: int
    has_grown: bool


def next_budget(
    config: MemoryConfig, *, serving_used_bytes: float, cap_bytes: float, current_bytes: int, since_growth_s: float
) -> BudgetChange:
    """Return the rollout engine's KV budget.

    Args:
        config: The pool.
        serving_used_bytes: What serving uses now.
        cap_bytes: The lender's own limit, possibly ``inf``.
        current_bytes: The budget in force.
        since_growth_s: Time since the budget last grew.
    """
    free = config.pool_bytes - serving_used_bytes - config.headroom_bytes
    target = max(0, int(min(free, cap_bytes, config.pool_bytes)))
    target -= target % config.granule_bytes
    if target <= current_bytes:
        return BudgetChange(budget_bytes=target, has_grown=False)
    if since_growth_s < config.growth_interval_s or target - current_bytes < config.growth_margin_bytes:
        return BudgetChange(budget_bytes=current_bytes, has_grown=False)
    step = max(config.granule_bytes, int(config.growth_fraction * config.pool_bytes))
    return BudgetChange(budget_bytes=min(target, current_bytes + step), has_grown=True)


def possible_budget(config: MemoryConfig, cap_bytes: float) -> int:
    """Return the largest budget that an idle serving engine would ever leave."""
    most = int(min(config.pool_bytes - config.headroom_bytes, cap_bytes))
    return max(0, most - most % config.granule_bytes)


@attrs.frozen
class KvHolder:
    """A running request that can be evicted: when it was admitted, and what its eviction frees."""

    request_id: str
    admitted_s: float
    held_bytes: int


def choose_victims(running: Sequence[KvHolder], need_bytes: int) -> tuple[str, ...]:
    """Return which requests to evict so that ``need_bytes`` come free: the youngest, since they lose the least work.

    All of them when that is not enough; none when nothing is needed. Requests that hold nothing are spared.
    """
    victims: list[str] = []
    for holder in sorted(running, key=lambda holder: (-holder.admitted_s, holder.request_id)):
        if need_bytes <= 0:
            break
        if holder.held_bytes > 0:
            victims.append(holder.request_id)
            need_bytes -= holder.held_bytes
    return tuple(victims)


class Admission(enum.Enum):
    """What to do with a request that needs KV memory."""

    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"


def admits(*, need: int, used: int, budget: int, possible: int) -> Admission:
    """Return whether a request fits: now, later, or never. Any one unit (bytes, pages, blocks).

    Args:
        need: What the request will hold at its longest.
        used: What is held, expected growth of running requests included.
        budget: The budget in force.
        possible: The largest budget that the device could ever give.
    """
    if need > possible:
        return Admission.REFUSE
    return Admission.ADMIT if used + need <= budget else Admission.WAIT

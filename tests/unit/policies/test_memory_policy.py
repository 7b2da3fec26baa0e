"""The KV budget of a borrowed engine."""

from __future__ import annotations

import math

from rose.policies.memory import (
    Admission,
    BudgetChange,
    KvHolder,
    MemoryConfig,
    admits,
    choose_victims,
    next_budget,
    possible_budget,
)

CONFIG = MemoryConfig(
    pool_bytes=1000, headroom_bytes=100, granule_bytes=10, growth_fraction=0.05, growth_interval_s=1.0
)


def budget(used: float, current: int, *, since_s: float = 9.0, cap: float = math.inf) -> BudgetChange:
    return next_budget(CONFIG, serving_used_bytes=used, cap_bytes=cap, current_bytes=current, since_growth_s=since_s)


def test_a_cut_is_whole_and_at_once() -> None:
    assert budget(700, 500, since_s=0.0) == BudgetChange(budget_bytes=200, has_grown=False)
    assert budget(5000, 500).budget_bytes == 0
    assert budget(0, 500, cap=50).budget_bytes == 50


def test_growth_is_slow() -> None:
    assert budget(300, 200) == BudgetChange(budget_bytes=250, has_grown=True)
    assert budget(300, 200, since_s=0.5) == BudgetChange(budget_bytes=200, has_grown=False)
    assert budget(300, 590).budget_bytes == 600


def test_serving_s_growth_by_a_little_moves_nothing() -> None:
    assert budget(301, 590).budget_bytes == budget(309, 590).budget_bytes == 590


def test_the_youngest_go_and_no_more_than_needed() -> None:
    running = [KvHolder("old", 1.0, 50), KvHolder("young", 3.0, 20), KvHolder("middle", 2.0, 20)]
    assert choose_victims(running, 0) == ()
    assert choose_victims(running, 20) == ("young",)
    assert choose_victims(running, 21) == ("young", "middle")
    assert choose_victims(running, 999) == ("young", "middle", "old")
    assert choose_victims([KvHolder("empty", 9.0, 0), *running], 1) == ("young",)


def test_a_request_that_fits_later_waits_and_one_that_never_fits_is_refused() -> None:
    """Case C02: 100 pages, serving holds 90; one rollout needs 12, another 120."""
    pool = MemoryConfig(pool_bytes=100, headroom_bytes=0, granule_bytes=1, growth_fraction=1.0, growth_interval_s=0.0)

    def share(serving_pages: int, current: int) -> int:
        return next_budget(
            pool,
            serving_used_bytes=serving_pages,
            cap_bytes=math.inf,
            current_bytes=current,
            since_growth_s=1.0,
        ).budget_bytes

    possible = possible_budget(pool, math.inf)
    now = share(90, 0)
    assert now == 10
    assert admits(need=12, used=0, budget=now, possible=possible) is Admission.WAIT
    assert admits(need=120, used=0, budget=now, possible=possible) is Admission.REFUSE
    assert admits(need=12, used=0, budget=share(88, now), possible=possible) is Admission.ADMIT
    assert share(100, 12) == 0, "serving's allocations succeed up to its own limit"


def test_what_is_reserved_counts_as_used() -> None:
    assert admits(need=5, used=6, budget=10, possible=100) is Admission.WAIT
    assert possible_budget(CONFIG, 455.0) == 450

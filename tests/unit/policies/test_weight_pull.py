"""When a borrowed engine pulls a version."""

from __future__ import annotations

import math

import attrs
import pytest

from rose.policies.weight_pull import (
    ClusterSnapshot,
    LoanEstimate,
    PullAction,
    PullCandidate,
    PullConfig,
    PullReason,
    estimate_loan,
    plan_pulls,
    useful_s,
)
from rose.types import EngineId

CONFIG = PullConfig(prior_loan_s=100.0)
GB = 10**9


def candidate(name: str = "e", **fields) -> PullCandidate:
    defaults = {
        "is_dedicated": False,
        "pieces": {"d1": GB},
        "versions_behind": 1,
        "loan": LoanEstimate(mean_s=100.0),
        "tokens_per_s": 10.0,
    }
    return PullCandidate(engine_id=EngineId(name), **{**defaults, **fields})


def cluster(*candidates: PullCandidate, gbytes_per_s: float = 1.0, job: float | None = 30.0, present=()):
    return ClusterSnapshot(
        candidates=candidates,
        present=frozenset(present),
        link_bytes_per_s=gbytes_per_s * GB,
        job_tokens_per_s=job,
    )


def decide(*candidates: PullCandidate, config: PullConfig = CONFIG, **fields) -> list[tuple[PullAction, PullReason]]:
    plans = plan_pulls(config, cluster(*candidates, **fields))
    return [(plans[each.engine_id].action, plans[each.engine_id].reason) for each in candidates]


PAYS = (PullAction.PULL, PullReason.PAYS)
FREE = (PullAction.PULL, PullReason.FREE)
WAIT = (PullAction.WAIT, PullReason.DOES_NOT_PAY)
SKIP = (PullAction.SKIP, PullReason.LOAN_TOO_SHORT)


def test_the_gain_is_the_engines_share_of_the_jobs_tokens_over_what_is_left_of_its_loan() -> None:
    plan = plan_pulls(CONFIG, cluster(candidate(stage_s=2.0, pause_s=1.0)))[EngineId("e")]
    assert plan.gain_s == pytest.approx(100 * math.exp(-4 / 100) * 10 / 40)
    assert plan.cost_s == pytest.approx(1.0)
    assert plan.action is PullAction.PULL


def test_a_thin_link_makes_a_short_loan_wait_and_a_long_one_pull() -> None:
    short, long = candidate(loan=LoanEstimate(mean_s=20.0)), candidate(loan=LoanEstimate(mean_s=1000.0))
    assert decide(short, gbytes_per_s=0.1) == [WAIT]
    assert decide(long, gbytes_per_s=0.1) == [PAYS]
    assert decide(short, gbytes_per_s=10.0) == [PAYS]


def test_engines_of_a_cluster_pay_together_for_what_crosses_once() -> None:
    alone = candidate("a", loan=LoanEstimate(mean_s=30.0))
    assert decide(alone, gbytes_per_s=0.1, job=30.0) == [WAIT]
    many = [attrs.evolve(alone, engine_id=EngineId(f"e{i}")) for i in range(12)]
    assert decide(*many, gbytes_per_s=0.1, job=30.0) == [PAYS] * 12


def test_what_has_crossed_is_free() -> None:
    short = candidate(loan=LoanEstimate(mean_s=5.0))
    assert decide(short, gbytes_per_s=0.01) == [SKIP]
    assert decide(short, gbytes_per_s=0.01, present={"d1"}) == [FREE]


def test_what_one_group_brings_over_is_free_for_the_next() -> None:
    long = candidate("long", loan=LoanEstimate(mean_s=1000.0))
    short = candidate("short", loan=LoanEstimate(mean_s=5.0), pieces={"d0": 1, "d1": GB}, versions_behind=2)
    assert decide(long, short, gbytes_per_s=0.1) == [PAYS, PAYS]
    assert decide(short, gbytes_per_s=0.1) == [SKIP]


def test_dedicated_engines_always_pull() -> None:
    own = candidate(is_dedicated=True, loan=LoanEstimate(mean_s=0.0), pieces={"d1": 10**15})
    assert decide(own, gbytes_per_s=0.001) == [(PullAction.PULL, PullReason.DEDICATED)]


def test_nothing_waits_for_want_of_figures() -> None:
    unmeasured = (PullAction.PULL, PullReason.UNMEASURED)
    never = candidate(loan=LoanEstimate(mean_s=0.001))
    assert decide(attrs.evolve(never, tokens_per_s=None)) == [unmeasured]
    assert decide(never, job=None) == [unmeasured]
    plans = plan_pulls(CONFIG, attrs.evolve(cluster(never), link_bytes_per_s=None))
    assert plans[EngineId("e")].reason is PullReason.UNMEASURED


def test_a_loan_that_cannot_last_that_long_skips_the_version() -> None:
    doomed = candidate(loan=LoanEstimate(mean_s=2.0, error_fraction=0.5), stage_s=10.0)
    assert decide(doomed, gbytes_per_s=0.01) == [SKIP]


def test_an_engine_that_is_admissible_for_another_version_waits_unless_it_costs_nothing() -> None:
    lenient = PullConfig(max_staleness=2)
    behind = candidate(versions_behind=1)
    assert decide(behind, config=lenient) == [(PullAction.WAIT, PullReason.STILL_ADMISSIBLE)]
    assert decide(behind, config=lenient, present={"d1"}) == [FREE]
    assert decide(attrs.evolve(behind, versions_behind=2), config=lenient) == [PAYS]
    assert decide(attrs.evolve(behind, versions_behind=None), config=lenient) == [PAYS]


def test_a_decision_holds_until_the_figures_are_clear() -> None:
    """The mean says: just not worth it. One that pulls goes on, one that waits goes on waiting, on either side of the edge."""
    config = PullConfig(margin_fraction=0.2)
    for mean_s, first in ((42.0, WAIT), (52.0, PAYS)):
        edge = candidate(loan=LoanEstimate(mean_s=mean_s, error_fraction=0.2))
        assert decide(edge, config=config, gbytes_per_s=0.1, job=30.0) == [first]
        assert decide(attrs.evolve(edge, was_pulling=True), config=config, gbytes_per_s=0.1) == [PAYS]
        assert decide(attrs.evolve(edge, was_pulling=False), config=config, gbytes_per_s=0.1) == [WAIT]
    clear = candidate(loan=LoanEstimate(mean_s=500.0, error_fraction=0.2), was_pulling=False)
    assert decide(clear, config=config, gbytes_per_s=0.1) == [PAYS]


def test_an_idle_link_costs_nothing() -> None:
    assert decide(candidate(loan=LoanEstimate(mean_s=0.1)), config=PullConfig(link_price=0.0)) == [PAYS]


def test_loans_that_lived_long_are_expected_to_go_on() -> None:
    """Most loans end within seconds, a few last: a young one is not worth much, one that survived is."""
    ended = [10.0] * 9 + [1000.0] * 3
    young = estimate_loan(CONFIG, ended_s=ended, running_s=(), age_s=0.0)
    old = estimate_loan(CONFIG, ended_s=ended, running_s=(), age_s=20.0)
    assert young.mean_s == pytest.approx((9 * 10 + 3 * 1000 + 100) / 13)
    assert old.mean_s == pytest.approx((3 * 980 + 100) / 4)
    assert (old.mean_s > young.mean_s, old.error_fraction > young.error_fraction) == (True, True)


def test_loans_that_still_run_count_with_what_they_have_lasted() -> None:
    without = estimate_loan(CONFIG, ended_s=[50.0], running_s=[], age_s=0.0)
    beside = estimate_loan(CONFIG, ended_s=[50.0], running_s=[400.0, 400.0], age_s=0.0)
    assert (without.mean_s, beside.mean_s) == (75.0, 475.0)


def test_without_any_loan_seen_the_prior_holds_and_is_uncertain() -> None:
    estimate = estimate_loan(CONFIG, ended_s=[], running_s=[], age_s=7.0)
    assert (estimate.mean_s, estimate.cautious_s, estimate.hopeful_s) == (100.0, 50.0, 200.0)


def test_useful_time() -> None:
    assert useful_s(math.inf, 10.0) == math.inf
    assert useful_s(0.0, 10.0) == 0.0
    assert useful_s(10.0, 0.0) == 10.0
    assert useful_s(10.0, 10.0) == pytest.approx(10 / math.e)

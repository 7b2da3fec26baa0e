"""The plan of faults, and what a run under them calls a problem."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from rose.bench.faults.faults import DoneFault, FaultKind, PlannedFault, plan_faults
from rose.bench.faults.run import FaultsConfig, Rollout, compare, report
from rose.bench.faults.shapes import TurnShape
from rose.bench.faults.site import SiteConfig
from rose.types import EngineId, FinishReason, Hop, HopEnd, RouteReason, TurnResult

PLAN = (PlannedFault(kind=FaultKind.KILL, at_turn=1, number=0),)
DONE = DoneFault(kind=FaultKind.KILL, engine_id=EngineId("own0"), num_in_flight=3, at_s=1.0)


def config(dtype: str = "float32") -> FaultsConfig:
    shapes = ((TurnShape(4, 2), TurnShape(1, 1)), (TurnShape(3, 2),))
    return FaultsConfig(site=SiteConfig(folder=Path("unused"), dtype=dtype), shapes=shapes)


def turn(*tokens: int, off: float = 0.0, ends: tuple[HopEnd, ...] = (HopEnd.FINISHED,)) -> TurnResult:
    rest = [0] * (len(ends) - 1)
    hops = [
        Hop(engine_id=EngineId("own0"), reason=RouteReason.DEDICATED, num_tokens=number, ended=end)
        for number, end in zip([*rest, len(tokens)], ends, strict=True)
    ]
    return TurnResult(
        token_ids=tokens,
        logprobs=tuple(-float(token) + off for token in tokens),
        finish_reason=FinishReason.LENGTH,
        versions=(),
        hops=tuple(hops),
    )


def rollout(*turns: list[TurnResult]) -> Rollout:
    return Rollout(list(turns), num_done=sum(map(len, turns)), faults=[DONE])


CALM = rollout([turn(5, 6), turn(7)], [turn(8, 9)])


def test_every_kind_of_fault_is_planned_as_often_as_the_others_and_within_the_run():
    plan = plan_faults(15, 1000, seed=1)
    assert set(Counter(fault.kind for fault in plan).values()) == {3}
    turns = [fault.at_turn for fault in plan]
    assert turns == sorted(turns)
    assert 0 < turns[0] < turns[-1] < 1000
    assert plan == plan_faults(15, 1000, seed=1) != plan_faults(15, 1000, seed=2)
    assert plan_faults(0, 1000, seed=1) == ()


def test_equal_runs_have_no_problem():
    hurt = rollout([turn(5, 6, ends=(HopEnd.LOST, HopEnd.FINISHED)), turn(7)], [turn(8, 9, off=9e-5)])
    result = report(config(), CALM, hurt, PLAN)
    assert result["problems"] == []
    assert result["tokens_compared"] == 5
    assert result["logprob_differences"]["max"] == pytest.approx(9e-5)
    assert result["disturbed"]["hops"] == {"finished": 3, "lost": 1}
    assert result["faults"]["engine killed"] == {"number": 1, "turns_in_flight": 3}


@pytest.mark.parametrize(
    ("hurt", "plan", "message"),
    [
        (rollout([turn(5, 6), turn(7)], [turn(8, 1)]), PLAN, "1 trajectories have other tokens"),
        (rollout([turn(5, 6), turn(7)], [turn(8, 9, off=2e-4)]), PLAN, "log-probs differ by 0.0002 (max)"),
        (rollout([turn(5, 6, 7), turn(7)], [turn(8, 9)]), PLAN, "trajectory 0, turn 0: 3 tokens in place of 2"),
        (rollout([turn(5, 6)], [turn(8, 9)]), PLAN, "1 trajectories have other tokens"),
        (rollout([turn(5, 6), turn(7)], [turn(8, 9)]), (*PLAN, *PLAN), "only 1 of 2 faults happened"),
    ],
)
def test_what_differs_is_a_problem(hurt: Rollout, plan: tuple[PlannedFault, ...], message: str):
    assert any(message in problem for problem in report(config(), CALM, hurt, plan)["problems"])


def test_what_failed_is_a_problem():
    hurt = rollout([turn(5, 6), turn(7)], [turn(8, 9)])
    hurt.failures.append("trajectory 1, turn 0: gone")
    assert "disturbed: trajectory 1, turn 0: gone" in report(config(), CALM, hurt, PLAN)["problems"]


def test_log_probs_are_compared_up_to_the_first_token_that_differs():
    compared = compare(CALM.turns, [[turn(5, 1), turn(7)], [turn(8, 9)]])
    assert (compared.num_different, compared.num_tokens) == (1, 3)


def test_half_precision_may_change_tokens_but_not_log_probs_much():
    other_tokens = rollout([turn(5, 6), turn(1)], [turn(8, 9, off=4e-3)])
    assert report(config("bfloat16"), CALM, other_tokens, PLAN)["problems"] == []
    far = rollout([turn(5, 6), turn(7)], [turn(8, 9, off=4e-2)])
    problems = report(config("bfloat16"), CALM, far, PLAN)["problems"]
    assert [problem.partition("(")[2][:4] for problem in problems] == ["mean", "p99)"]

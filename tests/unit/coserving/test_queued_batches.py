"""Governors of engines that schedule ahead: one turn over all batches in flight, and nobody waits longer for it than was said."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rose.coserving.executor import GovernorConfig, RolloutGovernor, ServingGovernor, ServingLoad, StepGovernor
from rose.coserving.step_log import StepLog
from rose.interfaces.device import StepWork
from rose.policies.admission import AdmissionConfig, HoldReason, Mode, Slo

WORK = StepWork(num_decodes=4)
CONFIG = GovernorConfig()


def nothing() -> None:
    """Take nothing in."""


@pytest.fixture
def rollout(site: Any) -> RolloutGovernor:
    governor = RolloutGovernor(
        site.device("rollout"), site.clock, CONFIG, StepLog(), ledgers=[site.ledger], admission=AdmissionConfig()
    )
    governor.max_in_flight = 2
    return governor


@pytest.fixture
def serving(site: Any) -> Any:
    governor = ServingGovernor(
        site.device("serving"),
        site.clock,
        CONFIG,
        StepLog(),
        ledgers=[site.ledger],
        admission=AdmissionConfig(slo=Slo(ttft_s=0.5, tpot_s=0.15)),
        chunk_tokens=1024,
        kv_pool_bytes=1000,
    )
    governor.max_in_flight = 2
    yield governor
    governor.close()


def test_the_turn_is_held_until_the_last_batch_in_flight_is_done(site: Any) -> None:
    governor = StepGovernor(device := site.device("own"), site.clock, CONFIG, StepLog())
    governor.max_in_flight = 2
    for _ in range(2):
        assert governor.ask()
        governor.begin(WORK)
    assert (governor.num_in_flight, governor.has_queue) == (2, True)
    governor.finish(has_more=True)
    governor.release()
    assert site.turn.holder is device, "one batch is still in flight"
    governor.skip()
    assert site.turn.holder is device, "an empty step gives no turn back either"
    governor.finish(has_more=True)
    governor.release()
    assert site.turn.holder is None
    assert [round(end - start, 6) for _, start, end in site.turn.turns] == [0.010, 0.010]
    assert site.turn.turns[1][1] == site.turn.turns[0][2], "the second one runs when the first one is done"


def test_batches_behind_each_other_cost_no_slip_and_are_logged_one_by_one(site: Any) -> None:
    governor = StepGovernor(site.device("own"), site.clock, CONFIG, StepLog())
    governor.max_in_flight = 2
    governor.ask()
    governor.begin(WORK)
    for _ in range(3):
        governor.ask()
        governor.begin(WORK)
        governor.finish(has_more=True)
    governor.finish(has_more=False)
    records = governor.log.records()
    assert [record.late_s for record in records] == [0.0] * 4, "each end was noticed"
    assert sum(record.slip_s for record in records) == 0
    assert site.clock.now() == pytest.approx(10.0 + 4 * 0.010), "no host gap lies between them"


def test_an_engine_that_does_not_schedule_ahead_may_lose_a_batch(site: Any) -> None:
    """As before: a batch whose end nobody told counts for nothing when the next one begins or the turn is given back."""
    governor = StepGovernor(site.device("own"), site.clock, CONFIG, StepLog())
    governor.ask()
    governor.begin(WORK)
    governor.release()
    assert site.turn.holder is None
    governor.ask()
    governor.begin(WORK)
    assert governor.num_in_flight == 1


def serve(serving: ServingGovernor, load: ServingLoad) -> None:
    assert serving.ask_serving(nothing)
    serving.begin(StepWork(num_decodes=1))
    serving.finish(has_more=True)
    serving.publish(load)
    serving.release()


def decoding(num_tokens: int = 50) -> ServingLoad:
    return ServingLoad(num_running=1, decoding=[("a", num_tokens)], decode_context_tokens=100)


def test_a_second_batch_is_asked_for_with_the_time_of_both(
    site: Any, serving: ServingGovernor, rollout: RolloutGovernor
) -> None:
    """There is room for one step and serving's next one before the deadline, and not for two."""
    site.grant()
    serve(serving, decoding())
    state = site.ledger.serving()
    step_s = rollout._upper_s(WORK)
    site.clock.time_s = state.deadline_s - state.next_decode_s - 1.5 * step_s
    serving._ledgers[0].beat(site.clock.now())
    assert rollout.ask_rollout(WORK, nothing)
    rollout.begin(WORK)
    before_s = site.clock.now()
    assert not rollout.ask_rollout(WORK, nothing)
    assert rollout.last_hold is HoldReason.NO_SLACK
    assert site.clock.now() == before_s, "what is in flight is not kept waiting"
    assert site.turn.holder is not None
    rollout.finish(has_more=True)
    assert site.turn.holder is None


def test_the_yield_bound_counts_both_batches(site: Any, serving: ServingGovernor, rollout: RolloutGovernor) -> None:
    site.grant()
    serve(serving, decoding())
    assert rollout.ask_rollout(WORK, nothing)
    rollout.begin(WORK)
    assert rollout.ask_rollout(WORK, nothing)
    rollout.begin(WORK)
    assert site.ledger.rollout().turn_ends_s == pytest.approx(site.turn.free_at_s), (
        "the watchdog waits for the last one"
    )
    serving.note_arrival("b")
    assert not rollout.ask_rollout(WORK, nothing), "a prompt waits: the gate closes before the next batch"
    assert rollout.last_hold is HoldReason.PROMPT_WAITS
    rollout.finish(has_more=True)
    assert site.ledger.rollout().turn_ends_s == pytest.approx(site.turn.free_at_s)
    rollout.finish(has_more=True)
    assert site.turn.holder is None
    assert site.ledger.rollout().turn_ends_s == -math.inf
    assert site.ledger.rollout().busy_s == pytest.approx(0.020)


@pytest.mark.parametrize("mode", [Mode.SLO, Mode.UNGATED])
def test_serving_waits_for_two_batches_at_most(
    site: Any, serving: ServingGovernor, rollout: RolloutGovernor, mode: Mode
) -> None:
    """With slack for many, the turn is given back after two while serving has requests, since it may be waiting for it."""
    site.grant(mode)
    serve(serving, decoding())
    for _ in range(2):
        for is_allowed in (True, True, False):
            assert rollout.ask_rollout(WORK, nothing) is is_allowed
            if is_allowed:
                rollout.begin(WORK)
        for _ in range(2):
            rollout.finish(has_more=True)
        assert site.turn.holder is None
    serving.publish(ServingLoad())
    rollout.ask_rollout(WORK, nothing)
    rollout.begin(WORK)
    for _ in range(5):
        assert rollout.ask_rollout(WORK, nothing), "serving is idle: nobody waits"
        rollout.begin(WORK)
        rollout.finish(has_more=True)


def test_serving_drains_before_a_rollout_that_may_step(
    site: Any, serving: ServingGovernor, rollout: RolloutGovernor
) -> None:
    """A serving engine with a batch always in flight would never give the turn back otherwise."""
    site.grant()
    serve(serving, decoding())
    assert serving.ask_serving(nothing)
    serving.begin(StepWork(num_decodes=1))
    assert serving.ask_serving(nothing), "nobody wants the device"
    serving.begin(StepWork(num_decodes=1))
    serving.finish(has_more=True)
    assert not rollout.ask_rollout(WORK, nothing)
    assert rollout.last_hold is HoldReason.DEVICE_BUSY
    taken: list[str] = []
    assert not serving.ask_serving(lambda: taken.append("inputs"))
    assert taken == [], "no batch was built"
    serving.finish(has_more=True)
    serving.publish(decoding(51))
    serving.release()
    assert rollout.ask_rollout(WORK, nothing)


@pytest.mark.parametrize(("mode", "drains"), [(Mode.UNGATED, True), (Mode.STRICT, False), (Mode.CLOSED, False)])
def test_serving_goes_on_where_rollouts_get_no_turn_from_it(
    site: Any, serving: ServingGovernor, rollout: RolloutGovernor, mode: Mode, drains: Any
) -> None:
    site.grant(mode)
    serve(serving, decoding())
    serving.ask_serving(nothing)
    serving.begin(StepWork(num_decodes=1))
    rollout._want(site.clock.now() + 1.0, 0.010)
    assert serving.ask_serving(nothing) is not drains


def test_a_frozen_clock_mixes_with_batches_in_flight(site: Any, rollout: RolloutGovernor) -> None:
    """A batch begun while time stood still is charged to nobody, and lands in its order."""
    site.grant(Mode.UNGATED)
    assert rollout.ask_rollout(WORK, nothing)
    rollout.begin(WORK)
    site.clock.is_frozen = True
    assert rollout.ask_rollout(WORK, nothing)
    rollout.begin(WORK)
    site.clock.is_frozen = False
    rollout.finish(has_more=True)
    assert rollout.num_in_flight == 1
    rollout.finish(has_more=True)
    assert (rollout.num_in_flight, len(site.turn.turns), site.turn.holder) == (0, 1, None)


class Measuring:
    """A device that says how long its steps took: four times what was guessed."""

    def __init__(self, device: Any) -> None:
        self.inner = device
        self.measured_s: float | None = None
        self.is_known = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def finish_step(self, end_s: float) -> float:
        self.inner.clock.block(end_s + 0.030 - self.inner.clock.now())
        self.measured_s = 0.040 if self.is_known else None
        return 0.030


def test_measured_steps_replace_guesses(site: Any) -> None:
    device = Measuring(site.device("own"))
    governor = RolloutGovernor(
        device, site.clock, CONFIG, StepLog(), ledgers=[site.ledger], admission=AdmissionConfig()
    )
    site.grant(Mode.UNGATED)
    for _ in range(20):
        assert governor.ask_rollout(WORK, nothing)
        governor.begin(WORK)
        governor.finish(has_more=False)
    assert governor.expected_s(WORK) == pytest.approx(0.040, rel=0.15)
    on_device_s = governor._predictor.upper_s(WORK, 0.010)
    assert governor._upper_s(WORK) == on_device_s + CONFIG.host_gap_s, "the turn is held for the host's work too"
    assert site.ledger.rollout().busy_s == pytest.approx(20 * 0.040)
    assert governor.log.records()[-1].duration_s == pytest.approx(0.040)
    assert governor.log.records()[-1].late_s == pytest.approx(0.030)
    governor.ask_rollout(WORK, nothing)
    governor.begin(WORK)
    ends_s = site.ledger.rollout().turn_ends_s - site.clock.now()
    assert ends_s == pytest.approx(governor._upper_s(WORK)), "the watchdog goes by what steps took, not by the guess"
    governor.finish(has_more=False)
    device.is_known = False
    governor.ask_rollout(WORK, nothing)
    governor.begin(WORK)
    governor.finish(has_more=False)
    assert governor.log.records()[-1].duration_s == pytest.approx(0.010), "the guess, where nothing was measured"


def test_serving_s_own_time_is_what_was_measured(site: Any) -> None:
    governor = ServingGovernor(
        Measuring(site.device("serving")),  # type: ignore[arg-type] # as far as it is used
        site.clock,
        CONFIG,
        StepLog(),
        ledgers=[site.ledger],
        admission=AdmissionConfig(),
        chunk_tokens=1024,
        kv_pool_bytes=1000,
    )
    serve(governor, decoding())
    assert governor._own_s == pytest.approx(0.040)
    assert site.ledger.serving().last_step_end_s == pytest.approx(site.clock.now())
    governor.close()


def test_an_unmeasured_batch_is_charged_from_the_end_of_the_one_before(site: Any) -> None:
    """Without events the first one's lateness is no part of the second one's time."""
    device = Measuring(site.device("own"))
    device.is_known = False
    governor = StepGovernor(device, site.clock, CONFIG, StepLog())  # type: ignore[arg-type] # as far as it is used
    governor.max_in_flight = 2
    for _ in range(2):
        governor.ask()
        governor.begin(WORK)
    first = governor._finish_oldest(has_more=True)
    first_end_s = site.clock.now()
    second = governor._finish_oldest(has_more=True)
    assert first is not None
    assert second is not None
    assert second.start_s == first_end_s

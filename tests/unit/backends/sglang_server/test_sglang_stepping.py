"""SGLang's step loop with ROSE around it; on a stand-in of the scheduler, with a real paced device and ledger."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from sglang_stand_in import Batch, Req, Scheduler, stepping_for

from rose.backends.paced import PacedClock
from rose.backends.sglang_server.inputs import InputWatch
from rose.backends.sglang_server.stepping import Stepping
from rose.backends.step_settings import RoseSettings, read_settings
from rose.backends.turn_lock import TurnLock
from rose.coserving.ledger import Ledger, RolloutState
from rose.policies.admission import Budget, Mode


def settings_for(tmp_path: Path, role: str, **more: Any) -> RoseSettings:
    clock = tmp_path / "clock"
    if not clock.exists():
        PacedClock.create(clock, k=0.01)
    Ledger.create(tmp_path / "ledger")
    device = {"kind": "paced", "path": str(tmp_path / "device"), "clock": str(clock), "profile": "h100:qwen3-8b"}
    return read_settings({"role": role, "device": device, "ledger": str(tmp_path / "ledger"), **more})


def lend(tmp_path: Path, mode: Mode | None, token: int = 1) -> None:
    budget = Budget(fencing_token=token)
    if mode is not None:
        budget = attrs.evolve(budget, mode=mode, expires_s=math.inf, is_granted=True)
    Ledger.attach(tmp_path / "ledger").publish_budget(budget)


def step(scheduler: Scheduler, stepping: Stepping, *, after: Any = None) -> Batch | None:
    """One iteration of SGLang's loop; ``after`` runs when a batch is asked for, in the loop's own thread."""

    def build(running_batch: Batch, last_batch: Batch | None) -> Any:
        if after is not None:
            after()
        running_batch.filter_batch()
        for req in scheduler.waiting_queue:
            scheduler.run(req)
        scheduler.waiting_queue = []
        return SimpleNamespace(batch_to_run=running_batch if running_batch.reqs else None, running_batch=running_batch)

    plan = stepping.next_batch(build)
    batch = plan.batch_to_run
    scheduler.running_batch = plan.running_batch
    if batch is not None:
        stepping.before_step(batch)
        stepping.before_results()
        for req in batch.reqs:
            req.output += 1
            if req.output >= req.max_new_tokens:
                req.finished_reason = "length"
        stepping.after_step(batch)
    scheduler.last_batch = batch
    return batch  # type: ignore[no-any-return] # a stand-in's


def opener(stepping: Stepping, num_iterations: int = 3) -> Any:
    """Return a message that comes again and again and opens the gate at last."""
    left = iter(range(num_iterations, -1, -1))

    def message() -> None:
        if next(left) == 0:
            stepping.is_open = True
        else:
            stepping.scheduler.inbox.append(message)

    return message


def test_without_a_device_steps_just_run() -> None:
    scheduler = Scheduler()
    stepping = stepping_for(scheduler)
    scheduler.run(Req("a"))
    batch = step(scheduler, stepping)
    assert batch is not None
    assert [req.rid for req in batch.reqs] == ["a"]


def test_a_held_step_leaves_the_scheduler_as_it_is() -> None:
    """Neither the running batch nor the last prefill batch is touched, and messages are served all the while."""
    scheduler = Scheduler()
    stepping = stepping_for(scheduler)
    scheduler.run(Req("a"))
    scheduler.last_batch = last = Batch("extend", Req("b", slots=[99]))
    stepping.is_open = False
    seen: list[Any] = []
    scheduler.inbox = [opener(stepping)]
    step(scheduler, stepping, after=lambda: seen.append((scheduler.running_batch.reqs[0].rid, scheduler.last_batch)))
    assert seen == [("a", last)]
    assert scheduler.num_idle == 4, "an iteration behind the gate looks after health checks and load"
    assert scheduler.cur_batch_for_debug is None, "SGLang's watchdog would end the engine"


def test_what_is_aborted_behind_a_closed_gate_ends_at_once() -> None:
    scheduler = Scheduler()
    stepping = stepping_for(scheduler)
    req = scheduler.run(Req("a", return_logprob=True))
    stepping.is_open = False

    def abort() -> None:
        req.to_finish = "gone"
        scheduler.inbox.append(opener(stepping, 0))

    scheduler.inbox = [abort]
    assert step(scheduler, stepping) is None
    assert scheduler.sent == [("a", "gone")]
    assert req.logprob.input_token_logprobs_val == [], "SGLang's last message has log-probs of the prompt"
    assert stepping.num_kv_tokens_used == 0


def abort_of(request_id: str) -> SimpleNamespace:
    return SimpleNamespace(rid=request_id, abort_all=False, abort_message=None)


def test_a_retracted_request_ends_without_its_last_token_again() -> None:
    """SGLang's own abort of a waiting request sends its last token once more."""
    scheduler = Scheduler()
    stepping = stepping_for(scheduler)
    scheduler.waiting_queue = [Req("r1", output=3), Req("r2"), Req("other", output=2)]
    left: list[str] = []
    stepping.abort(abort_of("r"), lambda _: left.extend(req.rid for req in scheduler.waiting_queue))
    assert scheduler.sent == [("r1", "Aborted")]
    assert left == ["r2", "other"], "the rest is SGLang's matter"


def test_a_pause_wins_over_an_open_gate_and_inputs_are_served() -> None:
    scheduler = Scheduler()
    stepping = stepping_for(scheduler)
    scheduler.run(Req("a"))
    scheduler._engine_paused = True

    def resume() -> None:
        scheduler._engine_paused = False

    scheduler.inbox = [resume]
    assert step(scheduler, stepping) is not None
    assert scheduler.num_idle == 0, "SGLang's own loop does no idle work while paused"


def test_budget_evicts_the_youngest_with_the_next_iteration() -> None:
    scheduler = Scheduler(100)
    stepping = stepping_for(scheduler)
    for rid in ("old", "young"):
        scheduler.waiting_queue.append(Req(rid, prompt=30))
        scheduler.running_batch.forward_mode.name = "extend"
        step(scheduler, stepping)
    assert stepping.set_kv_budget(40) == 40
    assert scheduler.sent == [("young", "rose:evicted")]
    assert [req.rid for req in scheduler.running_batch.reqs] == ["old"]
    assert stepping.num_kv_tokens_used == 30
    assert stepping.num_evicted == 1
    assert not scheduler.running_batch.batch_is_full
    assert stepping.set_kv_budget(1000) == 100


def test_sleeping_holds_everything_and_waking_gives_the_budget_back() -> None:
    scheduler = Scheduler(100)
    stepping = stepping_for(scheduler)
    stepping.is_asleep = True
    assert stepping.set_kv_budget(50) == 50
    assert stepping.reserve.num_held == 0, "a sleeping engine's slots are sleep's own matter"
    scheduler.waiting_queue.append(Req("late"))
    stepping.take(SimpleNamespace(rid="late"), lambda _: None)
    step(scheduler, stepping)
    assert scheduler.sent == [("late", "rose:evicted")]


@pytest.mark.parametrize(("longest", "sent"), [(20, []), (70, [("r", "rose:refused")])])
def test_what_can_never_fit_is_refused(tmp_path: Path, longest: int, sent: list[Any]) -> None:
    """The device gives 64 tokens at most."""
    token = 147_456
    memory = {"pool_bytes": 64 * token, "headroom_bytes": 0, "granule_bytes": token, "growth_fraction": 1.0}
    settings = settings_for(tmp_path, "rollout", memory=memory)
    lend(tmp_path, Mode.UNGATED)
    scheduler = Scheduler(100)
    stepping = stepping_for(scheduler, settings)
    scheduler.waiting_queue.append(Req("r", prompt=10, max_new_tokens=longest - 10))
    stepping.take(SimpleNamespace(rid="r"), lambda _: None)
    step(scheduler, stepping)
    assert scheduler.sent == sent
    stepping.control.close()


def test_a_rollout_takes_turns_and_ends_with_its_lease(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "rollout")
    lend(tmp_path, Mode.UNGATED)
    scheduler = Scheduler()
    stepping: Any = stepping_for(scheduler, settings)
    scheduler.run(Req("a", max_new_tokens=100))
    assert step(scheduler, stepping) is not None
    assert len(stepping.control.governor.log) == 1
    assert Ledger.attach(tmp_path / "ledger").rollout().num_running == 1
    other = TurnLock(tmp_path / "device")
    assert other.acquire(is_blocking=False), "the turn was kept after the step"
    other.release()
    lend(tmp_path, None, token=2)
    assert step(scheduler, stepping) is None
    assert scheduler.sent == [("a", "rose:evicted")]
    assert Ledger.attach(tmp_path / "ledger").rollout().num_running == 0
    assert other.acquire(is_blocking=False)
    other.close()
    stepping.control.close()


def test_an_unmade_step_gives_the_turn_back(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "rollout")
    lend(tmp_path, Mode.UNGATED)
    scheduler = Scheduler()
    stepping = stepping_for(scheduler, settings)
    scheduler.waiting_queue.append(Req("a"))
    plan = SimpleNamespace(batch_to_run=None, running_batch=scheduler.running_batch)
    assert stepping.next_batch(lambda **_: plan) is plan
    other = TurnLock(tmp_path / "device")
    assert other.acquire(is_blocking=False)
    other.close()
    stepping.control.close()


def test_serving_hears_of_prompts_first_and_takes_them_into_the_step(tmp_path: Path) -> None:
    """Prompts that come during a step are in the ledger before the turn is given back; those that come while the turn is
    waited for join the step."""
    settings = settings_for(tmp_path, "serving")
    lend(tmp_path, Mode.SLO)
    scheduler, inbox = Scheduler(), list[Any]()
    stepping: Any = stepping_for(scheduler, settings, inbox)
    scheduler.run(Req("a", max_new_tokens=100))
    inbox.append(Req("b"))
    step(scheduler, stepping)
    ledger = Ledger.attach(tmp_path / "ledger")
    assert (ledger.arrivals().num_arrived, ledger.serving().num_admitted) == (1, 0)
    other = TurnLock(tmp_path / "device")
    assert other.acquire(is_blocking=False)
    scheduler.inbox = [lambda: scheduler.waiting_queue.append(Req("late"))]
    releaser = threading.Timer(0.1, other.release)
    releaser.start()
    batch = step(scheduler, stepping)
    releaser.join()
    assert batch is not None
    assert {req.rid for req in batch.reqs} == {"a", "late"}
    other.close()
    stepping.control.close()


def test_a_prompt_ends_serving_s_courtesy(tmp_path: Path) -> None:
    """Serving leaves the device to a rollout that wants it for long; a prompt that comes meanwhile is served at once."""
    clock = PacedClock.create(tmp_path / "clock", k=1.0)
    settings = settings_for(tmp_path, "serving")
    lend(tmp_path, Mode.SLO)
    scheduler, inbox = Scheduler(), list[Any]()
    stepping: Any = stepping_for(scheduler, settings, inbox)
    scheduler.run(Req("a", max_new_tokens=100))
    step(scheduler, stepping)
    ledger, begun_s = Ledger.attach(tmp_path / "ledger"), clock.now()
    ledger.publish_rollout(RolloutState(wants_until_s=begun_s + 1000.0, step_s=1e-3, num_running=1))
    assert ledger.serving().deadline_s > begun_s + 0.06, "there is nothing to give away"
    prompt = threading.Timer(0.01, inbox.append, [Req("b")])
    prompt.start()
    built_s: list[float] = []
    step(scheduler, stepping, after=lambda: built_s.append(clock.now()))
    prompt.join()
    assert ledger.arrivals().num_arrived == 1
    assert 0.009 < built_s[0] - begun_s < 0.05
    stepping.control.close()


def test_serving_counts_each_arrival_once_as_admitted_or_lost(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "serving")
    scheduler, inbox = Scheduler(), list[Any]()
    stepping: Any = stepping_for(scheduler, settings, inbox)
    good, bad, health = Req("good", custom_params={"slo_class": "chat"}), Req("bad"), Req("HEALTH_CHECK_1")
    inbox += [good, bad, health]
    assert stepping.inputs.pull() == [good, bad, health]
    stepping.take(good, scheduler.waiting_queue.append)
    stepping.take(bad, lambda _: None)
    stepping.take(health, scheduler.waiting_queue.append)
    ledger = Ledger.attach(tmp_path / "ledger")
    assert (ledger.arrivals().num_arrived, ledger.serving().num_admitted) == (1, 1)
    assert ledger.serving().num_waiting == 1
    stepping.abort(abort_of("good"), lambda _: scheduler.waiting_queue.remove(good))
    stepping.control.publish(stepping)
    assert ledger.serving().num_waiting == 1, "the health check still waits"
    stepping.control.close()


def test_frozen_serving_makes_no_step(tmp_path: Path) -> None:
    clock = PacedClock.create(tmp_path / "clock", k=0.01)
    settings = settings_for(tmp_path, "serving")
    scheduler = Scheduler()
    stepping = stepping_for(scheduler, settings)
    scheduler.run(Req("a"))
    clock.freeze()
    num_held = 0

    def message() -> None:
        nonlocal num_held
        num_held += 1
        scheduler.inbox.append(message)
        if num_held == 3:
            clock.unfreeze()

    scheduler.inbox = [message]
    begun_s = time.monotonic()
    step(scheduler, stepping)
    assert num_held >= 3
    assert time.monotonic() - begun_s < 5
    stepping.control.close()


def test_messages_are_handed_on_once_and_in_order() -> None:
    """What was read early comes first; a rank that reads nothing hands on nothing."""
    scheduler, inbox = Scheduler(), list[Any]()
    inputs = stepping_for(scheduler, inbox=inbox).inputs
    inbox += ["first", "second"]
    inputs.look()
    inbox.append("third")
    assert inputs.pull() == ["first", "second", "third"]
    assert inputs.pull() == []
    arrived: list[str] = []
    follower = InputWatch(scheduler, lambda: None, arrived.append)
    follower.look()
    assert follower.pull() is None
    assert not arrived

"""Settings of the vLLM scheduler, and the shape of its steps; no vLLM needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose.backends.paced import PacedClock
from rose.backends.step_control import DeviceControl, RolloutControl, ServingControl, StepControl
from rose.backends.step_settings import read_settings
from rose.backends.vllm.steps import measure, open_control, serving_load
from rose.coserving.ledger import Ledger
from rose.errors import ConfigError, LedgerError
from rose.policies.admission import Budget, Mode
from rose.policies.compute import StepShape


def settings_for(tmp_path: Path, role: str, **device: Any) -> dict[str, Any]:
    clock = PacedClock.create(tmp_path / "clock")
    Ledger.create(tmp_path / "ledger")
    options = {"kind": "paced", "path": str(tmp_path / "dev"), "clock": clock.path, "profile": "h100:qwen3-8b"}
    return {"role": role, "device": options | device, "ledger": str(tmp_path / "ledger")}


def request(request_id: str = "r", *, prompt: int, computed: int, output: int = 0, **more: Any) -> SimpleNamespace:
    total = prompt + output
    return SimpleNamespace(
        request_id=request_id,
        num_prompt_tokens=prompt,
        num_computed_tokens=computed,
        num_output_tokens=output,
        is_prefill_chunk=computed < total,
        **more,
    )


def fake_scheduler(running: list[Any], waiting: list[Any]) -> SimpleNamespace:
    return SimpleNamespace(
        running=running,
        waiting=waiting,
        kv_holding_waiting=[],
        requests={r.request_id: r for r in [*running, *waiting]},
        max_num_scheduled_tokens=2048,
        num_kv_tokens=1000,
        num_kv_tokens_used=64,
        num_evicted=0,
        get_request_counts=lambda: (len(running), len(waiting)),
        has_unfinished_requests=lambda: bool(running or waiting),
        drain_inputs=lambda: None,
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rolle": "alone"}, "rolle"),
        ({"role": "owner"}, "role"),
        ({"role": "serving"}, "set rose.device and rose.ledger"),
        ({"device": {"kind": "paced", "path": "/p"}}, "set rose.device.clock and rose.device.profile"),
        ({"device": {"kind": "host", "path": "/p", "tokens_per_token": 0}}, "tokens_per_token"),
        ({"memory": {"pool_bytes": 0}}, "pool_bytes"),
        ({"admission": {"slo": {"ttft_s": 0.0}}}, "ttft_s"),
    ],
)
def test_wrong_settings_are_one_clear_error(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(table)


def test_missing_shared_files_are_named(tmp_path: Path) -> None:
    table = settings_for(tmp_path, "rollout")
    (tmp_path / "ledger").unlink()
    with pytest.raises(LedgerError, match="ledger"):
        open_control(read_settings(table), fake_scheduler([], []))


def test_each_role_gets_its_control(tmp_path: Path) -> None:
    scheduler = fake_scheduler([], [])
    assert type(open_control(read_settings({}), scheduler)) is StepControl
    for role, kind in (("alone", DeviceControl), ("rollout", RolloutControl), ("serving", ServingControl)):
        control = open_control(read_settings(settings_for(tmp_path, role)), scheduler)
        assert type(control) is kind
        control.close()


def test_a_step_is_measured_as_vllm_scheduled_it() -> None:
    """A decode, a prompt's middle chunk and end, a preempted request computed anew, a prompt's single last token."""
    requests = {
        "decode": request(prompt=10, computed=15, output=5),
        "middle": request(prompt=100, computed=64),
        "end": request(prompt=50, computed=50),
        "anew": request(prompt=10, computed=14, output=4),
        "last": request(prompt=20, computed=20),
    }
    shape = measure(requests, {"decode": 1, "middle": 32, "end": 18, "anew": 14, "last": 1})
    assert shape == StepShape(
        num_prefill_tokens=65,
        prefill_positions=32 * (64 - 16) + 18 * (50 - 9) + 14 * (14 - 7) + 19.5,
        num_decodes=1,
        decode_context_tokens=15,
        num_completed=3,
        completed_context_tokens=84,
    )


def test_serving_s_load_counts_prompts_until_their_first_token() -> None:
    running = [request("d", prompt=4, computed=6, output=2), request("p", prompt=90, computed=40)]
    load = serving_load(fake_scheduler(running, [request("w", prompt=5, computed=0)]), 10)
    assert load.num_running == 2
    assert load.waiting_ids == ("w", "p")
    assert load.decoding == [("d", 2)]
    assert (load.decode_context_tokens, load.kv_used_bytes) == (6, 640)


def test_a_dedicated_step_takes_all_its_turns(tmp_path: Path) -> None:
    scheduler = fake_scheduler([request("a", prompt=4, computed=6, output=2)], [])
    control: Any = open_control(read_settings(settings_for(tmp_path, "alone", tokens_per_token=4)), scheduler)
    assert control.may_step(scheduler)
    assert scheduler.max_num_scheduled_tokens == 1 + 512, (
        "a chunk in engine tokens is as long in each of the four turns"
    )
    control.begin(scheduler, {"a": 1})
    control.finish(scheduler)
    control.publish(scheduler)
    assert len(control.governor.log) == 4
    assert control.governor.device.acquire(is_blocking=False)
    assert control.may_step(scheduler)
    control.begin(scheduler, {})
    control.finish(scheduler)
    assert len(control.governor.log) == 4, "an empty step was charged"
    control.close()


def test_an_engine_whose_steps_are_many_turns_keeps_one_batch_in_flight(tmp_path: Path) -> None:
    scheduler = fake_scheduler([request("a", prompt=4, computed=6, output=2)], [])
    control: Any = open_control(read_settings(settings_for(tmp_path, "alone", tokens_per_token=4)), scheduler)
    control.keep_in_flight(2)
    assert control.may_step(scheduler)
    control.begin(scheduler, {"a": 1})
    assert not control.may_step(scheduler), "its turns have not ended"
    control.finish(scheduler)
    assert control.may_step(scheduler)
    control.close()


def test_an_engine_that_schedules_ahead_keeps_two_batches_and_one_turn(tmp_path: Path) -> None:
    scheduler = fake_scheduler([request("a", prompt=4, computed=6, output=2)], [])
    table = settings_for(tmp_path, "alone")
    control: Any = open_control(read_settings(table), scheduler)
    other: Any = open_control(read_settings(table), scheduler)
    control.keep_in_flight(2)
    for is_allowed in (True, True, False):
        assert control.may_step(scheduler) is is_allowed
        if is_allowed:
            control.begin(scheduler, {"a": 1})
    control.begin(scheduler, {})
    for is_free in (False, True):
        control.finish(scheduler)
        control.publish(scheduler)
        assert other.governor.device.acquire(is_blocking=False) is is_free
    control.close()
    other.close()


@pytest.mark.parametrize(("num_batches", "most"), [(1, 512), (2, 128)])
def test_chunks_of_batches_in_flight_share_the_bound_on_serving_s_wait(
    tmp_path: Path, num_batches: int, most: int
) -> None:
    """Serving may wait for all that is in flight: each batch has its part of ``max_step_s``."""
    scheduler = fake_scheduler([], [request("p", prompt=4000, computed=0)])
    table = settings_for(tmp_path, "rollout") | {"chunk": {"max_step_s": 0.0165}}
    budget = Budget(mode=Mode.SLO, fencing_token=1, expires_s=1e12, is_granted=True)
    Ledger.attach(table["ledger"]).publish_budget(budget)
    control: Any = open_control(read_settings(table), scheduler)
    control.keep_in_flight(num_batches)
    control._governor._ruling(0.001)  # reads the mode
    control.may_step(scheduler)
    assert scheduler.max_num_scheduled_tokens == most
    control.close()

"""A decode engine's step control: waiting for KV takes no turn and holds nobody. No vLLM needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from rose.backends.paced import PacedClock
from rose.backends.step_settings import read_settings
from rose.backends.turn_lock import TurnLock
from rose.backends.vllm.steps import open_control
from rose.coserving.ledger import Ledger
from rose.policies.admission import START, AdmissionConfig, Budget, Hold, HoldReason, Mode, Role, decide

STEP_S = 0.010


def request(status: str, computed: int, output: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        request_id="r",
        status=SimpleNamespace(name=status),
        num_prompt_tokens=8,
        num_computed_tokens=computed,
        num_output_tokens=output,
        is_prefill_chunk=computed < 8 + output,
        sampling_params=None,
    )


@attrs.define
class Decode:
    """The control of a decode engine with at most one request, its ledger, and somebody else's turn on the device."""

    control: Any
    ledger: Ledger
    clock: PacedClock
    other: TurnLock
    scheduler: Any

    def have(self, *, running: Any = None, waiting: Any = None, held: Any = None) -> None:
        """Set the engine's request: running, waiting without blocks, or waiting with blocks."""
        present = [one for one in (running, waiting, held) if one is not None]
        self.scheduler.running = [running] if running else []
        self.scheduler.waiting = [waiting] if waiting else []
        self.scheduler.kv_holding_waiting = [held] if held else []
        self.scheduler.requests = {one.request_id: one for one in present}

    def step(self, **scheduled: int) -> None:
        assert self.control.may_step(self.scheduler)
        self.control.begin(self.scheduler, scheduled)
        self.control.finish(self.scheduler)
        self.control.publish(self.scheduler)

    def verdict(self) -> Any:
        config = AdmissionConfig(role=Role.DECODE)
        return decide(config, Mode.SLO, self.ledger.serving(), STEP_S, self.clock.now())


@pytest.fixture
def decode(tmp_path: Path) -> Iterator[Decode]:
    clock, ledger = PacedClock.create(tmp_path / "clock"), Ledger.create(tmp_path / "ledger")
    ledger.publish_budget(Budget(fencing_token=1, expires_s=math.inf, is_granted=True))
    device = {"kind": "paced", "path": str(tmp_path / "device"), "clock": clock.path, "profile": "h100:qwen3-8b"}
    table = {"role": "serving", "device": device, "ledger": ledger.path, "admission": {"role": "decode"}}
    scheduler = SimpleNamespace(
        finished_recving_kv_req_ids=set(),
        max_num_scheduled_tokens=2048,
        num_kv_tokens=1000,
        num_kv_tokens_used=64,
        has_unfinished_requests=lambda: True,
        drain_inputs=lambda: None,
    )
    other = TurnLock(tmp_path / "device")
    control: Any = open_control(read_settings(table), scheduler)
    yield Decode(control, ledger, clock, other, scheduler)
    other.close()
    control.close()


def test_kv_on_its_way_needs_no_turn_and_holds_nobody(decode: Decode) -> None:
    """The device is somebody else's all the while: taking the turn would wait for ever."""
    assert decode.other.acquire(is_blocking=False)
    decode.have(held=request("WAITING_FOR_REMOTE_KVS", 8))
    decode.step()
    serving = decode.ledger.serving()
    assert (serving.num_running, serving.num_waiting, serving.deadline_s) == (0, 0, math.inf)
    assert decode.verdict() is START


def test_a_prompt_that_did_not_ask_for_its_kv_needs_no_turn_but_holds(decode: Decode) -> None:
    """Asking computes nothing, so it waits for nobody's turn, and comes at once."""
    assert decode.other.acquire(is_blocking=False)
    decode.have(waiting=request("WAITING", 0))
    decode.step()
    assert decode.verdict() == Hold(HoldReason.PROMPT_WAITS)


@pytest.mark.parametrize(
    ("name", "status", "computed"), [("held", "WAITING_FOR_REMOTE_KVS", 8), ("waiting", "PREEMPTED", 0)]
)
def test_a_request_that_can_go_on_holds_rollouts(decode: Decode, name: str, status: str, computed: int) -> None:
    """Its KV is here, or its prompt is computed here: the next step is serving's."""
    decode.have(**{name: request(status, computed)})
    decode.scheduler.finished_recving_kv_req_ids = set() if status == "PREEMPTED" else {"r"}
    decode.control.publish(decode.scheduler)
    assert decode.ledger.serving().num_waiting == 1
    assert decode.verdict() == Hold(HoldReason.PROMPT_WAITS)
    assert decode.control.may_step(decode.scheduler)
    assert not decode.other.acquire(is_blocking=False), "its step needs the turn"


def test_a_prompt_whose_kv_did_not_come_takes_the_turn_late(decode: Decode) -> None:
    """Nothing said that vLLM would compute it here: the turn is taken when the step turns out to have work."""
    decode.have(waiting=request("WAITING", 0))
    assert decode.control.may_step(decode.scheduler)
    assert decode.other.acquire(is_blocking=False), "the turn was taken for nothing"
    decode.other.release()
    decode.have(running=request("RUNNING", 8))
    decode.control.begin(decode.scheduler, {"r": 8})
    assert not decode.other.acquire(is_blocking=False)
    decode.control.finish(decode.scheduler)
    decode.control.publish(decode.scheduler)
    assert decode.other.acquire(is_blocking=False)
    assert len(decode.control.governor.log) == 1

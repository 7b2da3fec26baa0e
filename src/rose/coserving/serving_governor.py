"""The step loop of the engine that owns a shared device and lends its slack.

Invariants: the ledger hears of a prompt before the step loop does; serving's state is published before the turn is given
back; serving waits for at most one rollout turn, whose length the admission policy chose.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import attrs

from rose.coserving.governor import GovernorConfig, StepClock, StepGovernor
from rose.coserving.ledger import ArrivalState, Ledger
from rose.coserving.step_log import StepLog
from rose.errors import LedgerError
from rose.interfaces.device import Device, StepWork
from rose.policies.admission import (
    AdmissionConfig,
    Mode,
    ServingState,
    arrival_reserve_s,
    decode_deadline_s,
    should_yield,
    targets,
)

_HEARTBEAT_S = 0.1


@attrs.frozen(kw_only=True)
class ServingLoad:
    """A serving engine's requests after a step, as its step loop sees them.

    Attributes:
        num_running: Requests in the batch.
        waiting_ids: Requests without a first token, taken over by the step loop.
        decoding: ``(request id, tokens so far)`` of each request that decodes.
        decode_context_tokens: Their contexts together.
        kv_used_bytes: Modelled bytes in use.
    """

    num_running: int = 0
    waiting_ids: Sequence[str] = ()
    decoding: Sequence[tuple[str, int]] = ()
    decode_context_tokens: int = 0
    kv_used_bytes: float = 0.0


class ServingGovernor(StepGovernor):
    """The step loop of the engine that owns the device and lends its slack."""

    def __init__(
        self,
        device: Device,
        clock: StepClock,
        config: GovernorConfig,
        log: StepLog,
        *,
        ledger: Ledger,
        admission: AdmissionConfig,
        chunk_tokens: int,
        kv_pool_bytes: float,
    ) -> None:
        """Govern serving's steps.

        Args:
            device: The shared device.
            clock: Its clock.
            config: Timing.
            log: Where turns are noted.
            ledger: The device's ledger; this engine writes its serving sections.
            admission: The SLO and how it is spent.
            chunk_tokens: Most prompt tokens of one serving step.
            kv_pool_bytes: KV memory of the device, modelled.

        Raises:
            ConfigError: The SLO leaves no room for one prefill chunk.
        """
        super().__init__(device, clock, config, log)
        self._ledger = ledger
        self._admission = admission
        self._kv_pool_bytes = kv_pool_bytes
        chunk = StepWork(num_prefill_tokens=chunk_tokens, prefill_positions=chunk_tokens**2 / 2)
        self._reserve_s = arrival_reserve_s(
            admission, device.predict_s(chunk), chunk_tokens, f"device {device.device_id}"
        )
        self._arrived_s: dict[str, float] = {}
        self._waiting_since_s: dict[str, float] = {}
        self._first_token_s: dict[str, float] = {}
        self._num_arrived = 0
        self._num_admitted = 0
        self._last_end_s = -math.inf
        self._load = ServingLoad()
        self._is_closed = threading.Event()
        ledger.publish_arrivals(ArrivalState())
        ledger.beat(clock.now())
        self.publish(self._load)
        threading.Thread(target=self._beat, name="rose-heartbeat", daemon=True).start()

    def note_arrival(self, request_id: str) -> None:
        """Count a prompt as soon as it reaches the process. Called on the input thread."""
        now_s = self._clock.now()
        self._arrived_s[request_id] = now_s
        self._num_arrived += 1
        self._ledger.publish_arrivals(ArrivalState(num_arrived=self._num_arrived, last_arrival_s=now_s))

    def note_admitted(self, request_id: str) -> None:
        """Note that the step loop took a prompt over."""
        self._num_admitted += 1
        self._waiting_since_s[request_id] = self._arrived_s.pop(request_id, self._clock.now())
        self.publish(attrs.evolve(self._load, waiting_ids=(*self._load.waiting_ids, request_id)))

    def note_lost(self, request_id: str) -> None:
        """Note that an arrived prompt will never reach the step loop. Called on the input thread."""
        self._arrived_s.pop(request_id, None)
        self._num_arrived -= 1
        self._ledger.publish_arrivals(ArrivalState(num_arrived=self._num_arrived, last_arrival_s=self._clock.now()))

    def ask_serving(self, on_grant: Callable[[], None]) -> bool:
        """Wait for the turn; ``on_grant`` then takes in what arrived meanwhile. ``False`` while frozen."""
        self._start_asking()
        if self.is_frozen:
            self._clock.block(self._config.on_time_s)
            return False
        if self._ready_s is not None:
            self._clock.block(min(self._ready_s - self._asked_s, self._config.on_time_s))
        while self._should_yield():
            self._clock.block(self._config.poll_s)
            self._granted_s = self._clock.now()  # time given away is gone
        self.device.acquire(is_blocking=True)
        on_grant()
        return True

    def finish(self, *, has_more: bool) -> None:
        """Wait until the step is over and learn from it."""
        turn = self._turn
        super().finish(has_more=has_more)
        if turn is not None:
            self._last_end_s = turn[1]
            if not self.is_frozen:
                self._predictor.observe(turn[1] - turn[0], self._clock.now() - turn[0])

    def publish(self, load: ServingLoad) -> None:
        """Write serving's state to the ledger."""
        self._load = load
        self._ledger.publish_serving(self._state(load))

    def _state(self, load: ServingLoad) -> ServingState:
        ended_s = max(self._last_end_s, 0.0)
        first_s = {request_id: self._first_token_s.get(request_id, ended_s) for request_id, _ in load.decoding}
        self._first_token_s = first_s
        limits = targets(self._admission, self._mode(), self._reserve_s)
        decodes = StepWork(num_decodes=len(load.decoding), context_tokens=load.decode_context_tokens)
        since_s = {i: self._waiting_since_s.get(i, ended_s) for i in load.waiting_ids}  # a preempted one waits anew
        self._waiting_since_s = since_s
        return ServingState(
            num_arrived=self._num_arrived,
            num_admitted=self._num_admitted,
            num_running=load.num_running,
            num_waiting=len(load.waiting_ids),
            kv_used_bytes=load.kv_used_bytes,
            kv_pool_bytes=self._kv_pool_bytes,
            oldest_arrival_s=min(since_s.values(), default=math.nan),
            last_step_end_s=self._last_end_s,
            deadline_s=decode_deadline_s(limits, ended_s, ((first_s[i], n) for i, n in load.decoding)),
            next_decode_s=self._predictor.upper_s(self.device.predict_s(decodes)) if load.decoding else 0.0,
            heartbeat_s=self._clock.now(),
        )

    def _mode(self) -> Mode:
        try:
            return self._ledger.budget().mode
        except LedgerError:
            return Mode.CLOSED

    def _should_yield(self) -> bool:
        try:
            own, rollout, mode = self._ledger.serving(), self._ledger.rollout(), self._ledger.budget().mode
        except LedgerError:
            return False
        now_s = self._clock.now()
        return should_yield(self._admission, mode, own, rollout.wants_until_s, rollout.step_s, now_s)

    def _beat(self) -> None:
        while not self._is_closed.wait(_HEARTBEAT_S):
            self._ledger.beat(self._clock.now())

    def close(self) -> None:
        """Stop the heartbeat and let go of the device."""
        self._is_closed.set()
        super().close()

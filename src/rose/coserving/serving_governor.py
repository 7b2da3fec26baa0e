"""The step loop of the engine that owns a shared device and lends its slack.

Invariants: the ledger hears of a prompt before the step loop does; serving's state is published before the turn is given
back; serving waits for at most one rollout turn, whose length the admission policy chose, or ends who keeps it for longer
(``rose.coserving.watchdog``). An engine over n devices writes the same to all their ledgers.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Sequence

import attrs

from rose.coserving.governor import GovernorConfig, StepClock, StepGovernor
from rose.coserving.ledger import ArrivalState, Ledger
from rose.coserving.serving_accounts import ServingAccounts
from rose.coserving.step_log import StepLog
from rose.coserving.usage import UsageMeter
from rose.coserving.watchdog import Watchdog
from rose.errors import ConfigError, LedgerError
from rose.interfaces.device import Device, StepWork
from rose.policies.admission import (
    AdmissionConfig,
    Mode,
    ServingState,
    arrival_reserve_s,
    decode_deadline_s,
    should_yield,
)

_TICK_S = 0.02
_TICKS_PER_BEAT = 5
_STEPS_PER_RESERVE = 16


@attrs.frozen(kw_only=True)
class ServingLoad:
    """A serving engine's requests after a step, as its step loop sees them.

    Attributes:
        num_running: Requests in the batch.
        waiting_ids: Requests without a first token, taken over by the step loop.
        awaited_ids: Those of them whose KV is on its way from elsewhere; they need no device now.
        decoding: ``(request id, tokens so far)`` of each request that decodes.
        decode_context_tokens: Their contexts together.
        kv_used_bytes: Modelled bytes in use.
    """

    num_running: int = 0
    waiting_ids: Sequence[str] = ()
    awaited_ids: Collection[str] = ()
    decoding: Sequence[tuple[str, int]] = ()
    decode_context_tokens: int = 0
    kv_used_bytes: float = 0.0

    def without(self, request_id: str) -> ServingLoad:
        """Return the load without one request's names; its share of the sums stays until the next step."""
        return attrs.evolve(
            self,
            waiting_ids=tuple(each for each in self.waiting_ids if each != request_id),
            awaited_ids=tuple(each for each in self.awaited_ids if each != request_id),
            decoding=[each for each in self.decoding if each[0] != request_id],
        )


class ServingGovernor(StepGovernor):
    """The step loop of the engine that owns the device and lends its slack."""

    def __init__(
        self,
        device: Device,
        clock: StepClock,
        config: GovernorConfig,
        log: StepLog,
        *,
        ledgers: Sequence[Ledger],
        admission: AdmissionConfig,
        chunk_tokens: int,
        kv_pool_bytes: float,
    ) -> None:
        """Govern serving's steps.

        Args:
            device: The shared device, or a gang of them.
            clock: Its clock.
            config: Timing.
            log: Where turns are noted.
            ledgers: One a device; this engine writes their serving sections.
            admission: The SLO and how it is spent.
            chunk_tokens: Most prompt tokens of one serving step.
            kv_pool_bytes: KV memory of one device, modelled; uses of the engine are shared evenly by its devices.

        Raises:
            ConfigError: The SLO leaves no room for one prefill chunk.
        """
        super().__init__(device, clock, config, log)
        self._ledgers = tuple(ledgers)
        self._admission = admission
        self._kv_pool_bytes = kv_pool_bytes
        self._chunk_tokens = chunk_tokens
        self._reserve_s = arrival_reserve_s(
            admission, self._prefill_s(chunk_tokens), chunk_tokens, f"device {device.device_id}"
        )
        self._num_steps = 0
        self._accounts = ServingAccounts()
        self._arrived_s: dict[str, float] = {}
        self._num_arrived = 0
        self._num_admitted = 0
        self._last_end_s = -math.inf
        self._own_s = 0.0
        self._load = ServingLoad()
        self._watchdog = Watchdog(self._ledgers, config.watchdog_s)
        self._usages = [UsageMeter(config.usage_window_s, pid=os.getpid()) for _ in self._ledgers]
        self._is_closed = threading.Event()
        for ledger in self._ledgers:
            ledger.publish_arrivals(ArrivalState())
            ledger.beat(clock.now())
        self.publish(self._load)
        threading.Thread(target=self._tend, name="rose-heartbeat", daemon=True).start()

    def note_arrival(self, request_id: str) -> None:
        """Count a prompt as soon as it reaches the process. Called on the input thread."""
        now_s = self._clock.now()
        self._arrived_s[request_id] = now_s
        self._count_arrivals(1, now_s)

    def note_lost(self, request_id: str) -> None:
        """Note that an arrived prompt will never reach the step loop. Called on the input thread."""
        self._arrived_s.pop(request_id, None)
        self._count_arrivals(-1, self._clock.now())

    def _count_arrivals(self, num: int, now_s: float) -> None:
        self._num_arrived += num
        for ledger in self._ledgers:
            ledger.publish_arrivals(ArrivalState(num_arrived=self._num_arrived, last_arrival_s=now_s))

    def note_admitted(self, request_id: str, num_prompt_tokens: int = 0, slo_class: str | None = None) -> None:
        """Note that the step loop took a prompt over; ``slo_class`` names what was promised to it."""
        self._num_admitted += 1
        since_s = self._arrived_s.pop(request_id, self._clock.now())
        slo = self._admission.slo_of(slo_class)
        begin_by_s = since_s + slo.ttft_s - self._prompt_s(num_prompt_tokens)
        self._accounts.note_prompt(request_id, since_s, begin_by_s, slo)
        self.publish(attrs.evolve(self._load, waiting_ids=(*self._load.waiting_ids, request_id)))

    def note_aborted(self, request_id: str) -> None:
        """Note that a client gave a request up, so that it is not counted as late."""
        self._accounts.drop(request_id)
        self._load = self._load.without(request_id)  # else the next admission would publish it again

    def ask_serving(self, on_grant: Callable[[], None], on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the turn; ``False`` while frozen.

        Args:
            on_grant: Takes in what arrived meanwhile.
            on_wait: Called again and again while serving leaves the device to a rollout, for an engine that has no thread which
                calls ``note_arrival``: a prompt ends the courtesy.
        """
        self._start_asking()
        if self._is_unpaced:
            self._clock.block(self._config.on_time_s)
            return False
        if self.has_queue:
            return self._may_queue(on_grant)
        if self._ready_s is not None:
            self._clock.block(min(self._ready_s - self._asked_s, self._config.on_time_s))
        begun_s = self._clock.now()
        if self._last_end_s > 0 and begun_s - self._last_end_s <= self._config.on_time_s:
            self._own_s += begun_s - self._last_end_s
        while self._should_yield():
            self._clock.block(self._config.poll_s)
            if on_wait is not None:
                on_wait()
            self._granted_s = self._clock.now()  # time given away is gone
        self._take_turn(begun_s)
        on_grant()
        return True

    def _may_queue(self, on_grant: Callable[[], None]) -> bool:
        """Return whether a batch is queued behind those in flight, whose turn is held.

        Not where a rollout engine is about to get the device: those in flight end first, and the turn is given back.
        """
        if self._should_yield() or (self._lends_in_turns() and self._is_wanted()):
            return False
        on_grant()
        return True

    def _lends_in_turns(self) -> bool:
        """Return whether the mode in force lets rollout steps in between serving's without its asking for them."""
        return self._mode() is Mode.UNGATED

    def _is_wanted(self) -> bool:
        try:
            return any(self._clock.now() < ledger.rollout().wants_until_s for ledger in self._ledgers)
        except LedgerError:
            return False

    def take_turn(self) -> None:
        """Take the turn for a step that was built without one."""
        self._start_asking()
        self._take_turn(self._clock.now())

    def _take_turn(self, begun_s: float) -> None:
        self._watchdog.begin(self._clock.now())  # what serving gave away before was no wait
        try:
            self.device.acquire(is_blocking=True)
        finally:
            self._watchdog.end()
        wait_s = self._clock.now() - begun_s
        for usage in self._usages:
            usage.note_wait(wait_s)

    def finish(self, *, has_more: bool) -> None:
        """Wait until the step is over and learn from it."""
        turn = self._finish_oldest(has_more=has_more)
        if turn is not None:
            self._learn(turn)
            self._last_end_s = turn.end_s
            self._own_s += turn.end_s - turn.start_s
            for usage in self._usages:
                usage.note_step(turn.end_s - turn.start_s)
            self._num_steps += 1
            if self._num_steps % _STEPS_PER_RESERVE == 0:
                self._reserve_s = self._learned_reserve_s()

    def publish(self, load: ServingLoad) -> None:
        """Write serving's state to the ledger."""
        ended_s = max(self._last_end_s, 0.0)
        come_ids = set(self._load.awaited_ids).difference(load.awaited_ids)
        self._load = load
        self._accounts.follow(
            load.waiting_ids, load.decoding, ended_s=ended_s, own_s=self._own_s, default=self._admission.slo
        )
        for request_id in come_ids:
            self._accounts.restart(request_id, self._clock.now())
        state = self._state(load, ended_s)
        kv_fraction = state.kv_used_bytes / state.kv_pool_bytes if state.kv_pool_bytes else 0.0
        for ledger, usage in zip(self._ledgers, self._usages, strict=True):
            usage.note_kv(kv_fraction)
            ledger.publish_serving(state)

    def _state(self, load: ServingLoad, ended_s: float) -> ServingState:
        accounts = self._accounts
        decoding = list(accounts.decoding((request_id for request_id, _ in load.decoding), self._own_s))
        decodes = StepWork(num_decodes=len(decoding), context_tokens=load.decode_context_tokens)
        next_decode_s = self._upper_s(decodes) if decoding else 0.0
        return ServingState(
            num_arrived=self._num_arrived,
            num_admitted=self._num_admitted,
            num_running=load.num_running,
            num_waiting=len(load.waiting_ids) - len(load.awaited_ids),
            kv_used_bytes=load.kv_used_bytes / len(self._ledgers),
            kv_pool_bytes=self._kv_pool_bytes,
            oldest_arrival_s=accounts.oldest_arrival_s,
            last_step_end_s=self._last_end_s,
            deadline_s=decode_deadline_s(
                self._admission,
                self._mode(),
                self._reserve_s,
                ended_s,
                decoding,
                next_decode_s=next_decode_s,
                paces=accounts.paces,
            ),
            next_decode_s=next_decode_s,
            heartbeat_s=self._clock.now(),
            first_token_deadline_s=accounts.first_token_deadline_s,
        )

    def _prefill_s(self, num_tokens: int) -> float:
        return self.expected_s(StepWork(num_prefill_tokens=num_tokens, prefill_positions=num_tokens**2 / 2))

    def _learned_reserve_s(self) -> float:
        """Return the reserve by what steps were seen to take; where that leaves no room, one that lends nothing while anything decodes."""
        chunk_tokens = self._chunk_tokens
        try:
            return arrival_reserve_s(
                self._admission, self._prefill_s(chunk_tokens), chunk_tokens, self.device.device_id
            )
        except ConfigError:
            return math.inf

    def _prompt_s(self, num_tokens: int) -> float:
        """Return how long a whole prompt takes, chunk by chunk."""
        num_whole, rest = divmod(num_tokens, self._chunk_tokens)
        return num_whole * self._prefill_s(self._chunk_tokens) + (self._prefill_s(rest) if rest else 0.0)

    def _mode(self) -> Mode:
        """Return the mode in force; that of the first device, since one lender sets it for all of an engine."""
        try:
            return self._ledgers[0].budget().mode
        except LedgerError:
            return Mode.CLOSED

    def _should_yield(self) -> bool:
        try:
            return any(self._yields_on(ledger) for ledger in self._ledgers)
        except LedgerError:
            return False

    def _yields_on(self, ledger: Ledger) -> bool:
        rollout = ledger.rollout()
        now_s = self._clock.now()
        if now_s >= rollout.wants_until_s:
            return False
        own, mode = ledger.serving(), ledger.budget().mode
        return should_yield(self._admission, mode, own, rollout.wants_until_s, rollout.step_s, now_s)

    def _tend(self) -> None:
        """[HEARTBEAT THREAD] Beat, publish usage, and look after waits."""
        num_ticks = 0
        while not self._is_closed.wait(_TICK_S):
            num_ticks += 1
            now_s = self._clock.now()
            self._watchdog.look(now_s)
            if num_ticks % _TICKS_PER_BEAT:
                continue
            for ledger, usage in zip(self._ledgers, self._usages, strict=True):
                ledger.beat(now_s)
                ledger.publish_usage(usage.read(now_s, _busy_s(ledger), self._accounts.counters))

    def close(self) -> None:
        """Stop the heartbeat and let go of the device."""
        self._is_closed.set()
        super().close()


def _busy_s(ledger: Ledger) -> float | None:
    try:
        return ledger.rollout().busy_s
    except LedgerError:
        return None

"""What an engine's scheduler does around each step in each role, for any engine library; imports none.

The scheduler itself is only touched through a ``StepView``, except for what every engine's scheduler offers here by the same
name: ``num_kv_tokens``, ``num_kv_tokens_used``, ``num_evicted``, ``get_request_counts()``, ``has_unfinished_requests()`` and
``drain_inputs()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import attrs

from rose.backends.paced import profile_named
from rose.backends.step_settings import DeviceSettings, RoseSettings, many, open_device
from rose.coserving.executor import RolloutGovernor, ServingGovernor, ServingLoad, StepClock, StepGovernor
from rose.coserving.ledger import Ledger
from rose.coserving.step_log import StepLog
from rose.errors import ConfigError
from rose.interfaces.device import StepWork
from rose.policies.admission import Role
from rose.policies.compute import ChunkConfig, StepShape, device_turns, fit_chunk


@attrs.frozen(kw_only=True)
class Outlook:
    """What a scheduler's next step may be about, in engine tokens.

    Attributes:
        decode_contexts: Context of each request that decodes.
        prefill_contexts: What is computed already of each prompt that is in the middle of its prefill.
        has_prompts: Whether any prompt token may be computed.
        is_mixed: Whether one step has both; otherwise a step is prompts or decodes.
    """

    decode_contexts: Sequence[int]
    prefill_contexts: Sequence[int]
    has_prompts: bool
    is_mixed: bool = True


class StepView(Protocol):
    """What a step control needs to know of an engine library's scheduler."""

    def measure(self, scheduler: Any, batch: Any) -> StepShape:
        """Return the shape of a step that the scheduler has built."""

    def outlook(self, scheduler: Any) -> Outlook:
        """Return what the next step may be about."""

    def chunk_tokens(self, scheduler: Any) -> int:
        """Return the most prompt tokens of a step, as configured or capped."""

    def cap_prompts(self, scheduler: Any, num_tokens: int, *, num_decodes: int) -> None:
        """Bound the prompt tokens of the next step, which may have ``num_decodes`` decodes beside them."""

    def token_bytes(self, scheduler: Any) -> float:
        """Return the KV bytes of one token on one rank."""

    def look(self, scheduler: Any) -> None:
        """Have prompts that reached the process noted, where no thread of its own does that."""

    def prompt(self, request: Any) -> tuple[str, int, str | None]:
        """Return a request's id, the length of its prompt and its SLO class."""

    def wants_device(self, scheduler: Any) -> bool:
        """Return whether a decode engine's next step computes something; asking for a prompt's KV does not."""

    def serving_load(self, scheduler: Any, bytes_per_token: float, *, is_decode: bool) -> ServingLoad:
        """Return serving's requests as the ledger wants them; with ``is_decode`` prompts are computed elsewhere."""


def open_control(settings: RoseSettings, scheduler: Any, view: StepView) -> StepControl:
    """Return the control of the settings' role; opens the device, the clock and the ledger.

    Raises:
        ConfigError: The SLO leaves no room for one of serving's prefill chunks, or the profile is unknown.
        LedgerError: A shared file is missing.
    """
    if settings.device is None:
        return StepControl()
    device = open_device(settings.device)
    clock = cast("StepClock", device.clock)
    timing, log = settings.timing, StepLog(1_000_000 if settings.log_steps else 0)
    if settings.device.profile is not None:
        timing = attrs.evolve(timing, host_gap_s=profile_named(settings.device.profile).host_gap_s)
    bytes_each = token_bytes(settings.device, scheduler, view)
    if settings.role == "alone":
        return DeviceControl(settings, StepGovernor(device, clock, timing, log), bytes_each, view)
    ledgers = [Ledger.attach(path) for path in many(settings.ledger or ())]
    if settings.role == "rollout":
        rollout = RolloutGovernor(
            device, clock, timing, log, ledgers=ledgers, admission=settings.admission, memory=settings.memory
        )
        return RolloutControl(settings, rollout, bytes_each, view)
    pool_bytes = scheduler.num_kv_tokens * bytes_each
    serving = ServingGovernor(
        device,
        clock,
        timing,
        log,
        ledgers=ledgers,
        admission=settings.admission,
        chunk_tokens=view.chunk_tokens(scheduler),
        kv_pool_bytes=settings.memory.pool_bytes if settings.memory else pool_bytes / len(ledgers),
    )
    return ServingControl(settings, serving, bytes_each, view)


def token_bytes(settings: DeviceSettings, scheduler: Any, view: StepView) -> float:
    """Return the KV bytes of one engine token on all devices of the engine: as modelled on a paced device, else as they are."""
    if settings.kind == "paced":
        return float(profile_named(settings.profile or "").kv_bytes_per_token * settings.tokens_per_token)
    return view.token_bytes(scheduler) * len(many(settings.path))


class StepControl:
    """No device: every step may start at once."""

    governor: StepGovernor | None = None
    token_bytes: float | None = None

    def keep_in_flight(self, num_batches: int) -> None:
        """Let the engine schedule up to ``num_batches`` before the first one's outputs are here. Call before the first step."""

    def may_step(self, scheduler: Any) -> bool:  # noqa: ARG002 - the face of all controls
        """Return whether a step may start now; the turn is held then."""
        return True

    def begin(self, scheduler: Any, batch: Any) -> None:
        """Note what the step computes; an empty batch computes nothing."""

    def finish(self, scheduler: Any) -> None:
        """Wait for the step's end, before its outputs are made."""

    def publish(self, scheduler: Any) -> None:
        """Tell the ledger about the engine's requests, then give the turn back."""

    def note_arrival(self, request_id: str) -> None:
        """Called on the input thread when a request reaches the process."""

    def note_lost(self, request_id: str) -> None:
        """Called on the input thread when such a request could not be read."""

    def note_admitted(self, request: Any) -> None:
        """Called when the scheduler took a request over."""

    def note_aborted(self, request_id: str) -> None:
        """Called when a request ended from outside."""

    def kv_budget_tokens(self) -> int | None:
        """Return the KV budget that the memory policy sets, in engine tokens; ``None``: leave it alone."""
        return None

    def possible_kv_tokens(self) -> int | None:
        """Return the largest KV budget that the device could ever give, in engine tokens; ``None``: no limit."""
        return None

    @property
    def is_drained(self) -> bool:
        """Whether the engine must hold no request at all (its lease is over)."""
        return False

    def close(self) -> None:
        """Let go of the device."""


class DeviceControl(StepControl):
    """A dedicated device."""

    def __init__(self, settings: RoseSettings, governor: StepGovernor, token_bytes: float, view: StepView) -> None:
        """Control steps through ``governor``; a token of the engine holds ``token_bytes`` of KV."""
        if settings.device is None:
            message = "a step control needs rose.device"
            raise ConfigError(message)
        self.governor = governor
        self.token_bytes = token_bytes
        self._view = view
        self._scale = settings.device.tokens_per_token
        self._chunk = settings.chunk
        self._is_ahead = False
        self._chunk_cap: int | None = None
        self._chunk_tokens = settings.chunk.max_tokens

    def keep_in_flight(self, num_batches: int) -> None:
        """Let the engine schedule ahead, unless each of its steps is several turns of the device."""
        self._is_ahead = num_batches > 1
        self._governor.max_in_flight = num_batches if self._scale == 1 else 1

    @property
    def _is_full(self) -> bool:
        """Whether what is in flight must end before the engine schedules again."""
        return self._is_ahead and self._governor.num_in_flight >= self._governor.max_in_flight

    def may_step(self, scheduler: Any) -> bool:
        """Take the dedicated device's turn and size the chunk."""
        if self._is_full:
            return False
        self._limit_chunk(scheduler, attrs.evolve(self._chunk, max_step_s=float("inf")))
        return bool(self._governor.ask())

    @property
    def _governor(self) -> Any:
        return self.governor

    def begin(self, scheduler: Any, batch: Any) -> None:
        """Charge the step's turns, or give the turn back when there is nothing to do."""
        if not batch:
            self._governor.skip()
            return
        shape = self._view.measure(scheduler, batch)
        self._count(shape)
        first, *later = device_turns(shape, self._scale, self._chunk_tokens)
        self._governor.begin(first, later)

    def _count(self, shape: StepShape) -> None:
        """Note what a step computes."""

    def finish(self, scheduler: Any) -> None:
        """Wait for the end of the step's turns."""
        self._governor.finish(has_more=scheduler.has_unfinished_requests())

    def publish(self, scheduler: Any) -> None:  # noqa: ARG002 - the face of all controls
        """Give the turn back."""
        self._governor.release()

    def close(self) -> None:
        """Let go of the device."""
        self._governor.close()

    def _limit_chunk(self, scheduler: Any, config: ChunkConfig) -> StepWork:
        """Cap the prompt tokens of the next step; return what its first turn is about."""
        if self._chunk_cap is None:
            self._chunk_cap = self._view.chunk_tokens(scheduler)
        outlook = self._view.outlook(scheduler)
        contexts = outlook.decode_contexts
        decodes = StepWork(num_decodes=len(contexts), context_tokens=sum(contexts) * self._scale)
        beside = decodes if outlook.is_mixed else StepWork()
        if self._governor.is_frozen:
            self._view.cap_prompts(scheduler, self._chunk_cap - beside.num_decodes, num_decodes=beside.num_decodes)
            return decodes
        context = max(outlook.prefill_contexts, default=0) * self._scale
        chunk = self._chunk_tokens = fit_chunk(config, beside, self._governor.expected_s, context_tokens=context)
        num_tokens = min(self._chunk_cap - beside.num_decodes, chunk)
        self._view.cap_prompts(scheduler, num_tokens, num_decodes=beside.num_decodes)
        if not outlook.has_prompts:
            return decodes
        prompts = attrs.evolve(beside, num_prefill_tokens=chunk, prefill_positions=chunk * (context + chunk / 2))
        return prompts if outlook.is_mixed else max(prompts, decodes, key=self._governor.expected_s)


class ServingControl(DeviceControl):
    """The engine that owns a shared device. Its chunk is the engine's own; its state goes to the ledger."""

    def __init__(self, settings: RoseSettings, governor: StepGovernor, token_bytes: float, view: StepView) -> None:
        """Control serving's steps; on a decode device prompts come computed."""
        super().__init__(settings, governor, token_bytes, view)
        self._is_decode = settings.admission.role is Role.DECODE
        self._has_turn = False

    def may_step(self, scheduler: Any) -> bool:
        """Wait for the turn, then take in the prompts that came meanwhile. Waiting for KV alone takes no turn."""
        if self._is_full:
            return False
        if self._is_decode and not self._governor.is_frozen and not self._view.wants_device(scheduler):
            self._has_turn = False
            return True
        self._has_turn = bool(self._governor.ask_serving(scheduler.drain_inputs, partial(self._view.look, scheduler)))
        return self._has_turn

    def begin(self, scheduler: Any, batch: Any) -> None:
        """Charge the step; a prompt whose KV did not come may want a turn only now."""
        if batch and not self._has_turn and not self._governor.is_frozen and not self._governor.has_queue:
            self._governor.take_turn()
        super().begin(scheduler, batch)

    def publish(self, scheduler: Any) -> None:
        """Publish serving's load before the turn is given back."""
        load = self._view.serving_load(scheduler, self.token_bytes or 1, is_decode=self._is_decode)
        self._governor.publish(load)
        self._governor.release()

    def note_arrival(self, request_id: str) -> None:
        """Count the prompt before the step loop knows of it."""
        self._governor.note_arrival(request_id)

    def note_lost(self, request_id: str) -> None:
        """Take back a count."""
        self._governor.note_lost(request_id)

    def note_admitted(self, request: Any) -> None:
        """Move the prompt from arrived to waiting."""
        self._governor.note_admitted(*self._view.prompt(request))

    def note_aborted(self, request_id: str) -> None:
        """Forget a request that its client gave up."""
        self._governor.note_aborted(request_id)


class RolloutControl(DeviceControl):
    """The engine that borrows a shared device."""

    _num_tokens = 0

    def _count(self, shape: StepShape) -> None:
        """Count the step's tokens, prompt tokens included, as modelled."""
        self._num_tokens += (shape.num_prefill_tokens + shape.num_decodes) * self._scale

    def may_step(self, scheduler: Any) -> bool:
        """Ask the gate; chunks are sized so that serving never waits longer than its bound, unless nothing is gated.

        Of an engine that schedules ahead, serving may wait for all that is in flight, so each batch has a part of the bound.
        """
        if self._is_full:
            return False
        is_bounded = self._governor.bounds_chunks
        bound_s = self._chunk.max_step_s / self._governor.max_in_flight if is_bounded else float("inf")
        chunk = attrs.evolve(self._chunk, max_step_s=bound_s)
        first = self._limit_chunk(scheduler, chunk)
        return bool(self._governor.ask_rollout(first, scheduler.drain_inputs))

    def publish(self, scheduler: Any) -> None:
        """Publish the rollout engine's state and give the turn back."""
        num_running, num_waiting = scheduler.get_request_counts()
        self._governor.publish(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_used_bytes=scheduler.num_kv_tokens_used * (self.token_bytes or 1),
            num_evicted=scheduler.num_evicted,
            num_tokens=self._num_tokens,
        )
        self._governor.release()

    def kv_budget_tokens(self) -> int | None:
        """Return the memory policy's budget in engine tokens."""
        budget = self._governor.kv_budget_bytes()
        return None if budget is None else int(budget // (self.token_bytes or 1))

    def possible_kv_tokens(self) -> int | None:
        """Return the largest budget that an idle serving engine would leave."""
        possible = self._governor.possible_kv_bytes()
        return None if possible == float("inf") else int(possible // (self.token_bytes or 1))

    @property
    def is_drained(self) -> bool:
        """Whether the lease is over."""
        return bool(self._governor.is_lease_over())

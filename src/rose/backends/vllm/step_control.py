"""What the vLLM scheduler does around each step in each role. Imports no vLLM: the scheduler is taken as it is used.

Settings are the table ``rose`` of vLLM's ``additional_config``; see ``RoseSettings``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import attrs
from attrs import validators as v

from rose.backends.cuda import CudaDevice
from rose.backends.gang import GangDevice
from rose.backends.host import HostDevice
from rose.backends.paced import PacedClock, PacedDevice, profile_named
from rose.config import load
from rose.coserving.executor import (
    GovernorConfig,
    RolloutGovernor,
    ServingGovernor,
    ServingLoad,
    StepClock,
    StepGovernor,
)
from rose.coserving.ledger import Ledger
from rose.coserving.step_log import StepLog
from rose.errors import ConfigError
from rose.interfaces.device import StepWork
from rose.policies.admission import AdmissionConfig, Role
from rose.policies.compute import ChunkConfig, StepShape, device_turns, fit_chunk
from rose.policies.memory import MemoryConfig


@attrs.frozen(kw_only=True)
class DeviceSettings:
    """Which device an engine runs on.

    Attributes:
        kind: ``paced`` (needs ``clock`` and ``profile``), ``host`` or ``cuda``.
        path: The device's file; engines with the same path share the device. A list for an engine over several devices, as many
            as its tensor-parallel ranks.
        clock: The paced clock's file.
        profile: ``gpu:model``, see ``rose.backends.paced.PROFILES``; a first guess of step times on ``cuda``.
        memory: Of ``cuda``: how KV budgets move memory, see ``rose.backends.cuda.CudaDevice``.
        tokens_per_token: Modelled tokens that one token of the real engine stands for.
    """

    kind: Literal["paced", "host", "cuda"]
    path: str | tuple[str, ...]
    clock: str | None = None
    profile: str | None = None
    memory: Literal["kvcached", "sleep"] = "kvcached"
    tokens_per_token: int = attrs.field(default=1, validator=v.ge(1))


@attrs.frozen(kw_only=True)
class RoseSettings:
    """The table ``rose`` of ``additional_config``.

    Attributes:
        role: ``alone``: the device is this engine's; ``serving``: it owns a shared one; ``rollout``: it borrows it.
        device: Without one the engine is not paced, gated or shared; its KV budget can still be set.
        ledger: The shared device's ledger file; a list for an engine over several devices, in the order of their paths.
        admission: The SLO and how it is spent. The mode in force is the lender's, in the ledger.
        memory: How the device's KV memory is shared; without it budgets move only by ``set_kv_budget_tokens``.
        chunk: Bounds of prefill chunks of rollout and dedicated engines.
        timing: Timing of the step loop; the host gap of a paced device comes from its profile.
        log_steps: Keep a log of device turns.
    """

    role: Literal["alone", "serving", "rollout"] = "alone"
    device: DeviceSettings | None = None
    ledger: str | tuple[str, ...] | None = None
    admission: AdmissionConfig = attrs.field(factory=AdmissionConfig)
    memory: MemoryConfig | None = None
    chunk: ChunkConfig = attrs.field(factory=ChunkConfig)
    timing: GovernorConfig = attrs.field(factory=GovernorConfig)
    log_steps: bool = True


def read_settings(table: Mapping[str, Any]) -> RoseSettings:
    """Read the table strictly.

    Raises:
        ConfigError: Unknown keys, wrong types, or parts that do not go together.
    """
    settings = load(RoseSettings, table)
    device = settings.device
    if settings.role != "alone" and (device is None or settings.ledger is None):
        message = f"rose.role = {settings.role!r} shares a device: set rose.device and rose.ledger"
        raise ConfigError(message)
    if device is not None and settings.ledger is not None and len(_many(device.path)) != len(_many(settings.ledger)):
        message = (
            f"rose.device.path names {len(_many(device.path))} devices and rose.ledger {len(_many(settings.ledger))} "
            "ledgers; give each device its own ledger"
        )
        raise ConfigError(message)
    if device is not None and device.kind == "cuda" and len(_many(device.path)) > 1:
        message = "rose.device: an engine over several CUDA devices cannot be shared yet; name one path"
        raise ConfigError(message)
    if device is not None and device.kind == "paced" and (device.clock is None or device.profile is None):
        message = f"rose.device {device.path} is paced: set rose.device.clock and rose.device.profile"
        raise ConfigError(message)
    return settings


def measure(requests: Mapping[str, Any], num_scheduled_tokens: Mapping[str, int]) -> StepShape:
    """Return the shape of a step that vLLM has scheduled (its requests' computed tokens are advanced already)."""
    prefill = decodes = decode_context = completed = completed_context = 0
    positions = 0.0
    for request_id, num_tokens in num_scheduled_tokens.items():
        request = requests[request_id]
        end = request.num_computed_tokens
        if num_tokens == 1 and end > request.num_prompt_tokens:
            decodes += 1
            decode_context += end
            continue
        prefill += num_tokens
        positions += num_tokens * (end - num_tokens / 2)
        if not request.is_prefill_chunk:
            completed += 1
            completed_context += end
    return StepShape(
        num_prefill_tokens=prefill,
        prefill_positions=positions,
        num_decodes=decodes,
        decode_context_tokens=decode_context,
        num_completed=completed,
        completed_context_tokens=completed_context,
    )


def open_control(settings: RoseSettings, scheduler: Any) -> StepControl:
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
    bytes_each = token_bytes(settings.device, scheduler)
    if settings.role == "alone":
        return DeviceControl(settings, StepGovernor(device, clock, timing, log), bytes_each)
    ledgers = [Ledger.attach(path) for path in _many(settings.ledger or ())]
    if settings.role == "rollout":
        rollout = RolloutGovernor(
            device, clock, timing, log, ledgers=ledgers, admission=settings.admission, memory=settings.memory
        )
        return RolloutControl(settings, rollout, bytes_each)
    pool_bytes = scheduler.num_kv_tokens * bytes_each
    serving = ServingGovernor(
        device,
        clock,
        timing,
        log,
        ledgers=ledgers,
        admission=settings.admission,
        chunk_tokens=scheduler.max_num_scheduled_tokens,
        kv_pool_bytes=settings.memory.pool_bytes if settings.memory else pool_bytes / len(ledgers),
    )
    return ServingControl(settings, serving, bytes_each)


def _many(paths: str | Sequence[str]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths)


def open_device(settings: DeviceSettings) -> PacedDevice | HostDevice | CudaDevice | GangDevice:
    """Open a device by its settings; a gang where it names several."""
    paths = _many(settings.path)
    if settings.kind == "cuda":
        return CudaDevice(paths[0], memory=settings.memory, profile=settings.profile)
    if settings.kind == "host":
        hosts = [HostDevice(path) for path in paths]
        return hosts[0] if len(hosts) == 1 else GangDevice(hosts)
    clock = PacedClock(settings.clock or "")
    paced = [PacedDevice(path, settings.profile or "", clock) for path in paths]
    return paced[0] if len(paced) == 1 else GangDevice(paced)


def token_bytes(settings: DeviceSettings, scheduler: Any) -> float:
    """Return the KV bytes of one engine token on all devices of the engine: as modelled on a paced device, else as they are."""
    if settings.kind == "paced":
        return float(profile_named(settings.profile or "").kv_bytes_per_token * settings.tokens_per_token)
    plan = scheduler.kv_cache_config
    one_rank = sum(tensor.size for tensor in plan.kv_cache_tensors) / (plan.num_blocks * int(scheduler.block_size))
    return float(one_rank * len(_many(settings.path)))


class StepControl:
    """No device: every step may start at once."""

    governor: StepGovernor | None = None
    token_bytes: float | None = None

    def may_step(self, scheduler: Any) -> bool:  # noqa: ARG002 - the face of all controls
        """Return whether a step may start now; the turn is held then."""
        return True

    def begin(self, scheduler: Any, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Note what the step computes."""

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

    def __init__(self, settings: RoseSettings, governor: StepGovernor, token_bytes: float) -> None:
        """Control steps through ``governor``; a token of the engine holds ``token_bytes`` of KV."""
        if settings.device is None:
            message = "a step control needs rose.device"
            raise ConfigError(message)
        self.governor = governor
        self.token_bytes = token_bytes
        self._scale = settings.device.tokens_per_token
        self._chunk = settings.chunk
        self._chunk_cap: int | None = None
        self._chunk_tokens = settings.chunk.max_tokens

    def may_step(self, scheduler: Any) -> bool:
        """Take the dedicated device's turn and size the chunk."""
        self._limit_chunk(scheduler, attrs.evolve(self._chunk, max_step_s=float("inf")))
        return bool(self._governor.ask())

    @property
    def _governor(self) -> Any:
        return self.governor

    def begin(self, scheduler: Any, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Charge the step's turns, or give the turn back when there is nothing to do."""
        if not num_scheduled_tokens:
            self._governor.skip()
            return
        shape = measure(scheduler.requests, num_scheduled_tokens)
        first, *later = device_turns(shape, self._scale, self._chunk_tokens)
        self._governor.begin(first, later)

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
            self._chunk_cap = scheduler.max_num_scheduled_tokens
        contexts = [request.num_computed_tokens for request in scheduler.running if not request.is_prefill_chunk]
        decodes = StepWork(num_decodes=len(contexts), context_tokens=sum(contexts) * self._scale)
        if self._governor.is_frozen:
            scheduler.max_num_scheduled_tokens = self._chunk_cap
            return decodes
        done = [request.num_computed_tokens for request in scheduler.running if request.is_prefill_chunk]
        context = max(done, default=0) * self._scale
        chunk = self._chunk_tokens = fit_chunk(config, decodes, self._governor.expected_s, context_tokens=context)
        scheduler.max_num_scheduled_tokens = min(self._chunk_cap, len(contexts) + chunk)
        if len(contexts) == len(scheduler.running) and not scheduler.get_request_counts()[1]:
            return decodes
        return attrs.evolve(decodes, num_prefill_tokens=chunk, prefill_positions=chunk * (context + chunk / 2))


class ServingControl(DeviceControl):
    """The engine that owns a shared device. Its chunk is vLLM's own; its state goes to the ledger."""

    def __init__(self, settings: RoseSettings, governor: StepGovernor, token_bytes: float) -> None:
        """Control serving's steps; on a decode device prompts come computed."""
        super().__init__(settings, governor, token_bytes)
        self._is_decode = settings.admission.role is Role.DECODE
        self._has_turn = False

    def may_step(self, scheduler: Any) -> bool:
        """Wait for the turn, then take in the prompts that came meanwhile. Waiting for KV alone takes no turn."""
        if self._is_decode and not self._governor.is_frozen and not _wants_device(scheduler):
            self._has_turn = False
            return True
        self._has_turn = bool(self._governor.ask_serving(scheduler.drain_inputs))
        return self._has_turn

    def begin(self, scheduler: Any, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Charge the step; a prompt whose KV did not come may want a turn only now."""
        if num_scheduled_tokens and not self._has_turn and not self._governor.is_frozen:
            self._governor.take_turn()
        super().begin(scheduler, num_scheduled_tokens)

    def publish(self, scheduler: Any) -> None:
        """Publish serving's load before the turn is given back."""
        self._governor.publish(serving_load(scheduler, self.token_bytes or 1, is_decode=self._is_decode))
        self._governor.release()

    def note_arrival(self, request_id: str) -> None:
        """Count the prompt before the step loop knows of it."""
        self._governor.note_arrival(request_id)

    def note_lost(self, request_id: str) -> None:
        """Take back a count."""
        self._governor.note_lost(request_id)

    def note_admitted(self, request: Any) -> None:
        """Move the prompt from arrived to waiting."""
        self._governor.note_admitted(request.request_id, request.num_prompt_tokens, slo_class(request))

    def note_aborted(self, request_id: str) -> None:
        """Forget a request that its client gave up."""
        self._governor.note_aborted(request_id)


class RolloutControl(DeviceControl):
    """The engine that borrows a shared device."""

    _num_tokens = 0

    def begin(self, scheduler: Any, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Charge the step's turns and count its tokens, prompt tokens included, as modelled."""
        self._num_tokens += sum(num_scheduled_tokens.values()) * self._scale
        super().begin(scheduler, num_scheduled_tokens)

    def may_step(self, scheduler: Any) -> bool:
        """Ask the gate; the chunk is sized so that serving never waits longer than its bound, unless nothing is gated."""
        chunk = self._chunk if self._governor.bounds_chunks else attrs.evolve(self._chunk, max_step_s=float("inf"))
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


def slo_class(request: Any) -> str | None:
    """Return the request class that a client named by the sampling parameter ``extra_args["slo_class"]`` (``vllm_xargs`` over HTTP)."""
    parameters = getattr(request, "sampling_params", None)
    name = (getattr(parameters, "extra_args", None) or {}).get("slo_class")
    return name if isinstance(name, str) else None


def _is_kv_awaited(scheduler: Any, request: Any) -> bool:
    """Return whether a waiting request of a decode engine asked for its prompt's KV and still lacks it."""
    is_asking = request.status.name == "WAITING_FOR_REMOTE_KVS"
    return is_asking and request.request_id not in scheduler.finished_recving_kv_req_ids


def _wants_device(scheduler: Any) -> bool:
    """Return whether a decode engine's next step computes something; asking for a prompt's KV does not."""
    waiting = (*scheduler.waiting, *scheduler.kv_holding_waiting)
    asks = (request.status.name == "WAITING" and request.num_computed_tokens == 0 for request in waiting)
    idle = (asks_now or _is_kv_awaited(scheduler, request) for asks_now, request in zip(asks, waiting, strict=True))
    return bool(scheduler.running) or not all(idle)


def serving_load(scheduler: Any, bytes_per_token: float, *, is_decode: bool = False) -> ServingLoad:
    """Return serving's requests as the ledger wants them.

    Args:
        scheduler: vLLM's.
        bytes_per_token: KV bytes of a token, modelled.
        is_decode: Prompts are computed elsewhere: those whose KV is on its way do not need the device.
    """
    waiting = [*scheduler.waiting, *scheduler.kv_holding_waiting]
    decoding, decode_context_tokens = [], 0
    for request in scheduler.running:
        num_computed_tokens = request.num_computed_tokens
        if num_computed_tokens >= request.num_prompt_tokens:
            decoding.append((request.request_id, request.num_output_tokens))
            decode_context_tokens += num_computed_tokens
        else:
            waiting.append(request)
    awaited = [request for request in waiting if _is_kv_awaited(scheduler, request)] if is_decode else []
    return ServingLoad(
        num_running=len(scheduler.running),
        waiting_ids=tuple(request.request_id for request in waiting),
        awaited_ids=tuple(request.request_id for request in awaited),
        decoding=decoding,
        decode_context_tokens=decode_context_tokens,
        kv_used_bytes=scheduler.num_kv_tokens_used * bytes_per_token,
    )

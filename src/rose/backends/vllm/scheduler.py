"""vLLM's scheduler, made a good neighbour: steps take turns on a shared device, KV memory follows a budget.

Invariants:

* The device's turn is held only from ``schedule`` to the end of ``update_from_output``; with asynchronous scheduling to that of the last
  batch in flight. A closed gate starts no further batch, so that those in flight end and the turn is given back.
* An evicted request's tokens have all been delivered; its stream ends with finish reason ``abort`` and stop reason
  ``rose:evicted`` (``rose:refused`` where it could never fit), and the engine stays awake until that is sent.
* Blocks in use plus blocks held back never exceed the pool; budgets only change between steps.
* Asleep, the engine holds no request and no block; a request that comes all the same ends at once as evicted.
* A closed gate never blocks the engine loop for long: it makes empty steps, so that aborts and remote calls are served.

Life cycle of a step: ``schedule`` applies the budget, asks the governor (``rose.coserving.executor``), builds the batch
and charges the device; vLLM computes; ``update_from_output`` waits for the modelled end, makes the outputs, publishes to
the ledger and gives the turn back. With asynchronous scheduling (vLLM's choice, on GPUs as a rule) the next ``schedule`` comes before
the outputs of the last batch; the governor is asked for both together.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable
from typing import Any, Self

import attrs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from rose.backends.answers import EVICTED, REFUSED
from rose.backends.cuda import LimitedBlocks
from rose.backends.in_flight import InFlight
from rose.backends.step_settings import read_settings
from rose.backends.vllm import gpu_process
from rose.backends.vllm.kv_blocks import HeldBlocks, HoldPages
from rose.backends.vllm.lifeline import tie_to_parent
from rose.backends.vllm.steps import open_control
from rose.policies.memory import Admission, KvHolder, admits, choose_victims

IDLE_POLL_S = 0.05
"""How often an idle borrowed engine looks at its budget."""

_CLOSED_POLL_S = 2e-3
_DRAINABLE = (EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT, EngineCoreRequestType.WAKEUP)


class RoseScheduler(Scheduler):  # type: ignore[misc] # vLLM is untyped here
    """A drop-in ``scheduler_cls``. Settings: ``additional_config["rose"]``, see ``RoseSettings``.

    Where vLLM schedules asynchronously, what is made is a ``RoseAsyncScheduler``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Choose the class by vLLM's configuration."""
        config = kwargs.get("vllm_config", args[0] if args else None)
        is_async = bool(getattr(getattr(config, "scheduler_config", None), "async_scheduling", False))
        chosen: Any = RoseAsyncScheduler if is_async and cls is RoseScheduler else cls
        return object.__new__(chosen)  # type: ignore[no-any-return] # a subclass at most

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build vLLM's scheduler, then open the device and the ledger of the settings."""
        tie_to_parent()  # a driver may be killed while its engine still loads
        super().__init__(*args, **kwargs)
        self.settings = read_settings((self.vllm_config.additional_config or {}).get("rose", {}))
        self.num_evicted = 0
        self._core: Any = None
        self._parting: list[tuple[int, EngineCoreOutput]] = []
        self._admitted_order: dict[str, int] = {}
        self._num_admitted = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._is_gate_open = True
        self._is_asleep = False
        self._is_shut_down = threading.Event()
        self._in_flight = InFlight()
        self._held: HeldBlocks | LimitedBlocks = HeldBlocks(self.kv_cache_manager.block_pool, self._in_flight)
        self._budget_blocks = self._held.num_blocks
        gpu_process.check(self.settings, self.vllm_config)
        self.control = open_control(self.settings, self)
        self.control.keep_in_flight(int(self.vllm_config.max_concurrent_batches))
        limiter = getattr(getattr(self.control.governor, "device", None), "kv_limiter", None)
        if limiter is not None:
            self._held = LimitedBlocks(self.kv_cache_manager.block_pool, limiter, self._in_flight)
        _watch_inputs()

    # -- one step

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Build the next step, or an empty one while the gate is closed, the clock frozen or nothing is ready."""
        self._follow_budget()
        if self._is_asleep or self.pause_state == PauseState.PAUSED_ALL or not self.has_unfinished_requests():
            out = super().schedule(*args, **kwargs)
        elif not self._is_gate_open:
            time.sleep(0.0 if self._in_flight else _CLOSED_POLL_S)
            return self._empty_step(*args, **kwargs)
        elif not self.control.may_step(self):
            return self._empty_step(*args, **kwargs)
        else:
            self.max_num_active_reqs = len(self.running) + self._num_admissible()
            out = super().schedule(*args, **kwargs)
        self.control.begin(self, out.num_scheduled_tokens)
        self._in_flight.launch(out, is_charged=bool(out.num_scheduled_tokens))
        for data in out.scheduled_new_reqs:
            self._num_admitted += 1
            self._num_prompt_tokens += len(data.prompt_token_ids or ())
            self._num_cached_tokens += data.num_computed_tokens
            self._admitted_order.setdefault(data.req_id, self._num_admitted)
        return out

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        """Wait until the step is over on the device, then make its outputs and those of evicted requests."""
        if self._in_flight.land(scheduler_output) or not self._in_flight:
            self.control.finish(self)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for client_index, output in self._parting:
            outputs.setdefault(client_index, EngineCoreOutputs()).outputs.append(output)
        self._parting.clear()
        self.control.publish(self)
        return outputs  # type: ignore[no-any-return] # vLLM is untyped here

    def _empty_step(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        state = self.pause_state
        self._pause_state = PauseState.PAUSED_ALL
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self._pause_state = state

    def drain_inputs(self) -> None:
        """Take in requests and aborts that came while the step loop waited, so that they join this step."""
        inputs: queue.Queue[Any] | None = getattr(self._core, "input_queue", None)
        while inputs is not None and not inputs.empty() and inputs.queue[0][0] in _DRAINABLE:
            self._core._handle_client_request(*inputs.get_nowait())  # noqa: SLF001 - vLLM's own loop does the same

    # -- requests

    def add_request(self, request: Request) -> None:
        """Take a request over; one that can never fit the device's memory is refused at once."""
        super().add_request(request)
        self.control.note_admitted(request)
        if self._is_asleep:
            self._part([request.request_id], EVICTED)
        elif self._blocks_at_most(request) > self._possible_blocks():
            self._part([request.request_id], REFUSED)

    def finish_requests(self, *args: Any, **kwargs: Any) -> list[Request]:
        """End requests from outside and tell the ledger."""
        finished: list[Request] = super().finish_requests(*args, **kwargs)
        for request in finished:
            self._admitted_order.pop(request.request_id, None)
            self.control.note_aborted(request.request_id)
        return finished

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._admitted_order.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def has_requests(self) -> bool:
        """Stay awake until the outputs of evicted requests are sent. An idle engine follows its budget when it is asked."""
        if self._parting or super().has_requests():
            return True
        self._follow_budget()
        return bool(self._parting)

    def keep_following(self, core: Any) -> None:
        """Have the step loop of a borrowed engine look at its budget every so often, also when it has nothing to do."""
        if self.settings.role == "rollout" and hasattr(core, "input_queue"):
            threading.Thread(target=self._wake_loop, args=(core.input_queue,), name="rose-idle", daemon=True).start()

    def _wake_loop(self, inputs: queue.Queue[Any]) -> None:
        while not self._is_shut_down.wait(IDLE_POLL_S):
            if inputs.empty():
                inputs.put((EngineCoreRequestType.WAKEUP, None))

    def _part(self, request_ids: Iterable[str], stop_reason: str) -> None:
        """End requests with what they have; their clients hear of it with the next outputs."""
        for request in self.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED):
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ABORT,
                stop_reason=stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            self._parting.append((request.client_index, output))
            self.num_evicted += stop_reason == EVICTED

    # -- KV memory

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of the whole pool."""
        return (int(self.kv_cache_manager.block_pool.num_gpu_blocks) - 1) * int(self.block_size)

    @property
    def num_kv_tokens_used(self) -> int:
        """Tokens of blocks in use by requests."""
        return self._held.num_used * int(self.block_size)

    @property
    def kv_budget_tokens(self) -> int:
        """Tokens of the budget in force."""
        return (self._held.num_blocks - self._held.num_held) * int(self.block_size)

    @property
    def holds_blocks_itself(self) -> bool:
        """Whether blocks that are held back are this scheduler's to give, and not kvcached's."""
        return isinstance(self._held, HeldBlocks)

    def attach_kv_pages(self, hold_pages: HoldPages, *, group_blocks: int) -> None:
        """Let blocks that are held back return their memory; see ``HeldBlocks.attach``."""
        self._held.attach(hold_pages, group_blocks=group_blocks)

    def set_kv_budget_tokens(self, num_tokens: int) -> int:
        """Set the KV budget at once. Requests over it are evicted, youngest first. Call between steps.

        Returns:
            The budget in force: ``num_tokens`` rounded down to whole blocks, at most the pool; asleep, from the waking on.
        """
        num_blocks = max(0, min(num_tokens // int(self.block_size), self._held.num_blocks))
        self._budget_blocks = num_blocks
        if self._is_asleep:
            return num_blocks * int(self.block_size)
        num_missing = self._held.resize(self._held.num_blocks - num_blocks)
        if num_missing:
            self._part(choose_victims(self._holders(), num_missing), EVICTED)
            self._held.resize(self._held.num_blocks - num_blocks)
        return self.kv_budget_tokens

    def fall_asleep(self) -> int:
        """End all requests as evicted and give all KV pages back. Call between steps.

        Returns:
            How many requests ended.
        """
        self._is_asleep = True
        num_requests = len(self.requests)
        self._part(list(self.requests), EVICTED)
        self._held.hold_every_page()
        return num_requests

    def wake(self) -> None:
        """Take requests again, with the budget of before."""
        self._is_asleep = False
        self._held.resize(self._held.num_blocks - self._budget_blocks)

    def _follow_budget(self) -> None:
        """Do what the lender and the memory policy say, between steps."""
        if self._is_asleep:
            return
        if self.control.is_drained and self.requests:
            self._part(list(self.requests), EVICTED)
        if (budget := self.control.kv_budget_tokens()) is not None and budget != self.kv_budget_tokens:
            self.set_kv_budget_tokens(budget)
        self._held.settle()

    def _holders(self) -> list[KvHolder]:
        """Return running requests with the blocks that only they hold (shared prefixes free nothing)."""
        return [
            KvHolder(request.request_id, self._admitted_order.get(request.request_id, 0), self._own_blocks(request))
            for request in self.running
        ]

    def _own_blocks(self, request: Request) -> int:
        groups = self.kv_cache_manager.get_blocks(request.request_id).blocks
        return sum(block.ref_cnt == 1 and not block.is_null for group in groups for block in group)

    def _blocks_at_most(self, request: Request) -> int:
        num_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return -(-int(num_tokens) // int(self.block_size))

    def _possible_blocks(self) -> int:
        possible = self.control.possible_kv_tokens()
        return (
            self._held.num_blocks if possible is None else min(self._held.num_blocks, possible // int(self.block_size))
        )

    def _num_admissible(self) -> int:
        """Return how many waiting requests may start, the expected growth of running ones being reserved."""
        num_slots = int(self.max_num_running_reqs) - len(self.running)
        if self.settings.memory is None or self.settings.role != "rollout":
            return num_slots
        used = sum(self._blocks_at_most(request) for request in self.running)
        budget = self._held.num_blocks - self._held.num_held
        num_admissible = 0
        for request in self.waiting:
            need = self._blocks_at_most(request)
            verdict = admits(need=need, used=used, budget=budget, possible=self._possible_blocks())
            if num_admissible >= num_slots or verdict is not Admission.ADMIT:
                break
            used += need
            num_admissible += 1
        return num_admissible

    def get_kv_cache_usage(self) -> float:
        """Return the share of the budget in use; blocks held back are neither."""
        return self._held.num_used / max(1, self._held.num_blocks - self._held.num_held)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Make vLLM's statistics with the KV use of the budget."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            stats.kv_cache_usage = self.get_kv_cache_usage()
        return stats

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Drop cached prefixes; blocks held back do not stand in the way."""
        with self._held.lent():
            return bool(super().reset_prefix_cache(*args, **kwargs))

    # -- for the engine's remote calls

    def set_gate(self, is_open: bool) -> None:  # noqa: FBT001 - called by position through vLLM's utility calls
        """Open or close the step gate; a step that runs already is not stopped."""
        self._is_gate_open = is_open

    def rose_snapshot(self) -> dict[str, Any]:
        """Return the engine's load as plain data, in engine tokens."""
        num_running, num_waiting = self.get_request_counts()
        governor = self.control.governor
        hold = getattr(governor, "last_hold", None)
        return {
            "num_running": num_running,
            "num_waiting": num_waiting,
            "kv_used_tokens": self.num_kv_tokens_used,
            "kv_total_tokens": self.num_kv_tokens,
            "kv_budget_tokens": self.kv_budget_tokens,
            "kv_given_bytes": self._held.num_bytes_given,
            "num_evicted": self.num_evicted,
            "num_prompt_tokens": self._num_prompt_tokens,  # of requests that started
            "num_cached_tokens": self._num_cached_tokens,  # of these, found in the prefix cache
            "is_paused": self.pause_state != PauseState.UNPAUSED,
            "is_gate_open": self._is_gate_open,
            "is_asleep": self._is_asleep,
            "is_frozen": governor is not None and governor.is_frozen,
            "hold": None if hold is None else hold.value,
        }

    def pacing_report(self, since_s: float = float("-inf")) -> dict[str, Any]:
        """Return whether this engine's paced times may be believed, as plain data; empty without a device."""
        governor = self.control.governor
        if governor is None:
            return {}
        report = governor.log.report(since_s, getattr(governor, "owed_s", 0.0))
        return attrs.asdict(report) | {"device": getattr(governor.device, "description", governor.device.device_id)}

    def step_log(self, since_s: float = float("-inf")) -> list[list[float]]:
        """Return the device turns as rows of ``StepRecord``'s values."""
        governor = self.control.governor
        return [] if governor is None else [list(attrs.astuple(record)) for record in governor.log.records(since_s)]

    def shutdown(self) -> None:
        """Give the device up, then shut vLLM's scheduler down."""
        self._is_shut_down.set()
        self.control.close()
        super().shutdown()

    def note_arrival(self, core: Any, request_id: str) -> None:
        """[INPUT THREAD] Note that a request reached the process; ``core`` is the engine core that owns the inputs."""
        self._core = core
        self.control.note_arrival(request_id)


class RoseAsyncScheduler(RoseScheduler, AsyncScheduler):  # type: ignore[misc] # vLLM is untyped here
    """The same over vLLM's asynchronous scheduler: up to ``max_concurrent_batches`` batches in flight."""


def _watch_inputs() -> None:
    """Let every engine core of this process tell its scheduler of a request before its step loop hears of it."""
    inner = EngineCore.preprocess_add_request
    if getattr(inner, "is_rose", False):
        return

    def preprocess_add_request(core: Any, request: Any) -> Any:
        scheduler = getattr(core, "scheduler", None)
        if not isinstance(scheduler, RoseScheduler):
            return inner(core, request)
        scheduler.note_arrival(core, request.request_id)
        try:
            return inner(core, request)
        except BaseException:
            scheduler.control.note_lost(request.request_id)
            raise

    preprocess_add_request.is_rose = True  # type: ignore[attr-defined] # a mark on our own function
    EngineCore.preprocess_add_request = preprocess_add_request

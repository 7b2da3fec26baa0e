"""SGLang's step loop, made a good neighbour: steps take turns on a shared device, KV memory follows a budget.

Invariants:

* The device's turn is held only from ``next_batch`` to the end of ``after_step``.
* A step that is held back leaves the scheduler as it is: the loop waits before it builds a batch, and nothing is merged,
  retracted or checked for leaks meanwhile.
* It never waits for long: messages are taken in every few milliseconds, aborted requests end at once, pauses are obeyed.
* An evicted request's tokens have all been delivered (``rose.backends.sglang_server.endings``).
* Slots in use and slots held back never exceed the pool; budgets only change between steps.
* All ranks do the same in the same iteration; the first one decides (``rose.backends.sglang_server.agreement``).
* Asleep, the engine holds no request and no slot; a request that comes all the same ends at once as evicted.

Life cycle of a step, all in the scheduler's process:

1. ``next_batch``: apply the budget, ask the control (``rose.backends.step_control``), then let SGLang build the batch.
2. ``before_step``: charge the device with what the batch is. SGLang computes.
3. ``before_results``: wait for the modelled end. SGLang makes and sends the outputs.
4. ``after_step``: count prompts that came meanwhile, publish to the ledger, give the turn back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from rose.backends.answers import EVICTED, REFUSED
from rose.backends.sglang_server.agreement import Ranks, Word
from rose.backends.sglang_server.endings import SglangCalls, aborts, end_aborted, end_requests
from rose.backends.sglang_server.inputs import InputWatch, is_prompt
from rose.backends.sglang_server.kv_reserve import KvReserve
from rose.backends.sglang_server.steps import SglangSteps, longest_tokens, running, waiting
from rose.backends.step_control import StepControl, open_control
from rose.backends.step_settings import RoseSettings
from rose.policies.memory import KvHolder, choose_victims

CLOSED_POLL_S = 2e-3
"""Between two looks at a closed gate or a pause."""

IDLE_POLL_S = 0.02
"""How often an idle engine looks at its budget."""


class Stepping:
    """The steps of one scheduler (one rank of an engine)."""

    def __init__(
        self,
        scheduler: Any,
        settings: RoseSettings,
        *,
        ranks: Ranks,
        calls: SglangCalls,
        read_inputs: Callable[[], list[Any] | None],
    ) -> None:
        """Open the device and the ledger of the settings, on the first rank.

        Args:
            scheduler: SGLang's own.
            settings: The table ``rose``.
            ranks: Those of the engine.
            calls: SGLang's own functions.
            read_inputs: See ``InputWatch``.
        """
        self.scheduler = scheduler
        self.settings = settings
        self.ranks = ranks
        self._calls = calls
        self.reserve = KvReserve(scheduler, calls.make_room)
        self.num_evicted = self.num_prompt_tokens = self.num_cached_tokens = 0
        self.is_open = True
        self.is_asleep = False
        self.weight_sums: Any = None
        self.budget_tokens = self.num_kv_tokens
        self._admitted_order: dict[str, int] = {}
        self._num_admitted = self._num_ended = 0
        self._fresh: list[Any] = []
        self._wants_inputs = False
        self.has_device = settings.device is not None
        self.control = StepControl()
        if ranks.is_first:
            self.control = open_control(settings, self, SglangSteps())
        self.inputs = InputWatch(scheduler, read_inputs, self.control.note_arrival)

    # -- one step

    def next_batch(self, build: Callable[..., Any]) -> Any:
        """Return SGLang's plan for the next step, once one may be made; ``build`` is its own function."""
        scheduler = self.scheduler
        while not scheduler.gracefully_exit and not self._may_build():
            self._hold()
        had_requests = self.has_unfinished_requests()
        plan = build(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        if plan.batch_to_run is None:
            self.control.begin(self, None)
            if had_requests:
                self.inputs.wait(CLOSED_POLL_S)  # nobody has room; do not spin
        return plan

    def before_step(self, batch: Any) -> None:
        """Charge the device with a batch."""
        if batch.forward_mode.is_extend():
            self._note_admitted(batch)
        self.control.begin(self, batch if batch.reqs else None)

    def before_results(self) -> None:
        """Wait until the step is over on the device."""
        self.control.finish(self)

    def after_step(self, batch: Any) -> None:
        """Publish what the step left, prompts that came meanwhile first, and give the turn back."""
        for req in batch.reqs:
            if req.finished():
                self._admitted_order.pop(req.rid, None)
        if self.has_device and self.ranks.is_first:
            self.inputs.look()
            self.control.publish(self)

    def while_paused(self) -> None:
        """Follow the budget and end aborted requests while SGLang is paused, without spinning."""
        self._agree(asks=False)
        self._end_aborted()
        self.inputs.wait(CLOSED_POLL_S)

    def _may_build(self) -> bool:
        word = self._agree(asks=True)
        if not word.may_step:
            return False
        if word.takes_inputs:
            num_ended = self._num_ended
            self.scheduler.ingest_requests()
            is_stopped = self._is_stopped() and self.has_unfinished_requests()
            if (
                is_stopped or self._num_ended != num_ended
            ):  # what a command ended was published, and the turn given back
                self.control.begin(self, None)
                return False
        return True

    def _hold(self) -> None:
        """Let an iteration pass without a step."""
        scheduler = self.scheduler
        scheduler.cur_batch_for_debug = None  # SGLang's watchdog ends a scheduler that has a batch and makes no step
        if not scheduler._engine_paused and not scheduler.is_fully_idle():  # noqa: SLF001 - SGLang's own state
            scheduler.on_idle()  # answers health checks and publishes the load
        if self._is_stopped():
            self.inputs.wait(CLOSED_POLL_S)
        scheduler.ingest_requests()
        self._end_aborted()

    def _is_stopped(self) -> bool:
        return not self.is_open or self.is_asleep or bool(self.scheduler._engine_paused)  # noqa: SLF001 - as above

    def _agree(self, *, asks: bool) -> Word:
        """Apply what the first rank decides, and return it."""
        if not self.has_device:
            word = Word(may_step=self._may_step())
            self._apply(word)
            return word
        if not self.ranks.is_first:
            word = self.ranks.share(None)
            self._apply(word)
            self.scheduler.chunked_prefill_size = word.chunk_tokens or self.scheduler.chunked_prefill_size
            return word
        control = self.control
        word = Word(
            kv_budget_tokens=control.kv_budget_tokens(),
            possible_tokens=control.possible_kv_tokens(),
            is_drained=control.is_drained,
        )
        self._apply(word)
        self._wants_inputs = False
        may_step = asks and self._may_step()
        chunk = int(self.scheduler.chunked_prefill_size or 0)
        word = attrs.evolve(word, may_step=may_step, takes_inputs=self._wants_inputs, chunk_tokens=chunk)
        return self.ranks.share(word)

    def _may_step(self) -> bool:
        if self.scheduler._engine_paused:  # noqa: SLF001 - as above
            return False
        if not self.has_unfinished_requests():
            return True  # nothing to compute: SGLang's idle work needs no turn
        return self.is_open and not self.is_asleep and self.control.may_step(self)

    # -- requests

    def take(self, recv_req: Any, handle: Callable[[Any], None]) -> None:
        """Let SGLang take a request over; one that can never fit ends before the next step."""
        handle(recv_req)
        req = next((req for req in reversed(waiting(self.scheduler)) if req.rid == recv_req.rid), None)
        if req is not None:
            self._fresh.append(req)
        if not is_prompt(recv_req.rid):
            return
        if req is None:
            self.control.note_lost(recv_req.rid)
        else:
            self.control.note_admitted(req)

    def abort(self, recv_req: Any, abort: Callable[[Any], None]) -> None:
        """Let SGLang abort requests, and tell the ledger of those that are over.

        Retracted ones, which wait with tokens, are ended here: SGLang's own word on a waiting request repeats its last token.
        """
        before = {req.rid for req in self._requests() if req.to_finish is None}
        retracted = [req for req in self.scheduler.waiting_queue if len(req.output_ids) and aborts(recv_req, req)]
        end_requests(self.scheduler, retracted, recv_req.abort_message or "Aborted", self._calls)
        abort(recv_req)
        after = {req.rid for req in self._requests() if req.to_finish is None}
        for request_id in before - after:
            self.control.note_aborted(request_id)

    def end_all(self) -> int:
        """End every request as evicted; returns how many."""
        return self._end(self._requests(), EVICTED)

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many requests run and how many wait."""
        return len(running(self.scheduler)), len(waiting(self.scheduler))

    def has_unfinished_requests(self) -> bool:
        """Return whether there is anything to compute."""
        return bool(self._requests())

    def drain_inputs(self) -> None:
        """Have requests that came while the first rank waited for its turn join the step, on all ranks."""
        self._wants_inputs = True

    def _requests(self) -> list[Any]:
        return [*running(self.scheduler), *waiting(self.scheduler)]

    def _end(self, reqs: list[Any], message: str) -> int:
        end_requests(self.scheduler, reqs, message, self._calls)
        for req in reqs:
            self._admitted_order.pop(req.rid, None)
            self.control.note_aborted(req.rid)
        self._num_ended += len(reqs)
        self.num_evicted += len(reqs) if message == EVICTED else 0
        if reqs:
            self.control.publish(self)
        return len(reqs)

    def _end_aborted(self) -> None:
        for request_id in end_aborted(self.scheduler, self._calls):
            self._admitted_order.pop(request_id, None)

    def _note_admitted(self, batch: Any) -> None:
        for req in batch.reqs:
            if req.rid in self._admitted_order:
                continue
            self._num_admitted += 1
            self._admitted_order[req.rid] = self._num_admitted
            self.num_prompt_tokens += len(req.origin_input_ids)
            self.num_cached_tokens += req.prefix_len

    # -- KV memory

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of the whole pool."""
        return self.reserve.num_tokens

    @property
    def num_kv_tokens_used(self) -> int:
        """Tokens of slots in use by requests."""
        return self.reserve.num_used

    def set_kv_budget(self, num_tokens: int) -> int:
        """Set the KV budget at once. Requests over it are evicted, youngest first. Call between steps.

        Returns:
            The budget in force, at most the pool; asleep, from the waking on.
        """
        self.budget_tokens = max(0, min(num_tokens, self.num_kv_tokens))
        if self.is_asleep:
            return self.budget_tokens
        num_held = self.num_kv_tokens - self.budget_tokens
        num_missing = self.reserve.resize(num_held)
        while num_missing > 0 and (victims := self._victims(num_missing)):
            self._end(victims, EVICTED)
            num_missing = self.reserve.resize(num_held)
        return self.num_kv_tokens - self.reserve.num_held

    def _victims(self, num_tokens: int) -> list[Any]:
        """Return whom to evict for that many tokens, as if no prefix were shared; the caller looks again."""
        reqs = {req.rid: req for req in running(self.scheduler) if req.kv.holds_kv}
        holders = [
            KvHolder(rid, self._admitted_order.get(rid, 0), req.kv.kv_allocated_len) for rid, req in reqs.items()
        ]
        return [reqs[rid] for rid in choose_victims(holders, num_tokens)]

    def _apply(self, word: Word) -> None:
        """Do what the lender and the memory policy say, between steps."""
        fresh, self._fresh = [req for req in self._fresh if not req.finished()], []
        if self.is_asleep:
            self._end(fresh, EVICTED)
            return
        if word.is_drained:
            self.end_all()
        elif word.possible_tokens is not None:
            most = min(word.possible_tokens, self.num_kv_tokens)
            self._end([req for req in fresh if longest_tokens(req) > most], REFUSED)
        if word.kv_budget_tokens is None:
            return
        budget = min(word.kv_budget_tokens, self.num_kv_tokens)
        if budget != self.budget_tokens:
            self.set_kv_budget(budget)

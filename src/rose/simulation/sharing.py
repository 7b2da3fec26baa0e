"""Who makes the next steps on a device: alone, by the live co-serving policies, or by switching models.

The co-serving rule asks the functions that engines ask in production (``rose.policies.admission``, ``memory``, ``compute``) and
adds nothing to their judgement. What it leaves out of a live step loop: polling (a gate is looked at when it may have
changed), lateness, and the moments in which two processes race for the turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import attrs

from rose.coserving.predictor import PredictorConfig, StepPredictor
from rose.errors import ConfigError
from rose.interfaces.device import StepWork
from rose.policies.admission import (
    YIELDING_MODES,
    AdmissionConfig,
    Budget,
    Decoding,
    Mode,
    Role,
    ServingState,
    Start,
    arrival_reserve_s,
    check_lease,
    decide,
    decode_deadline_s,
    should_yield,
)
from rose.policies.compute import ChunkConfig, fit_chunk
from rose.policies.memory import MemoryConfig
from rose.policies.quiet import OwnPaces
from rose.simulation.batch import Job
from rose.simulation.device import NEVER_S, Device, Idle, Lane, Turn
from rose.simulation.guest_memory import GuestMemory, MemoryRule

_MOST_MISSED = 2.0
_RESERVE_EVERY = 16
_EXACT_MARGIN = PredictorConfig().min_margin


class AloneRule:
    """One lane has the device to itself."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def choose(self, now_s: float) -> Turn | Idle:
        """Let the lane go as soon as its host is ready."""
        lane = self._lane
        if not lane.wants:
            return Idle(NEVER_S)
        return Turn(lane, math.inf, lane.chunk_tokens) if lane.ready_s <= now_s else Idle(lane.ready_s)

    def note_step(self, lane: Lane, now_s: float) -> None:
        """Nothing to note."""


@attrs.define(eq=False)
class MemoryLedger:
    """A device's ledger in memory: the lender writes the budget, everybody reads."""

    on_change: Callable[[], None]
    state: Callable[[], ServingState]
    _budget: Budget = attrs.field(factory=Budget)

    @property
    def mode(self) -> Mode:
        """How much is lent."""
        return self._budget.mode

    def publish_budget(self, budget: Budget) -> None:
        """[LENDER] Say what is allowed."""
        self._budget = budget
        self.on_change()

    def budget(self) -> Budget:
        """Return what is allowed."""
        return self._budget

    def serving(self) -> ServingState:
        """Return what serving says of itself."""
        return self.state()


@attrs.frozen(kw_only=True)
class CoservingConfig:
    """The executor's settings on one modelled device.

    Attributes:
        missed_turns: Guest turns more than its own, for each of serving's, that the guest gets where both want the device and
            serving does not yield by policy: serving's host was late. 0 on a machine that is fast enough; measured ones come
            from the step logs of live runs.
        guess_ratio: The profile's guesses as a share of the modelled times: 0.5 is a profile that is 50 % too low.
        learns: Let the step predictors see what steps took; needless where guesses are exact.
    """

    admission: AdmissionConfig
    memory: MemoryConfig
    chunk: ChunkConfig = attrs.field(factory=ChunkConfig)
    memory_rule: MemoryRule = MemoryRule.HEADROOM
    missed_turns: float = 0.0
    guess_ratio: float = 1.0
    learns: bool = False


class CoservingRule:
    """Serving (``owner``) and a borrowing rollout engine (``guest``) on one device.

    Attributes:
        ledger: What the lender writes to; the device must be poked when it does.
        evict: Called with guest jobs that have to go at once.
    """

    def __init__(
        self, owner: Lane, guest: Lane, config: CoservingConfig, *, evict: Callable[[Sequence[Job]], None]
    ) -> None:
        self.ledger = MemoryLedger(lambda: None, lambda: self._state_at())
        self._owner = owner
        self._guest = guest
        self._config = config
        self._memory = GuestMemory(owner, guest, config.memory, config.memory_rule, evict=evict)
        self._predictors = {id(owner): StepPredictor(), id(guest): StepPredictor()}
        chunk = owner.chunk_tokens
        self._chunk = StepWork(num_prefill_tokens=chunk, prefill_positions=chunk**2 / 2)
        self._reserve_s = self._read_reserve_s()
        self._paces = OwnPaces()
        self._next_work: StepWork | None = None
        self._num_seen = 0
        self._state: ServingState | None = None
        self._highest_token = 0
        self._num_missed = 0.0
        self._late_until_s = 0.0

    # -- what serving says

    def note_serving_changed(self) -> None:
        """Hear that serving's requests changed."""
        self._state = None

    def note_answer(self, job: Job, now_s: float) -> None:
        """Hear that a request of serving ended: ``quiet`` learns from what it took."""
        self._paces.observe(
            own_s=self._owner.own_s - job.own_at_first_s,
            elapsed_s=now_s - job.first_token_s,
            num_tokens=job.output_tokens,
        )

    def note_step(self, lane: Lane, now_s: float) -> None:
        """Serving has published after a step, or is late for its turn after one of the guest's."""
        if self._config.learns and lane.last_work is not None:
            self._learn(lane, lane.last_work)
        if lane is self._owner:
            self._state = None
            self._num_missed = min(_MOST_MISSED, self._num_missed + self._config.missed_turns)
        elif self._num_missed >= 1 and self.ledger.mode not in YIELDING_MODES and self._owner.wants:
            self._num_missed -= 1
            # just beyond the guest's next chance, so that it gets another step first
            self._late_until_s = now_s + 1.01 * self._guest.times.host_gap_s

    def note_job_step(self) -> None:
        """A new step of the RL job begins: a budget that was frozen may grow again."""
        self._memory.note_job_step()

    def _state_at(self) -> ServingState:
        if self._state is None:
            self._state = self._read_state()
        return self._state

    def _learn(self, lane: Lane, work: StepWork) -> None:
        self._predictors[id(lane)].observe(work, self._guess_s(lane, work), lane.last_step_s)
        self._num_seen += 1
        if lane is self._owner and self._num_seen % _RESERVE_EVERY == 0:
            try:
                self._reserve_s = self._read_reserve_s()
            except ConfigError:  # prompts turned out to take too long: nothing is lent while anything decodes
                self._reserve_s = math.inf

    def _guess_s(self, lane: Lane, work: StepWork) -> float:
        step_s = lane.times.step_s(
            work.num_prefill_tokens, work.num_decodes, work.context_tokens, work.prefill_positions
        )
        return self._config.guess_ratio * step_s

    def _predict_s(self, lane: Lane, work: StepWork) -> float:
        guess_s = self._guess_s(lane, work)
        return self._predictors[id(lane)].predict_s(work, guess_s) if self._config.learns else guess_s

    def _upper_s(self, lane: Lane, work: StepWork) -> float:
        return self._predict_s(lane, work) * (1 + self._margin(lane))

    def _margin(self, lane: Lane) -> float:
        """Return the predictor's margin; where guesses are exact, the smallest, at which it would settle."""
        return self._predictors[id(lane)].margin if self._config.learns else _EXACT_MARGIN

    def _read_reserve_s(self) -> float:
        chunk_s = self._predict_s(self._owner, self._chunk)  # as the live governor: the reserve has a margin of its own
        where = f"serving engine {self._owner.name}"
        return arrival_reserve_s(self._config.admission, chunk_s, self._chunk.num_prefill_tokens, where)

    def _read_state(self) -> ServingState:
        owner, batch = self._owner, self._owner.batch
        oldest_s = batch.oldest_prompt_s()
        decode_s = 0.0
        if self._decodes:
            work = StepWork(num_decodes=max(1, batch.num_decodes), context_tokens=batch.decode_context_tokens)
            decode_s = self._upper_s(owner, work)
        return ServingState(
            num_arrived=0,
            num_admitted=0,
            num_running=batch.num_running,
            num_waiting=batch.num_prompts,
            kv_used_bytes=batch.kv_tokens_used * owner.times.kv_bytes_per_token,
            kv_pool_bytes=self._config.memory.pool_bytes,
            oldest_arrival_s=math.nan if oldest_s is None else oldest_s,
            last_step_end_s=owner.ends_s,
            deadline_s=self._deadline_s(decode_s),
            next_decode_s=decode_s,
            heartbeat_s=math.inf,
            first_token_deadline_s=self._first_token_deadline_s(),
        )

    def _deadline_s(self, next_decode_s: float) -> float:
        """Return the deadline by the live policy, asked with every decoding request."""
        owner, batch, config = self._owner, self._owner.batch, self._config.admission
        if not self._decodes or (batch.num_prompts and config.role is Role.BOTH):
            return math.inf  # nothing to keep, or held anyway
        own_s, slo, made = owner.own_s, config.slo, batch.made_tokens
        decoding = [Decoding(job.first_token_s, made(job), own_s - job.own_at_first_s, slo) for job in batch.decoding()]
        if config.role is Role.DECODE:  # their first tokens were made elsewhere
            decoding += [Decoding(job.first_token_s, 1, 0.0, slo) for job in batch.without_token()]
        return decode_deadline_s(
            config,
            self.ledger.mode,
            self._reserve_s,
            max(owner.ends_s, 0.0),
            decoding,
            next_decode_s=next_decode_s,
            paces=self._paces,
        )

    @property
    def _decodes(self) -> bool:
        batch = self._owner.batch
        return batch.num_decodes > 0 or (self._config.admission.role is Role.DECODE and batch.num_prompts > 0)

    def _first_token_deadline_s(self) -> float:
        """Return by when the most urgent waiting prompt must be begun; only the published rule asks."""
        if self.ledger.mode is not Mode.PAPER:
            return math.inf
        ttft_s = self._config.admission.slo.ttft_s
        return min(
            (job.arrived_s + ttft_s - self._prefill_s(job) for job in self._owner.batch.without_token()),
            default=math.inf,
        )

    def _prefill_s(self, job: Job) -> float:
        left, chunk = job.prompt_tokens - job.computed_tokens, self._owner.chunk_tokens
        positions = left * (job.computed_tokens + left / 2)
        num_steps = max(1, -(-left // chunk))
        work = StepWork(num_prefill_tokens=left // num_steps, prefill_positions=positions / num_steps)
        return num_steps * self._predict_s(self._owner, work)

    # -- the guest's lease and memory

    def follow_budget(self, now_s: float) -> None:
        """Let the guest's KV budget follow serving's use; evict what no longer fits, everything without a lease."""
        budget = self.ledger.budget()
        if self._has_lease(budget, now_s):
            self._memory.follow(budget.kv_cap_bytes, now_s)
        else:
            self._memory.withdraw()

    def _look_again_s(self, now_s: float) -> float:
        """Return until when a run of steps may go on unseen: a lease runs out, memory that the guest's requests wait for grows."""
        batch = self._guest.batch
        if not len(batch):
            return NEVER_S
        growth_s = self._memory.next_growth_s(now_s) if batch.waiting else NEVER_S
        return min(self.ledger.budget().expires_s, growth_s)

    def _has_lease(self, budget: Budget, now_s: float) -> bool:
        self._highest_token = max(self._highest_token, budget.fencing_token)
        return check_lease(budget, self._highest_token, now_s) is None

    # -- whose turn

    def choose(self, now_s: float) -> Turn | Idle:
        """Return whose turn it is, as the two live step loops would settle it between them."""
        owner, guest = self._owner, self._guest
        self._next_work = None
        self.follow_budget(now_s)
        owner_s = max(owner.ready_s, self._late_until_s) if owner.wants else NEVER_S
        guest_s = guest.ready_s if guest.wants else NEVER_S
        if guest_s == NEVER_S:
            return self._without_guest(owner_s, now_s)
        if owner_s <= now_s and not self._owner_waits(guest_s, now_s):
            if self.ledger.mode is Mode.UNGATED and guest_s < owner_s:
                return self._guest_turn(now_s)
            return Turn(owner, 1, owner.chunk_tokens)
        if guest_s <= now_s and self._may_start(now_s):
            return self._guest_turn(now_s)
        if owner_s <= now_s:
            return Idle(guest_s) if guest_s > now_s else Turn(owner, 1, owner.chunk_tokens)
        return Idle(min(owner_s, guest_s) if guest_s > now_s else min(owner_s, now_s + self._retry_s))

    @property
    def _retry_s(self) -> float:
        return max(self._config.memory.growth_interval_s, 0.01)

    def _without_guest(self, owner_s: float, now_s: float) -> Turn | Idle:
        if owner_s <= now_s:
            return Turn(self._owner, math.inf, self._owner.chunk_tokens, self._look_again_s(now_s))
        if not len(self._guest.batch):
            return Idle(owner_s)
        # a paused guest waits for no memory, but leaves when its lease ends
        again_s = self.ledger.budget().expires_s if self._guest.is_paused else now_s + self._retry_s
        return Idle(min(owner_s, again_s))

    def _owner_waits(self, guest_s: float, now_s: float) -> bool:
        """Whether serving leaves the device to the guest (always asked of the live policy)."""
        if self.ledger.mode not in YIELDING_MODES:
            return False
        at_s = max(guest_s, now_s)
        return should_yield(
            self._config.admission, self.ledger.mode, self._state_at(), math.inf, self._guest_upper_s(), at_s
        )

    def _may_start(self, now_s: float) -> bool:
        state = None if self.ledger.mode is Mode.UNGATED else self._state_at()
        verdict = decide(self._config.admission, self.ledger.mode, state, self._guest_upper_s(), now_s)
        return isinstance(verdict, Start)

    def _guest_chunk(self) -> int:
        config, batch = self._config.chunk, self._guest.batch
        if self.ledger.mode is Mode.UNGATED:
            config = attrs.evolve(config, max_step_s=math.inf)
        decodes = StepWork(num_decodes=batch.num_decodes, context_tokens=batch.decode_context_tokens)
        return fit_chunk(
            config,
            decodes,
            lambda work: self._predict_s(self._guest, work),
            context_tokens=batch.prompt_context_tokens,
        )

    def _guest_work(self) -> StepWork:
        """Return the guest's next step; settled once for all questions of one choice."""
        if self._next_work is None:
            self._next_work = self._read_guest_work()
        return self._next_work

    def _read_guest_work(self) -> StepWork:
        batch = self._guest.batch
        chunk = min(self._guest_chunk(), batch.prompt_tokens_left) if batch.has_prefill else 0
        positions = chunk * (batch.prompt_context_tokens + chunk / 2)
        return StepWork(chunk, batch.num_decodes, batch.decode_context_tokens, positions)

    def _guest_upper_s(self) -> float:
        """Return how long the guest's next step takes at most, as its governor would say."""
        return self._upper_s(self._guest, self._guest_work())

    def _guest_turn(self, now_s: float) -> Turn:
        guest = self._guest
        if guest.batch.has_prefill:
            return Turn(guest, 1, self._guest_work().num_prefill_tokens)
        if not self._owner.wants:
            return Turn(guest, math.inf, 1, self._look_again_s(now_s))
        has_company = self.ledger.mode in YIELDING_MODES and not self._owner.batch.num_prompts
        return Turn(guest, self._num_steps(now_s) if has_company else 1, 1, self._look_again_s(now_s))

    def _num_steps(self, now_s: float) -> int:
        """Return how many steps in a row the live policy would let start while serving stands still."""
        guest, batch = self._guest, self._guest.batch
        upper_s, base_s = self._guest_upper_s(), self._guess_s(self._guest, self._guest_work())
        growth_s, gap_s = guest.times.growth_s(batch.num_decodes), guest.times.host_gap_s

        def may_start(i: int) -> bool:
            start_s = now_s + i * (base_s + gap_s) + growth_s * i * (i - 1) / 2
            step_s = upper_s * (1 + growth_s * i / base_s)
            verdict = decide(self._config.admission, self.ledger.mode, self._state_at(), step_s, start_s)
            return isinstance(verdict, Start)

        most = batch.steps_to_change()
        low, high = 0, 1  # step ``low`` may start
        while high < most and may_start(high):
            low, high = high, min(most, 2 * high)
        if high >= most and (most == 1 or may_start(most - 1)):
            return most
        high = min(high, most - 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if may_start(middle) else (low, middle)
        return low + 1


def share_device(
    loop: asyncio.AbstractEventLoop,
    owner: Lane,
    guest: Lane,
    config: CoservingConfig,
    *,
    evict: Callable[[Sequence[Job]], None],
) -> tuple[Device, CoservingRule]:
    """Return a device on which ``guest`` co-serves with ``owner``; what the lender writes is heard at once."""
    rule = CoservingRule(owner, guest, config, evict=evict)
    device = Device(loop, rule)
    rule.ledger.on_change = device.poke
    return device, rule


def shared_poker(device: Device, rule: CoservingRule) -> Callable[[bool], None]:
    """Return what a feed calls when the requests of a serving engine changed that shares its device."""

    def on_change(_has_started: bool) -> None:  # noqa: FBT001 - as the feed calls it
        rule.note_serving_changed()
        device.poke()

    return on_change


class SwitchRule:
    """One model on the device at a time. The guest's comes when serving is idle or when it has waited long enough.

    It stays until a request of serving has waited long enough in turn.
    """

    def __init__(
        self, owner: Lane, guest: Lane, *, load_owner_s: float, load_guest_s: float, patience_s: float, wait_s: float
    ) -> None:
        """Begin with serving's model.

        Args:
            owner: Serving.
            guest: The rollout engine.
            load_owner_s: Time to bring serving's model in.
            load_guest_s: Time to bring the guest's in.
            patience_s: How long the guest waits for a busy serving model.
            wait_s: How long a request of serving waits for the guest.
        """
        self._owner = owner
        self._guest = guest
        self._load_s = {id(owner): load_owner_s, id(guest): load_guest_s}
        self._patience_s = patience_s
        self._wait_s = wait_s
        self._loaded = owner
        self._usable_s = 0.0
        self._waits_since_s = math.inf

    def choose(self, now_s: float) -> Turn | Idle:
        """Let the model that is loaded go, or load the other one."""
        again_s = self._leave_owner(now_s) if self._loaded is self._owner else self._leave_guest(now_s)
        lane = self._loaded
        if not lane.wants:
            return Idle(again_s)
        start_s = max(lane.ready_s, self._usable_s)
        if start_s > now_s:
            return Idle(start_s)
        return Turn(lane, math.inf if again_s == NEVER_S else 1, lane.chunk_tokens)

    def note_step(self, lane: Lane, now_s: float) -> None:
        """Nothing to note: switches are made when the next step is chosen."""

    def _leave_owner(self, now_s: float) -> float:
        """Load the guest if its time has come; returns when to look again otherwise."""
        if not len(self._guest.batch) or self._guest.is_paused:
            self._waits_since_s = math.inf
            return NEVER_S
        self._waits_since_s = min(self._waits_since_s, now_s)
        if self._owner.wants and now_s < self._waits_since_s + self._patience_s:
            return self._waits_since_s + self._patience_s
        self._load(self._guest, now_s)
        return now_s

    def _leave_guest(self, now_s: float) -> float:
        """Load serving if its time has come; returns when to look again otherwise."""
        oldest_s = self._owner.batch.oldest_prompt_s()
        is_guest_done = not len(self._guest.batch)
        if not len(self._owner.batch):
            return NEVER_S
        if is_guest_done or (oldest_s is not None and now_s >= oldest_s + self._wait_s):
            self._guest.batch.preempt_all()
            self._load(self._owner, now_s)
            self._waits_since_s = math.inf
        return NEVER_S if oldest_s is None else oldest_s + self._wait_s

    def _load(self, lane: Lane, now_s: float) -> None:
        self._loaded, self._usable_s = lane, now_s + self._load_s[id(lane)]

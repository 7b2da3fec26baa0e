"""Continuous batching of one modelled engine: who waits, who prefills, who decodes. No clock and no I/O.

Invariants:

* A job is in exactly one place: waiting, prefilling, decoding, or gone.
* ``kv_tokens_used`` is what the jobs of the batch hold; with the cached prefixes it never exceeds the budget, except for a
  single job that is alone in the batch.
* Steps are counted, not timed. A pure decode step gives each decoding job one token, so a job's end is known as a count of
  steps and a run of steps costs no more than one.

The order is vLLM's: decoding jobs first, then chunks of prompts that have begun, then waiting ones in order of arrival while
slots and memory last; without memory the youngest is preempted and computes its prefix again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable

import attrs

from rose.policies.memory import Admission, KvHolder, admits, choose_victims


@attrs.define(eq=False, kw_only=True)
class Job:
    """One request in a batch; counts are modelled tokens.

    Attributes:
        prompt_tokens: What must be in KV memory before it decodes; grows when it is preempted.
        output_tokens: It ends when it has made so many.
        max_output_tokens: What it asked for: what admission reserves.
        arrived_s: When it reached the engine.
        prefix_keys: Names of the prefixes that it may find in the cache, with their lengths, longest last; its own context is
            cached under the last when it ends.
        computed_tokens: Of the context; while it decodes, as of the step at which it began to.
        made_tokens: At the last change of place; ask the batch for the present number.
        cached_tokens: Of the prompt, found in the cache at its last admission.
        first_token_s: When its user saw the first token; -1 before. Listeners keep it.
        own_at_first_s: The engine's own time (``Lane.own_s``) at its first token. Listeners keep it.
        number: Admissions before its last one: the higher, the younger.
        joined_step: The batch's count of steps when it began to decode; -1 while it does not.
        reserved_tokens: What its admission reserved.
        is_gone: It ended or was dropped.
    """

    job_id: str
    prompt_tokens: int
    output_tokens: int
    max_output_tokens: int
    arrived_s: float
    prefix_keys: tuple[tuple[Hashable, int], ...] = ()
    computed_tokens: int = 0
    made_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float = -1.0
    own_at_first_s: float = 0.0
    number: int = -1
    joined_step: int = -1
    reserved_tokens: int = 0
    is_gone: bool = False

    @property
    def need_tokens(self) -> int:
        """What it may come to hold."""
        return self.prompt_tokens + self.max_output_tokens - self.made_tokens


@attrs.define(eq=False)
class PrefixCache:
    """Contexts of jobs that ended, least recently used first, and prefixes that several jobs share.

    Shared ones are small beside contexts: their memory is not counted, they stay until ``clear``.
    """

    num_tokens: int = 0
    shared: dict[Hashable, int] = attrs.field(factory=dict)
    _entries: OrderedDict[Hashable, int] = attrs.field(factory=OrderedDict)

    def put(self, key: Hashable, num_tokens: int) -> None:
        """Keep a context under ``key``, in place of an older one."""
        self.num_tokens += num_tokens - self._entries.pop(key, 0)
        self._entries[key] = num_tokens

    def length(self, key: Hashable) -> int:
        """Return the length of what is kept under ``key``; 0 when there is nothing."""
        return self._entries.get(key, 0)

    def take(self, key: Hashable) -> int:
        """Return the length of what is kept under ``key`` and forget it; 0 when there is nothing."""
        num_tokens = self._entries.pop(key, 0)
        self.num_tokens -= num_tokens
        return num_tokens

    def shrink(self, num_tokens: int) -> None:
        """Drop the least recently used until at most ``num_tokens`` are left."""
        while self.num_tokens > num_tokens and self._entries:
            _, dropped = self._entries.popitem(last=False)
            self.num_tokens -= dropped

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.shared.clear()
        self.num_tokens = 0


@attrs.frozen
class StepPlan:
    """The prompt part of one step: whose tokens, and the positions they attend to (tokens x tokens)."""

    parts: tuple[tuple[Job, int], ...]
    num_tokens: int
    positions: float


class Batch:
    """The requests of one engine.

    Attributes:
        kv_tokens: The budget in force.
        waiting: Jobs that are not admitted, in order. Read only; ``add`` and ``drop`` change it.
        cache: Contexts and shared prefixes that are kept.
        num_steps: Steps made.
        num_preempted: Times a job had to compute its prefix again for want of memory.
        num_prefilled_tokens: Prompt tokens computed, those computed again included.
        num_decodes, decode_context_tokens: Jobs that decode, and their contexts together.
    """

    def __init__(self, *, max_seqs: int, kv_tokens: int, reserves_growth: bool = False, has_cache: bool = True) -> None:
        """Make an empty batch.

        Args:
            max_seqs: Jobs in the batch at most.
            kv_tokens: KV memory in tokens.
            reserves_growth: Admit a job only if everything that all may come to hold fits (a borrowed engine); otherwise as
                soon as its prompt fits.
            has_cache: Keep the contexts of jobs that ended as prefixes.
        """
        self.kv_tokens = kv_tokens
        self.num_steps = 0
        self.num_preempted = 0
        self.num_prefilled_tokens = 0
        self.num_decodes = 0
        self.decode_context_tokens = 0
        self.waiting: deque[Job] = deque()
        self.cache = PrefixCache()
        self._max_seqs = max_seqs
        self._most_tokens = kv_tokens
        self._reserves_growth = reserves_growth
        self._has_cache = has_cache
        self._prefilling: dict[str, Job] = {}
        self._decoding: dict[str, Job] = {}
        self._ends: list[tuple[int, int, Job]] = []
        self._prefill_tokens = 0
        self._reserved_tokens = 0
        self._num_admitted = 0

    # -- who is here

    def __len__(self) -> int:
        """Return how many jobs wait or run."""
        return len(self.waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def num_running(self) -> int:
        """Return how many jobs are in the batch proper."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def is_running(self) -> bool:
        """Whether a job is in the batch proper."""
        return self.num_decodes > 0 or bool(self._prefilling)

    @property
    def has_prefill(self) -> bool:
        """Whether a prompt is being computed (call ``admit`` first)."""
        return bool(self._prefilling)

    @property
    def num_prompts(self) -> int:
        """Return how many jobs have no first token yet."""
        return len(self.waiting) + len(self._prefilling)

    @property
    def prompt_context_tokens(self) -> int:
        """Return what is computed of the prompt that the next chunk goes on with; 0 without one."""
        return next((job.computed_tokens for job in self._prefilling.values()), 0)

    @property
    def prompt_tokens_left(self) -> int:
        """Return what is still to compute of the prompts that have begun."""
        return sum(job.prompt_tokens - job.computed_tokens for job in self._prefilling.values())

    @property
    def kv_tokens_used(self) -> int:
        """Return what the jobs hold."""
        return self._prefill_tokens + self.decode_context_tokens

    @property
    def kv_tokens_reserved(self) -> int:
        """Return what the jobs of the batch proper may come to hold."""
        return self._reserved_tokens

    def decoding(self) -> list[Job]:
        """Return the jobs that decode, in the order in which they began to."""
        return list(self._decoding.values())

    def without_token(self) -> list[Job]:
        """Return the jobs without a first token here, those that wait included."""
        return [*self._prefilling.values(), *self.waiting]

    def everybody(self) -> list[Job]:
        """Return all jobs of the batch, those that wait included."""
        return [*self._decoding.values(), *self._prefilling.values(), *self.waiting]

    def oldest_prompt_s(self) -> float | None:
        """Return when the oldest job without a first token arrived."""
        arrivals = [job.arrived_s for job in self._prefilling.values()]
        if self.waiting:
            arrivals.append(self.waiting[0].arrived_s)
        return min(arrivals, default=None)

    def made_tokens(self, job: Job) -> int:
        """Return how many tokens a job has made by now."""
        if job.joined_step < 0 or job.is_gone:
            return job.made_tokens
        return job.made_tokens + self.num_steps - job.joined_step

    # -- coming and going

    def add(self, job: Job) -> None:
        """Put a job at the end of the queue."""
        self.waiting.append(job)

    def drop(self, job: Job) -> None:
        """Take a job out, wherever it is; its context stays as a cached prefix. A no-op for one that is gone."""
        if job.is_gone:
            return
        if job.job_id in self._decoding:
            self._leave_decoding(job)
        elif job.job_id in self._prefilling:
            del self._prefilling[job.job_id]
            self._prefill_tokens -= job.computed_tokens
            self._reserved_tokens -= job.reserved_tokens
        else:
            self.waiting.remove(job)
        job.is_gone = True
        self._keep_prefix(job)

    def admit(self) -> None:
        """Let waiting jobs in, first come first served, while slots and memory last."""
        if not self.waiting:
            return
        while self.waiting and self.num_running < self._max_seqs and self._fits(self.waiting[0]):
            job = self.waiting.popleft()
            self._find_prefix(job)
            job.number = self._num_admitted
            self._num_admitted += 1
            self._prefilling[job.job_id] = job
            self._prefill_tokens += job.computed_tokens
            job.reserved_tokens = job.need_tokens
            self._reserved_tokens += job.reserved_tokens
            self._shrink_cache()

    def _fits(self, job: Job) -> bool:
        if self._reserves_growth:
            verdict = admits(
                need=job.need_tokens, used=self._reserved_tokens, budget=self.kv_tokens, possible=self.kv_tokens
            )
            return verdict is Admission.ADMIT
        prompts = sum(job.prompt_tokens for job in self._prefilling.values())
        if not self.num_running and job.prompt_tokens >= self._most_tokens:
            return True  # it never fits; better alone than for ever in everybody's way
        return prompts + self.decode_context_tokens + job.prompt_tokens < self.kv_tokens

    def _find_prefix(self, job: Job) -> None:
        """Count what of the prompt is cached; at least one token is computed."""
        most = job.prompt_tokens - 1
        for place, (key, length) in enumerate(reversed(job.prefix_keys)):
            found = self.cache.take(key) if place == 0 else self.cache.shared.get(key, 0)
            job.computed_tokens = max(job.computed_tokens, min(found, length, most))
        job.cached_tokens = job.computed_tokens

    def _keep_prefix(self, job: Job) -> None:
        if not (self._has_cache and job.prefix_keys and job.computed_tokens):
            return
        self.cache.put(job.prefix_keys[-1][0], job.computed_tokens)
        self._shrink_cache()

    def _shrink_cache(self) -> None:
        room = max(0, self.kv_tokens - self.kv_tokens_used)
        if self.cache.num_tokens > room:
            self.cache.shrink(room)

    # -- one step with prompts

    def plan_step(self, chunk_tokens: int) -> StepPlan:
        """Return which prompt tokens the next step computes, at most ``chunk_tokens`` and what fits beside its decodes.

        Nothing changes yet. Call ``relieve`` first.
        """
        parts = []
        if self.num_running > 1:
            chunk_tokens = min(chunk_tokens, max(0, self.kv_tokens - self.kv_tokens_used - self.num_decodes))
        left, positions = chunk_tokens, 0.0
        for job in self._prefilling.values():
            if left <= 0:
                break
            num_tokens = min(left, job.prompt_tokens - job.computed_tokens)
            parts.append((job, num_tokens))
            positions += num_tokens * (job.computed_tokens + num_tokens / 2)
            left -= num_tokens
        return StepPlan(tuple(parts), chunk_tokens - left, positions)

    def finish_step(self, plan: StepPlan) -> tuple[list[Job], list[Job]]:
        """Make the step of ``plan`` and one decode of each decoding job.

        Returns:
            Jobs that got their first token of this stay, and jobs that made their last one.
        """
        ended = self.advance(1)
        started = []
        for job, num_tokens in plan.parts:
            if job.is_gone or job.job_id not in self._prefilling:
                continue
            job.computed_tokens += num_tokens
            self._prefill_tokens += num_tokens
            self.num_prefilled_tokens += num_tokens
            if job.computed_tokens == job.prompt_tokens:
                self._begin_decoding(job)
                started.append(job)
                if job.output_tokens <= job.made_tokens:
                    self._end(job)
                    ended.append(job)
        self._shrink_cache()
        return started, ended

    def _begin_decoding(self, job: Job) -> None:
        del self._prefilling[job.job_id]
        self._prefill_tokens -= job.computed_tokens
        if self._has_cache:
            self.cache.shared.update(job.prefix_keys[:-1])
        job.made_tokens += 1
        job.joined_step = self.num_steps
        self._decoding[job.job_id] = job
        self.num_decodes += 1
        self.decode_context_tokens += job.computed_tokens
        heapq.heappush(self._ends, (self.num_steps + job.output_tokens - job.made_tokens, job.number, job))

    # -- runs of pure decode steps

    def steps_to_change(self) -> int:
        """Return after how many decode steps a job ends or memory runs out; 0 without decoding jobs."""
        if not self.num_decodes:
            return 0
        while self._ends[0][2].is_gone or self._ends[0][2].job_id not in self._decoding:
            heapq.heappop(self._ends)
        room = (self.kv_tokens - self.kv_tokens_used) // self.num_decodes
        return max(1, min(self._ends[0][0] - self.num_steps, max(1, room)))

    def advance(self, num_steps: int) -> list[Job]:
        """Make decode steps, at most ``steps_to_change``; returns the jobs that made their last token."""
        self.num_steps += num_steps
        self.decode_context_tokens += num_steps * self.num_decodes
        ended = []
        while self._ends and self._ends[0][0] <= self.num_steps:
            job = heapq.heappop(self._ends)[2]
            if not job.is_gone and job.joined_step >= 0 and self.made_tokens(job) >= job.output_tokens:
                self._end(job)
                ended.append(job)
        if self.cache.num_tokens:
            self._shrink_cache()
        return ended

    def _end(self, job: Job) -> None:
        self._leave_decoding(job)
        job.is_gone = True
        self._keep_prefix(job)

    def _leave_decoding(self, job: Job) -> None:
        """Settle a job's counts and take it out of the decoding ones."""
        del self._decoding[job.job_id]
        num_steps = self.num_steps - job.joined_step
        self._reserved_tokens -= job.reserved_tokens
        job.made_tokens += num_steps
        job.computed_tokens += num_steps
        job.joined_step = -1
        self.num_decodes -= 1
        self.decode_context_tokens -= job.computed_tokens

    # -- memory

    def relieve(self) -> list[Job]:
        """Preempt the youngest while no step fits; returns them. One job alone is left in peace."""
        preempted: list[Job] = []
        if self.kv_tokens_used + (self.num_decodes or 1) <= self.kv_tokens:
            return preempted
        while self.num_running > 1 and self.kv_tokens_used + (self.num_decodes or 1) > self.kv_tokens:
            job = max((*self._decoding.values(), *self._prefilling.values()), key=lambda job: job.number)
            self._preempt(job)
            preempted.append(job)
        return preempted

    def preempt_all(self) -> None:
        """Send every job back to the queue, its context gone, and drop all cached prefixes."""
        for job in sorted((*self._decoding.values(), *self._prefilling.values()), key=lambda job: -job.number):
            self._preempt(job)
        self.cache.clear()

    def _preempt(self, job: Job) -> None:
        if job.job_id in self._decoding:
            self._leave_decoding(job)
        else:
            del self._prefilling[job.job_id]
            self._prefill_tokens -= job.computed_tokens
            self._reserved_tokens -= job.reserved_tokens
        job.prompt_tokens = max(job.prompt_tokens, job.computed_tokens)
        job.computed_tokens = 0
        self.num_preempted += 1
        self.waiting.appendleft(job)

    def cut(self, kv_tokens: int) -> list[Job]:
        """Set the budget; returns the jobs that must go for it, youngest first. Cached prefixes go before any job."""
        self.kv_tokens = kv_tokens
        self._shrink_cache()
        need = self.kv_tokens_used - kv_tokens
        if need <= 0:
            return []
        running = {job.job_id: job for job in (*self._prefilling.values(), *self._decoding.values())}
        holders = [KvHolder(job_id, job.number, self.held_tokens(job)) for job_id, job in running.items()]
        return [running[job_id] for job_id in choose_victims(holders, need)]

    def held_tokens(self, job: Job) -> int:
        """Return the KV that a running job holds."""
        return job.computed_tokens + (self.num_steps - job.joined_step if job.joined_step >= 0 else 0)

"""What a serving engine knows of each of its requests: when it came, when its tokens came, what it was promised.

Pure state: no clock, no I/O. The governor feeds it after every step; it answers with what the admission policy and the ledger need.

Invariants: a request is counted once, when its first token came and when it left; the counters only grow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs

from rose.policies.admission import Decoding, Slo
from rose.policies.quiet import OwnPaces


@attrs.define(eq=False)
class _Prompt:
    since_s: float
    first_token_by_s: float
    slo: Slo


@attrs.define(eq=False)
class _Answer:
    first_token_s: float
    own_at_first_s: float
    slo: Slo
    num_tokens: int
    last_token_s: float
    has_broken: bool


@attrs.define(eq=False, kw_only=True)
class ServiceCounters:
    """Counters since start, see ``UsageState``."""

    num_requests: int = 0
    num_broken: int = 0
    num_tokens: int = 0
    num_gaps_broken: int = 0
    debt_s: float = 0.0


class ServingAccounts:
    """The accounts of one serving engine.

    Attributes:
        counters: What users saw.
        paces: What the requests that ended teach of serving's own pace.
    """

    def __init__(self) -> None:
        """Start with no request."""
        self.counters = ServiceCounters()
        self.paces = OwnPaces()
        self._prompts: dict[str, _Prompt] = {}
        self._answers: dict[str, _Answer] = {}

    def note_prompt(self, request_id: str, since_s: float, first_token_by_s: float, slo: Slo) -> None:
        """Take a prompt over.

        Args:
            request_id: The request.
            since_s: When it arrived.
            first_token_by_s: By when its prefill must begin.
            slo: What was promised to it.
        """
        self._prompts[request_id] = _Prompt(since_s, first_token_by_s, slo)

    def drop(self, request_id: str) -> None:
        """Forget a request that its client gave up; it is not counted as broken."""
        self._prompts.pop(request_id, None)
        self._answers.pop(request_id, None)

    def follow(
        self,
        waiting_ids: Sequence[str],
        decoding: Collection[tuple[str, int]],
        *,
        ended_s: float,
        own_s: float,
        default: Slo,
    ) -> None:
        """Take in the state after a step.

        Args:
            waiting_ids: Requests without a first token, preempted ones included.
            decoding: ``(request id, tokens so far)``.
            ended_s: When the step ended.
            own_s: Serving's own time so far.
            default: The promise to requests that were never announced.
        """
        answers: dict[str, _Answer] = {}
        for request_id, num_tokens in decoding:
            answer = self._answers.pop(request_id, None)
            if answer is None:
                answer = self._begin(request_id, num_tokens, ended_s, own_s, default)
            elif num_tokens > answer.num_tokens:
                self._note_tokens(answer, num_tokens, ended_s)
            answers[request_id] = answer
        waiting = {
            request_id: self._prompts.get(request_id) or _Prompt(ended_s, math.inf, default)
            for request_id in waiting_ids
        }
        for request_id, answer in self._answers.items():
            if request_id in waiting:
                answers[request_id] = answer  # preempted: it goes on later
            else:
                self._end(answer, ended_s, own_s)
        gone = [request_id for request_id in self._prompts if request_id not in waiting]
        for request_id in gone:
            if request_id not in answers:
                self._count_unseen(self._prompts[request_id], ended_s)
        self._prompts, self._answers = waiting, answers

    def _begin(self, request_id: str, num_tokens: int, ended_s: float, own_s: float, default: Slo) -> _Answer:
        prompt = self._prompts.get(request_id)
        slo = default if prompt is None else prompt.slo
        over_s = 0.0 if prompt is None else ended_s - prompt.since_s - slo.ttft_s
        self._count_first_token(over_s)
        return _Answer(ended_s, own_s, slo, num_tokens, ended_s, over_s > 0)

    def _count_unseen(self, prompt: _Prompt, ended_s: float) -> None:
        """Count a request whose only token came with the step in which it ended."""
        self._count_first_token(ended_s - prompt.since_s - prompt.slo.ttft_s)

    def _count_first_token(self, over_s: float) -> None:
        counters = self.counters
        counters.num_requests += 1
        counters.num_tokens += 1
        if over_s > 0:
            counters.num_broken += 1
            counters.debt_s += over_s

    def _note_tokens(self, answer: _Answer, num_tokens: int, ended_s: float) -> None:
        counters = self.counters
        counters.num_tokens += num_tokens - answer.num_tokens
        over_s = ended_s - answer.last_token_s - answer.slo.tpot_s
        if over_s > 0:
            counters.num_gaps_broken += 1
            counters.debt_s += over_s
        answer.num_tokens, answer.last_token_s = num_tokens, ended_s

    def _end(self, answer: _Answer, ended_s: float, own_s: float) -> None:
        """Close an account; the last token came with the step that ended now, and was not seen in the batch."""
        self._note_tokens(answer, answer.num_tokens + 1, ended_s)
        num_gaps = answer.num_tokens - 1
        if not answer.has_broken and ended_s - answer.first_token_s > answer.slo.tpot_s * num_gaps:
            self.counters.num_broken += 1
        elapsed_s = ended_s - answer.first_token_s
        self.paces.observe(own_s=own_s - answer.own_at_first_s, elapsed_s=elapsed_s, num_tokens=answer.num_tokens)

    def decoding(self, ids: Iterable[str], own_s: float) -> Iterator[Decoding]:
        """Yield the decoding requests among ``ids`` as the admission policy wants them."""
        for request_id in ids:
            answer = self._answers[request_id]
            yield Decoding(answer.first_token_s, answer.num_tokens, own_s - answer.own_at_first_s, answer.slo)

    def restart(self, request_id: str, now_s: float) -> None:
        """Let a waiting request count from now on: its prompt, computed elsewhere, is here."""
        if request_id in self._prompts:
            self._prompts[request_id].since_s = now_s

    @property
    def oldest_arrival_s(self) -> float:
        """When the oldest waiting prompt came; ``nan`` without one."""
        return min((prompt.since_s for prompt in self._prompts.values()), default=math.nan)

    @property
    def first_token_deadline_s(self) -> float:
        """By when the prefill of the most urgent prompt must begin; ``inf`` without one."""
        return min((prompt.first_token_by_s for prompt in self._prompts.values()), default=math.inf)

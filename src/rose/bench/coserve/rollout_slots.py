"""Rollouts of a live run: slots that are always in use, each with an endless agentic trajectory.

Invariants:

* The lengths of a slot's turns depend on the seed alone; its token ids on the run's label too, so that no run finds another's
  prefixes in a cache.
* An evicted request goes on with the tokens it has; only the context that has to be computed anew is lost, and counted.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import attrs

from rose.bench.coserve.world import DeviceSetup
from rose.reference.trajectory import derive_seed
from rose.simulation.scenario import RolloutConfig
from rose.simulation.trajectories import TrajectorySource
from rose.types import EngineRequest, FinishReason, RequestId, Sampling

_FIRST_WORD, _VOCAB = 3, 512
_RETRY_S = 0.02


class SlotTurn(NamedTuple):
    """One turn; with ``is_first`` its new tokens are the whole prompt."""

    is_first: bool
    num_new: int
    num_output: int


def slot_turns(setup: DeviceSetup, seed: int, slot: int) -> Iterator[SlotTurn]:
    """Yield the turns of one slot, for ever: one trajectory after the other, the first from a random point of its life on."""
    config = RolloutConfig(
        profile=setup.rollout,
        workload=setup.workload,
        max_turn_tokens=setup.max_turn_tokens,
        num_trajectories=setup.num_slots,
        group_size=1,
    )
    source = TrajectorySource(config, seed=seed)
    rng = random.Random(derive_seed(seed, "slot", slot))
    for number in itertools.count(slot, setup.num_slots):
        turns = source.group(0, number).trajectories[0].turns
        turns = (attrs.evolve(turns[0], num_new_tokens=setup.first_prompt_tokens), *turns[1:])
        skipped = rng.randrange(len(turns)) if number == slot else 0
        context = sum(turn.num_new_tokens + turn.num_output_tokens for turn in turns[:skipped])
        for at, turn in enumerate(turns[skipped:]):
            yield SlotTurn(at == 0, turn.num_new_tokens + (0 if at else context), turn.num_output_tokens)


@attrs.define(eq=False, kw_only=True)
class RolloutSlots:
    """Keeps ``setup.num_slots`` requests in flight on one engine.

    Attributes:
        engine: The rollout engine.
        setup: Says how many slots there are and what their trajectories are like.
        seed, label: Of lengths, and of token ids.
        num_decoded: Answer tokens that were delivered.
        num_evicted: Requests that were ended by the engine.
        thrown_tokens: Their contexts together.
    """

    engine: Any
    setup: DeviceSetup
    seed: int
    label: str
    num_decoded: int = 0
    num_evicted: int = 0
    thrown_tokens: int = 0
    _is_abandoned: bool = False
    _num_requests: int = 0
    _tasks: list[asyncio.Task[None]] = attrs.field(factory=list)

    async def warm_up(self) -> None:
        """Compute every slot's first context, so that it lies in the prefix cache."""
        async with asyncio.TaskGroup() as group:
            for slot in range(self.setup.num_slots):
                prompt = self._ids(slot).choices(
                    range(_FIRST_WORD, _VOCAB), k=next(slot_turns(self.setup, self.seed, slot)).num_new
                )
                group.create_task(self._take_in(prompt))

    async def stir(self) -> None:
        """Ask for a few tokens, so that the engine makes steps."""
        await self._take_in((_FIRST_WORD,))

    def start(self) -> None:
        """Let all slots begin."""
        self._tasks = [asyncio.create_task(self._slot(slot)) for slot in range(self.setup.num_slots)]

    async def stop(self) -> None:
        """End all requests.

        Raises:
            RoseError: The engine was lost meanwhile.
        """
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for problem in ended:
            if isinstance(problem, Exception) and not self._is_abandoned:
                raise problem

    def abandon(self) -> None:
        """Expect the engine's loss: ``stop`` does not complain of it."""
        self._is_abandoned = True

    def _ids(self, slot: int) -> random.Random:
        return random.Random(derive_seed(self.label, "ids", slot))

    async def _take_in(self, prompt: Sequence[int]) -> None:
        async for _ in self._chunks(prompt, 1):
            pass

    async def _slot(self, slot: int) -> None:
        ids, context = self._ids(slot), list[int]()
        for turn in slot_turns(self.setup, self.seed, slot):
            if turn.is_first:
                context = []
            context += ids.choices(range(_FIRST_WORD, _VOCAB), k=turn.num_new)
            await self._say(context, turn.num_output)

    async def _say(self, context: list[int], num_left: int) -> None:
        """Extend ``context`` by the turn's answer, beginning anew with what there is whenever the engine ends the request."""
        while num_left:
            reason = None
            async for chunk in self._chunks(context, num_left):
                reason = chunk.finish_reason
                context += chunk.token_ids
                num_left -= len(chunk.token_ids)
                self.num_decoded += len(chunk.token_ids)
            if reason is not FinishReason.LENGTH:
                self.num_evicted += 1
                self.thrown_tokens += len(context)
                await asyncio.sleep(_RETRY_S)

    def _chunks(self, prompt: Sequence[int], max_tokens: int) -> Any:
        self._num_requests += 1
        request = EngineRequest(
            request_id=RequestId(f"{self.label}-r{self._num_requests}"),
            prompt_ids=tuple(prompt),
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=False),
        )
        return self.engine.generate(request)

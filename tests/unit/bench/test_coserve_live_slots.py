from __future__ import annotations

import asyncio
import itertools

import pytest

from rose.bench.coserve.rollout_slots import RolloutSlots, slot_turns
from rose.bench.coserve.world import DeviceSetup
from rose.errors import EngineError
from rose.types import FinishReason, TokenChunk

SETUP = DeviceSetup(num_slots=2)


def take(slot: int, num: int = 400, seed: int = 0):
    return list(itertools.islice(slot_turns(SETUP, seed, slot), num))


class Engine:
    """Answers each request with one token a chunk; ``cuts`` says after how many tokens the next ones are evicted."""

    def __init__(self, cuts=()):
        self.cuts = list(cuts)
        self.asked = []
        self.is_lost = False

    async def generate(self, request):
        self.asked.append(request)
        cut = self.cuts.pop(0) if self.cuts else None
        num_tokens = request.sampling.max_tokens if cut is None else cut
        for _ in range(num_tokens):
            await asyncio.sleep(0)
            if self.is_lost:
                message = "the engine is gone"
                raise EngineError(message)
            yield TokenChunk(token_ids=(7,))
        yield TokenChunk(finish_reason=FinishReason.LENGTH if cut is None else FinishReason.ABORTED)


def slots(engine, label="run"):
    return RolloutSlots(engine=engine, setup=SETUP, seed=0, label=label)


async def run_until(slots, engine, num_requests):
    slots.start()
    while len(engine.asked) < num_requests:
        await asyncio.sleep(0.001)


def test_turns_are_the_same_for_a_seed_and_differ_between_slots_and_seeds():
    assert take(0) == take(0)
    assert take(0) != take(1)
    assert take(0) != take(0, seed=1)


def test_a_slot_begins_in_the_middle_of_a_life_and_goes_on_with_whole_trajectories():
    turns = take(0)
    first, *later = [turn for turn in turns if turn.is_first]
    assert turns[0] is first
    assert first.num_new >= 1
    assert {turn.num_new for turn in later} == {SETUP.first_prompt_tokens}


def test_contexts_fit_the_models_and_answers_the_most_of_a_turn():
    context = 0
    for turn in take(1, num=2000):
        context = turn.num_new + turn.num_output + (0 if turn.is_first else context)
        assert context <= 32_768
        assert 1 <= turn.num_output <= SETUP.max_turn_tokens


def test_token_ids_are_new_in_every_run_but_lengths_are_not():
    async def prompts(label):
        engine = Engine()
        await slots(engine, label).warm_up()
        return [request.prompt_ids for request in engine.asked]

    one, two = asyncio.run(prompts("a")), asyncio.run(prompts("b"))
    assert [len(ids) for ids in one] == [len(ids) for ids in two] == [take(slot, 1)[0].num_new for slot in range(2)]
    assert one != two


def test_warm_up_computes_just_the_contexts_that_the_first_turns_have():
    async def both():
        engine = Engine()
        made = slots(engine)
        await made.warm_up()
        await run_until(made, engine, 4)
        await made.stop()
        return engine.asked

    asked = asyncio.run(both())
    assert {request.prompt_ids for request in asked[:2]} == {request.prompt_ids for request in asked[2:4]}
    assert all(request.sampling.max_tokens == 1 for request in asked[:2])


def test_an_evicted_request_goes_on_with_its_tokens_and_its_context_is_counted_as_thrown_away():
    async def run():
        engine = Engine(cuts=[3])
        made = slots(engine)
        made.start()
        again = []
        while not again:  # it comes after a wait by the clock
            await asyncio.sleep(0.001)
            again = [request for request in engine.asked[1:] if request.prompt_ids[:-3] == engine.asked[0].prompt_ids]
        await made.stop()
        return engine.asked, again[0], made

    asked, again, made = asyncio.run(run())
    assert again.prompt_ids[-3:] == (7, 7, 7)
    assert again.sampling.max_tokens == asked[0].sampling.max_tokens - 3
    assert made.num_evicted == 1
    assert made.thrown_tokens == len(again.prompt_ids)
    assert len({request.request_id for request in asked}) == len(asked)


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_the_loss_of_the_engine_is_told_unless_it_was_expected(is_abandoned):
    async def run():
        engine = Engine()
        made = slots(engine)
        await run_until(made, engine, 2)
        engine.is_lost = True
        await asyncio.sleep(0.01)
        if is_abandoned:
            made.abandon()
        await made.stop()

    if is_abandoned:
        asyncio.run(run())
    else:
        with pytest.raises(EngineError, match="the engine is gone"):
            asyncio.run(run())

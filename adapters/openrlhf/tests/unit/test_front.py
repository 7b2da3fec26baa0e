"""The front's life, under OpenRLHF's own executors."""

import asyncio
import copy
from types import SimpleNamespace

import attrs
import pytest
import torch

from doubles import LettersTokenizer, Script, openrlhf_params, result
from rose.errors import ConfigError, TurnFailedError
from rose.types import AtLeast, FinishReason
from rose_openrlhf import workers
from rose_openrlhf.broadcast import BroadcastMember
from rose_openrlhf.front import PoolFront
from rose_openrlhf.turns import TurnLimits, TurnRunner, current

workers.set_up()
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor


class Tokenizer(LettersTokenizer):
    """As OpenRLHF calls it: a batch of one, as a tensor."""

    def __call__(self, *, text, add_special_tokens, return_tensors=None):
        ids = self.encode(text)
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}


class Inlet:
    def __init__(self):
        self.taken = []

    async def take(self, name, tensor, *, is_last):
        self.taken.append((name, is_last))


def front(script, executor, hold_s=5.0, version=lambda: 4):
    limits = TurnLimits(deadline_s=9.0, retry_s=0.5)
    runner = TurnRunner(generate=script.generate, limits=limits, version=version, launch="r")
    return PoolFront(
        run="job",
        runner=runner,
        inlet=Inlet(),
        member=BroadcastMember(device="cpu"),
        executor=executor,
        load_tokenizer=Tokenizer,
        max_model_len=64,
        hold_s=hold_s,
    )


async def ask(one, num_samples=1, params=None, max_length=64):
    return await one.generate_responses(
        "what", "label", params or openrlhf_params(), max_length, Tokenizer(), num_samples
    )


async def test_one_turn():
    script = Script(result("abc", n=5), result("d" * 16, FinishReason.LENGTH, n=5))
    one = front(script, SingleTurnAgentExecutor(None))
    first, second = await ask(one, num_samples=2)
    prompt = [ord(char) for char in "what"]
    assert first["observation_tokens"] == [*prompt, *map(ord, "abc")]
    assert first["action_ranges"] == [(4, 7)]
    assert first["rollout_log_probs"] == [0.0] * 4 + [-0.5, -1.5, -2.5]
    assert (first["truncated"], second["truncated"]) == (False, True)
    assert first["extra_logs"] == {"rose_version_min": 5.0, "rose_version_max": 5.0, "rose_hops": 0.0}
    turns = script.turns
    assert {turn.group_id for turn in turns} == {"job/0"}
    assert [turn.trajectory_id for turn in turns] == ["job/0/0", "job/0/1"]
    assert all(turn.versions == AtLeast(4) and turn.deadline_s == 9.0 for turn in turns)


class Agent(AgentInstanceBase):
    def __init__(self):
        self.steps = 0

    async def step(self, state_dict, **_):
        self.steps += 1
        self.texts = [*getattr(self, "texts", []), state_dict["action_text"]]
        return {
            "rewards": torch.tensor(1.0),
            "environment_feedback": "++",
            "done": self.steps == 2,
            "extra_logs": {"turns": float(self.steps)},
        }


async def test_turns_of_a_trajectory_go_under_one_name_and_feedback_has_no_logprobs():
    script = Script(result("abc", n=1), result("de", n=2))
    (response,) = await ask(front(script, MultiTurnAgentExecutor(Agent)))
    assert response["observation_tokens"] == [ord(char) for char in "whatabc++de++"]
    assert response["action_ranges"] == [(4, 7), (9, 11)]
    assert response["rollout_log_probs"] == [0.0] * 4 + [-0.5, -1.5, -2.5, 0.0, 0.0, -0.5, -1.5, 0.0, 0.0]
    assert response["extra_logs"] == {"turns": 2.0, "rose_version_min": 1.0, "rose_version_max": 2.0, "rose_hops": 0.0}
    assert [turn.prompt_ids for turn in script.turns] == [tuple(map(ord, "what")), tuple(map(ord, "whatabc++"))]
    assert len({turn.trajectory_id for turn in script.turns}) == 1
    assert [turn.sampling.max_tokens for turn in script.turns] == [60, 55]  # the executor's budget


async def test_samples_do_not_change_each_others_settings():
    params = openrlhf_params(max_tokens=None)
    before = copy.deepcopy(params)
    await ask(
        front(Script(*(result("ab") for _ in range(4))), MultiTurnAgentExecutor(Agent)), num_samples=2, params=params
    )
    assert params == before


async def test_no_logprobs_where_none_were_asked_for():
    (response,) = await ask(
        front(Script(result("ab")), SingleTurnAgentExecutor(None)), params=openrlhf_params(logprobs=None)
    )
    assert response["rollout_log_probs"] is None


@pytest.mark.parametrize(("second", "given", "num_warnings"), [
    ("a" * 12, {}, 1),  # e^-78
    ("b" * 12, {}, 0),
    ("a" * 12, {"temperature": 0.0}, 0),
])  # fmt: skip
async def test_samples_that_cannot_be_alike_by_chance_are_said_once(second, given, num_warnings, caplog):
    script = Script(*(result(text, FinishReason.LENGTH) for text in ("a" * 12, second, "a" * 12, second)))
    one = front(script, SingleTurnAgentExecutor(None))
    for _ in range(2):
        await ask(one, num_samples=2, params=openrlhf_params(max_tokens=12, **given))
    assert len([record for record in caplog.records if "draw with one seed" in record.message]) == num_warnings


async def test_likely_answers_may_be_alike(caplog):
    likely = attrs.evolve(result("ab"), logprobs=(-0.1, -0.1))
    await ask(front(Script(likely, likely), SingleTurnAgentExecutor(None)), num_samples=2)
    assert not caplog.records


async def test_unfinished_samples_are_counted():
    gate = asyncio.Event()

    class Slow:
        async def execute(self, **_):
            await gate.wait()
            return {}

    one = front(Script(), Slow())
    task = asyncio.create_task(ask(one, num_samples=3))
    await asyncio.sleep(0.01)
    assert one.get_num_unfinished_requests() == 3
    gate.set()
    await task
    assert one.get_num_unfinished_requests() == 0


async def test_an_error_is_raised_as_it_is_and_ends_the_siblings():
    ended = []

    class Executor:
        async def execute(self, *, llm_engine, **_):
            if current.get().trajectory_id.endswith("/0"):
                raise TurnFailedError("no engine")
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(current.get().trajectory_id)

    one = front(Script(), Executor())
    with pytest.raises(TurnFailedError, match="no engine"):
        await ask(one, num_samples=2)
    assert ended == ["job/0/1"]
    assert one.get_num_unfinished_requests() == 0


async def test_no_turn_begins_in_a_pause_and_it_takes_the_newest_weights():
    newest = [4]
    script = Script(result("ab"))
    one = front(script, SingleTurnAgentExecutor(None), version=lambda: newest[0])
    await one.pause_generation()
    task = asyncio.create_task(ask(one))
    await asyncio.sleep(0.05)
    assert not script.turns
    newest[0] = 5
    await one.resume_generation()
    await task
    assert script.turns[0].versions == AtLeast(5)


async def test_no_turn_is_drawn_again_in_a_pause():
    newest, turns = [4], []

    class Pool:
        async def generate(self, turn):
            turns.append(turn)
            if len(turns) > 1:
                return result("ab")
            await one.pause_generation()
            return result([])  # an answer that must not be empty

    one = front(Pool(), SingleTurnAgentExecutor(None), version=lambda: newest[0])
    task = asyncio.create_task(ask(one))
    await asyncio.sleep(0.05)
    assert len(turns) == 1
    newest[0] = 5
    await one.resume_generation()
    await asyncio.wait_for(task, 5)
    assert [turn.versions for turn in turns] == [AtLeast(4), AtLeast(5)]


async def test_a_turn_under_way_goes_on_in_a_pause():
    begun, gate = asyncio.Event(), asyncio.Event()

    class Pool:
        async def generate(self, turn):
            begun.set()
            await gate.wait()
            return result("ab")

    one = front(Pool(), SingleTurnAgentExecutor(None))
    task = asyncio.create_task(ask(one))
    await begun.wait()
    await one.pause_generation()
    gate.set()
    assert (await asyncio.wait_for(task, 5))[0]["action_ranges"] == [(4, 6)]


async def test_a_pause_that_nobody_ends_is_over():
    one = front(Script(result("ab"), result("ab")), SingleTurnAgentExecutor(None), hold_s=0.05)
    await one.pause_generation()
    await asyncio.wait_for(ask(one), 5)
    await asyncio.wait_for(ask(one), 5)


async def test_a_call_from_outside_an_executor():
    script = Script(result("ab"), result("ab"))
    one = front(script, None)
    answers = [await one.generate([1, 2], openrlhf_params()) for _ in range(2)]
    assert answers[0].outputs[0].token_ids == [97, 98]
    assert answers[0].rose.token_ids == (97, 98)
    assert len({turn.trajectory_id for turn in script.turns}) == 2


async def test_what_is_refused():
    one = front(Script(), None)
    with pytest.raises(NotImplementedError, match="max_images_per_prompt"):
        await one.generate([1], openrlhf_params(), multi_modal_data={"image": [object()]})
    with pytest.raises(NotImplementedError, match="colocate_all"):
        await one.update_weight_cuda_ipc("w", None, None, ipc_handles={}, empty_cache=True)
    with pytest.raises(ConfigError, match="top_k"):
        await one.generate([1], openrlhf_params(top_k=5))


async def test_an_answer_that_the_engines_context_cut_off_is_an_error():
    one = front(Script(result("ab", FinishReason.LENGTH)), None)
    with pytest.raises(ConfigError, match="after 2 of 16 tokens by the context"):
        await one.generate([1, 2], openrlhf_params())


async def test_weights_come_through_the_group():
    one = front(Script(), None)
    one.member = SimpleNamespace(receive=lambda dtype, shape: (dtype, tuple(shape)))
    await one.update_weight("a", "bf16", [2, 3])
    await one.update_weight("b", "bf16", [2, 3], empty_cache=True)
    assert one.inlet.taken == [("a", False), ("b", True)]
    await one.reset_prefix_cache()
    await one.sleep(level=1)
    await one.wake_up(tags=["weights"])

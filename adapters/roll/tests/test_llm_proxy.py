"""The proxy over a real service of a pool of scripted engines."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import SETTINGS, make_proxy, prompt

from rose import PoolConfig
from rose.errors import ConfigError, NoEngineError, TurnFailedError
from rose.testing import FakeEngine, Fault, FaultKind
from rose.types import EngineId, TurnResult, WeightVersion
from rose_roll.fields import object_array
from rose_roll.llm_proxy import TrajectoryName
from rose_roll.partials import NOTHING
from rose_roll.patience import Patience


def engine(name: str = "e0", **options: Any) -> FakeEngine:
    return FakeEngine(engine_id=EngineId(name), **options)


def test_a_turn_has_the_fields_of_a_policy_proxys(make_site: Any, tokenizer: Any) -> None:
    proxy = make_proxy(make_site(engine()).url, tokenizer)
    output = proxy.generate([], prompt([5, 6, 7], width=5, src_rank=3), dict(SETTINGS))
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in output.batch.items()}
    assert shapes == {
        "prompts": ((1, 5), torch.int64),
        "responses": ((1, 8), torch.int64),
        "input_ids": ((1, 13), torch.int64),
        "attention_mask": ((1, 13), torch.int64),
        "position_ids": ((1, 13), torch.int64),
        "prompt_mask": ((1, 13), torch.bool),
        "response_mask": ((1, 13), torch.int64),
        "infer_logprobs": ((1, 12), torch.float32),
    }
    answer = output.batch["responses"][0].tolist()
    assert output.batch["input_ids"][0].tolist() == [5, 6, 7, *answer, 0, 0]
    assert output.batch["response_mask"][0].tolist() == [0] * 3 + [1] * 8 + [0] * 2
    assert (output.batch["infer_logprobs"][0, 2:10] < 0).all(), "one log-prob a token, at the position before it"
    assert output.batch["infer_logprobs"][0, :2].tolist() + output.batch["infer_logprobs"][0, 10:].tolist() == [0.0] * 4
    assert "generation_config" not in output.meta_info
    assert output.meta_info["rose"]["is_truncated"]


def test_a_drawn_padding_token_counts(make_site: Any, tokenizer: Any) -> None:
    proxy = make_proxy(make_site(engine(next_token=lambda *_: 0)).url, tokenizer)
    output = proxy.generate([], prompt([5]), dict(SETTINGS))
    assert output.batch["responses"][0].tolist() == [0]
    assert output.batch["response_mask"][0].tolist() == [0, 1]
    assert output.batch["infer_logprobs"][0, 0] < 0


def test_turns_of_a_trajectory_keep_their_name_and_their_engine(make_site: Any, tokenizer: Any) -> None:
    site = make_site(engine("e0"), engine("e1"))
    proxy = make_proxy(site.url, tokenizer)
    ids = [5, 6]
    for _ in range(4):
        output = proxy.generate([], prompt(ids), dict(SETTINGS))
        ids = [*ids, *output.batch["responses"][0].tolist(), 9]
    assert sorted(len(one.requests) for one in site.engines) == [0, 4]


def test_an_interrupted_turn_goes_on_where_it_was(make_site: Any, tokenizer: Any) -> None:
    """The engine dies after three tokens and no other is there: the turn comes back as none, and is asked again."""
    site = make_site(engine(token_s=0.05))
    whole = make_proxy(make_site(engine("whole")).url, tokenizer).generate([], prompt([5, 6]), dict(SETTINGS))
    proxy = make_proxy(site.url, tokenizer, deadline_s=0.25, retry_s=0.01)
    num_none = 0
    while (output := proxy.generate([], prompt([5, 6]), dict(SETTINGS))) is None:
        num_none += 1
        assert num_none < 20
    assert num_none >= 1
    assert output.batch["responses"].shape == (1, 8)
    assert len(whole.batch["responses"][0]) == 8
    assert output.meta_info["rose"]["num_resumed_tokens"] > 0
    asked = [len(one.prompt_ids) for one in site.engines[0].requests]
    assert asked == sorted(asked)
    assert asked[-1] > 2, "what was drawn is not drawn again"
    limits = [len(one.prompt_ids) + one.sampling.max_tokens for one in site.engines[0].requests]
    assert limits == [10] * len(limits), "one budget over all parts"


def test_greedy_parts_are_the_whole(make_site: Any, tokenizer: Any) -> None:
    settings = {**SETTINGS, "temperature": 0.0}
    whole = make_proxy(make_site(engine()).url, tokenizer).generate([], prompt([5, 6]), dict(settings))
    proxy = make_proxy(make_site(engine(token_s=0.05)).url, tokenizer, deadline_s=0.25, retry_s=0.01)
    output = None
    while output is None:
        output = proxy.generate([], prompt([5, 6]), dict(settings))
    assert output.batch["responses"].tolist() == whole.batch["responses"].tolist()
    assert output.batch["infer_logprobs"].tolist() == whole.batch["infer_logprobs"].tolist()


def test_another_prompt_begins_anew(make_site: Any, tokenizer: Any) -> None:
    site = make_site(engine(token_s=0.05))
    proxy = make_proxy(site.url, tokenizer, deadline_s=0.2, retry_s=0.01)
    proxy.trajectory = TrajectoryName(trajectory_id="t", group_id="g")
    assert proxy.generate([], prompt([5, 6]), dict(SETTINGS)) is None
    assert proxy.generate([], prompt([7, 8]), dict(SETTINGS)) is None
    assert site.engines[0].requests[-1].prompt_ids[:2] == (7, 8)
    assert len(site.engines[0].requests[-1].prompt_ids) == 2


def test_an_engine_that_dies_in_mid_turn_costs_nothing(make_site: Any, tokenizer: Any) -> None:
    dying = engine("e0", faults=[Fault(kind=FaultKind.DIE, after_tokens=3)])
    output = make_proxy(make_site(dying, engine("e1")).url, tokenizer).generate([], prompt([5, 6]), dict(SETTINGS))
    assert output.batch["responses"].shape == (1, 8)


def test_an_error_that_lasts_is_raised_in_the_end(make_site: Any, tokenizer: Any) -> None:
    dead = engine(
        faults=[Fault(kind=FaultKind.DIE, after_tokens=2, request_index=0), Fault(kind=FaultKind.DIE, request_index=1)]
    )
    site = make_site(dead, config=PoolConfig(no_engine_timeout_s=0.1, retry_s=0.01))
    proxy = make_proxy(site.url, tokenizer, give_up_s=1.0, retry_s=0.05)
    num_none = 0

    def play() -> None:
        nonlocal num_none
        while proxy.generate([], prompt([5]), dict(SETTINGS)) is None:
            num_none += 1

    with pytest.raises(NoEngineError) as caught:
        play()
    assert num_none >= 2
    assert caught.value.partial is not None
    assert len(caught.value.partial.token_ids) == 2


def test_time_in_which_roll_is_suspended_is_no_failure(
    make_site: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy, now = make_proxy(make_site(engine()).url, tokenizer, retry_s=0.001), [0.0]
    proxy._patience = Patience(10.0, clock=lambda: now[0])
    tries: list[TurnResult | NoEngineError] = [NoEngineError("none"), NOTHING, NoEngineError("none")]

    def run(*_: Any) -> TurnResult:
        done = tries.pop(0)
        if isinstance(done, NoEngineError):
            raise done
        return done

    monkeypatch.setattr(proxy, "_connection", SimpleNamespace(run=run))
    for now_s in (0.0, 1.0, 1000.0):
        now[0] = now_s
        assert proxy.generate([], prompt([5]), dict(SETTINGS)) is None
    assert not tries


@pytest.mark.parametrize(
    ("change", "words"),
    [({"top_k": 50}, "top_k: 50"), ({"num_return_sequences": 2}, "num_return_sequences: 2")],
)
def test_settings_that_cannot_be_kept(make_site: Any, tokenizer: Any, change: dict[str, Any], words: str) -> None:
    proxy = make_proxy(make_site(engine()).url, tokenizer)
    with pytest.raises(ConfigError, match=words):
        proxy.generate([], prompt([5]), {**SETTINGS, **change})


def test_a_prompt_that_fills_the_context_says_what_to_set(make_site: Any, tokenizer: Any) -> None:
    proxy = make_proxy(make_site(engine(max_model_len=4)).url, tokenizer)
    with pytest.raises(ConfigError, match="set sequence_length"):
        proxy.generate([], prompt([5] * 4), dict(SETTINGS))


def test_images_are_refused(make_site: Any, tokenizer: Any) -> None:
    asked = prompt([5])
    asked.non_tensor_batch["multi_modal_data"] = object_array([{}])
    with pytest.raises(ConfigError, match="multi_modal_data"):
        make_proxy(make_site(engine()).url, tokenizer).generate([], asked, dict(SETTINGS))


def test_an_option_that_is_not_there_is_named(make_site: Any, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="deadline"):
        make_proxy(make_site(engine()).url, tokenizer, deadline=3)


def test_nobody_said_where_the_pool_is(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSE_POOL", raising=False)
    with pytest.raises(ConfigError, match=r"system_envs\.ROSE_POOL"):
        make_proxy("", tokenizer)


def test_turns_of_a_step_want_the_weights_of_that_step(make_site: Any, tokenizer: Any) -> None:
    site = make_site(engine(weight_version=WeightVersion("r", 3)))
    proxy = make_proxy(site.url, tokenizer)
    proxy.begin_step(7)
    spans = proxy.generate([], prompt([5]), dict(SETTINGS)).meta_info["rose"]["spans"]
    assert [(span["start"], span["end"], span["version"]) for span in spans] == [(0, 8, "r:3")]


def test_a_pool_that_was_started_anew_ends_the_turns_that_it_can_never_finish(make_site: Any, tokenizer: Any) -> None:
    site = make_site(engine(weight_version=WeightVersion("r", 3)))
    proxy = make_proxy(site.url, tokenizer, give_up_s=0.2)
    assert proxy.generate([], prompt([5]), dict(SETTINGS)) is not None
    site.close()
    make_site(engine(), listen=site.url.removeprefix("http://"))
    with pytest.raises(TurnFailedError, match=r"has lost the weights of this job: it was started anew; .*checkpoint"):
        proxy.generate([], prompt([5]), dict(SETTINGS))


def test_many_environments_share_one_connection(make_site: Any, tokenizer: Any) -> None:
    site = make_site(engine("e0", token_s=0.005), engine("e1", token_s=0.005))
    proxies = [make_proxy(site.url, tokenizer) for _ in range(8)]
    assert len({id(proxy._connection) for proxy in proxies}) == 1
    outputs: list[Any] = []
    threads = [
        threading.Thread(target=lambda p=p, n=n: outputs.append(p.generate([], prompt([5, n]), dict(SETTINGS))))
        for n, p in enumerate(proxies)
    ]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(outputs) == 8
    assert time.monotonic() - started_s < 10

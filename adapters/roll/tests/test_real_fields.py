"""ROLL's own code and ours over the same turn; and the doubles against the checkout."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_doubles
import pytest
import torch
from helpers import SETTINGS, make_proxy, prompt

from rose.testing import FakeEngine
from rose.types import EngineId, FinishReason, TurnResult

pytestmark = pytest.mark.real


def test_doubles_are_those_of_the_checkout() -> None:
    folder = Path(__file__).parent / "doubles"
    made = make_doubles.make_doubles(Path(os.environ["ROLL_SRC"]))
    kept = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.py")}
    assert kept == made, "run tests/make_doubles.py ROLL_SRC"


@pytest.mark.parametrize("width", [None, 9])
def test_a_turn_is_bit_equal_with_rolls_policy_proxy(make_site: Any, tokenizer: Any, width: int | None) -> None:
    """Both get the same tokens and log-probs, one of them by ROLL's router client, the other by the pool."""
    from roll.pipeline.agentic.llm_proxy.policy_proxy import PolicyProxy

    generator = random.Random(1)
    site = make_site(FakeEngine(engine_id=EngineId("e0"), seed=3))
    ours = make_proxy(site.url, tokenizer)
    for _ in range(10):
        ids = [generator.randrange(2, 1000) for _ in range(generator.randrange(1, 9))]
        settings = {**SETTINGS, "max_new_tokens": generator.randrange(1, 12)}
        output = ours.generate([], prompt(ids, width=width), dict(settings))
        new = output.batch["responses"][0].tolist()
        logprobs = _logprobs(output, len(ids), len(new))
        theirs = PolicyProxy.__new__(PolicyProxy)
        theirs.tokenizer = tokenizer
        theirs.router_client = SimpleNamespace(generate_request_sync=_answer(new, logprobs))
        expected = theirs.generate([], prompt(ids, width=width), dict(settings))
        assert set(output.batch.keys()) == set(expected.batch.keys())
        for name in expected.batch.keys():  # noqa: SIM118 - a tensordict iterates over its rows
            assert output.batch[name].dtype == expected.batch[name].dtype, name
            if width is None or name not in {"input_ids"}:
                assert torch.equal(output.batch[name], expected.batch[name]), name
        mask = expected.batch["attention_mask"].bool()
        assert torch.equal(output.batch["input_ids"][mask], expected.batch["input_ids"][mask])
        assert dict(output.non_tensor_batch) == dict(expected.non_tensor_batch)
        assert {**output.meta_info, "rose": None} == {**expected.meta_info, "rose": None}


def _logprobs(output: Any, num_prompt: int, num_new: int) -> list[float]:
    return output.batch["infer_logprobs"][0, num_prompt - 1 : num_prompt - 1 + num_new].tolist()


def _answer(new: list[int], logprobs: list[float]) -> Any:
    from roll.distributed.scheduler.protocol import DataProto

    def generate_request_sync(req: Any, request_id: Any, uid: Any) -> Any:
        del request_id, uid
        answer = {"finish_reasons": ["stop"], "output_token_ids": [new], "output_logprobs": [logprobs]}
        return DataProto(meta_info={**req.meta_info, **answer, "eos_token_id": [1, 0], "pad_token_id": 0})

    return generate_request_sync


def test_a_worker_s_response_goes_through_rolls_postprocessing() -> None:
    """Aborted without a token, ROLL's own partial path must be able to read it."""
    from rose_roll.fields import response_payload

    nothing = TurnResult(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORTED, versions=(), hops=())
    payload = response_payload([nothing], has_logprobs=True)
    assert [len(one) for one in payload["output_token_ids"]] == [0]
    assert payload["output_logprobs"] == [[]]

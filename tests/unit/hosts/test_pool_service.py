"""A pool's service: turns, streams, status, the OpenAI routes and the exact tokens of chats (case E07)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import attrs
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

import aiohttp

from pool_parts import fakes, pool_of, turn, until
from rose import RolloutPool
from rose.errors import ConfigError, RequestRefusedError
from rose.pool.wire import result_from_wire, turn_to_wire
from rose.testing import FakeEngine
from rose.types import EngineId, Sampling, WeightVersion

SAMPLED = [1, 2]


@attrs.define
class ToyTokenizer:
    """Case E07: ``decode([1, 2])`` is ``ab``, and ``encode("ab")`` is ``[3]``. 9 ends a message, 7 begins one."""

    stop_token_ids: Sequence[int] = (9,)
    encoded: list[str] = attrs.field(factory=list)

    def encode(self, text: str) -> Sequence[int]:
        self.encoded.append(text)
        return [3] if text == "ab" else [{"c": 4, "q": 5, "!": 6}.get(letter, 8) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join({1: "a", 2: "b", 3: "ab", 4: "c", 5: "q", 6: "!"}.get(token, "?") for token in ids)

    def begin(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        return [*self._render(messages), 7]

    def go_on(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        return [9, *self._render(messages), 7]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [token for message in messages for token in (7, *self.encode(message["content"]), 9)]


@attrs.define
class Asker:
    """Asks one service over HTTP; gives status and decoded body."""

    session: aiohttp.ClientSession
    url: str

    async def __call__(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(method, self.url + path, json=body, headers=named) as answer:
            return answer.status, json.loads(await answer.read())

    async def lines(self, path: str, body: Any) -> list[str]:
        async with self.session.post(self.url + path, json=body) as answer:
            assert answer.status == 200
            return [line.decode().strip() async for line in answer.content if line.strip()]


@contextlib.asynccontextmanager
async def service(
    engines: list[FakeEngine] | None = None, **options: Any
) -> AsyncIterator[tuple[RolloutPool, Asker, list[FakeEngine]]]:
    engines = engines or fakes(2)
    async with pool_of(engines, **options) as (pool, url), aiohttp.ClientSession() as session:
        yield pool, Asker(session, url), engines


def chatty(*answers: list[int], **options: Any) -> FakeEngine:
    """Return an engine that gives these answers in turn, each ended by token 9."""
    left = [[*answer, 9] for answer in answers]
    now: list[int] = []

    def next_token(_ids: Sequence[int], _sampling: Sampling, _version: WeightVersion | None) -> int:
        if not now:
            now.extend(left.pop(0))
        return now.pop(0)

    return FakeEngine(engine_id=EngineId("e0"), next_token=next_token, eos_token_id=9, **options)


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return {"model": "toy", "messages": messages, "max_tokens": 8, "user": "t0", **more}


# Turns.


async def test_a_turn_in_and_its_result_out() -> None:
    async with service() as (pool, ask, _):
        status, data = await ask("/v1/generate", turn_to_wire(turn()))
        assert status == 200
        wanted = await pool.generate(turn())
        assert result_from_wire(data).token_ids == wanted.token_ids
        assert data["hops"][0]["ended"] == "finished"


async def test_a_streamed_turn_gives_every_token_once() -> None:
    async with service() as (_, ask, _):
        *lines, last = map(json.loads, await ask.lines("/v1/generate", turn_to_wire(turn()) | {"stream": True}))
        result = result_from_wire(last["result"])
        assert [token for line in lines for token in line["token_ids"]] == list(result.token_ids)
        assert [value for line in lines for value in line["logprobs"]] == list(result.logprobs)


async def test_a_stream_goes_on_over_a_move() -> None:
    async with service(fakes(2, token_s=0.01)) as (_, ask, engines):
        task = asyncio.create_task(ask.lines("/v1/generate", turn_to_wire(turn(max_tokens=40)) | {"stream": True}))
        await until(lambda: any(engine.num_in_flight for engine in engines))
        first = next(engine for engine in engines if engine.num_in_flight)
        await asyncio.sleep(0.1)
        first.die()
        *lines, last = map(json.loads, await task)
        result = result_from_wire(last["result"])
        assert len(result.hops) == 2
        assert [token for line in lines for token in line["token_ids"]] == list(result.token_ids)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "prompt_ids is missing"),
        ({"trajectory_id": "t", "group_id": "g", "prompt_ids": [1]}, "sampling is missing"),
        ([1], "a turn is a JSON object"),
        (turn_to_wire(turn()) | {"prompt_ids": []}, "at least 1 token ids"),
        (turn_to_wire(turn()) | {"prompt_ids": ["a"]}, "got 'a' at place 0"),
        (turn_to_wire(turn()) | {"temperature": 1}, "unknown: temperature"),
        (turn_to_wire(turn()) | {"sampling": {"max_token": 1}}, "unknown in sampling: max_token"),
        (turn_to_wire(turn()) | {"versions": {"newest": 1}}, "at_least"),
        (turn_to_wire(turn()) | {"turn_id": "a", "stream": True}, "leave out turn_id or stream"),
        (turn_to_wire(turn()) | {"stream": "no"}, "stream is true or false, not 'no'"),
        (turn_to_wire(turn()) | {"sampling": 5}, "sampling is an object, not 5"),
        (turn_to_wire(turn()) | {"sampling": {}}, "sampling has no max_tokens"),
        ({"prompt_ids": [1], "sampling": {"max_tokens": 1}}, "missing: group_id, trajectory_id"),
    ],
)
async def test_what_is_no_turn_is_refused(body: Any, says: str) -> None:
    async with service() as (_, ask, engines):
        status, data = await ask("/v1/generate", body)
        assert (status, data["error"]["type"]) == (422, "request_refused_error")
        assert says in data["error"]["message"]
        assert not any(engine.requests for engine in engines)


async def test_a_retry_finds_the_turn_and_its_result() -> None:
    engines = fakes(1, token_s=0.05)
    async with service(engines, linger_s=0.4) as (_, ask, _):
        body = turn_to_wire(turn(max_tokens=20)) | {"turn_id": "a"}
        first = asyncio.create_task(ask("/v1/generate", body))
        await until(lambda: engines[0].requests)
        first.cancel()  # the answer is lost
        await asyncio.sleep(0.05)
        answers = [await ask("/v1/generate", body) for _ in range(2)]
        assert answers[0] == answers[1]
        assert answers[0][0] == 200
        assert len(engines[0].requests) == 1
        status, data = await ask("/v1/generate", body | {"group_id": "other"})
        assert (status, data["error"]["type"]) == (400, "config_error")


async def test_a_turn_without_a_client_is_cancelled_after_a_while_and_on_demand_at_once() -> None:
    engines = fakes(1, token_s=0.05)
    async with service(engines, linger_s=0.1) as (pool, ask, _):
        body = turn_to_wire(turn(max_tokens=500))
        for more in ({"turn_id": "a"}, {}):
            task = asyncio.create_task(ask("/v1/generate", body | more))
            await until(lambda: engines[0].num_in_flight)
            task.cancel()
            await until(lambda: pool.snapshot().num_live_turns == 0 and not engines[0].num_in_flight)
        task = asyncio.create_task(ask("/v1/generate", body | {"turn_id": "b"}))
        await until(lambda: engines[0].num_in_flight)
        assert await ask("/v1/turns/b", method="DELETE") == (200, {"was_live": True})
        await until(lambda: pool.snapshot().num_live_turns == 0)
        assert await ask("/v1/turns/b", method="DELETE") == (200, {"was_live": False})
        status, data = await task
        assert (status, data["error"]["message"]) == (500, "turn 'b' was cancelled by its client")
        await until(lambda: len(engines[0].aborted) == 3)


async def test_a_stream_that_nobody_reads_is_cancelled() -> None:
    engines = fakes(1, token_s=0.02)
    async with service(engines) as (pool, ask, _):
        body = turn_to_wire(turn(max_tokens=500)) | {"stream": True}
        async with ask.session.post(ask.url + "/v1/generate", json=body) as answer:
            await answer.content.readline()
            answer.close()
        await until(lambda: pool.snapshot().num_live_turns == 0 and not engines[0].num_in_flight)
        assert len(engines[0].aborted) == 1


# The pool.


async def test_status_health_and_metrics() -> None:
    async with service() as (_, ask, engines):
        await ask("/v1/generate", turn_to_wire(turn()))
        _, status = await ask("/v1/pool", method="GET")
        assert status["name"] == "toy"
        assert {engine["state"] for engine in status["snapshot"]["engines"]} == {"ready"}
        assert sum(account["num_tokens"] for account in status["accounts"].values()) == 5
        async with ask.session.get(ask.url + "/metrics") as answer:
            text = await answer.text()
        assert 'rose_pool_engines{kind="dedicated",state="ready"} 2.0' in text
        assert 'rose_pool_attempts_total{ended="finished",engine="e0",kind="dedicated"} 1.0' in text
        assert (await ask("/health", method="GET"))[1]["num_ready_engines"] == 2
        for engine in engines:
            engine.die()
        await until(lambda: True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while (await ask("/health", method="GET"))[0] == 200:
                    await asyncio.sleep(0.05)
        assert (await ask("/health", method="GET"))[1]["reasons"] == ["none of 2 engines is ready"]


async def test_weights_are_synced_from_a_transport_that_the_pool_can_reach() -> None:
    async with service() as (_, ask, _), RolloutPool.connect(ask.url) as remote:
        with pytest.raises(ConfigError, match="names no file"):
            await remote._client.call("POST", "/v1/sync", {"address": {"name": "memory", "token_file": "/etc/passwd"}})
        with pytest.raises(TypeError, match="source must be"):
            await remote.sync_weights("weights")  # type: ignore[arg-type]


# OpenAI: completions.


async def test_a_completion_of_ids_needs_no_tokenizer() -> None:
    async with service() as (pool, ask, _):
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True, "logprobs": 1}
        status, data = await ask("/v1/completions", body)
        assert status == 200
        choice = data["choices"][0]
        assert (data["object"], choice["finish_reason"], choice["text"]) == ("text_completion", "length", "")
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 4
        assert data["prompt_token_ids"] == [1, 2, 3]
        assert data["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert data["rose"]["hops"][0]["num_tokens"] == 4
        assert pool.snapshot().num_live_turns == 0
        assert (await ask("/v1/models", method="GET"))[1]["data"][0]["id"] == "toy"


@pytest.mark.parametrize(("given", "has_logprobs"), [(0, True), (1, True), (True, True), (None, False), (False, False)])
async def test_logprobs_are_shown_where_they_are_asked_for(given: Any, *, has_logprobs: bool) -> None:
    """OpenAI's completions ask by a number; 0 is the sampled token's alone."""
    async with service() as (_, ask, _):
        _, data = await ask("/v1/completions", {"prompt": [1], "max_tokens": 2, "logprobs": given})
        assert ("logprobs" in data["choices"][0]) is has_logprobs


async def test_a_completion_of_text() -> None:
    async with service([chatty([1, 2])], tokenizer=ToyTokenizer()) as (_, ask, engines):
        _, data = await ask("/v1/completions", {"prompt": "q!", "stop": "c"})
        assert data["choices"][0] == {"index": 0, "finish_reason": "stop", "text": "ab"}
        assert engines[0].requests[0].prompt_ids == (5, 6)
        assert engines[0].requests[0].sampling.stop_token_ids == (4,)


async def test_a_streamed_completion_ends_as_openai_s_clients_expect() -> None:
    async with service() as (_, ask, _):
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "return_token_ids": True}
        lines = await ask.lines("/v1/completions", body)
        assert lines[-1] == "data: [DONE]"
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert len([token for piece in pieces for token in piece["choices"][0]["token_ids"]]) == 4
        assert [piece["choices"][0]["finish_reason"] for piece in pieces[-2:]] == [None, "length"]
        assert len({piece["id"] for piece in pieces}) == 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"prompt": "text"}, "needs a tokenizer"),
        ({"prompt": []}, "not empty"),
        ({"prompt": [[1], [2]]}, "several prompts as several requests"),
        ({"prompt": [1], "n": 2}, "not supported: n"),
        ({"prompt": [1], "presence_penalty": 0.5}, "not supported: presence_penalty"),
        ({"prompt": [1], "magic": 1}, "not supported: magic"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens must be"),
        ({"prompt": [1], "temperature": "hot"}, "temperature must be"),
        ({"prompt": [1], "deadline_s": -1}, "deadline_s must be"),
        ({"prompt": [1], "stop_token_ids": 5}, "stop_token_ids is a list"),
        ({"prompt": [1], "stop": 5}, "stop is a text or a list of texts"),
        ({"prompt": [1], "stream": "false"}, "stream is true or false, not 'false'"),
        ({"prompt": [1], "return_token_ids": 1}, "return_token_ids is true or false, not 1"),
        ({"prompt": [1], "logprobs": "all"}, "logprobs is true, false or a number"),
        ({"prompt": [1], "user": [1]}, "user is a text, not [1]"),
        ({"prompt": [1], "metadata": {"trajectory_id": {"a": 1}}}, "trajectory_id is a text, not {'a': 1}"),
        ({"prompt": [1], "metadata": {"group_id": True}}, "group_id is a text, not True"),
        ("x", "a JSON object"),
    ],
)
async def test_what_a_completion_cannot_do_is_said(body: Any, says: str) -> None:
    async with service() as (_, ask, _):
        status, data = await ask("/v1/completions", body)
        assert (status, data["error"]["type"]) == (422, "request_refused_error")
        assert says in data["error"]["message"]


@pytest.mark.parametrize("given", [{"max_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": None}])
async def test_a_bound_that_is_null_is_none(given: Any) -> None:
    async with service() as (_, ask, _):
        _, data = await ask("/v1/completions", {"prompt": [1], **given})
        assert data["usage"]["completion_tokens"] == 3


async def test_neutral_values_are_taken() -> None:
    async with service() as (_, ask, _):
        body = {
            "model": "any",
            "prompt": [1],
            "n": 1,
            "presence_penalty": 0.0,
            "stop": None,
            "tools": [],
            "echo": False,
        }
        assert (await ask("/v1/completions", body))[0] == 200


# OpenAI: chat.


async def test_a_chat_keeps_the_sampled_tokens() -> None:
    """Case E07: the second prompt is P + [1, 2] + template + [4]; it holds 1 and 2 and never 3."""
    tokenizer = ToyTokenizer()
    async with service([chatty(SAMPLED, [6])], tokenizer=tokenizer) as (_, ask, engines):
        _, first = await ask("/v1/chat/completions", chat("q"))
        assert first["choices"][0]["message"] == {"role": "assistant", "content": "ab"}
        _, second = await ask("/v1/chat/completions", chat("q", "ab", "c"))
        assert second["choices"][0]["message"]["content"] == "!"
        prompts = [list(request.prompt_ids) for request in engines[0].requests]
        assert prompts == [[7, 5, 9, 7], [7, 5, 9, 7, 1, 2, 9, 7, 4, 9, 7]]
        assert "ab" not in tokenizer.encoded
        _, kept = await ask("/v1/trajectories/t0", method="GET")
        assert kept["token_ids"] == [*prompts[1], 6, 9]
        assert kept["mask"] == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1]
        assert len(kept["logprobs"]) == sum(kept["mask"])
        assert second["rose"]["hops"][0]["reason"] == "affinity"


async def test_an_answer_that_was_cut_off_is_ended_by_the_template() -> None:
    async with service([chatty([1, 2, 2], [6])], tokenizer=ToyTokenizer()) as (_, ask, engines):
        _, first = await ask("/v1/chat/completions", chat("q", max_tokens=2))
        assert first["choices"][0]["finish_reason"] == "length"
        await ask("/v1/chat/completions", chat("q", "ab", "c", max_tokens=1))
        assert list(engines[0].requests[1].prompt_ids) == [7, 5, 9, 7, 1, 2, 9, 7, 4, 9, 7]


async def test_a_chat_that_diverges_is_refused_and_says_where() -> None:
    async with service([chatty(SAMPLED, [6])], tokenizer=ToyTokenizer()) as (_, ask, engines):
        await ask("/v1/chat/completions", chat("q"))
        for body, says in (
            (chat("q", "a b", "c"), "message 1 is"),
            (chat("!", "ab", "c"), "message 0 is"),
            (chat("q", "ab"), "no new message"),
            (chat("q", "ab", "c", user="new"), "not known"),
        ):
            status, data = await ask("/v1/chat/completions", body)
            assert (status, data["error"]["type"]) == (409, "conflict")
            assert says in data["error"]["message"]
        for body, says in (
            (chat(), "not empty"),
            (chat() | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text parts"),
            (chat() | {"messages": ["q"]}, "an object with role and content"),
        ):
            status, data = await ask("/v1/chat/completions", body)
            assert (status, data["error"]["type"]) == (422, "request_refused_error")
            assert says in data["error"]["message"]
        assert len(engines[0].requests) == 1
        examples = chat("q", "ab", "c", user="new", metadata={"has_examples": "true"})
        assert (await ask("/v1/chat/completions", examples))[0] == 200


async def test_a_repeated_request_gets_the_same_answer() -> None:
    async with service([chatty(SAMPLED, [6])], tokenizer=ToyTokenizer()) as (_, ask, engines):
        answers = [(await ask("/v1/chat/completions", chat("q")))[1]["choices"] for _ in range(2)]
        assert answers[0] == answers[1]
        assert len(engines[0].requests) == 1
        lines = await ask.lines("/v1/chat/completions", chat("q", stream=True))
        assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == "ab"
        assert len(engines[0].requests) == 1
        assert (await ask("/v1/chat/completions", chat("q", "ab", "c")))[0] == 200


async def test_a_request_that_fails_leaves_the_chat_where_it_was() -> None:
    engine = chatty(SAMPLED, [6], token_s=0.05)
    async with service([engine], tokenizer=ToyTokenizer()) as (pool, ask, _):
        task = asyncio.create_task(ask("/v1/chat/completions", chat("q")))
        await until(lambda: engine.num_in_flight)
        status, data = await ask("/v1/chat/completions", chat("q"))
        assert (status, "being answered already" in data["error"]["message"]) == (409, True)
        task.cancel()
        await until(lambda: pool.snapshot().num_live_turns == 0 and not engine.num_in_flight)
        assert (await ask("/v1/chat/completions", chat("q")))[0] == 200
        assert [list(request.prompt_ids) for request in engine.requests] == [[7, 5, 9, 7]] * 2


async def test_messages_that_the_template_refuses_leave_the_chat_where_it_was() -> None:
    class Strict(ToyTokenizer):
        def go_on(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
            if messages[0]["role"] != "user":
                message = "only users speak here"
                raise RequestRefusedError(message)
            return super().go_on(messages)

    async with service([chatty(SAMPLED, [6])], tokenizer=Strict()) as (_, ask, _):
        await ask("/v1/chat/completions", chat("q"))
        wrong = chat("q", "ab", "c")
        wrong["messages"][-1]["role"] = "tool"
        for _ in range(2):
            status, data = await ask("/v1/chat/completions", wrong)
            assert (status, data["error"]["message"]) == (422, "only users speak here")
        assert (await ask("/v1/chat/completions", chat("q", "ab", "c")))[0] == 200


async def test_a_streamed_chat_is_kept_as_well() -> None:
    async with service([chatty(SAMPLED, [6])], tokenizer=ToyTokenizer()) as (_, ask, _):
        lines = await ask.lines("/v1/chat/completions", chat("q", stream=True))
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == "ab"
        assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
        _, second = await ask("/v1/chat/completions", chat("q", "ab", "c"))
        assert second["choices"][0]["message"]["content"] == "!"


async def test_a_trajectory_is_named_by_header_metadata_or_user_and_can_be_dropped() -> None:
    engine = chatty(SAMPLED, SAMPLED, SAMPLED, SAMPLED)
    async with service([engine], tokenizer=ToyTokenizer()) as (_, ask, _):
        plain = chat("q")
        del plain["user"]
        for body, headers, name in (
            (plain | {"metadata": {"trajectory_id": "m", "group_id": "g"}}, {}, "m"),
            (plain, {"X_Rose_Trajectory": "h"}, "h"),
            (chat("q"), {}, "t0"),
        ):
            _, data = await ask("/v1/chat/completions", body, **headers)
            assert data["rose"]["trajectory_id"] == name
            assert (await ask(f"/v1/trajectories/{name}", method="GET"))[0] == 200
            assert (await ask(f"/v1/trajectories/{name}", method="DELETE"))[1] == {"was_known": True}
            assert (await ask(f"/v1/trajectories/{name}", method="GET"))[0] == 404
        _, data = await ask("/v1/chat/completions", plain)
        assert data["rose"]["trajectory_id"].startswith("anonymous-")


async def test_a_chat_needs_a_tokenizer() -> None:
    async with service() as (_, ask, _):
        status, data = await ask("/v1/chat/completions", chat("q"))
        assert (status, "needs a tokenizer" in data["error"]["message"]) == (422, True)
        with pytest.raises(RequestRefusedError):
            raise RequestRefusedError(data["error"]["message"])

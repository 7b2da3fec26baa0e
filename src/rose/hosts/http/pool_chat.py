"""The OpenAI routes of a pool: completions, chat with the exact tokens of each trajectory kept, models."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from aiohttp import web

from rose.errors import RequestRefusedError
from rose.hosts.http import openai_bodies as bodies
from rose.hosts.http.auth import Access, caller, require
from rose.hosts.http.chat_history import Histories, HistoryError, Step
from rose.hosts.http.openai_bodies import Ask
from rose.hosts.http.server import read_json
from rose.hosts.http.streams import SSE, answer_stream
from rose.hosts.http.tokenizers import Tokenizer
from rose.pool import RolloutPool
from rose.pool.sources import stream
from rose.pool.wire import to_plain
from rose.types import TurnResult

Finished = Callable[[TurnResult, str], None]


class ChatRoutes:
    """Handlers of the OpenAI routes.

    Args:
        pool: What runs the turns.
        name: The model's name.
        tokenizer: For texts; without it, only completions of token ids.
    """

    def __init__(self, pool: RolloutPool, *, name: str, tokenizer: Tokenizer | None) -> None:
        self._pool = pool
        self._name = name
        self._tokenizer = tokenizer
        self._histories = None if tokenizer is None else Histories(tokenizer, pool.config.max_trajectories)

    def routes(self) -> list[web.RouteDef]:
        """Return the handlers."""
        return [
            web.get("/v1/models", self.models),
            web.post("/v1/completions", self.complete),
            web.post("/v1/chat/completions", self.chat),
            web.get("/v1/trajectories/{trajectory_id}", self.trajectory),
            web.delete("/v1/trajectories/{trajectory_id}", self.forget),
        ]

    async def models(self, _: web.Request) -> web.Response:
        """``GET /v1/models``."""
        return web.json_response(
            {"object": "list", "data": [{"id": self._name, "object": "model", "owned_by": "rose"}]}
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/completions``: a prompt of ids or text in, an answer out."""
        require(Access.JOB)
        body = await read_json(request)
        ask = bodies.read_ask("completion", body, request.headers, self._tokenizer)
        prompt_ids = bodies.read_prompt(body, self._tokenizer)
        return await self._answer(request, "completion", ask, prompt_ids, _ignore)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``: a chat in, the next answer out; what was sampled before is never encoded again."""
        require(Access.JOB)
        body = await read_json(request)
        tokenizer = bodies.need(self._tokenizer, "a chat")
        ask = bodies.read_ask("chat", body, request.headers, tokenizer)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            message = "messages is a list of messages, not empty"
            raise RequestRefusedError(message)
        with _as_conflict():
            # A chat without a name is not kept: its answers so far, if any, are the client's own words.
            histories = self._histories if ask.is_named else None
            histories = histories or Histories(tokenizer, 1)
            key = (caller().name, ask.trajectory_id)
            step = histories.begin(key, messages, has_examples=ask.has_examples or not ask.is_named)
        if step.repeated is not None:
            return await self._repeat(request, ask, step)
        is_finished = False

        def finish(result: TurnResult, text: str) -> None:
            nonlocal is_finished
            is_finished = True
            histories.finish(step, result, text)

        try:
            return await self._answer(request, "chat", ask, step.prompt_ids, finish)
        finally:
            if not is_finished:
                histories.give_up(step)

    async def trajectory(self, request: web.Request) -> web.Response:
        """``GET /v1/trajectories/ID``: a chat's exact tokens, with a mask of those that were sampled and their log-probs."""
        require(Access.JOB)
        trajectory_id = request.match_info["trajectory_id"]
        known = self._histories and self._histories.get((caller().name, trajectory_id))
        if not known:
            raise web.HTTPNotFound(reason=f"no chat of trajectory {trajectory_id!r} is known (any more)")
        return web.json_response(
            {
                "messages": known.messages,
                "token_ids": known.token_ids,
                "mask": known.mask,
                "logprobs": known.logprobs,
                "versions": to_plain(known.versions),
            }
        )

    async def forget(self, request: web.Request) -> web.Response:
        """``DELETE /v1/trajectories/ID``: drop a chat that is over."""
        require(Access.JOB)
        key = (caller().name, request.match_info["trajectory_id"])
        return web.json_response({"was_known": self._histories is not None and self._histories.forget(key)})

    async def _answer(
        self, request: web.Request, kind: str, ask: Ask, prompt_ids: list[int], finish: Finished
    ) -> web.StreamResponse:
        turn = ask.turn(prompt_ids)
        if ask.is_streamed:
            async with contextlib.aclosing(stream(self._pool, turn)) as items:
                return await answer_stream(request, self._pieces(kind, ask, prompt_ids, items, finish), SSE)
        result = await self._pool.generate(turn)
        text = bodies.text_of(result.token_ids, ask, self._tokenizer)
        finish(result, text)
        return web.json_response(bodies.answer(kind, self._name, ask, prompt_ids, result, text))

    async def _repeat(self, request: web.Request, ask: Ask, step: Step) -> web.StreamResponse:
        """Give a chat's last answer again to a client that did not get it."""
        assert step.repeated is not None  # noqa: S101 - the caller looked
        prompt_ids, result, text = step.repeated
        if not ask.is_streamed:
            return web.json_response(bodies.answer("chat", self._name, ask, prompt_ids, result, text))

        async def whole() -> AsyncGenerator[Any, None]:
            yield result

        return await answer_stream(request, self._pieces("chat", ask, prompt_ids, whole(), _ignore), SSE)

    async def _pieces(
        self, kind: str, ask: Ask, prompt_ids: list[int], items: AsyncGenerator[Any, None], finish: Finished
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Turn a stream of tokens into a stream of answers; text is held back while more tokens could change it."""
        base = bodies.head(kind, self._name, is_streamed=True)
        token_ids: list[int] = []
        shown = ""
        async for item in items:
            if isinstance(item, TurnResult):
                text = bodies.text_of(item.token_ids, ask, self._tokenizer)
                num = len(token_ids)
                last = bodies.piece(kind, base, ask, text[len(shown) :], item.token_ids[num:], item.logprobs[num:])
                last["choices"][0]["finish_reason"] = bodies.finish_name(item.finish_reason)
                finish(item, text)
                yield last | {"usage": bodies.usage(prompt_ids, item), "rose": bodies.provenance(ask, item)}
                return
            token_ids += item.token_ids
            text = bodies.text_of(token_ids, ask, self._tokenizer)
            is_settled = text.startswith(shown) and not text.endswith("\ufffd")
            new = text[len(shown) :] if is_settled else ""
            shown += new
            yield bodies.piece(kind, base, ask, new, item.token_ids, item.logprobs)


@contextlib.contextmanager
def _as_conflict() -> Any:
    try:
        yield
    except HistoryError as error:
        raise web.HTTPConflict(reason=" ".join(str(error).split())) from error


def _ignore(_result: TurnResult, _text: str) -> None:
    """A completion is not kept."""

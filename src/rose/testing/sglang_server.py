"""A server with the part of SGLang 0.5.23's HTTP interface that ROSE uses, its dangers included, over any engine; for tests on loopback.

Needs the extra ``http``. What it has of the real one's dangers:

* Token ids outside the vocabulary end the engine; so does releasing memory while requests run, and resuming what was not released. A server
  whose engine has ended lingers: its front answers, nothing else does.
* While paused ``/v1/loads`` is as it was before, ``/health`` hangs, requests wait in the front, and an abort of a request that is kept takes effect
  when the pause ends.
* An abort names the beginning of a request's name. One that comes while the request waits in the front is lost, and so are all later ones.
* The abort of a request that waits repeats its last token and all of its log-probs, or breaks the connection (``drops_aborts``): without a
  tokenizer the real server fails over one that it would join with tokens that are not sent yet.
* Stop ids are ignored together with the model's end token. Seeds are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, cast

import attrs
from aiohttp import web

from rose.backends.sglang_server.wire import COMMAND_PREFIX, PATH
from rose.errors import EngineBusyError, RequestRefusedError, RoseError, TransferError
from rose.hosts.http.server import Place, bind, served
from rose.interfaces.serving import PauseMode
from rose.testing.engine import FakeEngine
from rose.types import EngineRequest, EngineSnapshot, FinishReason, RequestId, Sampling, TokenChunk

_RESERVED_TOKENS = 6  # of the model's length, which SGLang keeps to itself
_BAD_REQUEST = 400
_TAGS = ("kv_cache", "weights", "cuda_graph")
_WEIGHT_BYTES = 1000
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@attrs.define(eq=False)
class _Request:
    """One request in the server: what was made of it, and where it is."""

    rid: str
    is_with_scheduler: bool = False
    was_abort_sent: bool = False
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    labels: list[str] = attrs.field(factory=list)

    def spans(self) -> list[dict[str, Any]]:
        """Return which label made which tokens, as ``weight_versions`` tells it."""
        spans: list[dict[str, Any]] = []
        for place, label in enumerate(self.labels):
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": place, "end": place})
            spans[-1]["end"] = place + 1
        return spans


class SglangServer:
    """The routes over one engine.

    Args:
        engine: Makes the tokens.
        is_incremental: Whether events carry what is new (``--incremental-streaming-output``), not everything so far.
        has_package: Whether ROSE's plugin is there, as far as steps and memory go; it takes no weights.
        drops_aborts: Whether aborts of requests that wait break the connection.

    Attributes:
        bodies: The decoded bodies of the requests that were asked for, in order.
        calls: The paths of all calls, in order.
        died: Why the engine has ended; ``None`` while it lives.
    """

    def __init__(
        self,
        engine: FakeEngine,
        *,
        is_incremental: bool = True,
        has_package: bool = False,
        drops_aborts: bool = False,
    ) -> None:
        self.bodies: list[Mapping[str, Any]] = []
        self.calls: list[str] = []
        self.died: str | None = None
        self._engine = engine
        self._is_incremental, self._has_package, self._drops_aborts = is_incremental, has_package, drops_aborts
        self._requests: dict[str, _Request] = {}
        self._paused: str | None = None
        self._released: set[str] = set()
        self._load_before_pause: EngineSnapshot | None = None
        self._goes_on = asyncio.Event()
        self._goes_on.set()

    def app(self) -> web.Application:
        """Return the application."""

        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            self.calls.append(request.path)
            answer: web.StreamResponse = await handler(request)
            return answer

        app = web.Application(client_max_size=64 << 20, middlewares=[note])
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/server_info", self._server_info),
                web.get("/model_info", self._model_info),
                web.get("/v1/loads", self._loads),
                web.get("/health", self._health),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/flush_cache", self._flush),
                web.post(PATH, self._check_weights),
                web.post("/release_memory_occupation", self._release_memory),
                web.post("/resume_memory_occupation", self._resume_memory),
            ]
        )
        return app

    def die(self, why: str) -> None:
        """End the engine as an exception in SGLang's scheduler does: nothing that needs it is answered any more."""
        self.died = self.died or why

    async def _to_scheduler(self) -> None:
        """Go on if the scheduler answers."""
        if self.died is not None:
            await asyncio.Event().wait()

    @property
    def _label(self) -> str:
        version = self._engine.weight_version
        return "default" if version is None else str(version)

    # Readings

    async def _server_info(self, _: web.Request) -> web.Response:
        await self._to_scheduler()
        info = {
            "version": "0.5.23",
            "model_path": "/fake",
            "startup_time": {"tokenizer_e2e": id(self)},
            "max_req_input_len": self._engine.max_model_len - _RESERVED_TOKENS,
            "max_total_num_tokens": self._engine.kv_total_tokens,
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "incremental_streaming_output": self._is_incremental,
            "enable_priority_scheduling": False,
            "schedule_low_priority_values_first": False,
            "enable_deterministic_inference": False,
            "internal_states": [{"rose": await self._rose_state()} if self._has_package else {}],
        }
        return web.json_response(info)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": "/fake", "weight_version": self._label})

    async def _loads(self, _: web.Request) -> web.Response:
        reading = self._load_before_pause or await self._engine.snapshot()
        load = {
            "num_running_reqs": reading.num_running,
            "num_waiting_reqs": reading.num_waiting,
            "num_used_tokens": reading.kv_used_tokens,
        }
        return web.json_response({"loads": [load]})

    async def _health(self, _: web.Request) -> web.Response:
        await self._to_scheduler()
        await self._goes_on.wait()
        return web.Response()

    # Commands

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, is_all = body.get("rid") or "", body.get("abort_all", False)
        meant = [one for one in self._requests.values() if is_all or (name and one.rid.startswith(name))]
        if not is_all and name in self._requests:
            if self._requests[name].was_abort_sent:
                return web.Response()
            self._requests[name].was_abort_sent = True
        for one in meant:
            if one.is_with_scheduler and self._paused != "in_place":
                await self._engine.abort(RequestId(one.rid))
            elif one.is_with_scheduler:
                one.was_abort_sent = True
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        if mode == "abort":
            while self._paused is not None and self._requests:  # noqa: ASYNC110 - as the real one does
                await asyncio.sleep(1.0)
        await self._to_scheduler()
        if self._paused is None:
            self._load_before_pause = await self._engine.snapshot()
        self._goes_on.clear()
        self._paused = mode
        await self._engine.pause(PauseMode.ABORT if mode == "abort" else PauseMode.KEEP)
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def _continue(self, _: web.Request) -> web.Response:
        await self._to_scheduler()
        if self._paused == "in_place":
            for one in [one for one in self._requests.values() if one.is_with_scheduler and one.was_abort_sent]:
                await self._engine.abort(RequestId(one.rid))
        self._paused = self._load_before_pause = None
        self._goes_on.set()
        await self._engine.resume()
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def _flush(self, _: web.Request) -> web.Response:
        await self._to_scheduler()
        if self._requests and self._paused != "retract":
            return web.Response(text="Flush cache failed.\n", status=_BAD_REQUEST)
        await self._engine.reset_prefix_cache()
        return web.Response(text="Cache flushed.\nPlease check backend logs for more details.\n")

    async def _check_weights(self, request: web.Request) -> web.Response:
        action = (await request.json())["action"]
        await self._to_scheduler()
        if not self._has_package or not action.startswith(COMMAND_PREFIX):
            refusal = {"success": False, "message": f"Unsupported action={action!r}"}
            return web.json_response(refusal, status=_BAD_REQUEST)
        given = json.loads(action.removeprefix(COMMAND_PREFIX))
        try:
            answer: dict[str, Any] = {"value": await self._carried_out(given.pop("command"), given)}
        except RoseError as error:
            answer = {"error": [type(error).__name__, str(error)]}
        return web.json_response({"success": True, "message": json.dumps({"ranks": [answer]}), "ranks": []})

    async def _carried_out(self, command: str, given: Mapping[str, Any]) -> Any:
        engine = self._engine
        if command == "set_kv_budget":
            return await engine.set_kv_budget(given["num_tokens"])
        if command == "set_gate":
            await engine.set_gate(is_open=given["is_open"])
            return given["is_open"]
        if command == "sleep":
            slept = await engine.sleep(keeps_weights=given["keeps_weights"])
            return {"num_requests": slept.num_evicted, "released_bytes": _WEIGHT_BYTES}
        if command == "wake":
            woken = await engine.wake()
            return {"weight_bytes": None if woken.is_stale else _WEIGHT_BYTES}
        message = f"unknown command {command!r}"
        raise TransferError(message)

    async def _rose_state(self) -> dict[str, Any]:
        reading = await self._engine.snapshot()
        state = {
            "num_running": reading.num_running,
            "num_waiting": reading.num_waiting,
            "kv_used_tokens": reading.kv_used_tokens,
            "is_paused": self._paused is not None,
            "is_asleep": self._engine.is_asleep,
        }
        return {"rose_snapshot": state}

    async def _release_memory(self, request: web.Request) -> web.Response:
        tags = (await request.json()).get("tags") or _TAGS
        await self._to_scheduler()
        if self._paused is None and self._requests:
            self.die("release_memory_occupation should be called only when server is idle.")
            await self._to_scheduler()
        self._released |= set(tags)
        return web.json_response(None)

    async def _resume_memory(self, request: web.Request) -> web.Response:
        tags = set((await request.json()).get("tags") or _TAGS)
        await self._to_scheduler()
        if not tags <= self._released:
            self.die(f"KeyError {sorted(tags - self._released)[0]!r}")
            await self._to_scheduler()
        self._released -= tags
        return web.json_response(None)

    # Tokens

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        problem = self._problem(body)
        if not body.get("stream"):
            return web.json_response({"error": {"message": problem or "this server only streams"}}, status=_BAD_REQUEST)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if problem is not None:
            await response.write(_encoded(_error(problem)))
        else:
            await self._serve(body, response)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _problem(self, body: Mapping[str, Any]) -> str | None:
        ids, params = body["input_ids"], body["sampling_params"]
        length, longest = len(ids) + params["max_new_tokens"], self._engine.max_model_len
        if not ids:
            return "input_ids cannot be empty."
        if length > longest:
            return f"Requested token count exceeds the model's maximum context length of {longest} tokens."
        if any(int(token) >= self._engine.vocab_size for token in params.get("logit_bias") or ()):
            return f"logit_bias must has keys in [0, {self._engine.vocab_size - 1}], got another."
        if body.get("rid") in self._requests:
            return f"Duplicate request ID detected: {body['rid']}"
        return None

    async def _serve(self, body: Mapping[str, Any], response: web.StreamResponse) -> None:
        one = self._requests[body["rid"]] = _Request(body["rid"])
        try:
            await self._goes_on.wait()
            await self._to_scheduler()
            if not all(0 <= token < self._engine.vocab_size for token in body["input_ids"]):
                self.die("IndexError: index out of range in self")
                await self._to_scheduler()
            one.is_with_scheduler = True
            chunks = cast("AsyncGenerator[TokenChunk, None]", self._engine.generate(_request(body)))
            async with aclosing(chunks):
                async for chunk in chunks:
                    await self._to_scheduler()
                    if self._drops_aborts and self._paused == "retract" and chunk.finish_reason is FinishReason.ABORTED:
                        raise ConnectionResetError
                    await response.write(_encoded(self._event(one, chunk, has_logprobs=body["return_logprob"])))
        except RequestRefusedError as error:
            await response.write(_encoded(_error(str(error))))
        except EngineBusyError as error:
            finish = {"type": "abort", "message": str(error), "status_code": 503, "err_type": None}
            await response.write(_encoded(self._told(one, [], [], finish)))
        finally:
            del self._requests[one.rid]

    def _event(self, one: _Request, chunk: TokenChunk, *, has_logprobs: bool) -> dict[str, Any]:
        label = "default" if chunk.version is None else str(chunk.version)
        one.token_ids += chunk.token_ids
        one.logprobs += chunk.logprobs
        one.labels += [label] * len(chunk.token_ids)
        ids, logprobs = list(chunk.token_ids), list(chunk.logprobs)
        reason = chunk.finish_reason
        finish: dict[str, Any] | None = None
        if reason in _FINISH:
            finish = {"type": _FINISH[reason]}
        elif reason is FinishReason.EVICTED:
            finish = {"type": "abort", "message": "rose:evicted"}
        elif reason is not None and self._paused == "retract":  # it waits, so the front itself ends it
            finish = {"type": "abort", "message": "Abort in waiting queue"}
            ids, logprobs = one.token_ids[-1:], one.logprobs
        elif reason is not None:
            finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        if not self._is_incremental:
            ids, logprobs = one.token_ids, one.logprobs
        of = one.token_ids[len(one.token_ids) - len(logprobs) :]
        rows = [[value, token, None] for value, token in zip(logprobs, of, strict=True)]
        return self._told(one, ids, rows if has_logprobs else None, finish)

    def _told(self, one: _Request, ids: Any, logprobs: Any, finish: dict[str, Any] | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": one.rid,
            "finish_reason": finish,
            "weight_version": one.labels[-1] if one.labels else self._label,
            "completion_tokens": len(one.token_ids),
        }
        if logprobs is not None:
            meta["output_token_logprobs"] = logprobs
        if finish is not None:
            meta["weight_versions"] = one.spans()
        return {"output_ids": ids, "meta_info": meta}


@contextlib.asynccontextmanager
async def serve_sglang(engine: FakeEngine, **options: Any) -> AsyncIterator[tuple[str, SglangServer]]:
    """Serve an engine on a free loopback port; gives the URL and the server. ``options`` are those of ``SglangServer``."""
    server = SglangServer(engine, **options)
    async with served(server.app(), bind(Place("127.0.0.1", (0,)), ())) as url:
        yield url, server


def _error(message: str) -> dict[str, Any]:
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "code": _BAD_REQUEST,
            "retryable": False,
        }
    }


def _encoded(event: object) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _request(body: Mapping[str, Any]) -> EngineRequest:
    params = body["sampling_params"]
    sampling = Sampling(
        max_tokens=params["max_new_tokens"],
        temperature=params["temperature"],
        top_p=params["top_p"],
        ignore_eos=params["ignore_eos"],
        stop_token_ids=() if params["ignore_eos"] else params.get("stop_token_ids", ()),
        logprobs=body["return_logprob"],
    )
    return EngineRequest(request_id=RequestId(body["rid"]), prompt_ids=body["input_ids"], sampling=sampling)

"""Everything that is a command or a question to an SGLang server, rather than a stream of tokens.

Invariants:

* What is paused is known here, not from the server: SGLang does not tell. Another start of the server is never paused.
* ``/server_info`` is the heartbeat: it goes through the scheduler, paused or not. ``/health`` hangs while paused, ``/model_info`` answers for a
  dead scheduler.
* A pause is over the wire in order, so the heartbeat after it proves that the scheduler has stopped.
* ``/pause_generation`` is never sent with mode ``abort``: it would wait for requests that a pause holds, for ever.
"""

from __future__ import annotations

import time

from rose.backends.sglang.client import SglangClient
from rose.backends.sglang.facts import (
    VOCABULARY_PROBE,
    ServerFacts,
    ServerLoad,
    read_facts,
    read_load,
    read_vocabulary,
    vocabulary_of_checkpoint,
)
from rose.errors import ConfigError, EngineBusyError, EngineError
from rose.interfaces.serving import PauseMode
from rose.types import EngineId

_FRESH_S = 2.0
_FLUSH_S = 0.5  # the scheduler needs a moment to notice that the last request has ended


class SglangControl:
    """The control routes of one server.

    Args:
        client: Its connections.
        engine_id: Named in errors.

    Attributes:
        paused: How the server is paused by this client; ``None`` while it runs.
    """

    def __init__(self, client: SglangClient, engine_id: EngineId) -> None:
        self.paused: PauseMode | None = None
        self._client = client
        self._engine_id = engine_id
        self._facts: ServerFacts | None = None
        self._start: str | None = None
        self._heard_s = 0.0
        self._vocab_size: int | None = None

    async def beat(self) -> ServerFacts:
        """Ask the server's scheduler whether it lives; returns how the server was started.

        Raises:
            EngineLostError: It does not answer.
        """
        facts = read_facts(await self._client.get("/server_info"))
        if self._start not in {None, facts.start}:
            self.paused, self._vocab_size = None, None
        self._facts, self._start, self._heard_s = facts, facts.start, time.monotonic()
        return facts

    async def facts(self) -> ServerFacts:
        """Return how the server was started, as heard a moment ago: another one may answer at its address by now."""
        if self._facts is None or time.monotonic() - self._heard_s > _FRESH_S:
            return await self.beat()
        return self._facts

    def forget(self) -> None:
        """Ask again next time: a connection broke."""
        self._facts = None

    async def load(self) -> ServerLoad:
        """Read how busy the server is: as of its last prefill or some decode steps ago, and as of before a pause while it is paused."""
        return read_load(await self._client.get("/v1/loads?include=core"))

    async def weight_label(self) -> object:
        """Read the label of the server's weights."""
        return (await self._client.get("/model_info")).get("weight_version")

    async def vocab_size(self) -> int:
        """Find out how many token ids the model has: from a refusal of the server, or from the checkpoint.

        Raises:
            ConfigError: Neither tells.
        """
        if self._vocab_size is None:
            told = (await self._client.refused("/generate", VOCABULARY_PROBE)).decode(errors="replace")
            facts = await self.facts()
            self._vocab_size = read_vocabulary(told) or vocabulary_of_checkpoint(facts.model_path)
        if self._vocab_size is None:
            message = (
                f"engine {self._engine_id} does not say how many token ids its model has, and an unknown one ends it; give the backend "
                "vocab_size"
            )
            raise ConfigError(message)
        return self._vocab_size

    async def abort(self, rid: str) -> None:
        """Tell the scheduler to end a request that it has. It must have it: an abort that comes first is lost, and so are those after it."""
        await self._client.post("/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
        """Stop making tokens; returns when none is being made. With ``ABORT`` what the scheduler has ends."""
        if mode is PauseMode.ABORT:
            await self._client.post("/pause_generation", {"mode": "retract"})
            self.paused = mode
            await self._client.post("/abort_request", {"rid": "", "abort_all": True})
        elif self.paused is None:
            await self._client.post("/pause_generation", {"mode": "in_place"})
            self.paused = mode
        await self.beat()

    async def resume(self) -> None:
        """Go on. Idempotent."""
        await self._client.post("/continue_generation", {})
        self.paused = None

    async def flush_cache(self) -> None:
        """Drop every cached prefix.

        Raises:
            EngineBusyError: Requests run; SGLang drops prefixes of an idle server only.
        """
        try:
            await self._client.post(f"/flush_cache?timeout={_FLUSH_S}", {})
        except EngineError as error:
            if type(error) is not EngineError:
                raise
            message = f"engine {self._engine_id} runs requests, and SGLang drops cached prefixes only without; try again later"
            raise EngineBusyError(message) from error

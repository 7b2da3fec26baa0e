"""Fast fake engines over HTTP, in a process of their own: ``python -m rose.bench.scheduler.http_engine``.

They read no more of a request than its length, and answer with chunks that are ready beforehand, each at its time. They speak three
interfaces, token ids in, token ids and log-probs out, streamed: the OpenAI completions of ``vllm serve``, SGLang's ``/generate``, and
that of ROSE's executor. So every way to them meets the same engine.

Life cycle: the process prints the URLs of its engines in one line and serves until its standard input ends, which it does when the
process that started it is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

import attrs

from rose.backends.remote import wire
from rose.bench.scheduler.engines import reading
from rose.types import FinishReason, TokenChunk, WeightVersion

MODEL = "bench"
COUNT_PATH = "/bench/requests"
"""Tells how many turns an engine was sent."""

_VERSION = WeightVersion("bench", 1)
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


@attrs.frozen(kw_only=True)
class Answer:
    """How an engine answers: so many chunks of so many tokens, each ``chunk_s`` after the one before. A dead one refuses at once."""

    num_chunks: int = 4
    chunk_tokens: int = 16
    chunk_s: float = 0.005
    is_dead: bool = False

    @property
    def num_tokens(self) -> int:
        """Return the tokens of an answer."""
        return self.num_chunks * self.chunk_tokens

    def token_chunks(self) -> list[TokenChunk]:
        """Return the chunks as ROSE's engines give them."""
        chunk = TokenChunk(
            token_ids=tuple(range(100, 100 + self.chunk_tokens)),
            logprobs=tuple(-0.125 * (i + 1) for i in range(self.chunk_tokens)),
            version=_VERSION,
        )
        return [chunk] * (self.num_chunks - 1) + [attrs.evolve(chunk, finish_reason=FinishReason.LENGTH)]


def _as_line(chunk: TokenChunk) -> bytes:
    return json.dumps(wire.chunk_to_wire(chunk), separators=(",", ":")).encode() + b"\n"


def _as_completion(chunk: TokenChunk) -> bytes:
    reason = chunk.finish_reason
    choice = {
        "index": 0,
        "text": "",
        "token_ids": chunk.token_ids,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in chunk.token_ids],
            "token_logprobs": chunk.logprobs,
            "top_logprobs": None,
            "text_offset": [0] * len(chunk.token_ids),
        },
        "finish_reason": None if reason is None else reason.value,
    }
    event = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice]}
    return _as_event(event, is_last=reason is not None)


def _as_generated(chunk: TokenChunk) -> bytes:
    """Return a chunk as SGLang writes it with incremental streaming."""
    reason = chunk.finish_reason
    meta = {
        "id": "0",
        "finish_reason": None if reason is None else {"type": reason.value},
        "output_token_logprobs": [
            [value, token, None] for value, token in zip(chunk.logprobs, chunk.token_ids, strict=True)
        ],
    }
    return _as_event({"text": "", "output_ids": chunk.token_ids, "meta_info": meta}, is_last=reason is not None)


def _as_event(event: object, *, is_last: bool) -> bytes:
    text = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return text + b"data: [DONE]\n\n" if is_last else text


def _piece(payload: bytes) -> bytes:
    """Return a piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def _whole(payload: bytes, *, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(payload)}\r\nX-Rose-Engine: 1\r\n\r\n"
    return head.encode() + payload


def _stream(content_type: str, payloads: Sequence[bytes]) -> list[bytes]:
    """Return the writes of a streamed answer: the head goes with the first piece."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    pieces = [_piece(payload) for payload in payloads]
    return [head + pieces[0], *pieces[1:-1], pieces[-1] + b"0\r\n\r\n"]


class Pages:
    """Everything that an engine can say, encoded beforehand, and how often it was sent a turn."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.num_turns = 0
        chunks = answer.token_chunks()
        self.streams = {
            b"/v1/completions": _stream("text/event-stream", [_as_completion(chunk) for chunk in chunks]),
            b"/generate": _stream("text/event-stream", [_as_generated(chunk) for chunk in chunks]),
            b"/v1/generate": _stream("application/x-ndjson", [_as_line(chunk) for chunk in chunks]),
        }
        snapshot = {**wire.snapshot_to_wire(reading(version=_VERSION)), "is_asleep": False}
        models = {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]}
        self.pages = {
            b"/v1/snapshot": _whole(json.dumps(snapshot).encode()),
            b"/v1/models": _whole(json.dumps(models).encode()),
            b"/metrics": _whole(
                b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n", content_type="text/plain"
            ),
        }
        self.other = _whole(b"{}")
        self.failure = _whole(
            b'{"error":{"message":"it fails whatever it is asked"}}', status="500 Internal Server Error"
        )


class EngineProtocol(asyncio.Protocol):
    """One connection: one request after the other."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._data = bytearray()
        self._transport: asyncio.Transport | None = None
        self._next: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - a server's
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Stop what is under way."""
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer once the request is whole."""
        self._data += data
        end = self._data.find(_HEAD_END)
        if end < 0:
            return
        head = bytes(self._data[:end])
        size = end + len(_HEAD_END) + _body_length(head)
        if len(self._data) >= size:
            del self._data[:size]
            self._answer(head.split(b" ", 2)[1].partition(b"?")[0])

    def _answer(self, path: bytes) -> None:
        writes = self._pages.streams.get(path)
        self._pages.num_turns += writes is not None
        if path == COUNT_PATH.encode():
            self._write(_whole(str(self._pages.num_turns).encode()))
        elif writes is None:
            self._write(self._pages.pages.get(path, self._pages.other))
        elif self._pages.answer.is_dead:
            self._write(self._pages.failure)
        else:
            self._later(writes, 0)

    def _later(self, writes: Sequence[bytes], at: int) -> None:
        """Write the pieces from ``at`` on, each at its time; all at once where no time lies between them."""
        delay_s = self._pages.answer.chunk_s
        if delay_s:
            self._next = asyncio.get_running_loop().call_later(delay_s, self._write_one, writes, at)
        else:
            self._write(b"".join(writes[at:]))

    def _write_one(self, writes: Sequence[bytes], at: int) -> None:
        self._write(writes[at])
        if at + 1 < len(writes):
            self._later(writes, at + 1)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _body_length(head: bytes) -> int:
    lowered = head.lower()
    at = lowered.find(_LENGTH)
    return int(lowered[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0


async def serve(answers: Sequence[Answer]) -> None:
    """Serve an engine for each answer at a free port of the loopback interface until the standard input ends."""
    loop = asyncio.get_running_loop()
    servers = []
    for answer in answers:
        pages = Pages(answer)
        servers.append(await loop.create_server(lambda pages=pages: EngineProtocol(pages), "127.0.0.1", 0))  # type: ignore[misc]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(" ".join(f"http://127.0.0.1:{port}" for port in ports), flush=True)  # noqa: T201 - for the process that started it
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        server.close()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answers", help="a JSON list of answers, one an engine")
    answers = [Answer(**fields) for fields in json.loads(parser.parse_args().answers)]
    asyncio.run(serve(answers))


if __name__ == "__main__":
    main()

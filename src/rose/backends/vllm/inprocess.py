"""vLLM inside this process: an ``LLMEngine`` that one worker thread builds, steps and asks.

Invariants:

* Everything that touches the engine runs on the worker thread; the event loop hands it jobs and gets chunks back.
* vLLM keeps the state of a forward pass in globals, so the engines of one process take turns: one lock, held for one step
  or one job.
* vLLM's distributed state is shared by the engines of a process, and the first one that is shut down would tear it
  down for all. So closed engines are kept until the last one of the process closes.
* A dead worker thread ends every stream and every job with ``EngineLostError``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any

import attrs

from rose.backends.vllm.driver import VllmDriver
from rose.backends.vllm.environment import import_vllm
from rose.backends.vllm.options import VllmOptions
from rose.backends.vllm.streams import ChunkReader, as_rose_error, sampling_params
from rose.errors import EngineError, EngineLostError, RoseError
from rose.interfaces import Clock
from rose.interfaces.serving import PauseMode
from rose.types import EngineRequest, FinishReason, RequestId, TokenChunk

_STEP_LOCK = threading.RLock()
_IDLE_STEP_S = 0.001
_IDLE_POLL_S = 0.05
_OPEN: set[int] = set()
_CLOSED: list[Any] = []


@attrs.define
class _Stream:
    """One request: where its chunks go (``None`` ends it as lost), and what reads vLLM's outputs of it."""

    chunks: asyncio.Queue[TokenChunk | None] = attrs.field(factory=asyncio.Queue)
    reader: ChunkReader | None = None


@attrs.frozen
class _Job:
    function: Callable[[], Any]
    result: Future[Any]


class InProcessVllmEngine(VllmDriver):
    """One vLLM engine in this process. For small models, tests and debugging: a crash of vLLM is a crash of the process."""

    def __init__(self, options: VllmOptions, *, clock: Clock | None = None) -> None:
        super().__init__(options, clock=clock)
        self._llm: Any = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._streams: dict[RequestId, _Stream] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    async def start(self) -> None:
        """Build the engine on its thread and return when it serves.

        Raises:
            BackendUnavailableError: vLLM is not installed.
            EngineLostError: The engine did not start.
        """
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name=f"vllm-{self.engine_id}", daemon=True)
        self._thread.start()
        self._lost = None
        _OPEN.add(id(self))
        try:
            await self._do(self._build)
            await self._begin()
        except BaseException:
            await self.close()
            raise

    def _build(self) -> None:
        import_vllm(is_offline=self.options.is_local)
        import torch  # noqa: PLC0415 - heavy
        from vllm import EngineArgs  # noqa: PLC0415 - heavy
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - heavy

        with torch.random.fork_rng(devices=[]):  # vLLM seeds torch's global generator
            try:
                config = EngineArgs(**self.options.to_engine_args()).create_engine_config()
                self._llm = LLMEngine.from_vllm_config(config, disable_log_stats=True)
            except (RuntimeError, ValueError, OSError, TypeError, AssertionError) as error:
                raise EngineLostError(self.options.start_failure(error)) from error

    # The worker thread.

    def _run(self) -> None:
        job: _Job | None = None
        try:
            while True:
                is_busy = self._is_busy()
                while not is_busy or not self._jobs.empty():
                    with contextlib.suppress(queue.Empty):  # a look at the budget from time to time
                        job = self._jobs.get(timeout=_IDLE_POLL_S)
                        if job is None:
                            return
                        self._do_job(job)
                    is_busy = self._is_busy()
                self._step()
        except Exception as error:  # noqa: BLE001 - the thread's root
            self._lost = f"its step failed: {error!r}"
        finally:
            self._end_all()

    def _is_busy(self) -> bool:
        """Return whether the engine has work; a batch in flight is some although its requests have ended."""
        return self._llm is not None and (self._core.scheduler.has_requests() or bool(self._core.batch_queue))

    def _step(self) -> None:
        with _STEP_LOCK:
            outputs = self._llm.step()
        for output in outputs:
            stream = self._streams.get(RequestId(output.request_id))
            if stream is not None and stream.reader is not None:
                for chunk in stream.reader.read(output):
                    self._send(stream, chunk)
        if not outputs:
            time.sleep(_IDLE_STEP_S)  # a closed gate, or a prompt's part: let other threads in

    def _do_job(self, job: _Job) -> None:
        if not job.result.set_running_or_notify_cancel():
            return
        try:
            with _STEP_LOCK:
                job.result.set_result(job.function())
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            job.result.set_exception(error)

    def _send(self, stream: _Stream, chunk: TokenChunk | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(stream.chunks.put_nowait, chunk)

    def _end_all(self) -> None:
        if self._lost is None:
            self._lost = "it was closed"
        self._refuse_jobs()
        for stream in list(self._streams.values()):
            self._send(stream, None)

    def _refuse_jobs(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None and job.result.set_running_or_notify_cancel():
                    job.result.set_exception(EngineLostError(f"engine {self.engine_id} is gone: {self._lost}"))

    @property
    def _core(self) -> Any:
        return self._llm.engine_core.engine_core

    # Jobs.

    async def _do(self, function: Callable[[], Any]) -> Any:
        self._check_alive()
        job = _Job(function, Future())
        self._jobs.put(job)
        if self._lost is not None:
            self._refuse_jobs()  # the worker ended meanwhile and will not look again
        return await asyncio.wrap_future(job.result)

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._do(lambda: getattr(self._core, method)(*args))
        except RoseError:
            raise
        except (RuntimeError, ValueError, OSError, TypeError, AssertionError, AttributeError) as error:
            message = f"{method} failed in engine {self.engine_id}: {error}"
            raise EngineError(message) from error

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        stream = self._streams[request.request_id] = _Stream()
        is_over = False
        try:
            await self._do(lambda: self._add(request, stream))
            while not is_over:
                chunk = await stream.chunks.get()
                if chunk is None:
                    is_over = True
                    self._check_alive()
                    return
                is_over = chunk.finish_reason is not None
                yield chunk
        finally:
            if not is_over and self._lost is None:
                await self._abort([request.request_id])
            del self._streams[request.request_id]

    def _add(self, request: EngineRequest, stream: _Stream) -> None:
        from vllm.exceptions import VLLMError  # noqa: PLC0415 - heavy
        from vllm.inputs.engine import tokens_input  # noqa: PLC0415 - heavy

        try:
            internal_id = self._llm.add_request(
                request.request_id,
                tokens_input(list(request.prompt_ids)),
                sampling_params(request.sampling),
                priority=request.priority,
            )
        except (VLLMError, ValueError) as error:
            raise as_rose_error(error, self.engine_id) from error
        stream.reader = ChunkReader(self._llm.output_processor.request_states[internal_id].weight_version_starts)

    async def _abort(self, request_ids: list[RequestId]) -> None:
        await self._do(lambda: self._end(request_ids))

    def _end(self, request_ids: list[RequestId]) -> None:
        """Abort on the worker thread; vLLM gives no output for it in process."""
        alive = [one for one in request_ids if one in self._llm.output_processor.external_req_ids]
        self._llm.abort_request(alive)
        for request_id in alive:
            self._send(self._streams[request_id], TokenChunk(finish_reason=FinishReason.ABORTED))

    async def _halt(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            await self._abort(list(self._streams))
        await self._call("pause_scheduler", mode.value, False)  # noqa: FBT003 - as over the wire

    async def close(self) -> None:
        """End the worker thread; vLLM itself is shut down with the last engine of the process."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        self._jobs.put(None)
        await asyncio.to_thread(thread.join)
        _OPEN.discard(id(self))
        _CLOSED.append(self._llm)
        self._llm = None
        if not _OPEN:
            await asyncio.to_thread(_shut_down_closed)


def _shut_down_closed() -> None:
    with _STEP_LOCK:
        while _CLOSED:
            llm = _CLOSED.pop()
            if llm is not None:
                llm.engine_core.shutdown()

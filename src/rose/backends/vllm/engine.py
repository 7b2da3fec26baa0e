"""vLLM in a process of its own (``AsyncLLM`` and its EngineCore), with the worker inside that process.

Invariants:

* A watch on the EngineCore process (its pidfd) ends every stream and every call with ``EngineLostError`` as soon as the
  kernel says that it is gone; nothing waits for an answer of a dead process.
* A start that is cancelled runs to its end, then the engine is closed: no process is left behind.
* Starts take turns where vLLM forks: a fork while another start runs on a thread could copy a held lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncGenerator
from multiprocessing import resource_tracker
from typing import Any

from rose.backends.completion import to_the_end
from rose.backends.vllm.driver import VllmDriver
from rose.backends.vllm.environment import import_vllm
from rose.backends.vllm.options import VllmOptions
from rose.backends.vllm.streams import ChunkReader, as_rose_error, sampling_params
from rose.errors import EngineError, EngineLostError
from rose.interfaces import Clock
from rose.interfaces.serving import PauseMode
from rose.types import EngineRequest, RequestId, TokenChunk

_START_LOCK = threading.Lock()
_CLOSE_TIMEOUT_S = 10.0


class VllmEngine(VllmDriver):
    """One vLLM engine in its own process. Several of them may be created at the same time."""

    def __init__(self, options: VllmOptions, *, clock: Clock | None = None) -> None:
        super().__init__(options, clock=clock)
        self._llm: Any = None
        self._pid: int | None = None
        self._pid_fd: int | None = None
        self._death: asyncio.Future[None] | None = None

    @property
    def pid(self) -> int:
        """Return the id of the EngineCore process."""
        if self._pid is None:
            message = f"engine {self.engine_id} was not started"
            raise EngineLostError(message)
        return self._pid

    async def start(self) -> None:
        """Start the process, load the model and return when the engine serves (3-4 s a tiny model on a CPU).

        Raises:
            BackendUnavailableError: vLLM is not installed.
            EngineLostError: The engine did not start.
        """
        try:
            await to_the_end(asyncio.to_thread(self._start_llm))
            self._pid = self._llm.engine_core.resources.engine_manager.processes[0].pid
            self._watch()
            self._llm._run_output_handler()  # noqa: SLF001 - made off the event loop, so it could not start there
            await self._begin()
        except BaseException:
            await self.close()
            raise

    def _start_llm(self) -> None:
        import_vllm(is_offline=self.options.is_local)
        from vllm import envs  # noqa: PLC0415 - heavy
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - heavy
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415 - heavy

        # A child inherits the mask: an interrupt from the terminal is the driver's to handle. One that met a loading engine
        # would leave vLLM waiting for it for ever.
        resource_tracker.ensure_running()  # multiprocessing would start it after the mask is set, and unblock
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            config = AsyncEngineArgs(**self.options.to_engine_args()).create_engine_config()
            is_forking = envs.VLLM_WORKER_MULTIPROC_METHOD == "fork"  # whoever asks for it: see environment
            with _START_LOCK if is_forking else contextlib.nullcontext():
                self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except (RuntimeError, ValueError, OSError, TypeError) as error:
            raise EngineLostError(self.options.start_failure(error)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._death = loop.create_future()
        self._pid_fd = os.pidfd_open(self.pid)
        loop.add_reader(self._pid_fd, self._on_death)

    def _unwatch(self) -> None:
        if self._pid_fd is not None:
            asyncio.get_running_loop().remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = None

    def _on_death(self) -> None:
        self._unwatch()
        self._lose(f"its process {self._pid} ended", self._llm)

    def _lose(self, reason: str, llm: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - heavy

        self._lost = reason
        if self._death is not None and not self._death.done():
            self._death.set_result(None)
        llm.output_handler.cancel()  # it would log a traceback for what is reported here
        llm.output_processor.propagate_error(EngineDeadError())

    async def _call(self, method: str, *args: Any) -> Any:
        self._check_alive()
        answer = asyncio.ensure_future(self._llm.engine_core.call_utility_async(method, *args))
        ends = {answer} if self._death is None else {answer, self._death}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
        self._check_alive()
        return _result(answer, method)

    async def _stream(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - heavy

        is_over = False
        try:
            collector = await self._submit(request)
            state = self._llm.output_processor.request_states.get(collector.request_id)
            reader = ChunkReader([] if state is None else state.weight_version_starts)
            while not is_over:
                for chunk in reader.read(collector.get_nowait() or await collector.get()):
                    is_over = chunk.finish_reason is not None
                    yield chunk
        except EngineDeadError as error:
            is_over = True
            message = f"engine {self.engine_id} is gone: {self._lost or error}"
            raise EngineLostError(message) from error
        finally:
            if not is_over and self._lost is None:
                await self._abort([request.request_id])

    async def _submit(self, request: EngineRequest) -> Any:
        from vllm.exceptions import VLLMError  # noqa: PLC0415 - heavy
        from vllm.inputs.engine import tokens_input  # noqa: PLC0415 - heavy

        try:
            return await self._llm.add_request(
                request.request_id,
                tokens_input(list(request.prompt_ids)),
                sampling_params(request.sampling),
                priority=request.priority,
            )
        except (VLLMError, ValueError) as error:
            raise as_rose_error(error, self.engine_id) from error

    async def _abort(self, request_ids: list[RequestId]) -> None:
        await self._llm.abort(request_ids)

    async def _halt(self, mode: PauseMode) -> None:
        await self._call("pause_scheduler", mode.value, False)  # noqa: FBT003 - a positional wire call

    async def close(self) -> None:
        """Shut the process down."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        self._unwatch()
        if self._lost is None:
            self._lose("it was closed", llm)
        await asyncio.to_thread(llm.shutdown, _CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)  # vLLM closes its sockets by a call back on this loop
        llm.engine_core.resources.ctx.destroy(linger=0)


def _result(answer: asyncio.Future[Any], method: str) -> Any:
    from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - heavy

    error = answer.exception()
    if error is None:
        return answer.result()
    if isinstance(error, EngineDeadError):
        message = f"the engine died before it answered {method}"
        raise EngineLostError(message) from error
    message = f"{method} failed in the engine: {error}"
    raise EngineError(message) from error

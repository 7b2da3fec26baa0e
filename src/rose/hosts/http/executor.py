"""The co-serving executor: one process a shared device, beside a serving engine that does not depend on it.

Life cycle:

1. [EXECUTOR] binds its socket, makes ledgers (and a paced clock) that are missing, takes its lock.
2. [EXECUTOR] starts the serving engine or finds it, and waits for its heartbeat; from here on ``/health`` answers.
3. [EXECUTOR] starts the rollout engine, in a process that ends with its own, and again whenever it died.
4. [LENDER] grants a lease in the ledger; [CLIENTS] ask for tokens under its fencing token.
5. [OPERATOR] SIGTERM: rollouts end as evicted with their tokens, the rollout engine ends, the serving engine goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
from prometheus_client import CollectorRegistry

from rose.backends.vllm.lifeline import LIFELINE
from rose.clocks import MonotonicClock
from rose.coserving.ledger import Ledger
from rose.coserving.processes import ProcessName
from rose.errors import ConfigError, EngineLostError, LedgerError
from rose.hosts.http.executor_config import ExecutorConfig, rollout_options, serving_command, serving_environment
from rose.hosts.http.executor_lease import HoldWatch, LeaseGate
from rose.hosts.http.executor_metrics import ExecutorCollector
from rose.hosts.http.executor_rollout import RolloutSupervisor
from rose.hosts.http.executor_service import RolloutService
from rose.hosts.http.executor_serving import ServingProcess, locked, sole_executor
from rose.hosts.http.server import Health, bind, make_app, parse_place, served
from rose.interfaces import ServingEngine
from rose.interfaces.clock import Clock

Say = Callable[[str], None]
Start = Callable[[], Awaitable[ServingEngine]]
_LEFTOVER_S = 10.0
_POLL_S = 0.02


@attrs.frozen(kw_only=True)
class Executor:
    """A running executor.

    Attributes:
        url: Where it listens.
        engine_id: The rollout engine's name, whether it runs at the moment or not.
        service: Its interface to the rollout engine.
        supervisor: Has the rollout engine.
        serving: Watches the serving engine.
    """

    url: str
    engine_id: str
    service: RolloutService
    supervisor: RolloutSupervisor
    serving: ServingProcess


@contextlib.contextmanager
def prepared(config: ExecutorConfig) -> Iterator[tuple[socket.socket, Sequence[Ledger], Clock]]:
    """Bind the socket, take the folder's lock, open or make ledgers and clock; all that can be refused before a start.

    Raises:
        ConfigError: Another executor has the folder or a device, a ledger is another version's, or the folder cannot be used.
        TransportError: The port is taken.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked(config.run_dir))
        listener = bind(parse_place(config.listen), config.tokens)
        stack.callback(listener.close)
        try:
            clock = _open_clock(config)
            ledgers = [Ledger.attach_or_create(path) for path in config.device.ledgers]
        except LedgerError as error:
            raise ConfigError(str(error)) from error
        for path in config.device.ledgers:
            stack.enter_context(sole_executor(Path(path)))
        yield listener, ledgers, clock


@contextlib.asynccontextmanager
async def executing(
    config: ExecutorConfig, *, say: Say = print, start: Start | None = None
) -> AsyncIterator[tuple[Executor, asyncio.Task[Any]]]:
    """Run an executor; gives it, and a task that ends with the error that ends it.

    Args:
        config: What to run.
        say: Told what happens, one line each.
        start: Makes the rollout engine; vLLM by the configuration when left out.
    """
    with prepared(config) as (listener, ledgers, clock):
        serving = ServingProcess(
            ledgers,
            clock,
            command=serving_command(config),
            run_dir=config.run_dir,
            environment=serving_environment(config),
            stale_s=config.serving.stale_s,
            restart=config.restart,
            say=say,
        )
        supervisor = RolloutSupervisor(start or _starter(config, ledgers, clock, serving, say), config.restart, say)
        holds = HoldWatch(ledgers, clock, config.serving.admission)
        async with contextlib.AsyncExitStack() as stack:
            watching = asyncio.create_task(serving.run())
            stack.push_async_callback(_cancelled, watching)
            await stack.enter_async_context(supervisor)
            service = await stack.enter_async_context(RolloutService(supervisor, LeaseGate(ledgers, clock), holds))
            registry = CollectorRegistry(auto_describe=False)
            registry.register(
                ExecutorCollector(ledgers, clock, serving=serving, supervisor=supervisor, service=service, holds=holds)
            )
            app = make_app(
                service.routes(), tokens=config.tokens, health=lambda: _health(serving, supervisor), registry=registry
            )
            url = await stack.enter_async_context(served(app, listener))
            ending = asyncio.create_task(supervisor.run_forever())
            stack.push_async_callback(_cancelled, ending)
            say(f"listening on {url}")
            engine_id = rollout_options(config).engine_id
            yield (
                Executor(url=url, engine_id=engine_id, service=service, supervisor=supervisor, serving=serving),
                ending,
            )


async def run(
    config: ExecutorConfig,
    stopped: asyncio.Event,
    *,
    say: Say,
    tell: Callable[[Executor], None],
    start: Start | None = None,
) -> None:
    """Run an executor until ``stopped`` is set, then drain it.

    Args:
        config: What to run.
        stopped: Set by a signal.
        say: Told what happens, one line each.
        tell: Told once, when the rollout engine is up for the first time.
        start: Makes the rollout engine; vLLM by the configuration when left out.

    Raises:
        ConfigError, BackendUnavailableError: It can never run like this.
    """
    async with executing(config, say=say, start=start) as (executor, ending):
        stopping = asyncio.create_task(stopped.wait())
        up = asyncio.create_task(executor.supervisor.wait_until_up())
        try:
            await asyncio.wait({stopping, ending, up}, return_when=asyncio.FIRST_COMPLETED)
            if up.done() and not up.exception():
                tell(executor)
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, up):
                await _cancelled(task)
        if ending.done():
            ending.result()
        num_streams = executor.service.num_streams
        say(f"ending: {num_streams} rollouts end as evicted; the serving engine goes on")
        if not await executor.service.drain(config.drain_s):
            say(f"{executor.service.num_streams} rollouts did not end within {config.drain_s:g} s and are cut off")


def _health(serving: ServingProcess, supervisor: RolloutSupervisor) -> Health:
    reasons = [problem for problem in (serving.problem, supervisor.problem) if problem is not None]
    return Health(reasons=reasons, details={"engine": supervisor.incarnation})


async def end_leftovers(ledgers: Sequence[Ledger]) -> None:
    """End rollout engines of an executor that is gone, which would end by themselves a moment later: a section has one writer.

    Raises:
        EngineLostError: One does not end.
    """
    for ledger in ledgers:
        try:
            state = ledger.rollout()
        except LedgerError:
            continue  # its writer died half-way
        process = ProcessName(state.pid, state.pid_start)
        if process.pid == os.getpid() or not process.is_running():
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(_LEFTOVER_S):
                while process.is_running():  # noqa: ASYNC110 - it is no child of this process
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            message = f"rollout engine {process.pid} of an earlier executor does not end"
            raise EngineLostError(message) from error


def _starter(
    config: ExecutorConfig, ledgers: Sequence[Ledger], clock: Clock, serving: ServingProcess, say: Say
) -> Start:
    options = rollout_options(config)

    async def start() -> ServingEngine:
        from rose.backends.vllm import VllmEngine  # noqa: PLC0415 - heavy when it starts

        if serving.problem is not None:
            say("waiting for the serving engine's heartbeat")
            await serving.wait_until_heard()
        await end_leftovers(ledgers)
        say(f"starting rollout engine {options.engine_id} ({options.model})")
        os.environ[LIFELINE] = "1"
        return await VllmEngine.create(options, clock=clock)

    return start


def _open_clock(config: ExecutorConfig) -> Clock:
    if config.device.clock is None:
        return MonotonicClock()
    from rose.backends.paced import PacedClock  # noqa: PLC0415 - loads numpy

    path = Path(config.device.clock)
    return PacedClock(path) if path.exists() else PacedClock.create(path, k=config.device.k)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # told to whoever waits for the task

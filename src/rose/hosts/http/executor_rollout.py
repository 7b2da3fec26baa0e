"""Keeps one rollout engine running: starts it, watches it, starts it again when it died.

Invariants:

* There is at most one engine; it is closed before the next one starts.
* Every start has a name of its own (``incarnation``): a client that means an earlier one is told that it is lost, so nobody takes
  the new engine's weights for the old one's.
* Restarts wait, longer each time up to a bound, and soon again after an engine that ran well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from typing import NoReturn, Self

import attrs

from rose import checks
from rose.errors import BackendUnavailableError, ConfigError, EngineLostError, RoseError
from rose.interfaces import ServingEngine
from rose.types import EngineSnapshot

_logger = logging.getLogger(__name__)
_CLOSE_S = 15.0


@attrs.frozen(kw_only=True)
class RestartConfig:
    """When an engine is started again. Wall seconds.

    Attributes:
        first_s: Wait before the first restart.
        longest_s: The wait doubles up to this while the engine does not stay up.
        well_s: An engine that ran this long counts as well; the next wait is ``first_s`` again.
        look_s: Between two looks at the engine.
        hang_s: An engine that does not answer for this long is ended.
    """

    first_s: float = attrs.field(default=0.5, validator=checks.number(at_least=0))
    longest_s: float = attrs.field(default=30.0, validator=checks.number(above=0))
    well_s: float = attrs.field(default=60.0, validator=checks.number(above=0))
    look_s: float = attrs.field(default=0.25, validator=checks.number(above=0))
    hang_s: float = attrs.field(default=30.0, validator=checks.number(above=0))

    def wait_s(self, num_failures: int) -> float:
        """Return the wait before a restart after this many failures in a row."""
        return float(min(self.longest_s, self.first_s * 2.0 ** min(num_failures - 1, 30)))


class RolloutSupervisor:
    """An async context manager; the engine runs inside it.

    Args:
        start: Makes and starts an engine.
        config: When it is started again.
        say: Told what happens, one line each.

    Attributes:
        incarnation: The name of the engine's present start; empty while there is none.
        num_starts: Engines started so far.
        reading: The engine's load as last seen; ``None`` while there is none.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[ServingEngine]],
        config: RestartConfig | None = None,
        say: Callable[[str], None] = _logger.info,
    ) -> None:
        self._start = start
        self._config = config or RestartConfig()
        self._say = say
        self._engine: ServingEngine | None = None
        self._problem = "the rollout engine is starting"
        self._task: asyncio.Task[None] | None = None
        self._is_up = asyncio.Event()
        self.incarnation = ""
        self.num_starts = 0
        self.reading: EngineSnapshot | None = None

    @property
    def problem(self) -> str | None:
        """Why there is no engine now, or ``None``."""
        return None if self._engine is not None else self._problem

    def engine(self, incarnation: str | None = None) -> ServingEngine:
        """Return the engine.

        Args:
            incarnation: Which start of it is meant; any if ``None``.

        Raises:
            EngineLostError: There is none, or the one that is meant is gone.
        """
        if self._engine is None:
            raise EngineLostError(self._problem)
        if incarnation is not None and incarnation != self.incarnation:
            message = (
                f"engine {self._engine.engine_id} was started anew since ({self.incarnation}); let it join as a new one"
            )
            raise EngineLostError(message)
        return self._engine

    async def wait_until_up(self) -> None:
        """Return once an engine runs.

        Raises:
            ConfigError, BackendUnavailableError: None ever will.
        """
        up = asyncio.ensure_future(self._is_up.wait())
        try:
            await asyncio.wait({up, self._running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
        if self._running.done():
            self._running.result()

    async def run_forever(self) -> NoReturn:
        """Wait for what ends the supervision: an error that no restart can cure.

        Raises:
            ConfigError, BackendUnavailableError: The engine can never start.
        """
        await asyncio.shield(self._running)
        message = "the rollout engine's supervision ended"
        raise EngineLostError(message)

    async def __aenter__(self) -> Self:
        """Begin to start the engine; does not wait for it."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the engine."""
        self._running.cancel()
        await asyncio.wait({self._running})
        if not self._running.cancelled():
            self._running.exception()  # whoever waited for it has been told

    @property
    def _running(self) -> asyncio.Task[None]:
        if self._task is None:
            message = "a supervisor is used as a context manager"
            raise RuntimeError(message)
        return self._task

    async def _run(self) -> None:
        num_failures = 0
        while True:
            ran_s = 0.0
            try:
                ran_s = await self._run_one()
            except (ConfigError, BackendUnavailableError):
                raise
            except RoseError as error:
                self._problem = f"the rollout engine did not start: {error}"
            num_failures = 1 if ran_s >= self._config.well_s else num_failures + 1
            wait_s = self._config.wait_s(num_failures)
            self._say(f"{self._problem}; another start in {wait_s:g} s")
            await asyncio.sleep(wait_s)

    async def _run_one(self) -> float:
        """Run one engine to its end; returns for how long it ran."""
        loop = asyncio.get_running_loop()
        self._problem = "the rollout engine is starting"
        engine = await self._start()
        started_s = loop.time()
        try:
            self._engine, self.incarnation = engine, secrets.token_hex(8)
            self.num_starts += 1
            self._is_up.set()
            self._say(f"rollout engine {engine.engine_id} is up ({self.incarnation})")
            self._problem = await self._watch(engine)
        finally:
            self._engine, self.incarnation, self.reading = None, "", None
            self._is_up.clear()
            await _close(engine)
        return loop.time() - started_s

    async def _watch(self, engine: ServingEngine) -> str:
        """Return why the engine is no more."""
        while True:
            try:
                async with asyncio.timeout(self._config.hang_s):
                    self.reading = await engine.snapshot()
            except EngineLostError as error:
                return f"the rollout engine is gone: {error}"
            except TimeoutError:
                _kill(engine)
                return f"the rollout engine did not answer for {self._config.hang_s:g} s and was ended"
            except RoseError as error:
                _logger.warning("a reading of the rollout engine failed: %s", error)
            await asyncio.sleep(self._config.look_s)


def _kill(engine: ServingEngine) -> None:
    """End an engine's process, if it has one of its own, whatever it is doing."""
    pid = getattr(engine, "pid", None)
    if isinstance(pid, int) and pid not in {0, os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def _close(engine: ServingEngine) -> None:
    """Close an engine; one that does not end in time is ended by force."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            await engine.close()
    except TimeoutError:
        _kill(engine)
    except Exception:  # a broken engine must not stop its successor
        _logger.exception("closing engine %s failed", engine.engine_id)

"""The turns of the clients of a pool, each client heard of now and then.

Invariants:

* A turn id that runs, or whose outcome the client has not named yet, is not run again, however often it is submitted.
* Each turn has exactly one outcome in the outbox of its session, unless it was cancelled or the session ended.
* A session ends when its client leaves or is not heard of for ``timeout_s``; its turns are cancelled then. The next call of that client
  begins a new session, which shows in its epoch.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence

import attrs

from rose.errors import RoseError, TurnFailedError
from rose.hosts.ray.outbox import Outbox
from rose.types import Turn, TurnResult

TurnId = str
Outcome = TurnResult | Exception
Generate = Callable[[Turn], Awaitable[TurnResult]]


@attrs.frozen(kw_only=True)
class Delivery:
    """Outcomes for a client.

    Attributes:
        epoch: Of its session; turns that were submitted under another one are not known here.
        upto: Number of the last outcome, to be named in the next read.
        outcomes: Turn ids and what became of them.
    """

    epoch: str
    upto: int
    outcomes: tuple[tuple[TurnId, Outcome], ...]


@attrs.define(eq=False)
class _Session:
    epoch: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    outbox: Outbox[tuple[TurnId, Outcome]] = attrs.field(factory=Outbox)
    running: dict[TurnId, asyncio.Task[None]] = attrs.field(factory=dict)
    num_reads: int = 0
    alarm: asyncio.TimerHandle | None = None


class Sessions:
    """All sessions of a pool."""

    def __init__(self, generate: Generate, *, timeout_s: float) -> None:
        """Run turns by ``generate``."""
        self._generate = generate
        self._timeout_s = timeout_s
        self._sessions: dict[str, _Session] = {}

    @property
    def num_clients(self) -> int:
        """Return how many clients there are."""
        return len(self._sessions)

    def submit(self, client: str, turns: Iterable[tuple[TurnId, Turn]]) -> str:
        """Run turns that are new to the client's session; returns its epoch."""
        session = self._session(client)
        over = {turn_id for turn_id, _ in session.outbox.items}
        for turn_id, turn in turns:
            if turn_id not in session.running and turn_id not in over:
                session.running[turn_id] = asyncio.create_task(self._run(session, turn_id, turn))
        self._heard(client, session)
        return session.epoch

    async def read(self, client: str, epoch: str | None, after: int, wait_s: float) -> Delivery:
        """Return outcomes after number ``after`` of ``epoch``, waiting for the first; all, when the epoch is another one."""
        session = self._session(client)
        session.num_reads += 1
        self._heard(client, session)
        try:
            if session.epoch != epoch:  # the client must hear of that at once
                after, wait_s = 0, 0.0
            upto, outcomes = await session.outbox.read(after, wait_s)
        finally:
            session.num_reads -= 1
            self._heard(client, session)
        return Delivery(epoch=session.epoch, upto=upto, outcomes=tuple(outcomes))

    def forget(self, client: str, turn_ids: Sequence[TurnId]) -> None:
        """Cancel turns; those that are over are left alone."""
        session = self._sessions.get(client)
        running = {} if session is None else session.running
        for task in [running[turn_id] for turn_id in turn_ids if turn_id in running]:
            task.cancel()

    def leave(self, client: str) -> None:
        """End a client's session and its turns."""
        session = self._sessions.pop(client, None)
        if session is not None:
            if session.alarm is not None:
                session.alarm.cancel()
            for task in session.running.values():
                task.cancel()

    async def close(self) -> None:
        """End all sessions."""
        tasks = [task for session in self._sessions.values() for task in session.running.values()]
        for client in list(self._sessions):
            self.leave(client)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _session(self, client: str) -> _Session:
        return self._sessions.setdefault(client, _Session())

    def _heard(self, client: str, session: _Session) -> None:
        """Begin to wait anew for the client's next call; a read that waits is as good as one."""
        if session.alarm is not None:
            session.alarm.cancel()
            session.alarm = None
        if session.num_reads == 0 and self._sessions.get(client) is session:
            session.alarm = asyncio.get_running_loop().call_later(self._timeout_s, self.leave, client)

    async def _run(self, session: _Session, turn_id: TurnId, turn: Turn) -> None:
        try:
            outcome: Outcome = await self._generate(turn)
        except (RoseError, TypeError) as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - the root of a task: the client must hear of it
            outcome = TurnFailedError(f"the pool failed: {type(error).__name__}: {error}")
        finally:
            session.running.pop(turn_id, None)
        session.outbox.put((turn_id, outcome))

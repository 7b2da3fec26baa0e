"""A pool in another actor, seen from a trainer: the trainer's face of ``RolloutPool``.

Life cycle of a turn:

1. [CLIENT] gives it an id and submits it, together with others that came at the same time.
2. [HOST] runs it; [CLIENT] one read waits for the outcomes of all turns.
3. The pool cannot be reached: [CLIENT] asks now and then whether it is back, for ``restart_timeout_s``.
4. It is back and does not know the turn: [CLIENT] submits it again under the same id, ``max_resubmits`` times at most.

Invariants:

* ``generate`` gives exactly one result or one error for each call, or passes on its caller's cancellation, which cancels the turn.
* A turn never runs twice at the same time: the pool knows it by its id, and a pool that does not know it has lost all it had.
* A turn that is given up because of the pool's loss ends with ``TransportError``, and may be sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self

import attrs

from rose import checks, registry
from rose.errors import RoseError, TransportError
from rose.hosts.ray.peers import Peer
from rose.hosts.ray.pool_host import PoolStatus
from rose.hosts.ray.sessions import Delivery, Outcome, TurnId
from rose.hosts.ray.specs import EngineSpec
from rose.policies.routing import EngineState
from rose.pool import EngineAccount, PoolSnapshot, PoolStatistics, SyncReport
from rose.types import EngineId, TransportAddress, Turn, TurnResult, WeightVersion

_WAIT_S = 10.0


@attrs.frozen(kw_only=True)
class ClientConfig:
    """How a client treats the loss of its pool.

    Attributes:
        restart_timeout_s: How long it waits for the pool to come back.
        retry_s: How often it asks meanwhile, at first; up to ten times as long later on.
        max_resubmits: How often one turn is submitted again after the pool has lost it; 0 leaves that to the caller.
    """

    restart_timeout_s: float = attrs.field(default=120.0, validator=checks.number(above=0))
    retry_s: float = attrs.field(default=0.2, validator=checks.number(above=0))
    max_resubmits: int = attrs.field(default=1, validator=checks.integer(0))


@attrs.define(eq=False)
class _Pending:
    """A turn without an outcome. ``epoch``: of the session that has it, ``None`` while it is not submitted."""

    turn_id: TurnId
    turn: Turn
    future: asyncio.Future[TurnResult]
    epoch: str | None = None
    num_lost: int = 0


class RayPool:
    """A client of a pool in a Ray actor. Use it on one event loop, best in ``async with``.

    Args:
        peer: The pool's host; raises ``TransportError`` when it cannot be reached.
        name: The pool's name, for messages.
        config: How the loss of the pool is treated.
    """

    def __init__(self, peer: Peer, *, name: str, config: ClientConfig | None = None) -> None:
        self._peer = peer
        self._name = name
        self._config = config or ClientConfig()
        self._client = uuid.uuid4().hex
        self._pending: dict[TurnId, _Pending] = {}
        self._unsent: list[_Pending] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._rescue: asyncio.Task[None] | None = None
        self._is_closed = False

    # The trainer's face.

    async def generate(self, turn: Turn) -> TurnResult:
        """Run one turn to its end, wherever that takes it.

        Raises:
            RoseError: As ``RolloutPool.generate`` raises it, in its own type.
            TransportError: The pool was lost and did not come back, or lost the turn too often; the turn may be sent again.
            TypeError: ``turn`` is no ``Turn``.
        """
        self._check_open()
        given: object = turn
        if not isinstance(given, Turn):
            message = f"turn must be of type Turn, got {checks.shown(given)}"
            raise TypeError(message)
        pending = _Pending(uuid.uuid4().hex, turn, asyncio.get_running_loop().create_future())
        self._pending[pending.turn_id] = pending
        self._send([pending])
        try:
            return await pending.future
        except asyncio.CancelledError:
            if pending.epoch is not None:
                self._spawn(self._forget([pending.turn_id]))
            raise
        finally:
            del self._pending[pending.turn_id]

    async def generate_many(self, turns: Iterable[Turn]) -> list[TurnResult | RoseError]:
        """Run turns side by side; returns in their order what became of each. Cancelling it cancels them all."""
        tasks = [asyncio.ensure_future(self.generate(turn)) for turn in turns]
        try:
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, RoseError):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, TurnResult | RoseError)]

    async def sync_weights(self, address: TransportAddress | Mapping[str, Any] | str) -> SyncReport:
        """Bring every engine to the newest weights in a store.

        Args:
            address: Of the store, as ``rose.open_transport`` takes it; the pool's process must reach it.

        Raises:
            TransportError: The pool or the store cannot be reached.
        """
        known = address if isinstance(address, TransportAddress) else registry.read_address(address)
        report: SyncReport = await self._ask("sync_weights", known)
        return report

    async def status(self) -> PoolStatus:
        """Return what the pool does, and where it and its engines are."""
        status: PoolStatus = await self._ask("status")
        return status

    async def snapshot(self) -> PoolSnapshot:
        """Return the pool's state."""
        return (await self.status()).snapshot

    async def accounts(self) -> Mapping[EngineId, EngineAccount]:
        """Return what each engine did since the pool was started the last time."""
        return (await self.status()).accounts

    async def statistics(self) -> PoolStatistics:
        """Return what became of turns and tokens, of all clients, since the pool was started the last time."""
        return (await self.status()).statistics

    async def barrier(self, version: WeightVersion, *, timeout_s: float | None = None) -> None:
        """Wait until nothing of older weights is under way. See ``RolloutPool.barrier``.

        Raises:
            DeadlineExceededError: Something older was under way for ``timeout_s``.
            TransportError: The pool was lost meanwhile; ask again.
        """
        await self._ask("barrier", version, timeout_s)

    async def add_engine(self, spec: EngineSpec) -> EngineState:
        """Let the pool make an engine in its own process. See ``Deployment.add_engine`` for one in an actor."""
        state: EngineState = await self._ask("add_engine", spec)
        return state

    async def remove_engine(self, engine_id: EngineId, reason: str) -> bool:
        """Take an engine out for good; its turns go on elsewhere. See ``RolloutPool.remove_engine``."""
        return bool(await self._ask("remove_engine", engine_id, reason))

    async def wait_until_up(self) -> str:
        """Return once the pool answers; gives its incarnation, which changes whenever it is started anew.

        Raises:
            TransportError: It does not within ``restart_timeout_s``, or is known to have ended.
            RoseError: It cannot start.
        """
        limit_s = self._config.restart_timeout_s
        deadline_s = asyncio.get_running_loop().time() + limit_s
        wait_s = self._config.retry_s
        while True:
            try:
                return str(await self._peer.call("hello"))
            except TransportError as error:
                if self._peer.is_gone:
                    message = f"pool {self._name!r} has ended for good: {error}"
                    raise TransportError(message) from error
                if asyncio.get_running_loop().time() >= deadline_s:
                    message = f"pool {self._name!r} did not come back within {limit_s:g} s: {error}"
                    raise TransportError(message) from error
            await asyncio.sleep(wait_s * (1 + random.random()))
            wait_s = min(2 * wait_s, 10 * self._config.retry_s)

    async def close(self) -> None:
        """Cancel what is under way and leave the pool, which goes on. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail(list(self._pending.values()), TransportError(f"this client of pool {self._name!r} was closed"))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TransportError):  # it is gone, and our turns with it
            await self._peer.call("leave", self._client)

    async def __aenter__(self) -> Self:
        """Wait until the pool answers."""
        await self.wait_until_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the client."""
        await self.close()

    # Below: one sender, one reader, and one that waits for a lost pool.

    def _send(self, pending: Sequence[_Pending]) -> None:
        self._unsent += pending
        if self._sender is None or self._sender.done():
            self._sender = self._spawn(self._send_all())
        if self._reader is None or self._reader.done():
            self._reader = self._spawn(self._read())

    async def _send_all(self) -> None:
        """Submit what there is, then what has come meanwhile."""
        while self._unsent:
            batch, self._unsent = [each for each in self._unsent if not each.future.done()], []
            while batch:
                try:
                    turns = [(each.turn_id, each.turn) for each in batch]
                    epoch = await self._peer.call("submit", self._client, turns)
                except TransportError:
                    if not await self._is_back():
                        break
                    batch = [each for each in batch if not each.future.done()]
                except Exception as error:  # noqa: BLE001 - the root of a task: the callers must hear of it
                    self._fail(batch, error)
                    break
                else:
                    self._note_submitted(batch, epoch)
                    break

    def _note_submitted(self, batch: Sequence[_Pending], epoch: str) -> None:
        for each in batch:
            each.epoch = epoch
        given_up = [each.turn_id for each in batch if each.future.done()]
        if given_up:  # cancelled while they were on their way
            self._spawn(self._forget(given_up))

    async def _read(self) -> None:
        """Hand out outcomes until there is nothing to wait for."""
        epoch, after = None, 0
        while self._pending:
            try:
                delivery: Delivery = await self._peer.call("read", self._client, epoch, after, _WAIT_S)
            except TransportError:
                if not await self._is_back():
                    return
                continue
            if epoch != delivery.epoch:
                self._resubmit(delivery.epoch)
            epoch, after = delivery.epoch, delivery.upto
            for turn_id, outcome in delivery.outcomes:
                self._settle(turn_id, outcome)

    def _resubmit(self, epoch: str) -> None:
        """Submit again what another session had: that one is gone."""
        lost = [each for each in self._pending.values() if each.epoch not in (None, epoch)]
        for each in lost:
            each.epoch, each.num_lost = None, each.num_lost + 1
        too_often = [each for each in lost if each.num_lost > self._config.max_resubmits]
        message = f"pool {self._name!r} was started anew and has lost this turn; send it again"
        self._fail(too_often, TransportError(message))
        self._send([each for each in lost if not each.future.done()])

    def _settle(self, turn_id: TurnId, outcome: Outcome) -> None:
        pending = self._pending.get(turn_id)
        if pending is None or pending.future.done():
            return
        if isinstance(outcome, Exception):
            pending.future.set_exception(outcome)
        else:
            pending.future.set_result(outcome)

    async def _is_back(self) -> bool:
        """Wait for a pool that cannot be reached, all together; where it does not come back everything ends with that error."""
        if self._rescue is None or self._rescue.done():
            self._rescue = self._spawn(self._wait_or_fail())
        await asyncio.shield(self._rescue)
        return any(not each.future.done() for each in self._pending.values())

    async def _wait_or_fail(self) -> None:
        try:
            await self.wait_until_up()
        except Exception as error:  # noqa: BLE001 - the root of a task: the callers must hear of it
            self._fail(list(self._pending.values()), error)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the pool; what was lost on the way is not repeated, but a pool that is being started anew is waited for."""
        self._check_open()
        await self.wait_until_up()
        return await self._peer.call(method, *arguments)

    async def _forget(self, turn_ids: Sequence[TurnId]) -> None:
        with contextlib.suppress(TransportError):  # the pool is gone, and the turns with it
            await self._peer.call("forget", self._client, turn_ids)

    def _fail(self, pending: Sequence[_Pending], error: Exception) -> None:
        for each in pending:
            if not each.future.done():
                each.future.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_open(self) -> None:
        if self._is_closed:
            message = f"this client of pool {self._name!r} was closed; connect again"
            raise TransportError(message)

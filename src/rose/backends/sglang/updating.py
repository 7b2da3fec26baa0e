"""The weights of one SGLang server: which version they are, and how they become another.

Invariants:

* A stage, an activation and a sleep never overlap: they take ``lock``.
* An activation happens in a pause (keep), so that the label of each event is that of the weights that made its tokens; a pause that was there
  before, anybody's, stays.
* What a reading says of the weights is taken over only if nothing changed them while it was under way.
* A server that was started anew is prepared anew.
* Fenced weights have no version; whoever made them so is told by ``on_fenced``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping

import attrs

from rose.backends.sglang.client import PatientHttp
from rose.backends.sglang.control import SglangControl
from rose.backends.sglang.facts import RoseState, read_label, read_rose_state
from rose.backends.sglang.updates import SglangUpdates
from rose.errors import EngineUnsupportedError, RoseError, TransferError
from rose.interfaces.serving import PauseMode
from rose.types import Activation, WeightUpdate, WeightVersion


class ServerWeights:
    """See the module's text.

    Args:
        http: The server's connections.
        control: Its commands.
        labels: Versions of weight labels that are not of the form ``run:n``.
        on_fenced: Called once the weights turn out to be of no known version.

    Attributes:
        version: Of the weights as last heard.
        is_fenced: They are not known to be any version.
        is_changing: The server is busy with a command that takes long, and may not answer meanwhile.
        num_changes: Begins and ends of such commands so far.
        lock: What must not overlap takes it.
    """

    def __init__(
        self,
        http: PatientHttp,
        control: SglangControl,
        *,
        labels: Mapping[str, WeightVersion],
        on_fenced: Callable[[], Awaitable[None]],
    ) -> None:
        self.version: WeightVersion | None = None
        self.is_fenced = False
        self.is_changing = False
        self.num_changes = 0
        self.lock = asyncio.Lock()
        self._http, self._control = http, control
        self._labels, self._on_fenced = labels, on_fenced
        self._updates: SglangUpdates | None = None
        self._start = ""

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Mark the time in which the server carries a command out that takes long."""
        self.is_changing = True
        self.num_changes += 1
        try:
            yield
        finally:
            self.is_changing = False
            self.num_changes += 1

    def hear(self, label: object) -> None:
        """Take over the label that the server's front shows."""
        self.version = None if self.is_fenced else read_label(label, self._labels)

    async def hear_state(self, state: RoseState, label: object) -> None:
        """Take over what ROSE's package in the server knows of the weights, which the front's label may have missed."""
        if not state.has_weights:
            self.hear(label)
            return
        was_fenced, self.is_fenced = self.is_fenced, state.is_fenced
        self.version = None if state.is_fenced or state.version is None else WeightVersion.parse(state.version)
        if self.is_fenced and not was_fenced:
            await self._on_fenced()
        elif self.version is not None and self.version != read_label(label, self._labels):
            await (await self.updates()).label(self.version)

    async def updates(self) -> SglangUpdates:
        """Return what carries updates, prepared for this start of the server.

        Raises:
            EngineUnsupportedError: The server has no ROSE package.
        """
        facts = await self._control.beat()
        if self._updates is None or self._start != facts.start:
            updates = SglangUpdates(self._http, facts.num_ranks)
            known = read_label(await self._control.weight_label(), self._labels)
            with self.changing():
                state = await updates.begin(None if known is None else str(known))
            self.is_fenced, self.version = state.is_fenced, state.version
            self._updates, self._start = updates, facts.start
        return self._updates

    async def stage(self, update: WeightUpdate) -> None:
        """Let the server's processes fetch, verify and decode an update while it serves."""
        updates = await self.updates()
        try:
            await updates.stage(update)
        except RoseError:
            await self._learn(updates)
            raise

    async def activate(self) -> Activation:
        """Make the staged update current; ``pause_s`` is the pause as a client sees it."""
        updates = await self.updates()
        target = (await updates.state()).staged
        if target is None:
            message = "no update is staged; call stage first"
            raise TransferError(message)
        state = read_rose_state(await self._control.beat())
        was_paused = self._control.paused is not None or (state is not None and state.is_paused)
        paused_at_s = time.perf_counter()
        with self.changing():
            try:
                if not was_paused:
                    await self._control.pause(PauseMode.KEEP)
                activation = await updates.activate(target=target)
            except RoseError:
                await self._learn(updates)
                raise
            else:
                self.version, self.is_fenced = activation.version, False
            finally:
                if not was_paused:
                    await self._control.resume()
        return attrs.evolve(activation, pause_s=time.perf_counter() - paused_at_s)

    async def lose(self) -> None:
        """Note that the weights are gone, here and in the server."""
        self.is_fenced, self.version = True, None
        with contextlib.suppress(EngineUnsupportedError):
            await (await self.updates()).fence()
            self.is_fenced, self.version = True, None

    async def _learn(self, updates: SglangUpdates) -> None:
        """Find out whether something that failed has left the weights unknown."""
        with contextlib.suppress(RoseError):
            if (await updates.state()).is_fenced and not self.is_fenced:
                self.is_fenced, self.version = True, None
                await self._on_fenced()

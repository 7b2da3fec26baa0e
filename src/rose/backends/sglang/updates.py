"""Weight updates of an SGLang server that runs ROSE's plugin: the client's half of ``rose.backends.sglang_server.weights``.

Invariants:

* One update is worked on at a time: a lock serialises everything but ``state``.
* An activation is seen to its end, also when its caller is cancelled.
* An answer counts only if every rank gave it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.backends.completion import to_the_end
from rose.backends.sglang.calls import Http, call
from rose.backends.sglang_server.wire import PATH
from rose.backends.wire import activation_from_wire, update_to_wire
from rose.errors import EngineError
from rose.interfaces.trainer import ShardSpec
from rose.transfer.kernels import Sum
from rose.transfer.layout import TargetLayout
from rose.transfer.sums import engine_sums
from rose.types import Activation, WeightUpdate, WeightVersion

_FIRST_POLL_S, _LAST_POLL_S, _POLL_GROWTH = 0.005, 0.1, 1.5


@attrs.frozen(kw_only=True)
class UpdateState:
    """Where an engine's weights are.

    Attributes:
        version: ``None`` when they are no published version.
        is_fenced: They are not known to be any version, on some rank at least.
        staged: The version that an activation would lead to.
        is_busy: An update is being staged, or sums are being made.
    """

    version: WeightVersion | None
    is_fenced: bool
    staged: WeightVersion | None
    is_busy: bool


class SglangUpdates:
    """See the module's text. ``begin`` comes first.

    Args:
        http: The server.
        num_ranks: The server's tensor-parallel ranks.
    """

    def __init__(self, http: Http, num_ranks: int) -> None:
        self._http, self._num_ranks = http, num_ranks
        self._lock = asyncio.Lock()

    async def begin(self, version_label: str | None) -> UpdateState:
        """Prepare the server for updates; returns where its weights are. Harmless on a server that is prepared.

        Args:
            version_label: The ``run:n`` form of the version that the loaded checkpoint is, if it is one.

        Raises:
            EngineUnsupportedError: The server does not run ROSE's plugin, or is of a kind that ROSE cannot update.
            LayoutMismatchError: Live parameters cannot be updated in place; names them.
        """
        async with self._lock:
            await self._call("open", version=version_label)
            state = await self.state()
            if state.version is not None:
                await self.label(state.version)
            return state

    async def stage(self, update: WeightUpdate) -> None:
        """Fetch, verify and decode an update on threads of the server while it generates. Replaces what was staged.

        Raises:
            LayoutMismatchError, CorruptUpdateError, VersionConflictError, BlobNotFoundError: Nothing has changed, and nothing
                is staged.
            CorruptUpdateError: Also when an audit of the live weights, due every so many updates, finds them damaged;
                ``state`` tells that they are fenced then.
        """
        async with self._lock:
            try:
                await self._finish("stage", update=update_to_wire(update))
            except asyncio.CancelledError:
                await to_the_end(self._call("drop"))
                raise

    async def drop(self) -> None:
        """Forget what is staged."""
        async with self._lock:
            await self._call("drop")

    async def activate(
        self, *, target: WeightVersion | None = None, is_verified: bool = False, keeps_kv: bool = True
    ) -> Activation:
        """Make the staged update current, between two steps of the engine; requests in flight go on under the new weights.

        No request that comes from now on meets a prefix that was computed under older weights. A cancelled caller waits until the
        engine is at one version again.

        Args:
            target: The version that is meant; another one that is staged, by another client, is refused.
            is_verified: Sum the whole state anew meanwhile, not what changed only.
            keeps_kv: Requests in flight keep the KV that older weights made of their tokens so far. Otherwise it is dropped and made
                anew, which takes the time of their prefills.

        Returns:
            The acknowledgement; ``pause_s`` is how long the engine's loop was held up.

        Raises:
            TransferError: Nothing is staged, or not the same on every rank; nothing has changed.
            EngineBusyError: An update is still being staged; nothing has changed.
            EngineFencedError, CorruptUpdateError: The weights are no version now; send an anchor.
        """
        async with self._lock:
            label = None if target is None else str(target)
            return await to_the_end(self._activate(target=label, is_verified=is_verified, keeps_kv=keeps_kv))

    async def state(self) -> UpdateState:
        """Return where the engine's weights are, over all ranks."""
        found = (await self._call("state"))["ranks"]
        versions = {state["version"] for state in found}
        is_fenced = len(versions) > 1 or any(state["is_fenced"] for state in found)
        staged = {state["staged"] for state in found}
        return UpdateState(
            version=None if is_fenced else _parse(found[0]["version"]),
            is_fenced=is_fenced,
            staged=None if len(staged) > 1 else _parse(found[0]["staged"]),
            is_busy=any(state["is_busy"] for state in found),
        )

    async def fence(self) -> None:
        """Let the weights count as lost: only an anchor brings them to a version again."""
        async with self._lock:
            await self._call("fence")

    async def target_layout(self) -> TargetLayout:
        """Return what each rank holds, for a publisher that should cut its cells along these boxes."""
        layouts = (await self._call("layout"))["ranks"]
        return TargetLayout.from_json({**layouts[0], "ranks": [layout["ranks"][0] for layout in layouts]})

    async def weight_sums(self) -> Mapping[str, Sum]:
        """Return the sum of every checkpoint tensor over all ranks, as the live weights are now (``rose.transfer.sums``).

        The engine generates meanwhile.

        Raises:
            LayoutMismatchError: The ranks do not hold one copy of the weights together.
        """
        async with self._lock:
            layout = await self.target_layout()
            found = await self._finish("sums")
        ranks = [
            [(name, ShardSpec(offset=tuple(o), shape=tuple(s)), (a, b)) for name, o, s, (a, b) in rows]
            for rows in found
        ]
        return engine_sums(ranks, {spec.name: spec for spec in layout.tensors})

    async def weight_checksums(self) -> Mapping[str, str]:
        """Return checkpoint tensor name -> xxh3_128 of its bytes, for the tensors that one rank holds whole."""
        async with self._lock:
            found = await self._finish("checksums")
        return {name: digest for digests in found for name, digest in digests.items()}

    async def server_checksums(self) -> Sequence[Mapping[str, str]]:
        """Return SGLang's own digests of the live parameters, fused and cut as they are, one mapping a rank."""
        answer = await self._http.post(PATH, {"action": "checksum"})
        return [dict(rank["checksums"]) for rank in answer["ranks"]]

    async def _activate(self, *, target: str | None, is_verified: bool, keeps_kv: bool) -> Activation:
        answer = await self._call("activate", target=target, is_verified=is_verified, keeps_kv=keeps_kv)
        found = [activation_from_wire(value) for value in answer["ranks"]]
        await self.label(found[0].version)
        return attrs.evolve(
            found[0],
            stage_s=max(one.stage_s for one in found),
            pause_s=float(answer["pause_s"]),
            fetched_bytes=sum(one.fetched_bytes for one in found),
            is_verified=all(one.is_verified for one in found),
        )

    async def label(self, version: WeightVersion) -> None:
        """Let the server's front name the version too; the spans of tokens do already."""
        await self._http.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def _finish(self, command: str, **given: Any) -> list[Any]:
        """Begin something on the threads of all ranks and wait for it; returns each rank's value."""
        await self._call(command, **given)
        wait_s = _FIRST_POLL_S
        while True:
            found = (await self._call("poll"))["ranks"]
            if all(one["is_done"] for one in found):
                return [one["value"] for one in found]
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * _POLL_GROWTH, _LAST_POLL_S)

    async def _call(self, command: str, **given: Any) -> dict[str, Any]:
        """Send a command; returns the answer with each rank's value under ``ranks``."""
        answer = await call(self._http, command, **given)
        if len(answer["ranks"]) != self._num_ranks:
            message = f"{len(answer['ranks'])} ranks answered {command}, the engine was said to have {self._num_ranks}"
            raise EngineError(message)
        return answer


def _parse(label: str | None) -> WeightVersion | None:
    return None if label is None else WeightVersion.parse(label)

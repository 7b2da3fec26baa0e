"""The receiving side: one subscriber a rank of an engine.

Invariants:

* The sink is at exactly one version, at none yet (``version`` is ``None``), or fenced.
* ``stage`` never writes to the sink; a refused or dropped stage leaves everything as it was.
* ``activate`` either reaches the target version, or refuses before the first write, or fences.
* Staged writes only overwrite, and the sums they lead to are compared with the published ones before they are staged.
* A fenced subscriber takes an update that starts with an anchor and nothing else; its activation is always verified.

Life cycle of one update (steps 5 to 7 of a version's life; the publisher has steps 1 to 4):

5. [ENGINE, any thread] ``stage``: read the manifests, refuse what does not fit, fetch this rank's cells, verify, decode, resolve.
6. [ENGINE, paused] ``activate``: write in place, set the version. On request, sum the whole state anew.
7. [ENGINE] the returned ``Activation`` is the acknowledgement. Every so often, and on request, ``audit``, while the engine serves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import attrs

from rose import registry
from rose.errors import CorruptUpdateError, EngineFencedError, TransferError, VersionConflictError
from rose.interfaces.transport import Transport
from rose.transfer import delta, kernels
from rose.transfer.cells import CellMap, Columns
from rose.transfer.delta import add_sums
from rose.transfer.kernels import Sum
from rose.transfer.layout import rows_of
from rose.transfer.manifest import Manifest
from rose.transfer.relay import read_manifest, read_map
from rose.transfer.sink import ArraySink, SupportsFlush, WeightSink
from rose.transfer.staging import Place, Routes, Stage, check_tied, find_routes
from rose.transfer.writes import Write, plan_writes
from rose.types import Activation, TransportAddress, WeightUpdate, WeightVersion

__all__ = ["ArraySink", "Subscriber", "WeightSink"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@attrs.frozen(kw_only=True, eq=False)
class _State:
    """What the sink must hold at a version: the published sums, and those of the boxes it holds as far as they are known."""

    routes: Routes
    columns: Columns
    sums: Mapping[Place, Sum]


@attrs.frozen(kw_only=True, eq=False)
class _Staged:
    target: WeightVersion
    base: WeightVersion | None
    writes: Sequence[Write]
    state: _State | None
    stage_s: float
    fetched_bytes: int


class Subscriber:
    """Brings one engine rank's sink from version to version.

    Args:
        sink: The live weights.
        aliases: Tied names of the engine: alias -> the name whose bits it shares, whether held separately or not.
        version: The version that the sink's bits are already, if they are one.
        num_threads: How many blobs are fetched and decoded, and how many tensors are written, at a time.
        audit_every: An audit is due after every so many activations; 0 never.
    """

    def __init__(
        self,
        sink: WeightSink,
        *,
        aliases: Mapping[str, str] | None = None,
        version: WeightVersion | None = None,
        num_threads: int = 2,
        audit_every: int = 16,
    ) -> None:
        self._sink = sink
        self._aliases = dict(aliases or {})
        self._num_threads, self._audit_every = num_threads, audit_every
        self._lock = threading.Lock()
        self._staged: _Staged | None = None
        self._version = version
        self._is_fenced = False
        self._state: _State | None = None
        self._routes: dict[str, Routes] = {}
        self._num_unaudited = 0
        self._transports: dict[TransportAddress, Transport] = {}

    @property
    def version(self) -> WeightVersion | None:
        """Return the version the sink is at; ``None`` before the first update and while fenced."""
        return self._version

    @property
    def is_fenced(self) -> bool:
        """Return whether the sink's bits are not known to be any version."""
        return self._is_fenced

    def stage(self, update: WeightUpdate, transport: Transport | None = None) -> None:
        """Fetch, verify and decode an update; replaces an earlier staged one. Blocking; any one thread at a time.

        An audit that is due comes first.

        Args:
            update: Manifests to apply in order, and where the blobs are.
            transport: Used in place of opening ``update.address``.

        Raises:
            VersionConflictError: The target is older, or the chain does not start from the sink's version.
            LayoutMismatchError: Tensors do not fit the sink.
            CorruptUpdateError: A checksum, a length or the chain is wrong.
            BlobNotFoundError: A blob or manifest is gone.
            EngineFencedError: The sink is fenced and the update does not start with an anchor.
        """
        started = time.monotonic()
        if self.is_audit_due:
            self.audit()
        if update.target == self._version:
            staged = _Staged(
                target=update.target, base=update.target, writes=(), state=None, stage_s=0.0, fetched_bytes=0
            )
        else:
            self._refuse_older(update.target)
            source = transport if transport is not None else self._open(update.address)
            staged = self._fetch(update, source, started)
        with self._lock:
            self._staged = staged

    def drop_staged(self) -> None:
        """Forget the staged update, if any."""
        with self._lock:
            self._staged = None

    def activate(self, *, verify: bool) -> Activation:
        """Write the staged update into the sink. The engine must be paused.

        Args:
            verify: Sum the sink's whole state anew, in the pause. A fenced sink is always verified so.

        Returns:
            The acknowledgement; ``is_verified`` says that every cell of this rank was compared with the published sums, by what
            changed or in full. It was not where the rank holds parts of cells, which is so only for layouts that the publisher does not know.

        Raises:
            TransferError: Nothing is staged.
            VersionConflictError: The sink's version has changed since the stage; nothing was written.
            EngineFencedError: The sink is fenced and what is staged is no anchor.
            CorruptUpdateError: The sums do not match; the sink is now fenced.
        """
        with self._lock:
            staged, self._staged = self._staged, None
        if staged is None:
            message = "no update is staged; call stage first"
            raise TransferError(message)
        self._check_base(staged.base)
        if staged.target == self._version or staged.state is None:
            return Activation(version=staged.target, stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=False)
        self._refuse_older(staged.target)
        started = time.monotonic()
        self._write(staged, staged.state, verify=verify or self._is_fenced)
        return Activation(
            version=staged.target,
            stage_s=staged.stage_s,
            pause_s=time.monotonic() - started,
            fetched_bytes=staged.fetched_bytes,
            is_verified=staged.state.routes.is_complete,
        )

    @property
    def is_audit_due(self) -> bool:
        """Return whether so many activations have passed that the whole state should be compared again."""
        return bool(self._audit_every) and self._num_unaudited >= self._audit_every

    def audit(self) -> None:
        """Sum the sink's whole state anew and compare; reads only, so that the engine may serve, but no activation may run.

        Raises:
            CorruptUpdateError: The state is not the published one; the sink is now fenced. Names the tensors.
        """
        state, version = self._state, self._version
        self._num_unaudited = 0
        if state is None or self._is_fenced:
            return
        wrong = self._find_wrong(state)
        if wrong:
            self._version, self._is_fenced = None, True
            message = f"these tensors are not the published bits of {version}: {', '.join(wrong)}"
            raise CorruptUpdateError(message)

    def fence(self) -> None:
        """Note that the sink's bits were lost: the next update must start with an anchor."""
        self.drop_staged()
        self._version, self._is_fenced, self._state = None, True, None

    def close(self) -> None:
        """Close the transports that this subscriber opened."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def _fetch(self, update: WeightUpdate, source: Transport, started: float) -> _Staged:
        chain = [read_manifest(source, key) for key in update.manifest_keys]
        self._check_chain(chain, update.target)
        if len({manifest.map_key for manifest in chain}) > 1:
            message = f"the cells change within the chain to {update.target}, which leaves it no one meaning; an anchor is needed"
            raise CorruptUpdateError(message)
        links = [(manifest, self._routes_of(manifest, source)) for manifest in chain]
        known = self._state.sums if self._state is not None and chain[0].base is not None else {}
        stage = Stage(self._sink, known, num_threads=self._num_threads)
        for i, (manifest, routes) in enumerate(links):
            stage.add(manifest, routes, source, later=chain[i + 1 :])
        state = _State(routes=links[-1][1], columns=chain[-1].columns, sums=stage.sums)
        return _Staged(
            target=update.target,
            base=chain[0].base,
            writes=plan_writes(stage.changes, self._sink.boxes()),
            state=state,
            stage_s=time.monotonic() - started,
            fetched_bytes=stage.fetched_bytes,
        )

    def _routes_of(self, manifest: Manifest, source: Transport) -> Routes:
        if manifest.map_key not in self._routes:
            if len(self._routes) > 1:
                self._routes.clear()
            cell_map: CellMap = read_map(source, manifest.map_key)
            self._routes[manifest.map_key] = find_routes(cell_map, self._sink, self._aliases)
        routes = self._routes[manifest.map_key]
        manifest.check_map(routes.cell_map)
        check_tied(manifest, routes.cell_map, self._aliases)
        return routes

    def _write(self, staged: _Staged, state: _State, *, verify: bool) -> None:
        """Write and check; the sink counts as fenced until all of it has succeeded."""
        self._version, self._is_fenced, self._state = None, True, None

        self._each(lambda write: write.apply(self._sink), staged.writes)
        if isinstance(self._sink, SupportsFlush):
            self._sink.flush()
        wrong = self._find_wrong(state) if verify else ()
        if wrong:
            message = f"after activating {staged.target} these tensors are not the published bits: {', '.join(wrong)}"
            raise CorruptUpdateError(message)
        self._num_unaudited = 0 if verify else self._num_unaudited + 1
        self._version, self._is_fenced, self._state = staged.target, False, state

    def _find_wrong(self, state: _State) -> list[str]:
        """Return the names whose bits do not have the published sums, of the cells that the sink holds whole."""
        loops = kernels.load()
        shapes = {spec.name: spec.shape for spec in state.routes.cell_map.tensors}

        def is_wrong(number: int) -> list[str]:
            found = []
            shape = shapes[state.routes.cell_map.cells[number].tensor]
            for held in state.routes.held[number]:
                sums = []
                for part in held.parts if held.is_summed else ():
                    rows = rows_of(part, shape)
                    sums.append(loops.state_sum(delta.as_rows(self._sink.read(held.name, part), rows), rows))
                if held.is_summed and add_sums(*sums) != state.columns.state_sum(number):
                    found.append(held.name)
            return found

        return sorted({name for names in self._each(is_wrong, state.routes.held) for name in names})

    def _each(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
        if self._num_threads == 1:
            return [work(item) for item in items]
        with ThreadPoolExecutor(self._num_threads, thread_name_prefix="rose-activate") as pool:
            return list(pool.map(work, items))

    def _check_chain(self, chain: list[Manifest], target: WeightVersion) -> None:
        self._check_base(chain[0].base)
        for before, after in pairwise(chain):
            if after.base != before.version:
                message = f"the chain breaks: {after.version} starts from {after.base}, not from {before.version}"
                raise VersionConflictError(message)
        if chain[-1].version != target:
            message = f"the chain ends at {chain[-1].version}, the update promises {target}"
            raise VersionConflictError(message)

    def _check_base(self, base: WeightVersion | None) -> None:
        if base is None:
            return
        if self._is_fenced:
            message = f"the weights are fenced, so a delta from {base} cannot apply; send an update that starts with an anchor"
            raise EngineFencedError(message)
        if base != self._version:
            message = f"the update starts from {base}, the engine is at {self._version}"
            raise VersionConflictError(message)

    def _refuse_older(self, target: WeightVersion) -> None:
        current = self._version
        if current is not None and current.run == target.run and target.n < current.n:
            message = f"the update leads to {target}, the engine is already at {current}"
            raise VersionConflictError(message)

    def _open(self, address: TransportAddress) -> Transport:
        if address not in self._transports:
            self._transports[address] = registry.open_transport(address)
        return self._transports[address]

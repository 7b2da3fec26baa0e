"""The receiving side: one subscriber a rank of an engine.

Invariants:

* The sink is at exactly one version, at none yet (``version`` is ``None``), or fenced.
* ``stage`` never touches the sink; a refused or dropped stage leaves everything as it was.
* ``activate`` either reaches the target version, or refuses before the first write, or fences.
* A fenced subscriber takes an update that starts with an anchor and nothing else; its activation is always verified, as far
  as the rank holds whole cells (it does where the publisher knows its layout).

Life cycle of one update (steps 5 to 7 of a version's life; the publisher has steps 1 to 4):

5. [ENGINE, any thread] ``stage``: read the manifests, refuse what does not fit, fetch this rank's cells, verify, decode.
6. [ENGINE, paused] ``activate``: write in place in chain order, compare state checksums, set the version.
7. [ENGINE] the returned ``Activation`` is the acknowledgement.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from itertools import pairwise

import attrs

from rose import registry
from rose.errors import CorruptUpdateError, EngineFencedError, TransferError, VersionConflictError
from rose.interfaces.transport import Transport
from rose.transfer.manifest import Manifest
from rose.transfer.relay import read_manifest
from rose.transfer.sink import ArraySink, WeightSink
from rose.transfer.staging import StateCheck, Write, fetch_writes, route_names, state_checks
from rose.types import Activation, TransportAddress, WeightUpdate, WeightVersion

__all__ = ["ArraySink", "Subscriber", "WeightSink"]


@attrs.frozen(kw_only=True)
class _Staged:
    target: WeightVersion
    base: WeightVersion | None
    writes: tuple[Write, ...]
    checks: tuple[StateCheck, ...]
    stage_s: float
    fetched_bytes: int


class Subscriber:
    """Brings one engine rank's sink from version to version.

    Args:
        sink: The live weights.
        aliases: Tied names of the engine: alias -> the name whose bits it shares, whether held separately or not.
        version: The version that the sink's bits are already, if they are one.
    """

    def __init__(
        self, sink: WeightSink, *, aliases: Mapping[str, str] | None = None, version: WeightVersion | None = None
    ) -> None:
        self._sink = sink
        self._aliases = dict(aliases or {})
        self._lock = threading.Lock()
        self._staged: _Staged | None = None
        self._version = version
        self._is_fenced = False
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
        if update.target == self._version:
            staged = _Staged(
                target=update.target, base=update.target, writes=(), checks=(), stage_s=0.0, fetched_bytes=0
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
            verify: Compare the checksum of every cell the sink holds whole. A fenced sink is always verified.

        Returns:
            The acknowledgement; ``is_verified`` only if every cell of this rank could be and was compared.

        Raises:
            TransferError: Nothing is staged.
            VersionConflictError: The sink's version has changed since the stage; nothing was written.
            EngineFencedError: The sink is fenced and what is staged is no anchor.
            CorruptUpdateError: The state checksums do not match; the sink is now fenced.
        """
        with self._lock:
            staged, self._staged = self._staged, None
        if staged is None:
            message = "no update is staged; call stage first"
            raise TransferError(message)
        self._check_base(staged.base)
        if staged.target == self._version:
            return Activation(version=staged.target, stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=False)
        self._refuse_older(staged.target)
        started = time.monotonic()
        must_verify = verify or self._is_fenced
        self._write(staged, verify=must_verify)
        return Activation(
            version=staged.target,
            stage_s=staged.stage_s,
            pause_s=time.monotonic() - started,
            fetched_bytes=staged.fetched_bytes,
            is_verified=must_verify and all(check.is_complete for check in staged.checks),
        )

    def close(self) -> None:
        """Close the transports that this subscriber opened."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def _fetch(self, update: WeightUpdate, source: Transport, started: float) -> _Staged:
        chain = [read_manifest(source, key) for key in update.manifest_keys]
        self._check_chain(chain, update.target)
        tensors, boxes = self._sink.tensors(), self._sink.boxes()
        routes = [route_names(manifest, tensors, self._aliases) for manifest in chain]
        writes: list[Write] = []
        fetched_bytes = 0
        for manifest, route in zip(chain, routes, strict=True):
            more, size = fetch_writes(manifest, route, boxes, source)
            writes += more
            fetched_bytes += size
        return _Staged(
            target=update.target,
            base=chain[0].base,
            writes=tuple(writes),
            checks=tuple(state_checks(chain[-1], routes[-1], boxes)),
            stage_s=time.monotonic() - started,
            fetched_bytes=fetched_bytes,
        )

    def _write(self, staged: _Staged, *, verify: bool) -> None:
        """Write and check; the sink counts as fenced until all of it has succeeded."""
        self._version, self._is_fenced = None, True
        for write in staged.writes:
            write.apply(self._sink)
        if verify:
            wrong = sorted({check.name for check in staged.checks if check.is_complete and not check.holds(self._sink)})
            if wrong:
                message = (
                    f"after activating {staged.target} these tensors are not the published bits: {', '.join(wrong)}"
                )
                raise CorruptUpdateError(message)
        self._version, self._is_fenced = staged.target, False

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

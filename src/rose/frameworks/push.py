"""A trainer rank's way to the engines of a pool: publish, then let the pool bring its engines there.

Life cycle of one push:

1. [EVERY RANK] the first time: ask the pool where weights go and whom to cut for, open the store, make the publisher.
2. [EVERY RANK] publish this rank's share; returns once the version is visible.
3. [RANK 0] announce the version to the framework, where that was asked for: turns may return tokens of it as soon as one engine has it, which is
   before the next step ends.
4. [RANK 0] let the pool sync: engines stage while they serve, and activate. A sync that fails as a whole, or for all engines for want of the store, is
   asked for again, for ``sync_retry_s``. The job's own engines are waited for, up to ``sync_timeout_s`` from the last time it was asked for, borrowed ones by nobody.

Invariants: all ranks push together, like a collective, though none runs inside; a sync that never ends, because the pool's host died, holds up no later one (the
pool itself runs one at a time); an engine that cannot take a version is reported and never an error of the push: the pool gives it no turns that ask for that version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rose.errors import ConfigError, RoseError, TransferError, TransportError
from rose.frameworks.place import PoolPlace
from rose.interfaces import Trainer, Transport
from rose.pool import SyncReport
from rose.pool.remote_pool import sync_report_from_plain
from rose.pool.store_offer import StoreOffer
from rose.transfer.publisher import Publisher, PublishReport
from rose.types import EngineId, WeightVersion

_logger = logging.getLogger(__name__)
_REST_S = 1.0


@attrs.frozen(kw_only=True)
class PushReport:
    """What one push did.

    Attributes:
        publish: What this rank published.
        sync: What the pool's engines made of it; ``None`` on other ranks than 0, and where that took too long or is not waited for.
        problem: Why the pool's sync failed as a whole, or has not ended; empty otherwise.
        error: Its error where it failed; no engine is known to have the version then.
    """

    publish: PublishReport
    sync: SyncReport | None = None
    problem: str = ""
    error: RoseError | None = None

    @property
    def version(self) -> WeightVersion:
        """Return the version that was published."""
        return self.publish.version

    @property
    def is_with_nobody(self) -> bool:
        """Return whether no engine is known to have the version, or to be on the way to it."""
        return self.error is not None if self.sync is None else _is_with_nobody(self.sync)

    @property
    def errors(self) -> Mapping[EngineId, Exception]:
        """Return the engines that did not take the version, and why."""
        return {} if self.sync is None else self.sync.errors


class WeightPush:
    """Brings the weights of one trainer rank to a pool. Not re-entrant: one push at a time.

    Args:
        place: The pool.
        trainer: This rank's weights.
        run: Name of this launch of the trainer, the same on every rank, and a new one for every launch.
        publish_timeout_s: How long one publish may take, waiting for the other ranks included.
        sync_timeout_s: How long rank 0 waits for the engines since the pool was last asked to sync them; they go on after that.
        sync_retry_s: How long after it first failed as a whole, or no engine reached the store, a sync is asked for again, since no engine may have the version before; a pool that
            does not let this process in is asked once.
        is_sync_awaited: Whether ``push`` waits for the engines at all.
    """

    def __init__(
        self,
        place: PoolPlace,
        *,
        trainer: Trainer,
        run: str,
        publish_timeout_s: float = 300.0,
        sync_timeout_s: float = 120.0,
        sync_retry_s: float = 30.0,
        is_sync_awaited: bool = True,
    ) -> None:
        self._place, self._trainer, self._run = place, trainer, WeightVersion(run, 0).run  # checks the name
        self._publish_timeout_s, self._sync_timeout_s = publish_timeout_s, sync_timeout_s
        self._sync_retry_s, self._is_sync_awaited = sync_retry_s, is_sync_awaited
        self._store: Transport | None = None
        self._offer: StoreOffer
        self._publisher: Publisher | None = None

    def push(self, *, announce: Callable[[WeightVersion], None] | None = None) -> PushReport:
        """Publish the trainer's weights as the next version; blocks. Call it on every rank; from a coroutine, in a thread.

        Args:
            announce: Called on rank 0, in the caller's thread, with the version that was published, before the pool is asked to bring engines there;
                the sync may still fail. What it raises is raised here, and the pool is not asked; the version stays published and the next
                push is the version after it.

        Raises:
            TransportError: Pool or store cannot be reached.
            ConfigError: The pool knows of no store, or does not let this process in.
            LayoutMismatchError: The weights do not fit the layouts to cut for; names the tensors.
            TransferError: Another rank failed, or did not come in time.
        """
        publisher = self._opened()
        publish = publisher.publish_sync()
        if self._trainer.rank != 0:
            return PushReport(publish=publish)
        if announce is not None:
            announce(publish.version)
        return self._synced(publish)

    def close(self) -> None:
        """Let go of the store. What was published stays there. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
        if self._store is not None:
            self._store.close()
        self._publisher = self._store = None

    def _opened(self) -> Publisher:
        if self._publisher is None:
            if self._store is None:
                self._store, self._offer = self._place.open_store()
            self._publisher = Publisher(
                self._trainer,
                self._store,
                run=self._run,
                targets=self._offer.layouts(list(self._trainer.tensors().values())),
                timeout_s=self._publish_timeout_s,
            )
        return self._publisher

    def _synced(self, publish: PublishReport) -> PushReport:
        """Let the pool sync; where one of an earlier push has not ended it takes this version along, or this one follows it there."""
        assert self._store is not None  # noqa: S101 - it was opened to publish
        address = self._store.address()
        sync = _Sync(self._place, {"name": address.name, **dict(address.options)}, retry_s=self._sync_retry_s)
        sync.begin()
        if not self._is_sync_awaited:
            return PushReport(publish=publish)
        if not sync.wait(self._sync_timeout_s):
            problem = f"the engines were not at {publish.version} after {self._sync_timeout_s} s (sync_timeout_s); the sync goes on"
            _logger.warning(problem)
            return PushReport(publish=publish, problem=problem)
        if sync.error is not None:
            return PushReport(publish=publish, problem=str(sync.error), error=sync.error)
        return PushReport(publish=publish, sync=sync.report)


class _Sync:
    """One sync of the pool, in a thread of its own, so that a trainer need not wait for it."""

    def __init__(self, place: PoolPlace, address: Mapping[str, Any], *, retry_s: float) -> None:
        self.report: SyncReport | None = None
        self.error: RoseError | None = None
        self._ended = threading.Event()
        self._place, self._address, self._retry_s = place, address, retry_s
        self._asked_s = time.monotonic()

    def begin(self) -> None:
        threading.Thread(target=self._run, name="rose-sync", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended; ``False`` once ``timeout_s`` have passed since the pool was last asked."""
        while not self._ended.wait(max(0.0, self._asked_s + timeout_s - time.monotonic())):
            if time.monotonic() >= self._asked_s + timeout_s:
                return False
        return True

    def _run(self) -> None:
        try:
            self.report = self._asked()
        except RoseError as error:
            self.error = error
            _logger.warning("the pool could not sync its engines: %s", error)
        except Exception as error:  # noqa: BLE001 - the root of a thread
            self.error = TransferError(f"{type(error).__name__}: {error}")
            _logger.warning("the pool could not sync its engines", exc_info=error)
        finally:
            if self.report is not None:
                _log_errors(self.report)
            self._ended.set()

    def _asked(self) -> SyncReport:
        body = {"address": dict(self._address)}
        failing_since_s: float | None = None
        while True:
            self._asked_s = time.monotonic()
            report: SyncReport | None = None
            try:
                report = sync_report_from_plain(self._place.call("POST", "/v1/sync", body, timeout_s=float("inf")))
                if not _is_store_away(report):
                    return report
                error: Exception = next(iter(report.errors.values()))
            except ConfigError:
                raise
            except RoseError as failed:
                error = failed
            now_s = time.monotonic()
            failing_since_s = now_s if failing_since_s is None else failing_since_s
            if now_s + _REST_S > failing_since_s + self._retry_s:
                if report is not None:
                    return report
                raise error
            self._asked_s = now_s + _REST_S  # nobody is to give up in between
            _logger.warning("the pool could not sync its engines (%s); asking again", error)
            time.sleep(_REST_S)


def _is_with_nobody(report: SyncReport) -> bool:
    return bool(report.errors) and not (report.activations or report.unchanged or report.put_off)


def _is_store_away(report: SyncReport) -> bool:
    """Return whether all engines are without the version because none could reach the store, which may pass."""
    return _is_with_nobody(report) and all(isinstance(error, TransportError) for error in report.errors.values())


def _log_errors(report: SyncReport) -> None:
    for engine_id, error in report.errors.items():
        _logger.warning("engine %s did not take the new weights and gets no turns that need them: %s", engine_id, error)

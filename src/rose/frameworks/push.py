"""A trainer rank's way to the engines of a pool: publish, then let the pool bring its engines there.

Life cycle of one push:

1. [EVERY RANK] the first time: ask the pool where weights go and whom to cut for, open the store, make the publisher.
2. [EVERY RANK] publish this rank's share; returns once the version is visible.
3. [RANK 0] announce the version to the framework, where that was asked for: turns may return tokens of it as soon as one engine has it, which is
   before the next step ends.
4. [RANK 0] let the pool sync: engines stage while they serve, and activate. A sync that fails as a whole, or that brings the version to no engine because
   some cannot reach the store, is asked for again, for ``sync_retry_s``. The job's own engines are waited for, up to ``sync_timeout_s`` from the last time it was asked for, borrowed ones by nobody.

Invariants: all ranks push together, like a collective, though none runs inside; a sync that never ends, because the pool's host died, holds up no later one (the
pool itself runs one at a time); an engine that cannot take a version is reported and never an error of the push: the pool gives it no turns that ask for that version; engines are never said to have
a version that the store has lost.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import attrs

from rose.errors import ConfigError, RoseError, TransferError, TransportError
from rose.frameworks.place import PoolPlace
from rose.interfaces import Trainer, Transport
from rose.policies.weight_pull import PullReason
from rose.pool import SyncReport
from rose.pool.remote_pool import sync_report_from_plain
from rose.pool.store_offer import StoreOffer
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import POINTER, version_of_key
from rose.types import EngineId, WeightVersion

_logger = logging.getLogger(__name__)
_REST_S = 1.0
STORE_ADVICE = "the store of weights must be at an address that the engines' machines reach: see [transport] listen in the pool's job.toml"


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
        """Return whether some engines could not take the version, and no other is known to have it, to be on the way to it, or to do without it."""
        if self.sync is None:
            return self.error is not None
        does_without = any(plan.reason is PullReason.STILL_ADMISSIBLE for plan in self.sync.put_off.values())
        return bool(self.sync.errors) and not (_has_reached_any(self.sync) or does_without)

    @property
    def is_store_away(self) -> bool:
        """Return whether no engine took the version and that they could not reach the store is all that is known; ``STORE_ADVICE`` is what to look at then."""
        return (
            self.is_with_nobody
            and bool(self.errors)
            and all(isinstance(error, TransportError) for error in self.errors.values())
        )

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
        sync_retry_s: How long after it first failed as a whole, or reached no engine for want of the store, a sync is asked for again, since no engine may have
            the version before; a pool that does not let this process in is asked once.
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
        self._store: _OpenStore | None = None
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
        """Let go of the store, and ask for no sync again. What was published stays there. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
        if self._store is not None:
            self._store.close()
        self._publisher = self._store = None

    def _opened(self) -> Publisher:
        if self._publisher is None:
            if self._store is None:
                transport, self._offer = self._place.open_store()
                self._store = _OpenStore(transport)
            self._publisher = Publisher(
                self._trainer,
                self._store.transport,
                run=self._run,
                targets=self._offer.layouts(list(self._trainer.tensors().values())),
                timeout_s=self._publish_timeout_s,
            )
        return self._publisher

    def _synced(self, publish: PublishReport) -> PushReport:
        """Let the pool sync; where one of an earlier push has not ended it takes this version along, or this one follows it there."""
        assert self._store is not None  # noqa: S101 - it was opened to publish
        sync = _Sync(self._place, self._store, publish.version, retry_s=self._sync_retry_s)
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


class _OpenStore:
    """A store that a push has open. Syncs outlive the push and ask no more of it then."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.closed = threading.Event()
        self._reading = threading.Lock()

    def newest(self) -> WeightVersion | None:
        """Return the version that it shows.

        Raises:
            TransferError: It was closed, or shows something else.
            TransportError: It cannot be reached.
        """
        with self._reading:
            if self.closed.is_set():
                message = "the push was closed"
                raise TransferError(message)
            key = self.transport.read_pointer(POINTER)
        return None if key is None else version_of_key(key)

    def close(self) -> None:
        """Close it, after what is being read."""
        self.closed.set()
        with self._reading:
            self.transport.close()


class _Sync:
    """One sync of the pool, in a thread of its own, so that a trainer need not wait for it."""

    def __init__(self, place: PoolPlace, store: _OpenStore, version: WeightVersion, *, retry_s: float) -> None:
        self.report: SyncReport | None = None
        self.error: RoseError | None = None
        self._ended = threading.Event()
        self._place, self._store, self._version, self._retry_s = place, store, version, retry_s
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
        failing_since_s: float | None = None
        errors: dict[EngineId, Exception] = {}
        while True:
            self._asked_s = time.monotonic()
            report: SyncReport | None = None
            failed: RoseError | None = None
            try:
                report = self._ask()
                errors |= report.errors
                why = _why_away(report)
            except (ConfigError, _VersionLostError):
                raise
            except RoseError as error:
                failed, why = error, str(error)
            if report is not None and not why:
                return _with_errors(report, errors)
            now_s = time.monotonic()
            if failing_since_s is None:
                failing_since_s = now_s
                _logger.warning(
                    "no engine is at %s yet (%s); asked for again for %g s", self._version, why, self._retry_s
                )
            self._asked_s = now_s + _REST_S  # nobody is to give up in between
            if now_s + _REST_S > failing_since_s + self._retry_s or self._store.closed.wait(_REST_S):
                if report is not None:
                    return _with_errors(report, errors)
                assert failed is not None  # noqa: S101 - one of the two is there
                raise failed

    def _ask(self) -> SyncReport:
        address = self._store.transport.address()
        body = {"address": {"name": address.name, **dict(address.options)}}
        report = sync_report_from_plain(self._place.call("POST", "/v1/sync", body, timeout_s=float("inf")))
        if report.unchanged and not report.activations:
            self._check_store()
        return report

    def _check_store(self) -> None:
        """Check that engines without an update have none because they are there: a store that lost all it had has none to offer either.

        Raises:
            TransferError: It no longer has the version.
            TransportError: It cannot be reached.
        """
        newest = self._store.newest()
        if newest is None or newest.run != self._version.run or newest.n < self._version.n:
            held = "nothing" if newest is None else newest
            message = (
                f"the store of weights has {held} where it had {self._version}: it was started anew, or another job uses it; "
                "start this job again, from its last checkpoint"
            )
            raise _VersionLostError(message)


class _VersionLostError(TransferError):
    """No repetition brings a version back that the store has lost."""


def _has_reached_any(report: SyncReport) -> bool:
    return bool(report.activations or report.unchanged)


def _with_errors(report: SyncReport, errors: Mapping[EngineId, Exception]) -> SyncReport:
    """Add what earlier asks told of engines that are not in this report: one that was lost is asked no more."""
    named = {*report.activations, *report.unchanged, *report.put_off}
    return attrs.evolve(
        report, errors={name: error for name, error in {**errors, **report.errors}.items() if name not in named}
    )


def _why_away(report: SyncReport) -> str:
    """Return, where no engine has the version, why one could not reach the store, which may pass; empty where that is not the reason."""
    away = (
        f"engine {engine_id}: {error}"
        for engine_id, error in report.errors.items()
        if isinstance(error, TransportError)
    )
    return "" if _has_reached_any(report) else next(away, "")


def _log_errors(report: SyncReport) -> None:
    for engine_id, error in report.errors.items():
        _logger.warning("engine %s did not take the new weights and gets no turns that need them: %s", engine_id, error)

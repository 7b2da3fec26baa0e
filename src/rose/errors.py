"""The exception tree of ROSE.

Every error that a run can meet derives from ``RoseError`` and also from the standard-library class that a
caller would expect, so that ``except ValueError`` works without importing ROSE. All of them pickle. A mistake in the
calling program, a wrong argument for instance, is a plain ``ValueError`` or ``TypeError``.

    RoseError
    ├── ConfigError (ValueError)               bad configuration or command-line input
    ├── BackendUnavailableError (ImportError)  a backend's own library is missing; names the extra to install
    ├── EngineError (RuntimeError)
    │   ├── EngineLostError (ConnectionError)  the engine process or server is gone
    │   ├── EngineBusyError                    the engine is alive and refuses more work now (429, 503)
    │   │   └── EngineLeaseError (LeaseError)  it refuses work under this lease, which is over or was never its own
    │   ├── RequestRefusedError (ValueError)   the engine can never serve this request (too long, unknown token ids)
    │   ├── EngineFencedError                  the engine's weights are not known; it must not serve
    │   └── EngineUnsupportedError (NotImplementedError)  this kind of engine, or its server as it was started, cannot do this at all
    ├── TransferError (RuntimeError)
    │   ├── LayoutMismatchError (ValueError)   unknown, missing, misshapen or mistyped tensors; names them
    │   ├── CorruptUpdateError (ValueError)    a checksum or a length does not match
    │   ├── VersionConflictError               a compare-and-set lost, or an update's base is not the engine's version
    │   └── BlobNotFoundError (KeyError)       a key is not (or no longer) in the transport
    ├── TransportError (ConnectionError)       the transport itself failed
    ├── LeaseError (RuntimeError)              a lease is unknown, expired, revoked, or carries an old fencing token
    ├── LedgerError (RuntimeError)             a ledger is missing, of another version, or torn for too long
    ├── TurnFailedError (RuntimeError)         a turn could not be finished; carries the hops that were tried
    │   ├── VersionUnavailableError            no engine holds weights that the turn may run on; says whether to ask again
    │   ├── StaleTrajectoryError               the trajectory's oldest token is too old for its bound; drop it
    │   ├── GroupDroppedError                  turns of the group failed again and again; drop it
    │   └── NoEngineError                      no engine could take a turn for too long
    ├── DeadlineExceededError (TimeoutError)   a wait ran over its ``timeout_s``
    ├── TrainerError (RuntimeError)            a trainer process failed
    ├── EnvironmentFailedError (RuntimeError)  an environment, or the process that runs it, failed
    └── SimulationError (RuntimeError)         a simulated system is stuck, or a part of it failed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rose.types import Hop, TurnResult


class RoseError(Exception):
    """Base class of every error that a run can meet; mistakes of the calling program are plain standard errors.

    Attributes:
        partial: On an error that ended a turn: the tokens that the turn had by then, as an aborted result. ``None`` elsewhere.
    """

    partial: TurnResult | None = None


class ConfigError(RoseError, ValueError):
    """Configuration or command-line input is wrong; the message says what, where and what to do."""


class BackendUnavailableError(RoseError, ImportError):
    """A backend was asked for whose library is not installed; the message names the extra to install."""


class EngineError(RoseError, RuntimeError):
    """A serving engine failed."""


class EngineLostError(EngineError, ConnectionError):
    """The engine's process or server is gone; its requests will not come back."""


class EngineBusyError(EngineError):
    """The engine is alive but takes no more work at the moment."""


class RequestRefusedError(EngineError, ValueError):
    """The engine can never serve this request; another attempt on a like engine would fail as well."""


class EngineFencedError(EngineError):
    """The engine's weights are not known to be any published version, so it must not serve rollouts."""


class EngineUnsupportedError(EngineError, NotImplementedError):
    """The engine cannot do what was asked, now or later; the message says what could."""


class TransferError(RoseError, RuntimeError):
    """Publishing or receiving weights failed."""


class LayoutMismatchError(TransferError, ValueError):
    """Tensors are unknown, missing, misshapen or mistyped; the message names them."""


class CorruptUpdateError(TransferError, ValueError):
    """Bytes that arrived are not the bytes that were sent, or do not give the promised state."""


class VersionConflictError(TransferError):
    """A compare-and-set lost, or an update does not start from the version that the engine holds."""


class BlobNotFoundError(TransferError, KeyError):
    """A key is not, or no longer, in the transport."""

    def __str__(self) -> str:
        """Return the plain message (``KeyError`` would quote it)."""
        return str(self.args[0]) if self.args else ""


class TransportError(RoseError, ConnectionError):
    """The transport itself could not be reached or broke its contract."""


class LeaseError(RoseError, RuntimeError):
    """A lease is unknown, expired or revoked, or carries an old fencing token."""


class EngineLeaseError(EngineBusyError, LeaseError):
    """An engine on a borrowed device was asked under no lease, one that is over, or an outdated fencing token."""


class LedgerError(RoseError, RuntimeError):
    """A ledger file is missing, of another version, or could not be read untorn."""


class TurnFailedError(RoseError, RuntimeError):
    """A turn could not be finished on any engine.

    Attributes:
        hops: Where the turn was tried, in order, with the reason each try ended.
    """

    def __init__(self, message: str, hops: tuple[Hop, ...] = ()) -> None:
        super().__init__(message, hops)
        self.hops = hops

    def __str__(self) -> str:
        """Return the message without the hops."""
        return str(self.args[0])


class VersionUnavailableError(TurnFailedError):
    """No engine holds weights that the turn may run on.

    Attributes:
        is_retryable: Whether the version may still come; false once every engine is past it.
    """

    is_retryable: bool = False


class StaleTrajectoryError(TurnFailedError):
    """The pool's weights are further from the trajectory's oldest token than the turn allows; only dropping it helps."""


class GroupDroppedError(TurnFailedError):
    """Turns of the group were refused again and again, so this one was not tried; the message has the last refusal."""


class NoEngineError(TurnFailedError):
    """No engine could take turns for ``PoolConfig.no_engine_timeout_s``; the message names the engines and their states."""


class DeadlineExceededError(RoseError, TimeoutError):
    """A wait ran over its ``timeout_s``."""


class TrainerError(RoseError, RuntimeError):
    """A trainer process failed or answered with an error."""


class EnvironmentFailedError(RoseError, RuntimeError):
    """An environment raised, or the process that runs it is gone."""


class SimulationError(RoseError, RuntimeError):
    """A simulated system is stuck, or a part of it failed; says when and which tasks wait."""

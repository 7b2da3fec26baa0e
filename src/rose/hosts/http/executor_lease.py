"""The lease of an executor's devices: whose fencing token counts now, by their ledgers.

A fencing token says which lease, and can be guessed; so a job's bearer token is good for that job's leases only.

Invariants: the ledger is read for every question, so a lease that the lender ended counts nowhere from then on; what cannot be
read allows no new work, and ends none that runs (the rollout engine itself takes no step meanwhile); an engine over several
devices works under the leases of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rose.coserving.ledger import Ledger
from rose.coserving.lent_device import LentDevice
from rose.errors import ConfigError, EngineBusyError, EngineLeaseError, LedgerError
from rose.interfaces.clock import Clock
from rose.policies.admission import AdmissionConfig, HoldReason, check_lease
from rose.policies.lending import job_key
from rose.types import JobId

Tokens = tuple[int, ...]


class LeaseGate:
    """Compares fencing tokens with the ledgers' budget sections.

    Args:
        ledgers: One a device, in the order in which clients give their tokens.
        clock: The devices' clock.
    """

    def __init__(self, ledgers: Sequence[Ledger], clock: Clock) -> None:
        if not ledgers:
            message = "an executor needs the ledger of its device"
            raise ConfigError(message)
        self._ledgers = tuple(ledgers)
        self._clock = clock

    def require(self, header: str | None, job: JobId | None = None) -> Tokens:
        """Return the tokens that a request carries, if they are those of the leases in force.

        Args:
            header: The tokens, as the request has them.
            job: Whose request it is, where it can be only the holder's; ``None``: anybody's who knows the tokens.

        Raises:
            EngineLeaseError: They are missing, outdated or not granted, or a lease is over or another job's.
            EngineBusyError: A ledger cannot be read.
        """
        tokens = _tokens_in(header)
        problem = self._problem(tokens, job)
        if problem is HoldReason.UNREADABLE:
            message = "the device's ledger cannot be read, so no lease can be told; try again"
            raise EngineBusyError(message)
        if problem is not None:
            message = (
                f"fencing token {header or '(none)'} is not that of a lease in force ({problem.value}): the lease is over, was "
                "never granted, or is another job's; ask the lender for another"
            )
            raise EngineLeaseError(message)
        return tokens

    def is_over(self, tokens: Tokens) -> bool:
        """Return whether work that began under these tokens has to end."""
        return self._problem(tokens, None) not in (None, HoldReason.UNREADABLE)

    def _problem(self, tokens: Tokens, job: JobId | None) -> HoldReason | None:
        if len(tokens) != len(self._ledgers):
            return HoldReason.LEASE_MISSING
        try:
            budgets = [ledger.budget() for ledger in self._ledgers]
        except LedgerError:
            return HoldReason.UNREADABLE
        now_s = self._clock.now()
        for token, budget in zip(tokens, budgets, strict=True):
            is_others = job is not None and budget.holder not in (0, job_key(job))
            if token != budget.fencing_token or is_others:
                return HoldReason.LEASE_FENCED
            problem = check_lease(budget, token, now_s)
            if problem is not None:
                return problem
        return None


class HoldWatch:
    """Estimates for how long rollouts are held, and why, by putting the engine's own question to the ledgers now and then.

    Args:
        ledgers: One a device.
        clock: The devices' clock.
        admission: The settings that the rollout engine runs under.
    """

    def __init__(self, ledgers: Sequence[Ledger], clock: Clock, admission: AdmissionConfig) -> None:
        self._ledgers = tuple(ledgers)
        self._clock = clock
        self._lent = [LentDevice(ledger, admission, None) for ledger in ledgers]
        self._last_s: float | None = None
        self._held_s = dict.fromkeys(HoldReason, 0.0)

    @property
    def held_s(self) -> Mapping[HoldReason, float]:
        """Seconds of the device's clock in which the rollout engine had requests and could not step, by reason."""
        return self._held_s

    def look(self) -> None:
        """Take a sample: the time since the one before counts as held if the gate is closed now."""
        now_s = self._clock.now()
        last_s, self._last_s = self._last_s, now_s
        reason = self._reason(now_s)
        if reason is not None and last_s is not None:
            self._held_s[reason] += max(0.0, now_s - last_s)

    def _reason(self, now_s: float) -> HoldReason | None:
        try:
            states = [ledger.rollout() for ledger in self._ledgers]
        except LedgerError:
            return HoldReason.UNREADABLE
        if not any(state.num_running + state.num_waiting for state in states):
            return None
        rulings = (lent.ruling(state.step_s, now_s) for lent, state in zip(self._lent, states, strict=True))
        return next((ruling for ruling in rulings if ruling is not None), None)


def _tokens_in(header: str | None) -> Tokens:
    if not header:
        return ()
    try:
        return tuple(int(token) for token in header.split(","))
    except ValueError:
        message = f"a fencing token is a whole number (several with commas between them), not {header!r}"
        raise EngineLeaseError(message) from None

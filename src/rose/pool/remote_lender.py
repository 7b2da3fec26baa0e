"""A lender behind its HTTP service, for a ``Borrower``. Needs the extra ``http`` (aiohttp)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from rose.clocks import MonotonicClock
from rose.errors import BackendUnavailableError, ConfigError, EngineError, LeaseError, TransportError
from rose.interfaces import Clock
from rose.policies.lending import Ask, Lease
from rose.types import DeviceId, JobId, LeaseId

if TYPE_CHECKING:
    from rose.backends.remote.client import HttpClient

_WAIT_S = 20.0


class RemoteLender:
    """A ``rose.pool.lease_source.LeaseSource`` over HTTP. Use it on one event loop; ``close`` it there.

    Leases that were granted or renewed last, as the service says, from before the request was sent: never longer than they are. What
    is told after a long wait counts from the answer.

    Args:
        url: Of the service, ``http://host:port``.
        token: The job's bearer token.
        clock: The borrower's clock; it must run as fast as the lender's.
        timeout_s: How long an answer may take.
    """

    def __init__(
        self, url: str, *, token: str | None = None, clock: Clock | None = None, timeout_s: float = 5.0
    ) -> None:
        self._client = _client(url, token, timeout_s)
        self._clock = clock or MonotonicClock()
        self._timeout_s = timeout_s

    async def ask(self, ask: Ask) -> Sequence[Lease]:
        """Ask for more devices; see ``rose.coserving.lender.Lender.grant``.

        Raises:
            ConfigError: The token is none, or not this job's.
            TransportError: The lender cannot be reached.
        """
        body: dict[str, Any] = {"num_devices": ask.num_devices, "is_whole": ask.is_whole}
        if ask.model is not None:
            body["model"] = ask.model
        if ask.devices is not None:
            body["devices"] = sorted(ask.devices)
        if ask.but:
            body["but"] = sorted(ask.but)
        return await self._leases("grant", ask.job, body)

    async def renew(self, job: JobId, lease_ids: Sequence[LeaseId]) -> Sequence[Lease]:
        """Extend leases; returns those of them that are in force.

        Raises:
            TransportError: The lender cannot be reached.
        """
        try:
            return await self._leases("renew", job, {"lease_ids": list(lease_ids)})
        except LeaseError:  # all are over
            return ()

    async def release(self, job: JobId, lease_ids: Sequence[LeaseId]) -> None:
        """Give devices back.

        Raises:
            TransportError: The lender cannot be reached.
        """
        await self._leases("release", job, {"lease_ids": list(lease_ids)})

    async def changed(self, job: JobId, known: Mapping[LeaseId, bool]) -> Sequence[Lease]:
        """Wait until a lease of the job ends or is asked back, for some time at most; return all in force.

        Raises:
            TransportError: The lender cannot be reached.
        """
        return await self._leases("changed", job, {"known": dict(known), "wait_s": _WAIT_S}, _WAIT_S)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.close()

    async def __aenter__(self) -> Self:
        """Return the lender."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self.close()

    async def _leases(self, what: str, job: JobId, body: Mapping[str, Any], wait_s: float = 0.0) -> list[Lease]:
        sent_s = self._clock.now()
        try:
            answer = await self._client.call(
                "POST", f"/v1/{what}", {"job": job, **body}, timeout_s=self._timeout_s + wait_s
            )
            base_s = self._clock.now() if wait_s else sent_s
            return [lease_from_wire(data, base_s) for data in answer["leases"]]
        except (LeaseError, ConfigError):
            raise
        except (EngineError, KeyError, TypeError, ValueError) as error:
            message = f"the lender at {self._client.url} does not do its work: {error}"
            raise TransportError(message) from error


def lease_from_wire(data: Mapping[str, Any], now_s: float) -> Lease:
    """Return the lease that the service rendered, with times on a clock that shows ``now_s``."""
    return Lease(
        lease_id=LeaseId(data["lease_id"]),
        job=JobId(data["job"]),
        device_id=DeviceId(data["device_id"]),
        fencing_token=int(data["fencing_token"]),
        expires_s=now_s + float(data["expires_in_s"]),
        granted_s=now_s - float(data["held_s"]) if math.isfinite(data["held_s"]) else now_s,
        model=data["model"],
        is_revoking=bool(data["is_revoking"]),
    )


def _client(url: str, token: str | None, timeout_s: float) -> HttpClient:
    try:
        from rose.backends.remote.client import HttpClient  # noqa: PLC0415 - loads aiohttp
    except ImportError as error:
        message = "a lender over HTTP needs aiohttp: pip install 'rose-rl[http]'"
        raise BackendUnavailableError(message) from error
    return HttpClient(url, token=token, timeout_s=timeout_s, unreachable=TransportError)

"""The lender as a service: ``rose lend``.

Life cycle:

1. [LENDER] binds its socket, locks and opens its state, writes the ledgers as the state has them.
2. [JOB] asks (``/v1/grant``), renews (``/v1/renew``), waits for changes (``/v1/changed``), gives back (``/v1/release``).
3. [SERVING] takes back (``/v1/revoke``), throws and lifts kill switches (``/v1/switch``), sets the mode (``/v1/mode``).
4. [LENDER] ends what is over, restores fair shares and repairs ledgers, several times a second.
5. [LENDER] ends; leases go on until they run out or the next lender takes them over.

Invariants: a job touches its own leases only; a call about a lease that is over is answered 403 ``fenced``; times cross as durations,
since a job on another machine has another monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, TypeVar

import attrs
from aiohttp import web
from attrs import validators as v
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose import config as configuration
from rose.coserving.lender import Switch, SwitchKind
from rose.coserving.lender_devices import kv_use_fraction
from rose.errors import ConfigError, LedgerError
from rose.hosts.http.auth import Access, Caller, caller, require
from rose.hosts.http.errors import error_response
from rose.hosts.http.lender_config import LenderConfig, OpenLender, open_lender
from rose.hosts.http.server import Health, bind, make_app, parse_place, read_json, served
from rose.policies.admission import Mode
from rose.policies.lending import Lease
from rose.pool.lease_source import LocalLender
from rose.types import DeviceId, JobId, LeaseId

_logger = logging.getLogger(__name__)
_MOST_WAIT_S = 60.0
_MOST_ENTRIES = 10_000
_LATE_TICKS = 20
_LARGEST = (1 << 63) - 1

Body = TypeVar("Body")


@attrs.frozen(kw_only=True)
class GrantBody:
    """An ask for devices; ``job`` is needed only where the token is no job's."""

    num_devices: int = attrs.field(validator=[v.ge(0), v.le(1 << 20)])
    job: str | None = None
    model: str | None = None
    devices: tuple[str, ...] | None = None
    but: tuple[str, ...] = ()
    is_whole: bool = False


@attrs.frozen(kw_only=True)
class LeasesBody:
    """Leases to renew or release."""

    lease_ids: tuple[str, ...]
    job: str | None = None


@attrs.frozen(kw_only=True)
class ChangedBody:
    """What a job knows of its leases (asked back or not), and how long to wait for news."""

    known: dict[str, bool] = attrs.field(factory=dict)
    wait_s: float = attrs.field(default=20.0, validator=[v.ge(0), v.le(_MOST_WAIT_S)])
    job: str | None = None


@attrs.frozen(kw_only=True)
class RevokeBody:
    """Take devices back: one, or all."""

    device_id: str | None = None
    grace_s: float = attrs.field(default=0.0, validator=v.ge(0))
    reason: str = ""


@attrs.frozen(kw_only=True)
class SwitchBody:
    """Throw or lift a kill switch. Lifting ``all`` lifts that one; ``every`` lifts all that are thrown."""

    is_thrown: bool
    kind: SwitchKind = SwitchKind.ALL
    name: str = ""
    every: bool = False
    reason: str = ""

    def __attrs_post_init__(self) -> None:
        """Check that a device or a model is named just where one is meant."""
        if (self.kind is SwitchKind.ALL) is bool(self.name):
            message = f"name must {'be empty' if self.name else 'not be empty'} for kind {self.kind.value!r}"
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class ModeBody:
    """How much is lent."""

    mode: Mode


class LenderService:
    """Handlers of the lender's HTTP interface. Everything happens on one event loop, so every call is atomic."""

    def __init__(self, opened: OpenLender, config: LenderConfig) -> None:
        """Serve an open lender."""
        self._opened = opened
        self._lender = opened.lender
        self._config = config
        self._source = LocalLender(opened.lender)
        self._problem = ""
        self._ticked_s = asyncio.get_running_loop().time()

    def app(self) -> web.Application:
        """Return the application."""
        registry = CollectorRegistry()
        registry.register(LenderCollector(self._opened))
        routes = [
            web.post("/v1/grant", self.grant),
            web.post("/v1/renew", self.renew),
            web.post("/v1/release", self.release),
            web.post("/v1/changed", self.changed),
            web.get("/v1/leases", self.leases),
            web.get("/v1/devices", self.devices),
            web.get("/v1/audit", self.audit),
            web.post("/v1/revoke", self.revoke),
            web.post("/v1/switch", self.switch),
            web.post("/v1/mode", self.mode),
        ]
        return make_app(routes, tokens=self._config.tokens, health=self.health, registry=registry)

    async def tick(self) -> None:
        """Do for ever what has to be done now and then. What cannot be written is told by ``/health`` and tried again."""
        while True:
            try:
                self._opened.follow()
                self._lender.tick()
                self._problem = ""
            except LedgerError as error:
                if str(error) != self._problem:
                    _logger.warning("%s", error)
                self._problem = str(error)
            self._ticked_s = asyncio.get_running_loop().time()
            await asyncio.sleep(self._config.tick_s)

    def health(self) -> Health:
        """Tell whether the lender does its work."""
        late_s = asyncio.get_running_loop().time() - self._ticked_s
        reasons = [self._problem] if self._problem else []
        if late_s > max(1.0, _LATE_TICKS * self._config.tick_s):
            reasons.append(f"no lease was looked at for {late_s:.1f} s")
        return Health(reasons=reasons, details={"num_leases": len(self._lender.leases)})

    # Of jobs.

    async def grant(self, request: web.Request) -> web.Response:
        """``POST /v1/grant``: lend more devices, as many as there are for the job."""
        body, job = await self._of_job(request, GrantBody)
        devices = None if body.devices is None else [DeviceId(name) for name in body.devices]
        leases = self._lender.grant(
            job,
            body.num_devices,
            model=body.model,
            devices=devices,
            but=[DeviceId(name) for name in body.but],
            is_whole=body.is_whole,
        )
        return self._answer(leases)

    async def renew(self, request: web.Request) -> web.Response:
        """``POST /v1/renew``: extend leases; those that are not in the answer are over. 403 ``fenced`` when all are."""
        body, job = await self._of_job(request, LeasesBody)
        leases = self._lender.renew_all(self._own(job, body.lease_ids))
        if body.lease_ids and not leases:
            names = ", ".join(body.lease_ids)
            message = f"job {job!r} holds no lease {names} (never granted, expired or revoked); ask for a new one"
            return error_response(403, "fenced", message)
        return self._answer(leases)

    async def release(self, request: web.Request) -> web.Response:
        """``POST /v1/release``: give devices back; leases that are over are left alone."""
        body, job = await self._of_job(request, LeasesBody)
        return self._answer(self._lender.release(self._own(job, body.lease_ids)))

    async def changed(self, request: web.Request) -> web.Response:
        """``POST /v1/changed``: wait until a lease of the job ends or is asked back; answer with all in force."""
        body, job = await self._of_job(request, ChangedBody)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(body.wait_s):
                await self._source.changed(job, {LeaseId(name): flag for name, flag in body.known.items()})
        return self._answer(self._held(job))

    async def leases(self, _: web.Request) -> web.Response:
        """``GET /v1/leases``: a job's own; for others all."""
        who = caller()
        return self._answer(self._held(JobId(who.name)) if who.access is Access.JOB else self._lender.leases)

    # To look at.

    async def devices(self, _: web.Request) -> web.Response:
        """``GET /v1/devices``: use, leases, and what stops lending."""
        require(Access.READ)
        now_s = self._opened.clock.now()
        shown = []
        for use in self._lender.uses():
            ledger = self._opened.ledgers[use.device_id]
            reason = "" if use.lease is not None else ledger.problem or self._lender.closed_reason(use.device_id)
            shown.append(
                {
                    "device_id": use.device_id,
                    "has_ledger": ledger.is_there,
                    "kv_use_fraction": kv_use_fraction(ledger, now_s, self._lender.config.stale_after_s),
                    "is_lendable": use.lease is None and not reason,
                    "closed_because": reason,
                    "models": None if use.models is None else sorted(use.models),
                    "fencing_token": use.last_token,
                    "lease": None if use.lease is None else self._to_wire(use.lease),
                }
            )
        return web.json_response(
            {"mode": self._lender.mode.value, "switches": _switches(self._lender.switches), "devices": shown}
        )

    async def audit(self, request: web.Request) -> web.Response:
        """``GET /v1/audit?after=SEQ&limit=N``: entries of the audit ledger, and what each job's leases came to."""
        require(Access.READ)
        try:
            after = min(_LARGEST, max(0, int(request.query.get("after", "0"))))
            limit = min(_MOST_ENTRIES, max(0, int(request.query.get("limit", "1000"))))
        except ValueError as error:
            message = f"after and limit are whole numbers: {error}"
            raise ConfigError(message) from error
        entries = [attrs.asdict(entry) for entry in self._opened.store.entries(after, limit)]
        return web.json_response({"entries": entries, "totals": self._opened.store.totals()})

    # Of serving.

    async def revoke(self, request: web.Request) -> web.Response:
        """``POST /v1/revoke``: take devices back, with or without grace."""
        who = _serving(require())
        body = await _body(request, RevokeBody)
        device_id = None if body.device_id is None else DeviceId(body.device_id)
        return self._answer(self._lender.revoke(device_id, grace_s=body.grace_s, who=who, reason=body.reason))

    async def switch(self, request: web.Request) -> web.Response:
        """``POST /v1/switch``: throw or lift a kill switch; answers with the leases that it ended."""
        who = _serving(require())
        body = await _body(request, SwitchBody)
        switch = Switch(body.kind, body.name)
        ended: Sequence[Lease] = ()
        if body.is_thrown:
            ended = self._lender.stop(switch, who=who, reason=body.reason)
        else:
            self._lender.allow(None if body.every else switch, who=who, reason=body.reason)
        shown = [self._to_wire(lease) for lease in ended]
        return web.json_response({"switches": _switches(self._lender.switches), "leases": shown})

    async def mode(self, request: web.Request) -> web.Response:
        """``POST /v1/mode``: set how much is lent, on all devices."""
        who = _serving(require())
        body = await _body(request, ModeBody)
        self._lender.set_mode(body.mode, who=who)
        return web.json_response({"mode": self._lender.mode.value})

    # Within.

    async def _of_job(self, request: web.Request, kind: type[Body]) -> tuple[Body, JobId]:
        """Return a job's request and the job.

        Raises:
            ConfigError: The body is not as it must be, or names no job where it must.
            HTTPForbidden: It names another's job.
        """
        who = require(Access.JOB)
        body = await _body(request, kind)
        named: str | None = getattr(body, "job", None)
        if who.access is Access.JOB and named not in (None, who.name):
            message = f"the token is that of job {who.name!r}, not of {named!r}"
            raise web.HTTPForbidden(reason=message)
        job = who.name if who.access is Access.JOB else named
        if not job:
            message = f"{request.path} needs the name of the job: its token, or the key job"
            raise ConfigError(message)
        return body, JobId(job)

    def _held(self, job: JobId) -> list[Lease]:
        return [lease for lease in self._lender.leases if lease.job == job]

    def _own(self, job: JobId, lease_ids: Iterable[str]) -> list[LeaseId]:
        own = {lease.lease_id for lease in self._held(job)}
        return [LeaseId(name) for name in lease_ids if name in own]

    def _answer(self, leases: Iterable[Lease]) -> web.Response:
        return web.json_response({"leases": [self._to_wire(lease) for lease in leases]})

    def _to_wire(self, lease: Lease) -> dict[str, Any]:
        now_s = self._opened.clock.now()
        data = attrs.asdict(lease, filter=attrs.filters.exclude("expires_s", "granted_s"))
        return data | {"expires_in_s": lease.expires_s - now_s, "held_s": now_s - lease.granted_s}


class LenderCollector(Collector):
    """What ``/metrics`` shows of a lender, read when it is asked for."""

    def __init__(self, opened: OpenLender) -> None:
        self._opened = opened

    def collect(self) -> Iterable[Metric]:
        """Give the present figures."""
        lender = self._opened.lender
        uses = lender.uses()
        states = GaugeMetricFamily("rose_lender_devices", "Devices by state", labels=["state"])
        states.add_metric(["lent"], sum(use.lease is not None for use in uses))
        states.add_metric(["free"], sum(use.lease is None and use.kv_use_fraction is not None for use in uses))
        states.add_metric(["closed"], sum(use.lease is None and use.kv_use_fraction is None for use in uses))
        yield states
        held = GaugeMetricFamily("rose_lender_leases", "Leases in force", labels=["job"])
        for job in sorted({lease.job for lease in lender.leases}):
            held.add_metric([job], sum(lease.job == job for lease in lender.leases))
        yield held
        yield GaugeMetricFamily("rose_lender_switches", "Kill switches that are thrown", value=len(lender.switches))
        totals = self._opened.store.totals()
        for key, name, text in _TOTALS:
            family = CounterMetricFamily(name, text, labels=["tenant", "job"])
            for row in totals:
                family.add_metric([row["tenant"], row["job"]], row[key])
            yield family


_TOTALS = (
    ("lent_s", "rose_lender_lent_seconds", "Device seconds of leases that ended"),
    ("rollout_s", "rose_lender_rollout_seconds", "Device time of rollouts under leases that ended"),
    ("num_broken", "rose_lender_broken_requests", "Serving requests beyond their SLO during leases that ended"),
    ("debt_s", "rose_lender_debt_seconds", "Seconds beyond the SLO during leases that ended"),
    ("delay_s", "rose_lender_delay_seconds", "Waits of serving for rollout turns during leases that ended"),
)


@contextlib.asynccontextmanager
async def serve_lender(config: LenderConfig) -> AsyncIterator[str]:
    """Run the lender that ``config`` describes as a service; gives its URL.

    Raises:
        ConfigError: The state, the place or the tokens cannot be used.
        TransportError: The port is taken.
    """
    listener = bind(parse_place(config.listen), config.tokens)
    with contextlib.closing(listener), open_lender(config) as opened:
        service = LenderService(opened, config)
        async with served(service.app(), listener) as url, asyncio.TaskGroup() as group:
            ticking = group.create_task(service.tick())
            try:
                yield url
            finally:
                ticking.cancel()


async def _body(request: web.Request, kind: type[Body]) -> Body:
    data = await read_json(request)
    if not isinstance(data, dict):
        message = f"{request.path} takes a JSON object"
        raise ConfigError(message)
    return configuration.load(kind, data)


def _serving(who: Caller) -> str:
    return f"serving {who.name}".rstrip()


def _switches(switches: Iterable[Switch]) -> list[dict[str, str]]:
    return sorted(
        ({"kind": each.kind.value, "name": each.name} for each in switches), key=lambda row: tuple(row.values())
    )

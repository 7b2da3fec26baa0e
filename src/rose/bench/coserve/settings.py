"""What ``rose bench coserve --live`` is asked to measure; virtual time has its own settings beside its code."""

from __future__ import annotations

import attrs
from attrs import validators as v

from rose import checks
from rose.bench.coserve.workloads import CoserveWorkload
from rose.bench.coserve.world import DeviceSetup
from rose.observe.latency import Slo

LIVE_POLICIES = ("alone", "ungated", "paper", "slo", "quiet")
"""Policies that two engines on one device can run, in the order of the runs."""

VIRTUAL_ONLY = {
    "static": "a device is not split live",
    "priority": "one engine holds one model live",
}
"""Policies that are left to virtual time, and why."""

PROBES = ("ledger", "reclaim", "yield", "drain", "watchdog", "attached")
"""Single figures taken beside the policies, in this order."""


@attrs.frozen(kw_only=True)
class LiveSettings:
    """One live measurement.

    Attributes:
        workload: Serving's load.
        policies: Of ``LIVE_POLICIES``; ``alone`` is always among them. Empty: probes only.
        num_runs: Valid runs of each policy.
        num_retries: How often a disturbed run is repeated.
        duration_s: Modelled seconds of a run.
        probes: Of ``PROBES``.
        k: Real seconds of one modelled second; ``None``: what this machine needs.
        setup: The device and both engines.
        seed: Of arrivals and trajectories.
    """

    workload: CoserveWorkload = attrs.field(factory=lambda: CoserveWorkload(name="burst", rate_rps=5.53))
    policies: tuple[str, ...] = attrs.field(default=LIVE_POLICIES, validator=v.deep_iterable(v.in_(LIVE_POLICIES)))
    num_runs: int = attrs.field(default=3, validator=checks.integer(1))
    num_retries: int = attrs.field(default=2, validator=checks.integer(0))
    duration_s: float = attrs.field(default=24.0, validator=checks.number(above=0))
    probes: tuple[str, ...] = attrs.field(default=PROBES, validator=v.deep_iterable(v.in_(PROBES)))
    k: float | None = attrs.field(default=None, validator=checks.optional(checks.number(above=0)))
    setup: DeviceSetup = attrs.field(factory=DeviceSetup)
    seed: int = attrs.field(default=0, validator=checks.integer(0))

    @property
    def slo(self) -> Slo:
        """Return serving's promise in milliseconds."""
        return Slo(ttft_ms=self.setup.slo.ttft_s * 1e3, tpot_ms=self.setup.slo.tpot_s * 1e3)

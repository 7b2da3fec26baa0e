"""What an executor shows to Prometheus, read from the ledgers and the service at each scrape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.coserving.ledger import Ledger
from rose.errors import LedgerError
from rose.hosts.http.executor_lease import HoldWatch
from rose.hosts.http.executor_rollout import RolloutSupervisor
from rose.hosts.http.executor_service import RolloutService
from rose.hosts.http.executor_serving import ServingProcess
from rose.interfaces.clock import Clock

_DEVICE_GAUGES: Mapping[str, tuple[str, str]] = {
    "usage.busy_fraction": (
        "rose_device_busy_fraction",
        "Share of the window in which the device computed for serving",
    ),
    "usage.rollout_fraction": (
        "rose_device_rollout_fraction",
        "Share of the window in which the device computed for rollouts",
    ),
    "usage.window_s": ("rose_device_window_seconds", "Length of the window of the fractions"),
    "usage.kv_mean_fraction": ("rose_serving_kv_mean_fraction", "Serving's mean KV use over the window"),
    "usage.kv_peak_fraction": ("rose_serving_kv_peak_fraction", "Serving's largest KV use over the window"),
    "serving.num_running": ("rose_serving_requests_running", "Requests in serving's batch"),
    "serving.num_waiting": ("rose_serving_requests_waiting", "Serving's requests without a first token"),
    "serving.kv_used_bytes": ("rose_serving_kv_used_bytes", "KV memory that serving uses"),
    "serving.kv_pool_bytes": ("rose_device_kv_pool_bytes", "KV memory of the device"),
    "rollout.num_running": ("rose_rollout_requests_running", "Rollout requests in the batch"),
    "rollout.num_waiting": ("rose_rollout_requests_waiting", "Rollout requests that wait"),
    "rollout.kv_used_bytes": ("rose_rollout_kv_used_bytes", "KV memory that rollouts use"),
    "rollout.kv_budget_bytes": ("rose_rollout_kv_budget_bytes", "KV memory that rollouts may use"),
    "budget.fencing_token": ("rose_lease_fencing_token", "Fencing token of the device's latest lease"),
}
_DEVICE_COUNTERS: Mapping[str, tuple[str, str]] = {
    "rollout.num_evicted": ("rose_rollout_evictions", "Rollout requests that the engine evicted since its start"),
    "rollout.busy_s": ("rose_rollout_device_seconds", "Device time that rollouts took since the engine's start"),
    "rollout.num_tokens": (
        "rose_rollout_device_tokens",
        "Tokens that the rollout engine computed since its start, prompts included",
    ),
    "usage.num_requests": ("rose_serving_requests", "Serving's requests that got their first token since its start"),
    "usage.num_broken": ("rose_serving_requests_broken", "Of these, beyond their TTFT or mean TPOT budget"),
    "usage.num_gaps_broken": ("rose_serving_gaps_broken", "Gaps between two tokens beyond the TPOT budget"),
    "usage.debt_s": ("rose_serving_slo_debt_seconds", "Seconds beyond the budgets, summed"),
    "usage.delay_s": ("rose_serving_delay_seconds", "Seconds that serving waited for rollout turns"),
}


class ExecutorCollector(Collector):
    """Reads everything when it is asked.

    Args:
        ledgers: One a device; a device is labelled by its ledger's name, by the whole path where two have the same.
        clock: The devices' clock.
        serving: The serving engine's watch.
        supervisor: The rollout engine's.
        service: What counts requests and tokens.
        holds: What samples why rollouts are held.
    """

    def __init__(
        self,
        ledgers: Sequence[Ledger],
        clock: Clock,
        *,
        serving: ServingProcess,
        supervisor: RolloutSupervisor,
        service: RolloutService,
        holds: HoldWatch,
    ) -> None:
        names = [Path(ledger.path).stem for ledger in ledgers]
        self._ledgers = {
            name if names.count(name) == 1 else ledger.path: ledger for name, ledger in zip(names, ledgers, strict=True)
        }
        self._clock = clock
        self._serving = serving
        self._supervisor = supervisor
        self._service = service
        self._holds = holds

    def collect(self) -> Iterator[Metric]:
        """Give every metric as it is now."""
        yield from self._of_service()
        sections = {device: ledger.as_dict() for device, ledger in self._ledgers.items()}
        for kind, table in ((GaugeMetricFamily, _DEVICE_GAUGES), (CounterMetricFamily, _DEVICE_COUNTERS)):
            for path, (name, text) in table.items():
                section, _, field = path.partition(".")
                metric = kind(name, text, labels=["device"])
                for device, values in sections.items():
                    value = values[section].get(field)
                    if value is not None:
                        metric.add_metric([device], value)
                yield metric
        yield from self._of_leases()

    def _of_service(self) -> Iterator[Metric]:
        service, supervisor = self._service, self._supervisor
        yield CounterMetricFamily("rose_rollout_tokens", "Rollout tokens handed out", service.num_tokens)
        requests = CounterMetricFamily(
            "rose_rollout_requests", "Requests for tokens by how they ended", labels=["outcome"]
        )
        for outcome, count in service.outcomes.items():
            requests.add_metric([outcome], count)
        yield requests
        yield CounterMetricFamily(
            "rose_lease_refusals", "Requests without the token of a lease in force", service.num_fenced
        )
        yield GaugeMetricFamily("rose_rollout_streams", "Requests for tokens under way", service.num_streams)
        held = CounterMetricFamily(
            "rose_rollout_held_seconds",
            "Device-clock seconds that rollouts waited for the gate, by sampling",
            labels=["reason"],
        )
        for reason, held_s in self._holds.held_s.items():
            held.add_metric([reason.value], held_s)
        yield held
        yield GaugeMetricFamily("rose_rollout_engine_up", "1 while the rollout engine runs", supervisor.problem is None)
        yield CounterMetricFamily("rose_rollout_engine_starts", "Starts of the rollout engine", supervisor.num_starts)
        reading = supervisor.reading
        if reading is not None:
            yield GaugeMetricFamily("rose_rollout_kv_used_tokens", "Engine tokens in KV memory", reading.kv_used_tokens)
            yield GaugeMetricFamily("rose_rollout_kv_total_tokens", "Engine tokens that fit", reading.kv_total_tokens)
        age_s = self._serving.heartbeat_age_s
        yield GaugeMetricFamily("rose_serving_heartbeat_age_seconds", "Since serving was last heard of", age_s)
        yield CounterMetricFamily(
            "rose_serving_starts", "Serving engines that this executor started", self._serving.num_starts
        )

    def _of_leases(self) -> Iterator[Metric]:
        granted = GaugeMetricFamily("rose_lease_granted", "1 while the device is lent", labels=["device"])
        rest = GaugeMetricFamily(
            "rose_lease_remaining_seconds", "Until the lease ends if nobody renews it", labels=["device"]
        )
        mode = GaugeMetricFamily("rose_lease_mode", "1 for the mode in force", labels=["device", "mode"])
        now_s = self._clock.now()
        for device, ledger in self._ledgers.items():
            try:
                budget = ledger.budget()
            except LedgerError:
                continue
            left_s = max(0.0, budget.expires_s - now_s) if budget.is_granted else 0.0
            granted.add_metric([device], float(left_s > 0))
            rest.add_metric([device], left_s if math.isfinite(left_s) else math.inf)
            mode.add_metric([device, budget.mode.value], 1.0)
        yield from (granted, rest, mode)

"""What a pool shows to Prometheus, read when it is asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rose.hosts.http.pool_direct import DirectHost
from rose.pool import EngineState, RolloutPool, WaitReason


class PoolCollector(Collector):
    """Reads a pool and the sessions of its direct path."""

    def __init__(self, pool: RolloutPool, direct: DirectHost) -> None:
        self._pool = pool
        self._direct = direct

    def collect(self) -> Iterable[Metric]:
        """Give the present figures."""
        snapshot = self._pool.snapshot()
        yield GaugeMetricFamily("rose_pool_turns_live", "Turns that are not settled", value=snapshot.num_live_turns)
        waiting = GaugeMetricFamily("rose_pool_turns_waiting", "Turns that wait, by what for", labels=["reason"])
        for reason in WaitReason:
            waiting.add_metric([reason.name.lower()], snapshot.waiting.get(reason, 0))
        yield waiting
        engines = GaugeMetricFamily("rose_pool_engines", "Engines by kind and state", labels=["kind", "state"])
        counts = Counter((engine.kind.value, engine.state) for engine in snapshot.engines)
        for kind in sorted({kind for kind, _ in counts}):
            for state in EngineState:
                engines.add_metric([kind, state.value], counts[kind, state])
        yield engines
        if snapshot.version is not None:
            version = GaugeMetricFamily("rose_pool_weight_version", "The pool's weight version", labels=["run"])
            version.add_metric([snapshot.version.run], snapshot.version.n)
            yield version
        yield GaugeMetricFamily(
            "rose_pool_client_sessions", "Client processes on the direct path", value=len(self._direct.sessions)
        )
        yield from self._accounts()

    def _accounts(self) -> Iterable[Metric]:
        labels = ["engine", "kind"]
        tokens = CounterMetricFamily("rose_pool_tokens", "Tokens kept", labels=labels)
        busy = CounterMetricFamily("rose_pool_engine_busy_seconds", "Time with a turn of the pool", labels=labels)
        attempts = CounterMetricFamily("rose_pool_attempts", "Attempts that ended, by how", labels=[*labels, "ended"])
        for engine_id, account in self._pool.accounts().items():
            tokens.add_metric([engine_id, account.kind.value], account.num_tokens)
            busy.add_metric([engine_id, account.kind.value], account.busy_s)
            for ended, count in account.num_ended.items():
                attempts.add_metric([engine_id, account.kind.value, ended.value], count)
        yield from (tokens, busy, attempts)

"""The co-serving bench in virtual time: loads x seeds x policies, each policy on the very same arrivals.

One task is one load and one seed; it runs every policy, serving alone and a dedicated rollout engine among them. Tasks are spread over processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from attrs import validators as v

from rose.bench.coserve.figures import Sample, summarise_policy
from rose.bench.coserve.workloads import CoserveWorkload
from rose.bench.coserve.world import CoservePolicy, DeviceSetup, longest_step_s, run_case
from rose.errors import ConfigError
from rose.simulation.processes import ProcessDied, run_parallel

ALL_POLICIES = tuple(policy for policy in CoservePolicy if policy is not CoservePolicy.DEDICATED)
_REFERENCES = (CoservePolicy.ALONE, CoservePolicy.DEDICATED)


@attrs.frozen(kw_only=True)
class VirtualSettings:
    """What is run.

    Attributes:
        workloads: The loads.
        policies: Which policies; ``alone`` is always among them.
        num_seeds, first_seed: Runs of each load: other windows of a trace, other generated loads, other trajectories.
        duration_s: Counted, of each run; the warm-up comes before it.
        setup: The device.
        num_processes: Tasks at a time.
    """

    workloads: tuple[CoserveWorkload, ...] = attrs.field(validator=v.min_len(1))
    policies: tuple[CoservePolicy, ...] = ALL_POLICIES
    num_seeds: int = attrs.field(default=10, validator=v.ge(1))
    first_seed: int = attrs.field(default=0, validator=v.ge(0))
    duration_s: float = attrs.field(default=300.0, validator=v.gt(0))
    setup: DeviceSetup = attrs.field(factory=DeviceSetup)
    num_processes: int = attrs.field(default=1, validator=v.ge(1))


@attrs.frozen
class _Task:
    setup: DeviceSetup
    workload: CoserveWorkload
    seed: int
    duration_s: float
    policies: tuple[CoservePolicy, ...]


_Result = dict[CoservePolicy, Sample] | str


def run_virtual(settings: VirtualSettings, on_progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run everything and return the report.

    Args:
        settings: What to run.
        on_progress: Hears of each run that is done.

    Returns:
        ``{"kind": "virtual", "workloads": {name: report}}``, each report with ``policies`` by name; with the first
        load's ``policies``, ``yield_p99_ms`` and ``step_bound_ms`` at the top as well. Everything is JSON.

    Raises:
        ConfigError: A trace, a profile or the SLO is of no use, or a process died.
    """
    policies = tuple(dict.fromkeys((*_REFERENCES, *settings.policies)))
    seeds = range(settings.first_seed, settings.first_seed + settings.num_seeds)
    tasks = [
        _Task(settings.setup, workload, seed, settings.duration_s, policies)
        for workload in settings.workloads
        for seed in seeds
    ]
    results: dict[int, dict[CoservePolicy, Sample]] = {}
    for index, result in run_parallel(_run_task, tasks, settings.num_processes):
        task = tasks[index]
        if isinstance(result, ProcessDied | str):
            message = f"co-serving bench, load {task.workload.name}, seed {task.seed}: {result}"
            raise ConfigError(message)
        results[index] = result
        on_progress(f"{task.workload.name}, seed {task.seed}: {len(results)} of {len(tasks)} done")
    reports = {}
    for place, workload in enumerate(settings.workloads):
        runs = [results[place * len(seeds) + i] for i in range(len(seeds))]
        reports[workload.name] = _report(settings, runs)
    first = next(iter(reports.values()))
    return {
        "kind": "virtual",
        "num_seeds": settings.num_seeds,
        "duration_s": settings.duration_s,
        "step_bound_ms": longest_step_s(settings.setup) * 1e3,
        "yield_p99_ms": first["policies"].get("slo", {}).get("yield_p99_ms"),
        "policies": first["policies"],
        "workloads": reports,
    }


def _run_task(task: _Task) -> _Result:
    try:
        arrivals = task.workload.arrivals(
            duration_s=task.setup.warm_up_s + task.duration_s, seed=task.seed, serving_profile=task.setup.serving
        )
        return {
            policy: Sample.of(run_case(task.setup, policy, arrivals, duration_s=task.duration_s, seed=task.seed))
            for policy in task.policies
        }
    except ConfigError as error:
        return str(error)


def _report(settings: VirtualSettings, runs: Sequence[Mapping[CoservePolicy, Sample]]) -> dict[str, Any]:
    slo = settings.setup.slo
    alone, dedicated = ([run[reference] for run in runs] for reference in _REFERENCES)
    policies: dict[str, dict[str, Any]] = {}
    for policy in runs[0]:
        if policy is not CoservePolicy.DEDICATED:
            policies[policy.value] = summarise_policy([run[policy] for run in runs], alone, dedicated, slo)
    base = policies[CoservePolicy.ALONE.value]
    for name, figures in policies.items():
        figures["inflation"] = {
            key: figures[f"{key}_ms"] / base[f"{key}_ms"] - 1
            for key in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
            if figures[f"{key}_ms"] is not None and base[f"{key}_ms"]
        }
        figures["added_violations_fraction"] = figures["violations_fraction"] - base["violations_fraction"]
        figures["itl_tokens_added_over_slo"] = figures["itl_tokens_over_slo"] - base["itl_tokens_over_slo"]
        if name == CoservePolicy.PRIORITY.value:
            figures["note"] = "rollouts of serving's own model in its batch; not comparable in rollout tokens"
    hours = sum(sample.rest.duration_s for sample in alone) / 3600
    return {
        "rate_rps": sum(len(sample.ttft_s) for sample in alone) / (hours * 3600),
        "dedicated_net_tokens": sum(sample.rest.net_tokens for sample in dedicated),
        "slo": {"ttft_ms": slo.ttft_s * 1e3, "tpot_ms": slo.tpot_s * 1e3},
        "policies": policies,
    }

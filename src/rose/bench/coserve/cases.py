"""Named loads of the co-serving bench. Traces are files of the user's; their places are arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rose.bench.coserve.workloads import CoserveWorkload
from rose.errors import ConfigError

AZURE_FILE = "azure2023_conv.csv.gz"
SERVEGEN_FILE = "servegen_r1_24h_4rps.csv.gz"
_BUSIEST_S = 3600.0
_DEVICE_LOAD = 0.4


def standard_workloads(traces: str | Path | None) -> Mapping[str, CoserveWorkload]:
    """Return the loads by name: generated ones, and with a folder of traces those that replay its files.

    ``servegen`` takes the busiest hour and thins it to what one device serves: 40 % of its capacity for such requests, some 2 a second, since
    answers of some 1,500 tokens keep a batch of a hundred requests in flight.
    """
    loads = {
        "burst": CoserveWorkload(name="burst", rate_rps=5.53),
        "burst-40": CoserveWorkload(name="burst-40", load_fraction=0.4),
        "burst-80": CoserveWorkload(name="burst-80", load_fraction=0.8),
    }
    if traces is None:
        return loads
    azure, servegen = str(Path(traces) / AZURE_FILE), str(Path(traces) / SERVEGEN_FILE)
    loads |= {
        "azure": CoserveWorkload(name="azure", trace=azure),
        "azure-third": CoserveWorkload(name="azure-third", trace=azure, rate_fraction=1 / 3),
        "azure-80": CoserveWorkload(name="azure-80", trace=azure, load_fraction=0.8),
        "servegen": CoserveWorkload(name="servegen", trace=servegen, busiest_s=_BUSIEST_S, load_fraction=_DEVICE_LOAD),
    }
    return loads


def workload_named(name: str, traces: str | Path | None) -> CoserveWorkload:
    """Return a standard load by name, or one that replays a trace file as it is.

    Raises:
        ConfigError: Neither is of that name.
    """
    loads = standard_workloads(traces)
    if name in loads:
        return loads[name]
    if Path(name).is_file():
        return CoserveWorkload(name=Path(name).name, trace=name)
    message = (
        f"no load {name!r}: neither a trace file nor one of {', '.join(loads)}"
        f"{'' if traces else ' (give the folder of traces for more)'}"
    )
    raise ConfigError(message)

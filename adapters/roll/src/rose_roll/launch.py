"""One name for all ranks of a cluster, new for every launch of a job."""

from __future__ import annotations

import uuid
from typing import Any

import ray


def launch_name(worker: Any, purpose: str) -> str:
    """Return the name; every rank of the worker's cluster gets the same, whoever asks first makes it.

    ROLL's storage actor ends with the job, so the next launch finds nothing there.
    """
    key = f"rose-run/{worker.cluster_name}/{worker.master_addr}:{worker.master_port}/{purpose}"
    ray.get(worker.shared_storage.put_if_absent.remote(key, f"roll-{uuid.uuid4().hex[:16]}"))
    name: str = ray.get(worker.shared_storage.get.remote(key))
    return name

"""What ROSE adds to vLLM's ``EngineCore``: each function here becomes a method that drivers call by name.

They run on the engine's own thread between two steps, so they see the scheduler at rest. All but ``rose_init`` and
``rose_activate`` are reads or small writes; none waits.
"""

from __future__ import annotations

from typing import Any

from rose.backends.vllm import device_sleep, gpu_process
from rose.backends.vllm.lifeline import tie_to_parent
from rose.backends.wire import answers, unwrap
from rose.errors import EngineError, EngineFencedError


@answers
def rose_init(self: Any, version: str | None) -> dict[str, int]:
    """Prepare weight updates, label the weights, hand the KV tensors to the scheduler; returns the engine's limits.

    Called once, by the driver that started the engine; an engine process does not outlive that driver.
    """
    tie_to_parent()
    if not _is_host(self):
        gpu_process.claim(self)
    for answer in self.collective_rpc("rose_init", args=(version,)):
        unwrap(answer)
    if version is not None:
        self.set_weight_version(version)
    _attach_pages(self)
    keep_following = getattr(self.scheduler, "keep_following", None)
    if keep_following is not None:
        keep_following(self)
    config = self.vllm_config
    return {
        "vocab_size": config.model_config.get_vocab_size(),
        "max_model_len": config.model_config.max_model_len,
    }


def _attach_pages(core: Any) -> None:
    """Let blocks that the scheduler holds back give their memory up: pages of the host, or the whole pool of a GPU."""
    attach = getattr(core.scheduler, "attach_kv_pages", None)
    if attach is None:
        return
    if not _is_host(core):
        if device_sleep.has_sleep_mode(core) and core.scheduler.holds_blocks_itself:
            device_sleep.attach_kv(core)
        return
    num_blocks = int(core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)
    layouts = [unwrap(answer) for answer in core.collective_rpc("rose_attach_pages", args=(num_blocks,))]
    if not any(layout["num_bytes"] for layout in layouts):
        return  # laid out in a way that has no pages of its own

    def hold_pages(runs: Any) -> int:
        return sum(unwrap(answer) for answer in core.collective_rpc("rose_hold_pages", args=(runs,)))

    attach(hold_pages, group_blocks=max(layout["group_blocks"] for layout in layouts))


@answers
def rose_snapshot(self: Any) -> dict[str, Any]:
    """Return the engine's load; ``kv_*`` are engine tokens."""
    scheduler = self.scheduler
    if hasattr(scheduler, "rose_snapshot"):
        load = dict(scheduler.rose_snapshot())
    else:
        pool = scheduler.kv_cache_manager.block_pool
        num_running, num_waiting = scheduler.get_request_counts()
        total = (pool.num_gpu_blocks - 1) * scheduler.block_size
        free = pool.get_num_free_blocks() * scheduler.block_size
        load = {
            "num_running": num_running,
            "num_waiting": num_waiting,
            "kv_used_tokens": total - free,
            "kv_total_tokens": total,
        }
    return load | {"version": self.get_weight_version(), "is_paused": self.is_scheduler_paused()}


@answers
def rose_stage(self: Any, update: dict[str, Any]) -> None:
    """Begin to fetch an update, on threads of the workers."""
    for answer in self.collective_rpc("rose_stage", args=(update,)):
        unwrap(answer)


@answers
def rose_poll_stage(self: Any) -> bool:
    """Return whether every worker has staged its part; raises what one of them failed with."""
    are_done = [unwrap(answer) for answer in self.collective_rpc("rose_poll_stage")]
    return all(are_done)


@answers
def rose_activate(self: Any, is_verified: bool) -> dict[str, Any]:  # noqa: FBT001 - called by name over the wire
    """Write the staged update, label the weights, drop every cached prefix. The engine must be paused.

    Raises:
        EngineFencedError: Workers are at different versions, or one failed while it wrote.
    """
    results = self.collective_rpc("rose_activate", args=(is_verified,))
    failures = [answer for answer in results if "error" in answer]
    if failures and len(failures) < len(results):
        message = f"{len(failures)} of {len(results)} workers did not activate: {failures[0]['error'][1]}"
        raise EngineFencedError(message)
    activations = [unwrap(answer) for answer in results]
    self.set_weight_version(activations[0]["version"])
    self.reset_prefix_cache(reset_running_requests=True)
    merged = dict(activations[0])
    merged["stage_s"] = max(activation["stage_s"] for activation in activations)
    merged["fetched_bytes"] = sum(activation["fetched_bytes"] for activation in activations)
    return merged


@answers
def rose_is_fenced(self: Any) -> bool:
    """Return whether some worker's weights are unknown, or workers are at different versions."""
    states = [unwrap(answer) for answer in self.collective_rpc("rose_state")]
    return any(is_fenced for _, is_fenced in states) or len({version for version, _ in states}) > 1


@answers
def rose_target_layout(self: Any) -> dict[str, Any]:
    """Return the ``TargetLayout`` of the engine as plain data."""
    layouts = [unwrap(answer) for answer in self.collective_rpc("rose_target_layout")]
    return {**layouts[0], "ranks": [layout["ranks"][0] for layout in layouts]}


@answers
def rose_weight_checksums(self: Any) -> dict[str, str]:
    """Return the digest of every checkpoint tensor that one worker holds whole."""
    merged: dict[str, str] = {}
    for answer in self.collective_rpc("rose_weight_checksums"):
        merged |= unwrap(answer)
    return merged


@answers
def rose_weight_sums(self: Any) -> list[Any]:
    """Return what each worker says of the boxes that it holds."""
    return [unwrap(answer) for answer in self.collective_rpc("rose_weight_sums")]


@answers
def rose_set_kv_budget(self: Any, num_tokens: int) -> int:
    """Set the KV budget; returns the one in force."""
    return int(_scheduler_method(self, "set_kv_budget_tokens")(num_tokens))


@answers
def rose_sleep(self: Any, keeps_weights: bool, park_directory: str | None) -> dict[str, int]:  # noqa: FBT001 - as above
    """End all requests as evicted and give KV pages and weights back; returns how many, and how many bytes.

    Raises:
        EngineError: The weights could not be parked; the engine is awake.
        EngineFencedError: They left and did not come back; the engine takes no request.
        BackendUnavailableError: vLLM's own sleep mode is needed and was not enabled.
    """
    fall_asleep, is_host = _scheduler_method(self, "fall_asleep"), _is_host(self)
    if not is_host:
        device_sleep.check(self)
    num_evicted = fall_asleep()
    try:
        if is_host:
            parked = self.collective_rpc("rose_park", args=(keeps_weights, park_directory))
            weights_bytes = sum(unwrap(answer) for answer in parked)
        else:
            weights_bytes = device_sleep.sleep(self, keeps_weights=keeps_weights)
    except EngineFencedError:
        raise
    except EngineError:
        if is_host:
            self.collective_rpc("rose_unpark")  # those that had parked
        self.scheduler.wake()
        raise
    given_bytes = self.scheduler.rose_snapshot()["kv_given_bytes"]
    return {"num_evicted": num_evicted, "released_bytes": weights_bytes + given_bytes}


@answers
def rose_wake(self: Any) -> dict[str, Any]:
    """Bring weights and KV memory back; says how many bytes, and whether the weights are stale (and fenced)."""
    if _is_host(self):
        restored = [unwrap(answer) for answer in self.collective_rpc("rose_unpark")]
    else:
        restored = [device_sleep.wake(self)]
    is_stale = None in restored
    if is_stale:
        for answer in self.collective_rpc("rose_fence"):
            unwrap(answer)
    _scheduler_method(self, "wake")()
    return {"restored_bytes": sum(num_bytes or 0 for num_bytes in restored), "is_stale": is_stale}


def _is_host(core: Any) -> bool:
    return str(core.vllm_config.device_config.device_type) == "cpu"


@answers
def rose_set_gate(self: Any, is_open: bool) -> None:  # noqa: FBT001 - called by name over the wire
    """Open or close the step gate."""
    _scheduler_method(self, "set_gate")(is_open)


@answers
def rose_reset_prefix_cache(self: Any) -> bool:
    """Drop every cached prefix that no running request uses; returns whether the cache is empty now."""
    return bool(self.reset_prefix_cache(reset_running_requests=False))


@answers
def rose_pacing_report(self: Any, since_s: float) -> dict[str, Any]:
    """Return how well the engine's steps since then kept to the paced device's times."""
    return dict(_scheduler_method(self, "pacing_report")(since_s))


@answers
def rose_step_log(self: Any, since_s: float) -> list[Any]:
    """Return the log of device turns since then."""
    return list(_scheduler_method(self, "step_log")(since_s))


def _scheduler_method(core: Any, name: str) -> Any:
    method = getattr(core.scheduler, name, None)
    if method is None:
        message = f"{type(core.scheduler).__name__} has no {name}; start the engine with ROSE's scheduler"
        raise EngineError(message)
    return method


UTILITIES = (
    rose_init,
    rose_snapshot,
    rose_stage,
    rose_poll_stage,
    rose_activate,
    rose_is_fenced,
    rose_target_layout,
    rose_weight_checksums,
    rose_weight_sums,
    rose_set_kv_budget,
    rose_sleep,
    rose_wake,
    rose_set_gate,
    rose_reset_prefix_cache,
    rose_pacing_report,
    rose_step_log,
)

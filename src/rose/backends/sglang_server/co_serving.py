"""Puts co-serving into SGLang: hooks on its scheduler, settings from the environment.

``ROSE_SGLANG_SETTINGS`` has the table of ``rose.backends.step_settings.RoseSettings`` as JSON; without it the engine has no
shared device, and the commands of ``rose.backends.sglang_server.commands`` still work.

Invariants: a server whose settings are wrong, or whose SGLang is another than the hooks were made for, does not start; a
scheduler that cannot be stepped from here (overlapped, pipelined, disaggregated) is left alone and takes no command.
"""

from __future__ import annotations

import json
import logging
import os
import pkgutil
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from rose.backends.sglang_server import hooks
from rose.backends.sglang_server.agreement import Ranks
from rose.backends.sglang_server.commands import ATTRIBUTE, Commands, plain, snapshot
from rose.backends.sglang_server.endings import SglangCalls
from rose.backends.sglang_server.inputs import InputWatch
from rose.backends.sglang_server.kv_reserve import held_tokens
from rose.backends.sglang_server.stepping import IDLE_POLL_S, Stepping
from rose.backends.step_settings import RoseSettings, read_settings
from rose.errors import ConfigError

SETTINGS = "ROSE_SGLANG_SETTINGS"
MADE_FOR = "0.5.23"

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_PARTS = "sglang.srt.managers.scheduler_components"


_logger = logging.getLogger(__name__)
_watches: dict[int, InputWatch] = {}
"""By receiver of requests, which takes no attribute; there is one in a process."""


class HookRegistry(Protocol):
    """SGLang's registry of hooks."""

    def register(self, target: str, hook: Callable[..., Any], hook_type: Any) -> None:
        """Have ``hook`` called around ``target``."""


def install(registry: HookRegistry) -> None:
    """Register the hooks in this process; called by the plug-in, in every process of the server.

    Raises:
        SystemExit: The settings are wrong; a plain error would only be logged.
    """
    from sglang.srt.plugins.hook_registry import HookType  # noqa: PLC0415 - only inside SGLang

    try:
        settings = settings_from(os.environ.get(SETTINGS))
    except ConfigError as error:
        message = f"ROSE: {error}"
        raise SystemExit(message) from error
    for target, hook in _HOOKS.items():
        registry.register(target, hook, HookType.AROUND)
    registry.register(f"{_SCHEDULER}.__init__", partial(_attach, settings), HookType.AROUND)


def settings_from(text: str | None) -> RoseSettings:
    """Return the settings in a JSON text; the default ones for ``None``.

    Raises:
        ConfigError: Not JSON, or wrong settings.
    """
    try:
        table = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        message = f"{SETTINGS} is not JSON: {error}"
        raise ConfigError(message) from error
    if not isinstance(table, dict):
        message = f"{SETTINGS} is a JSON object, not {type(table).__name__}"
        raise ConfigError(message)
    settings = read_settings(table)
    if settings.device is not None and settings.device.kind == "cuda" and settings.device.memory != "sleep":
        message = "rose.device.memory: SGLang's KV pool gives no pages back while it runs; set it to 'sleep'"
        raise ConfigError(message)
    if settings.admission.role.value != "both" and settings.role == "serving":
        message = f"rose.admission.role = {settings.admission.role.value!r}: a disaggregated SGLang is not co-served"
        raise ConfigError(message)
    return settings


def why_not(scheduler: Any, parallel: Any) -> str | None:
    """Return why a scheduler cannot be stepped from here, ``None`` where it can."""
    if scheduler.enable_overlap:
        return "it overlaps steps; start the server with --disable-overlap-schedule"
    if parallel.pp_size > 1:
        return "it is a pipeline; start the server with --pp-size 1"
    if parallel.attn_dp_enabled:
        return "its attention is data-parallel; start the server without --enable-dp-attention"
    if scheduler.disaggregation_mode.value != "null":
        return "it is disaggregated"
    return None


def has_targets(targets: Iterable[str]) -> bool:
    """Tell whether this SGLang has all functions that are to be hooked.

    Raises:
        SystemExit: It has not, and there are settings, so that the server is meant to share a device.
    """
    for target in (*targets, *_HOOKS):
        try:
            pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            message = f"ROSE: this SGLang has no {target} ({error}); the hooks are made for sglang {MADE_FOR}"
            if SETTINGS in os.environ:
                raise SystemExit(message) from error
            _logger.warning("%s; none is set", message)
            return False
    return True


def _attach(settings: RoseSettings, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Build SGLang's scheduler, then give it its stepping and its commands."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT  # noqa: PLC0415 - only inside SGLang
    from sglang.srt.mem_cache.common import (  # noqa: PLC0415 - only inside SGLang
        evict_from_tree_cache,
        release_kv_cache,
    )
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - only inside SGLang

    original(scheduler, *args, **kwargs)
    problem = why_not(scheduler, get_parallel())
    if problem is None:
        receiver = scheduler.request_receiver
        stepping = Stepping(
            scheduler,
            settings,
            ranks=Ranks(get_parallel().tp_group),
            calls=SglangCalls(abort_reason=FINISH_ABORT, release_kv=release_kv_cache, make_room=evict_from_tree_cache),
            read_inputs=partial(type(receiver)._pull_raw_reqs.__wrapped__, receiver),  # noqa: SLF001 - what we hooked
        )
        _watches[id(receiver)] = stepping.inputs
        setattr(scheduler, ATTRIBUTE, Commands(stepping, partial(_set_cap, scheduler)))
        scheduler.rose_stepping = stepping
    elif settings.device is not None:
        message = f"this SGLang scheduler cannot share a device: {problem}"
        raise ConfigError(message)


def _set_cap(scheduler: Any, num_requests: int) -> int:
    from sglang.srt.runtime_context import get_context, get_parallel  # noqa: PLC0415 - only inside SGLang

    most = scheduler.max_running_requests // get_parallel().pp_size
    if not 1 <= num_requests <= most:
        message = f"num_requests is from 1 to {most}, not {num_requests}"
        raise ValueError(message)
    get_context().override(source="rose", pp_max_micro_batch_size=num_requests)
    scheduler.running_batch.batch_is_full = False
    return num_requests


def _stepping(scheduler: Any) -> Stepping | None:
    return getattr(scheduler, "rose_stepping", None)


def _next_batch(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    stepping = _stepping(scheduler)
    if stepping is None:
        return original(scheduler, *args, **kwargs)
    return stepping.next_batch(partial(original, scheduler))


def _run_batch(original: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    if (stepping := _stepping(scheduler)) is not None:
        stepping.before_step(batch)
    return original(scheduler, batch, *args, **kwargs)


def _process_batch_result(original: Any, scheduler: Any, batch: Any, result: Any) -> Any:
    stepping = _stepping(scheduler)
    if stepping is None:
        return original(scheduler, batch, result)
    stepping.before_results()
    original(scheduler, batch, result)
    stepping.after_step(batch)
    return None


def _pull(original: Any, receiver: Any) -> Any:
    watch = _watches.get(id(receiver))
    return original(receiver) if watch is None else watch.pull()


def _handle_generate(original: Any, scheduler: Any, recv_req: Any) -> Any:
    if (stepping := _stepping(scheduler)) is None:
        return original(scheduler, recv_req)
    return stepping.take(recv_req, partial(original, scheduler))


def _abort(original: Any, scheduler: Any, recv_req: Any) -> Any:
    if (stepping := _stepping(scheduler)) is None:
        return original(scheduler, recv_req)
    return stepping.abort(recv_req, partial(original, scheduler))


def _sleep_on_idle(original: Any, scheduler: Any) -> Any:
    """Wait for messages on the rank that reads them; the others wait for that rank anyway."""
    stepping = _stepping(scheduler)
    if stepping is None or not stepping.has_device:
        return original(scheduler)
    return stepping.inputs.wait(IDLE_POLL_S)


def _paused(original: Any, scheduler: Any) -> None:
    original(scheduler)
    if (stepping := _stepping(scheduler)) is not None:
        stepping.while_paused()


def _flush(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Drop the cache; slots held back do not stand in the way, and are held again afterwards."""
    is_flushed = bool(original(scheduler, *args, **kwargs))
    if is_flushed and (stepping := _stepping(scheduler)) is not None:
        stepping.reserve.retake()
    return is_flushed


def _held_tokens(original: Any, observer: Any) -> int:
    return int(original(observer)) + held_tokens(observer.token_to_kv_pool_allocator)


def _get_state(original: Any, scheduler: Any, recv_req: Any) -> Any:
    """Tell of the steps in ``/server_info``, which is a server's heartbeat: its load as of now, paused or not, and its weights."""
    answer = original(scheduler, recv_req)
    if (stepping := _stepping(scheduler)) is not None:
        weights = hooks.weights_state(scheduler)
        answer.internal_state["rose"] = {"rose_snapshot": plain(snapshot(stepping)), "weights": weights}
    return answer


_HOOKS: dict[str, Callable[..., Any]] = {
    f"{_SCHEDULER}.get_next_batch_to_run": _next_batch,
    f"{_SCHEDULER}.run_batch": _run_batch,
    f"{_SCHEDULER}.process_batch_result": _process_batch_result,
    f"{_SCHEDULER}.handle_generate_request": _handle_generate,
    f"{_SCHEDULER}.abort_request": _abort,
    f"{_SCHEDULER}.maybe_sleep_on_idle": _sleep_on_idle,
    f"{_SCHEDULER}._record_scheduler_state_for_paused_engine": _paused,
    f"{_SCHEDULER}.flush_cache": _flush,
    f"{_SCHEDULER}.get_internal_state": _get_state,
    f"{_PARTS}.request_receiver.SchedulerRequestReceiver._pull_raw_reqs": _pull,
    f"{_PARTS}.pool_stats_observer.SchedulerPoolStatsObserver.session_held_tokens": _held_tokens,
}

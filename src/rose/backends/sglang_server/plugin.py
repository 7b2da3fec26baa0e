"""ROSE's SGLang plugin (entry point ``sglang.srt.plugins``), loaded in every process of every SGLang server of the environment.

Most of those have nothing to do with ROSE, so registering adds only: weight commands and errors that do not end the engine. Cached
prefixes are parted by the weights that made them from the first weight update on.
"""

from __future__ import annotations

import os

from rose.backends.sglang_server import containment, hooks, seeds
from rose.backends.sglang_server.lifeline import LAUNCHER, tie_to_launcher

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"


def register() -> None:
    """Register everything, once a process. Silent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only in SGLang's processes

    around = {
        f"{_UPDATER}.check_weights": hooks.answer_command,
        f"{_SCHEDULER}._add_request_to_queue": hooks.key_request,
        f"{_WORKER}.deserialize_own_rank": containment.read_payload,
        **{f"{_UPDATER}.{name}": containment.contain(name) for name in containment.CONTAINED},
        f"{_UPDATER}.release_memory_occupation": containment.release_memory,
        f"{_UPDATER}.resume_memory_occupation": containment.resume_memory,
        f"{_CONTROL}.release_memory_occupation": containment.tell_refusal,
        f"{_CONTROL}.resume_memory_occupation": containment.tell_refusal,
    }
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    seeds.install(HookRegistry)
    mark = os.environ.get(LAUNCHER)
    if mark:
        tie_to_launcher(mark)

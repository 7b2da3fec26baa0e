"""ROSE's SGLang plugin (entry point ``sglang.srt.plugins``), loaded in every process of every SGLang server of the environment.

Most of those have nothing to do with ROSE, so registering adds only: commands, errors that do not end the engine, and a step loop that can be held.
Cached prefixes are parted by the weights that made them from the first weight update on; steps are held once the engine is told to share a device.
"""

from __future__ import annotations

from rose.backends.sglang_server import co_serving, containment, hooks, seeds

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"


def register() -> None:
    """Register everything, once a process, or nothing where this SGLang is another than the hooks were made for."""
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
    if not co_serving.has_targets(around):
        return
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    seeds.install(HookRegistry)
    co_serving.install(HookRegistry)

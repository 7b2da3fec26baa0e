"""Where ROSE meets SGLang's scheduler: the hooks that carry weight commands, contain errors and part cached prefixes.

Each function here is around one of SGLang's own (``HookType.AROUND``: the original comes first) and runs on every rank alike, in the
rank's own loop. ``plugin`` has the table of what is around what.

Weight commands travel as the ``action`` of ``/weights_checker``: a text of any length, answered by a text, on all ranks, at
once whether the engine is paused or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose.backends.sglang_server import commands, prefixes
from rose.backends.sglang_server.rank import RankModel, RankWeights
from rose.backends.sglang_server.weights import EngineWeights, Gather
from rose.backends.sglang_server.wire import COMMAND_PREFIX, REFUSAL_QUESTION, Answer

REFUSAL_ATTRIBUTE = "rose_memory_refusal"
"""Of SGLang's scheduler: why the last memory call was refused."""

_ATTRIBUTE = "rose_weights"
_LOST = "rose_weights_lost"
_logger = logging.getLogger(__name__)


class SchedulerLoop:
    """A scheduler as weight commands see it.

    Args:
        scheduler: SGLang's, of this rank.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.generation = 0

    def label(self, version: str) -> None:
        """Let the tokens from now on be of this version."""
        self._scheduler.record_weight_version_change(new_version=version)

    def part_prefixes(self) -> None:
        """Begin a new generation of prefixes; what waits, and so has no KV, belongs to it as well."""
        self.generation += 1
        for request in self._scheduler.waiting_queue:
            self.key(request)

    def key(self, request: Any) -> None:
        """Let a request find and leave prefixes of the present generation only."""
        request.extra_key = prefixes.keyed(request.extra_key, self.generation)

    def recompute(self) -> None:
        """Retract the requests in flight, which drops their KV; SGLang computes them anew. Then drop all of the cache."""
        from sglang.srt.managers.io_struct import (  # noqa: PLC0415 - only in SGLang's processes
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        scheduler = self._scheduler
        was_paused = scheduler._engine_paused  # noqa: SLF001 - there is no public one
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        scheduler.flush_cache(empty_cache=False)
        if not was_paused:
            scheduler.continue_generation(ContinueGenerationReqInput())

    def synchronize(self) -> None:
        """Wait for what the device still does."""
        import torch  # noqa: PLC0415 - heavy

        device = self._scheduler.tp_worker.model_runner.device
        if device != "cpu":
            torch.get_device_module(device).synchronize()


def answer_command(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around ``check_weights``: carry a command out."""
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput  # noqa: PLC0415 - only in SGLang's processes

    if request.action == REFUSAL_QUESTION:
        text = str(getattr(manager.scheduler, REFUSAL_ATTRIBUTE, ""))
        setattr(manager.scheduler, REFUSAL_ATTRIBUTE, "")
    elif request.action.startswith(COMMAND_PREFIX):
        text = _carry_out(manager, request.action.removeprefix(COMMAND_PREFIX))
    else:
        return original(manager, request)
    return CheckWeightsReqOutput(success=True, message=text)


def _carry_out(manager: Any, text: str) -> str:
    """Carry out a command, of the step loop or else of the weights; returns its answer."""
    found = commands.find(text)
    if found is None:
        return weights_of(manager).answer(text, is_released="weights" in manager.offload_tags)
    return commands.answer(manager.scheduler, *found)


def key_request(original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``_add_request_to_queue``: a request that begins, or begins anew, belongs to the present weights."""
    found = getattr(scheduler, _ATTRIBUTE, None)
    if found is not None:
        found[1].key(request)
    return original(scheduler, request, *args, **kwargs)


def weights_of(manager: Any) -> EngineWeights:
    """Return the weights of this rank, made when they are first asked for."""
    scheduler = manager.scheduler
    if not hasattr(scheduler, _ATTRIBUTE):
        loop = SchedulerLoop(scheduler)
        rank = RankWeights(_describe(scheduler))
        weights = EngineWeights(
            rank, gather_over(manager.tp_cpu_group), loop, is_lost=bool(getattr(scheduler, _LOST, False))
        )
        setattr(scheduler, _ATTRIBUTE, (weights, loop))
    return getattr(scheduler, _ATTRIBUTE)[0]  # type: ignore[no-any-return]


def lose_weights(manager: Any) -> None:
    """Note that something else than ROSE wrote the weights of this rank; also before ROSE was asked for anything."""
    found = getattr(manager.scheduler, _ATTRIBUTE, None)
    if found is None:
        setattr(manager.scheduler, _LOST, True)
    else:
        found[0].lose()


def weights_state(scheduler: Any) -> dict[str, Any] | None:
    """Return what the weights of this rank are, ``None`` before ROSE was asked for anything."""
    found = getattr(scheduler, _ATTRIBUTE, None)
    return None if found is None else found[0].told()


def gather_over(group: Any) -> Gather:
    """Return a gather over the ranks of a process group."""
    import torch.distributed as dist  # noqa: PLC0415 - heavy

    num_ranks = dist.get_world_size(group=group)

    def gather(own: Answer) -> list[Answer]:
        found: list[Any] = [own]
        if num_ranks > 1:
            found = [None] * num_ranks
            dist.all_gather_object(found, own, group=group)
        return found

    return gather


def _describe(scheduler: Any) -> RankModel:
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415 - only in SGLang's processes

    runner, parallel = scheduler.tp_worker.model_runner, get_parallel()
    config = runner.model_config
    text = config.hf_text_config
    kind = f"{text.model_type}:{config.dtype}".replace("torch.", "")
    problem = None
    if parallel.dp_size > 1 or parallel.pp_size > 1 or scheduler.draft_worker is not None:
        problem = (
            "ROSE updates the weights of SGLang engines with tensor parallelism only; start this one without "
            "data or pipeline parallelism and without a draft model"
        )
    return RankModel(
        module=runner.model,
        find_checkpoint=lambda: _directory(config),
        layout_id=f"sglang:{kind}:tp{parallel.tp_size}",
        is_tied=bool(getattr(text, "tie_word_embeddings", False)),
        is_from_checkpoint=runner.server_args.load_format != "dummy",
        problem=problem,
    )


def _directory(config: Any) -> Path:
    path = Path(config.model_path)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - hub models only

    return Path(snapshot_download(config.model_path, revision=config.revision, local_files_only=True))

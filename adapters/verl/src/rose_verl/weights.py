"""A trainer rank's weights to the pool: its own shards where they can be read, full tensors one after another where not.

Invariants: every rank takes the same way, and all push together; the way is chosen at the first push and kept; a process has one pusher,
whichever of veRL's paths leads to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from rose.errors import ConfigError, TransferError, TransportError
from rose.frameworks import STORE_ADVICE, PushReport, ShardedTrainer, StreamedTrainer, WeightPush
from rose.types import EngineId, WeightVersion
from rose_verl.board import find_board
from rose_verl.engines import sharded_state
from rose_verl.say import logger
from rose_verl.settings import Settings
from rose_verl.shards import local_shards, plan_of, tied_names, why_gathered

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_pushers: list[Pusher] = []


async def push_weights(weights: Any, step: int | None, *, is_tied: bool = False) -> dict[str, float]:
    """Publish this rank's weights and let the pool bring its engines there. Call it on every rank.

    Args:
        weights: veRL's generator of full tensors.
        step: The trainer's; ``None``: that of the push before.
        is_tied: Whether the model's output layer is its embedding.

    Returns:
        Figures of it on rank 0, nothing on the others.

    Raises:
        RoseError: The weights could not be published, or no engine at all took the first ones. Single engines that do not are no error.
    """
    if not _pushers:
        board = find_board()
        _pushers.append(Pusher(board, await board.settings.remote(), await board.run.remote()))
    return await _pushers[0].push(weights, step, is_tied=is_tied)


class Pusher:
    """One rank's pushes.

    Args:
        board: The job's.
        settings: Of the job.
        run: Name of this launch of the trainer.
    """

    def __init__(self, board: Any, settings: Settings, run: str) -> None:
        self._board, self._settings, self._run = board, settings, run
        has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = torch.distributed.get_rank() if has_group else 0
        self._world_size = torch.distributed.get_world_size() if has_group else 1
        self._push: WeightPush | None = None
        self._trainer: ShardedTrainer | StreamedTrainer | None = None
        self._engines: frozenset[EngineId] = frozenset()

    async def push(self, weights: Any, step: int | None, *, is_tied: bool) -> dict[str, float]:
        """Push once; see ``push_weights``."""
        begun = time.monotonic()
        way = self._take(weights, is_tied=is_tied)
        taken_s = time.monotonic() - begun
        is_first = self._push is None
        if self._push is None:
            assert self._trainer is not None  # noqa: S101 - it was filled
            options = self._settings.options
            self._push = WeightPush(
                self._settings.place,
                trainer=self._trainer,
                run=self._run,
                publish_timeout_s=options.publish_timeout_s,
                sync_timeout_s=options.sync_timeout_s,
            )
        try:
            report = await asyncio.to_thread(self._push.push, announce=self._announcer(step))
        except TransportError as error:
            message = f"{error}; a pool that was started anew does not know this job: start the job again, from its last checkpoint"
            raise error if is_first else TransportError(message) from error
        if self._rank != 0:
            return {}
        if report.is_with_nobody:
            _tell_nobody(report)
        else:
            await self._board.note.remote(report.version.n, step)
        figures = figures_of(report, taken_s=taken_s, total_s=time.monotonic() - begun)
        _tell(report, step, way, figures)
        engines = engines_of(report, self._engines)
        _tell_gone(self._engines - engines)
        self._engines = engines
        return figures

    def _announcer(self, step: int | None) -> Callable[[WeightVersion], None]:
        """Return what tells the board, from another thread than the event loop's, which step a version is, and waits until it knows."""
        loop = asyncio.get_running_loop()

        async def tell(version: WeightVersion) -> None:
            await self._board.announce.remote(version.n, step)

        return lambda version: asyncio.run_coroutine_threadsafe(tell(version), loop).result()

    def _take(self, weights: Any, *, is_tied: bool) -> str:
        """Show the trainer this pass's tensors; returns which way."""
        if not isinstance(self._trainer, StreamedTrainer):
            found = sharded_state(weights)
            why = "the engine has no shards to read" if found is None else why_gathered(found[0], _model_type(found[1]))
            if found is not None and not why:
                self._take_shards(*found)
                return "own shards"
            if self._trainer is not None:
                message = f"weights can no longer be published shard by shard: {why}"
                raise ConfigError(message)
            if self._rank == 0:
                logger().info("weights are gathered by the trainer, tensor by tensor: %s", why)
            aliases = {_OUTPUT: _EMBEDDING} if is_tied else {}
            self._trainer = StreamedTrainer(
                rank=self._rank, world_size=self._world_size, aliases=aliases, dtype=self._settings.dtype
            )
        self._trainer.update(weights)
        return "gathered"

    def _take_shards(self, state: dict[str, Any], model: Any) -> None:
        if self._trainer is None:
            plan = plan_of(state, aliases=tied_names(model), dtype=self._settings.dtype, rank=self._rank)
            self._trainer = ShardedTrainer(
                plan.tensors, plan.layout, rank=self._rank, world_size=self._world_size, aliases=plan.aliases
            )
        assert isinstance(self._trainer, ShardedTrainer)  # noqa: S101 - the way is kept
        self._trainer.update(local_shards(state, self._trainer.layout()))


def figures_of(report: PushReport, *, taken_s: float, total_s: float) -> dict[str, float]:
    """Return what veRL logs of a push."""
    publish, sync = report.publish, report.sync
    return {
        "rose/version": float(report.version.n),
        "rose/bytes_sent": float(publish.bytes_sent + publish.bytes_anchor),
        "rose/bytes_dense": float(publish.bytes_dense),
        "rose/changed_fraction": publish.changed_fraction,
        "rose/take_s": taken_s,
        "rose/publish_s": publish.publish_s,
        "rose/sync_s": total_s - taken_s - publish.publish_s,
        "rose/engines_updated": float(len(sync.activations) + len(sync.unchanged)) if sync else 0.0,
        "rose/engines_failed": float(len(report.errors)),
        "rose/engines_put_off": float(len(sync.put_off)) if sync else 0.0,
    }


def engines_of(report: PushReport, unknown: frozenset[EngineId]) -> frozenset[EngineId]:
    """Return all engines that a push was about; ``unknown`` where its sync has not ended."""
    sync = report.sync
    return unknown if sync is None else frozenset((*sync.activations, *sync.unchanged, *sync.errors, *sync.put_off))


def _tell_nobody(report: PushReport) -> None:
    """Tell that no engine took a version. Of a job's first weights that is no fault that passes, and nothing is there to go on with.

    Raises:
        TransferError: They were the first.
    """
    told = report.problem or "; ".join(f"{engine_id}: {error}" for engine_id, error in report.errors.items())
    if report.version.n > 0:
        logger().error("no engine of the pool is known to have %s; no turn asks for it: %s", report.version, told)
        return
    advice = STORE_ADVICE if report.is_store_away else "do model, dtype (rollout.dtype) and the pool's job.toml agree?"
    message = f"no engine of the pool could take the first weights ({told}); {advice}"
    logger().error("%s", message)
    raise TransferError(message)


def _tell(report: PushReport, step: int | None, way: str, figures: dict[str, float]) -> None:
    logger().info(
        "step %s is version %s (%s): %.4f of the elements changed, %d of %d bytes sent, published in %.2f s, engines in %.2f s: %d updated, %d put off",
        "(again)" if step is None else step,
        report.version,
        way,
        figures["rose/changed_fraction"],
        figures["rose/bytes_sent"],
        figures["rose/bytes_dense"],
        figures["rose/publish_s"],
        figures["rose/sync_s"],
        figures["rose/engines_updated"],
        figures["rose/engines_put_off"],
    )
    for engine_id, error in report.errors.items():
        logger().error("engine %s did not take %s, training goes on without it: %s", engine_id, report.version, error)
    if report.problem:
        logger().error("%s; training goes on", report.problem)


def _tell_gone(engines: AbstractSet[EngineId]) -> None:
    """Name engines that the update before was about and this one is not. Whether they went back or died only the pool knows."""
    if engines:
        names = ", ".join(sorted(engines))
        logger().info("left the pool since the update before, or died there (GET /v1/pool says which): %s", names)


def _model_type(model: Any) -> str | None:
    return getattr(getattr(model, "config", None), "model_type", None)

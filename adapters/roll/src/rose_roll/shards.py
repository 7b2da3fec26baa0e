"""Train workers that publish their own shards: no gather, and an engine that cannot take a version stops nobody.

Life cycle of one ``model_update`` of ROLL:

1. [EVERY RANK] ``start_model_update``: the rank compares its shards with those last published, codes what changed, puts it into the
   pool's store. Nothing is gathered; the ranks wait for each other, nobody else does.
2. [RANK 0] lets the pool sync its engines, and returns when its own ones have the version, or ``sync_timeout_s`` after the pool was last asked for that.
3. [EVERY RANK] where ROLL has infer workers of its own as well, its own broadcast goes on as ever. Fronts are none of those.

Invariants: ROLL's collective is set up only for infer workers that need it; a failed engine is logged, and a number in the metrics.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from roll.distributed.scheduler.protocol import DataProto
from roll.utils.context_managers import state_offload_manger
from roll.utils.import_utils import safe_import_class
from roll.utils.offload_states import OffloadStateType

import rose
from rose.errors import ConfigError
from rose.frameworks import PushReport, WeightPush
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec, Trainer
from rose_roll.infer_worker import RoseFront
from rose_roll.launch import launch_name
from rose_roll.options import RoseOptions, wire_dtype

_STACKED = ".experts.gate_up_proj"


class PublishesShards:
    """Mix-in for ROLL's train workers, put before one of them."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config)  # type: ignore[call-arg]
        self._pushes: dict[str, WeightPush] = {}
        self._has_own_engines: dict[str, bool] = {}

    def setup_model_update(self, infer_cluster: Any, model_update_name: str) -> None:
        """Make this rank's way to the pool, and ROLL's own way to its own engines where there are any.

        Raises:
            ConfigError: The model cannot be published shard by shard, or nobody said where the pool is.
        """
        worker: Any = self
        options = RoseOptions.of()
        dtype = wire_dtype(options, infer_cluster.worker_config.model_args)
        self._pushes[model_update_name] = WeightPush(
            options.place(),
            trainer=shard_trainer(worker, dtype),
            run=launch_name(worker, model_update_name),
            publish_timeout_s=options.publish_timeout_s,
            sync_timeout_s=options.sync_timeout_s,
        )
        has_own = not is_front(infer_cluster.worker_config)
        self._has_own_engines[model_update_name] = has_own
        if has_own:
            super().setup_model_update(infer_cluster=infer_cluster, model_update_name=model_update_name)  # type: ignore[misc]

    def start_model_update(self, model_update_name: str) -> DataProto:
        """Publish this rank's shards; then let ROLL update its own engines, if it has any.

        Raises:
            TransferError: The version could not be published.
            TransportError: The pool or its store cannot be reached.
        """
        metrics = self._publish(model_update_name)
        if not self._has_own_engines[model_update_name]:
            return DataProto(meta_info={"metrics": metrics})
        output = super().start_model_update(model_update_name=model_update_name)  # type: ignore[misc]
        output.meta_info["metrics"].update(metrics)
        return output

    def _publish(self, model_update_name: str) -> dict[str, float]:
        worker: Any = self
        push = self._pushes[model_update_name]
        metrics: dict[str, float] = {}
        started_s = time.monotonic()
        if _is_megatron(worker):  # its parameters have no memory while they are offloaded
            infix, load = f"{worker.cluster_name}/rose_publish", {"include": [OffloadStateType.model_params]}
            with state_offload_manger(strategy=worker.strategy, metrics=metrics, metric_infix=infix, load_kwargs=load):
                report = push.push()
        else:
            report = push.push()
        without = report.problem or f"{len(report.errors)} engines are without them"
        worker.logger.info("weights %s are published; %s", report.version, without)
        seconds = time.monotonic() - started_s
        return metrics | push_metrics(report, seconds=seconds, num_ranks=worker.world_size)


def push_metrics(report: PushReport, *, seconds: float, num_ranks: int) -> dict[str, float]:
    """Return a push's figures under ROLL's names of metrics, the same names on every rank.

    ROLL takes the mean over the ranks, and rank 0 alone knows what became of the engines: it says ``num_ranks`` times as much.
    """
    return {
        "time/rose/publish": seconds,
        "rose/version": float(report.version.n),
        "rose/num_engines_failed": float(len(report.errors) * num_ranks),
        "rose/has_sync_problem": float(num_ranks if report.problem else 0),
    }


def is_front(worker_config: Any) -> bool:
    """Tell whether an infer cluster's workers are fronts to a pool, which need no broadcast when shards are published."""
    named = worker_config.worker_cls
    found = safe_import_class(named) if isinstance(named, str) else named
    metadata = getattr(found, "__ray_metadata__", None)
    cls = metadata.modified_class if metadata is not None else found
    return isinstance(cls, type) and issubclass(cls, RoseFront)


def shard_trainer(worker: Any, dtype: str) -> Trainer:
    """Return a rank's shards as a source of weights, under checkpoint names.

    Raises:
        ConfigError: Its strategy or model has no way that publishes shards; says what has.
    """
    if worker.worker_config.model_args.lora_target is not None:
        message = "actor_train.model_args.lora_target: adapters of LoRA cannot be published shard by shard; train full weights"
        raise ConfigError(message)
    name = worker.worker_config.strategy_args.strategy_name
    if name == "fsdp2_train":
        return FsdpShards(worker.strategy.unwrap_model(), dtype)
    if _is_megatron(worker):
        config = _checkpoint_config(worker)
        models = list(worker.strategy.models_unwrapped)
        return rose.trainer(
            "megatron", models, family=config.model_type, vocab_size=config.vocab_size, wire_dtype=dtype
        )
    message = (
        f"actor_train.strategy_args.strategy_name: {name}: shards can be published of fsdp2_train and megatron_train"
    )
    raise ConfigError(message)


class FsdpShards(Trainer):
    """A model of ROLL's FSDP2 strategy. Offloading replaces its parameters, so they are looked up anew for each publish.

    Args:
        model: The sharded model.
        dtype: What parameters travel as.

    Raises:
        ConfigError: Parameters hold several checkpoint tensors each.
    """

    def __init__(self, model: Any, dtype: str) -> None:
        stacked = [name for name, _ in model.named_parameters() if _STACKED in name]
        if stacked:
            message = (
                f"{stacked[0]} holds the tensors of all experts, which cannot be published shard by shard; "
                "leave actor_train.worker_cls to ROLL: RoseInferWorker republishes what ROLL broadcasts"
            )
            raise ConfigError(message)
        self._model, self._dtype = model, dtype
        first = self._look()
        self.rank, self.world_size = first.rank, first.world_size
        self._tensors, self._aliases, self._layout = first.tensors(), first.aliases(), first.layout()

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor."""
        return self._tensors

    def aliases(self) -> Mapping[str, str]:
        """Return the tied names."""
        return self._aliases

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return this rank's boxes."""
        return self._layout

    def shards(self) -> Mapping[str, ShardBits]:
        """Return this rank's bits, of the parameters that the model has now."""
        return self._look().shards()

    def _look(self) -> Trainer:
        return rose.trainer("fsdp", self._model, wire_dtype=self._dtype)


def _is_megatron(worker: Any) -> bool:
    return bool(worker.worker_config.strategy_args.strategy_name == "megatron_train")


def _checkpoint_config(worker: Any) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415 - for Megatron only

    return AutoConfig.from_pretrained(worker.worker_config.model_args.model_name_or_path)

"""The ``rose`` backend of vLLM's weight transfer: one a worker, holding the subscriber that brings its weights along.

Life cycle, vLLM's own on the left:

1. ``init_transfer_engine``: trace the loader, compare live weights with the checkpoint, build the sink, note which version
   the loaded checkpoint is.
2. ``begin_stage`` / ``poll_stage``: fetch, verify and decode on a thread while the worker computes.
3. ``activate``: write in place; the engine must be paused.

A driver that knows vLLM only (``update_weights`` over HTTP, say) gets 2 and 3 in one call from ``receive_weights``;
``start_weight_update`` and ``finish_weight_update`` have nothing to do.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.backends.torch_weights.checkpoint_files import find_tensors
from rose.backends.torch_weights.loaded_bits import check_loaded_bits
from rose.backends.torch_weights.sink import ParameterSink
from rose.backends.torch_weights.slices import SlicePlan, as_meta
from rose.backends.wire import update_from_wire
from rose.errors import EngineFencedError, RoseError, TransferError
from rose.transfer.layout import TargetLayout
from rose.transfer.subscriber import Subscriber
from rose.transfer.sums import BoxSum, sink_sums
from rose.types import Activation, WeightUpdate, WeightVersion


@dataclass
class RoseInitInfo(WeightTransferInitInfo):  # type: ignore[misc] # vLLM is untyped here
    """``version``: the ``run:n`` form of the version that the loaded checkpoint is, if it is one."""

    version: str | None = None


@dataclass
class RoseUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc] # vLLM is untyped here
    """The fields of ``rose.backends.wire.update_to_wire``, and whether to sum the whole state anew afterwards."""

    target: str
    manifest_keys: list[str]
    transport: str
    options: list[list[Any]] = field(default_factory=list)
    is_verified: bool = False


class RoseWeightTransferEngine(WeightTransferEngine[RoseInitInfo, RoseUpdateInfo]):  # type: ignore[misc] # as above
    """See the module's text. ``init_transfer_engine`` comes first."""

    init_info_cls = RoseInitInfo
    update_info_cls = RoseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rose-stage")
        self._stage: Future[None] | None = None
        self._sink: ParameterSink | None = None
        self._subscriber: Subscriber | None = None

    @property
    def sink(self) -> ParameterSink:
        """Return the live weights.

        Raises:
            TransferError: ``init_transfer_engine`` was not called.
        """
        if self._sink is None:
            message = "weight transfer was not initialised; call init_weight_transfer_engine first"
            raise TransferError(message)
        return self._sink

    @property
    def is_fenced(self) -> bool:
        """Return whether a write failed half-way."""
        return self._subscriber is not None and self._subscriber.is_fenced

    @property
    def aliases(self) -> dict[str, str]:
        """Return the tied names of the model: alias -> the name that it loads from."""
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return {}
        names = self.sink.tensors()
        embedding = next((name for name in names if name.endswith("embed_tokens.weight")), None)
        return {} if embedding is None or "lm_head.weight" in names else {"lm_head.weight": embedding}

    def init_transfer_engine(self, init_info: RoseInitInfo) -> None:
        """Trace the model's loader.

        Raises:
            LayoutMismatchError: Live parameters are not what their loader makes of the checkpoint, so that they cannot be updated
                in place: packed, quantised or computed ones; names them.
        """
        checkpoint = _directory(self.model_config)
        stored = find_tensors(checkpoint)
        with set_current_vllm_config(self.vllm_config):
            plan = SlicePlan.trace(self.model, as_meta(stored))
        if self._sink is None and self.vllm_config.load_config.load_format != "dummy":
            check_loaded_bits(plan, stored, checkpoint)  # a later call may find weights that were updated
        self._sink = ParameterSink.over(plan)
        version = None if init_info.version is None else WeightVersion.parse(init_info.version)
        self._subscriber = Subscriber(self._sink, aliases=self.aliases, version=version)

    def begin_stage(self, update: WeightUpdate) -> None:
        """Begin to stage an update on this worker's staging thread, after a stage that still runs."""
        self._stage = self._thread.submit(self._started.stage, update)

    def poll_stage(self) -> bool:
        """Return whether the stage that began last is done.

        Raises:
            TransferError: It failed (the subclass says how), or none began.
        """
        if self._stage is None:
            message = "no stage has begun"
            raise TransferError(message)
        if not self._stage.done():
            return False
        self._stage.result()
        return True

    def activate(self, *, is_verified: bool) -> Activation:
        """Write the staged update. Raises what ``Subscriber.activate`` raises; ``is_fenced`` says what state is left."""
        try:
            return self._started.activate(verify=is_verified)
        except RoseError:
            raise
        except Exception as error:
            if not self.is_fenced:
                raise
            message = f"the update failed while it was written: {error!r}"
            raise EngineFencedError(message) from error

    def fence(self) -> None:
        """Let the weights count as lost: only an anchor brings them to a version again."""
        self._started.fence()

    def state(self) -> tuple[str | None, bool]:
        """Return the version's label, ``None`` when the weights are no published version, and whether they are fenced."""
        version = self._started.version
        return None if version is None else str(version), self.is_fenced

    def target_layout(self) -> TargetLayout:
        """Return this worker's part of the engine's layout (one rank)."""
        config = self.model_config
        parallel = self.parallel_config.tensor_parallel_size
        return TargetLayout(
            layout_id=f"vllm:{config.hf_text_config.model_type}:{config.dtype}:tp{parallel}".replace("torch.", ""),
            tensors=tuple(self.sink.tensors().values()),
            ranks=({name: tuple(boxes) for name, boxes in self.sink.boxes().items()},),
            aliases=self.aliases,
        )

    def checksums(self) -> dict[str, str]:
        """Return the digests of the tensors that this worker holds whole."""
        return self.sink.checksums()

    def sums(self) -> list[BoxSum]:
        """Return the sum of every box that this worker holds, as its live weights are now."""
        return sink_sums(self.sink)

    def start_weight_update(self) -> None:
        """Do nothing: updates are written in place."""

    def receive_weights(self, update_info: RoseUpdateInfo) -> None:
        """Stage and activate in one call. The engine must be paused."""
        fields = {name: getattr(update_info, name) for name in ("target", "manifest_keys", "transport", "options")}
        self._started.stage(update_from_wire(fields))
        self.activate(is_verified=update_info.is_verified)

    def finish_weight_update(self) -> None:
        """Do nothing: ``receive_weights`` has left complete weights."""

    def shutdown(self) -> None:
        """Let go of the transports; a stage that runs is left to end by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._subscriber is not None:
            self._subscriber.close()

    @property
    def _started(self) -> Subscriber:
        if self._subscriber is None:
            message = "weight transfer was not initialised; call init_weight_transfer_engine first"
            raise TransferError(message)
        return self._subscriber


def _directory(model_config: Any) -> Path:
    path = Path(model_config.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - hub models only

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))

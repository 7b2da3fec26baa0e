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

from rose.backends.torch_weights.live_model import LiveModel
from rose.backends.wire import update_from_wire
from rose.errors import TransferError
from rose.transfer.layout import TargetLayout
from rose.transfer.sums import BoxSum, sink_sums
from rose.types import Activation, WeightUpdate


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
        self._opened: LiveModel | None = None

    @property
    def is_fenced(self) -> bool:
        """Return whether a write failed half-way."""
        return self._opened is not None and self._opened.is_fenced

    def init_transfer_engine(self, init_info: RoseInitInfo) -> None:
        """Trace the model's loader.

        Raises:
            LayoutMismatchError: Live parameters are not what their loader makes of the checkpoint, so that they cannot be updated
                in place: packed, quantised or computed ones; names them.
        """
        is_first = self._opened is None  # a later call may find weights that were updated
        self._opened = LiveModel.open(
            self.model,
            _directory(self.model_config),
            is_tied=getattr(self.model_config.hf_text_config, "tie_word_embeddings", False),
            is_from_checkpoint=is_first and self.vllm_config.load_config.load_format != "dummy",
            version=init_info.version,
            tracing=set_current_vllm_config(self.vllm_config),
        )

    def begin_stage(self, update: WeightUpdate) -> None:
        """Begin to stage an update on this worker's staging thread, after a stage that still runs."""
        self._stage = self._thread.submit(self._live.subscriber.stage, update)

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
        return self._live.activate(is_verified=is_verified)

    def fence(self) -> None:
        """Let the weights count as lost: only an anchor brings them to a version again."""
        self._live.subscriber.fence()

    def state(self) -> tuple[str | None, bool]:
        """Return the version's label, ``None`` when the weights are no published version, and whether they are fenced."""
        version = self._live.version
        return None if version is None else str(version), self.is_fenced

    def target_layout(self) -> TargetLayout:
        """Return this worker's part of the engine's layout (one rank)."""
        config = self.model_config
        parallel = self.parallel_config.tensor_parallel_size
        layout_id = f"vllm:{config.hf_text_config.model_type}:{config.dtype}:tp{parallel}".replace("torch.", "")
        return self._live.layout(layout_id)

    def checksums(self) -> dict[str, str]:
        """Return the digests of the tensors that this worker holds whole."""
        return self._live.sink.checksums()

    def sums(self) -> list[BoxSum]:
        """Return the sum of every box that this worker holds, as its live weights are now."""
        return sink_sums(self._live.sink)

    def start_weight_update(self) -> None:
        """Do nothing: updates are written in place."""

    def receive_weights(self, update_info: RoseUpdateInfo) -> None:
        """Stage and activate in one call. The engine must be paused."""
        fields = {name: getattr(update_info, name) for name in ("target", "manifest_keys", "transport", "options")}
        self._live.subscriber.stage(update_from_wire(fields))
        self.activate(is_verified=update_info.is_verified)

    def finish_weight_update(self) -> None:
        """Do nothing: ``receive_weights`` has left complete weights."""

    def shutdown(self) -> None:
        """Let go of the transports; a stage that runs is left to end by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._opened is not None:
            self._opened.subscriber.close()

    @property
    def _live(self) -> LiveModel:
        if self._opened is None:
            message = "weight transfer was not initialised; call init_weight_transfer_engine first"
            raise TransferError(message)
        return self._opened


def _directory(model_config: Any) -> Path:
    path = Path(model_config.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - hub models only

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))

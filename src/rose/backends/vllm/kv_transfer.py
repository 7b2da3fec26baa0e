"""KV of prompts from a prefill engine to a decode engine through files: a vLLM connector for CPUs, tests and demos.

vLLM's stock file connector copies token by token; CPU attention packs keys and values within a block, so this one copies
whole blocks, the last one of a prompt also when it is not full. It loads in the background, as the connectors of real
deployments do, so that a decode engine's requests pass through ``WAITING_FOR_REMOTE_KVS``.

Invariants:

* A file holds every block of one prompt, for one tensor-parallel rank; it appears whole (written beside, then renamed).
* A load fills only the blocks that the decode engine allocated for it, never those of a cached prefix.
* A load that fails or times out is reported to vLLM, which computes the prompt where it is (``recompute``).

Life cycle of a request:

1. [PREFILL] The step that ends the prefill also writes the prompt's blocks.
2. [DECODE] The scheduler allocates blocks; the worker polls for the file and copies it in; vLLM then recomputes the last
   token of the prompt alone, for the logits of the first one of the answer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import safetensors
import safetensors.torch
import torch
import xxhash
from vllm.config import KVTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

_TIMEOUT_S = 10.0
_KEPT_BYTES = 1 << 30


def transfer_config(
    folder: Path | str, *, is_producer: bool, timeout_s: float = _TIMEOUT_S, kept_bytes: int = _KEPT_BYTES
) -> KVTransferConfig:
    """Return vLLM's ``kv_transfer_config`` (an entry of ``VllmOptions.engine_args``) for one side.

    Args:
        folder: Where the files are, best in shared memory. Prefill and decode engines of one deployment share it.
        is_producer: A prefill engine; otherwise a decode engine.
        timeout_s: How long a decode engine waits for a prompt's KV before it computes the prompt itself.
        kept_bytes: A prefill engine removes its oldest files beyond this.
    """
    return KVTransferConfig(
        kv_connector="FileKvConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_producer" if is_producer else "kv_consumer",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"folder": str(folder), "timeout_s": timeout_s, "kept_bytes": kept_bytes},
    )


@attrs.frozen
class _Load:
    """Blocks to fill: ``first_block`` of the prompt's blocks goes to ``block_ids[0]``, and so on."""

    request_id: str
    key: str
    first_block: int
    block_ids: list[int]


@attrs.frozen
class _Save:
    key: str
    block_ids: list[int]


@attrs.define
class FileKvMetadata(KVConnectorMetadata):  # type: ignore[misc] # vLLM is untyped here
    """What the scheduler's side tells the workers' with one step."""

    loads: list[_Load] = attrs.field(factory=list)
    saves: list[_Save] = attrs.field(factory=list)


class FileKvConnector(KVConnectorBase_V1):  # type: ignore[misc] # vLLM is untyped here
    """Both sides of the connector; see ``transfer_config`` for its settings. Text prompts of one KV group only."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Called by vLLM, once in the scheduler and once in each worker."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        config = self._kv_transfer_config
        self._is_producer = bool(config.is_kv_producer)
        self._folder = Path(config.get_from_extra_config("folder", ""))
        self._timeout_s = float(config.get_from_extra_config("timeout_s", _TIMEOUT_S))
        self._kept_bytes = int(config.get_from_extra_config("kept_bytes", _KEPT_BYTES))
        self._block_size = int(vllm_config.cache_config.block_size)
        self._requests: dict[str, Any] = {}
        self._asked: set[str] = set()
        self._next = FileKvMetadata()
        self._tensors: dict[str, torch.Tensor] = {}
        self._pending: dict[str, tuple[_Load, float]] = {}
        self._failed_blocks: set[int] = set()
        self._written: dict[Path, int] = {}  # sizes, oldest first

    # -- in the scheduler

    def on_new_request(self, request: Any) -> None:
        """Remember the request; the step's own record lacks its prompt."""
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many prompt tokens will come from outside, and that they come in the background."""
        if self._is_producer or request.request_id in self._asked:
            return 0, False  # a failed load, or a preempted request: it is computed here
        num_tokens = max(0, request.num_prompt_tokens - num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan a load into the blocks that were allocated for it."""
        if num_external_tokens:
            self._asked.add(request.request_id)
            first = (request.num_prompt_tokens - num_external_tokens) // self._block_size
            block_ids = list(blocks.get_block_ids()[0])[first : self._num_blocks(request)]
            self._next.loads.append(_Load(request.request_id, prompt_key(request), first, block_ids))

    def build_connector_meta(self, scheduler_output: Any) -> FileKvMetadata:
        """Return the step's loads and, on a producer, the prompts that it finishes."""
        metadata, self._next = self._next, FileKvMetadata()
        if self._is_producer:
            state = scheduler_output.kv_connector_block_state
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                request = self._requests[request_id]
                if request.num_computed_tokens < request.num_prompt_tokens <= request.num_computed_tokens + num_tokens:
                    block_ids = list(state.resolve_block_ids(request_id)[0])[: self._num_blocks(request)]
                    metadata.saves.append(_Save(prompt_key(request), block_ids))
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ARG002 - vLLM's face
        """Forget the request; its blocks are free at once."""
        self._requests.pop(request.request_id, None)
        self._asked.discard(request.request_id)
        return False, None

    def _num_blocks(self, request: Any) -> int:
        return -(-int(request.num_prompt_tokens) // self._block_size)

    # -- in each worker

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the KV tensors, whose first dimension counts blocks."""
        self._tensors = dict(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's face
        """Begin to wait for the step's loads."""
        for load in self._get_connector_metadata().loads:
            self._pending[load.request_id] = (load, time.monotonic() + self._timeout_s)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before the request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing a layer: prompts are saved whole."""

    def wait_for_save(self) -> None:
        """Write the prompts that this step finished."""
        for save in self._get_connector_metadata().saves:
            path = self._path(save.key)
            blocks = {name: tensor[save.block_ids].contiguous() for name, tensor in self._tensors.items()}
            beside = path.with_suffix(f".{os.getpid()}.part")  # another engine may write the same prompt now
            safetensors.torch.save_file(blocks, beside)
            self._written.pop(path, None)
            self._written[path] = beside.stat().st_size
            beside.rename(path)
        while sum(self._written.values()) > self._kept_bytes and len(self._written) > 1:
            oldest = next(iter(self._written))
            del self._written[oldest]
            oldest.unlink(missing_ok=True)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """Return the requests whose load is over, failed ones and those that ended meanwhile included."""
        over = {request_id for request_id in self._pending if request_id in finished_req_ids}
        for load, give_up_s in list(self._pending.values()):
            if load.request_id in over:
                continue
            if self._path(load.key).exists() and self._fill(load):
                over.add(load.request_id)
            elif time.monotonic() >= give_up_s:
                self._failed_blocks.update(load.block_ids)
                over.add(load.request_id)
        for request_id in over:
            del self._pending[request_id]
        return None, over

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks of failed loads, once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _fill(self, load: _Load) -> bool:
        """Copy the file's blocks in; ``False`` when it does not fit this engine or was just removed."""
        try:
            blocks = safetensors.torch.load_file(self._path(load.key))
        except (OSError, safetensors.SafetensorError):
            return False
        last = load.first_block + len(load.block_ids)
        for name, tensor in self._tensors.items():
            found = blocks.get(name)
            if found is None or found.dtype != tensor.dtype or found.shape[1:] != tensor.shape[1:] or len(found) < last:
                return False
        for name, tensor in self._tensors.items():
            tensor[load.block_ids] = blocks[name][load.first_block : last].to(tensor.device)
        return True

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}-{get_tensor_model_parallel_rank()}.safetensors"


def prompt_key(request: Any) -> str:
    """Return the name of a prompt's KV: a digest of its token ids."""
    return xxhash.xxh3_128_hexdigest(torch.tensor(list(request.prompt_token_ids), dtype=torch.int64).numpy().tobytes())

"""What ROSE adds to vLLM's worker (``worker_extension_cls``): thin calls into its weight-transfer engine and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rose.backends.paging import give_back
from rose.backends.wire import activation_to_wire, answers, update_from_wire


class RoseWorkerExtension:
    """Mixed into the worker by vLLM; every method is reached by ``collective_rpc`` and answers with plain data."""

    weight_transfer_engine: Any
    model_runner: Any
    _rose_pages: Any
    _rose_parked: Any

    @answers
    def rose_init(self, version: str | None) -> None:
        """Trace the model's loader and take the weights for ``version``."""
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.init_info_cls(version=version))

    @answers
    def rose_attach_pages(self, num_blocks: int) -> dict[str, int]:
        """Look at the KV tensors; returns how many blocks share a page, and the bytes that can be given back (0 on a device)."""
        from rose.backends.vllm.kv_memory import KvPages  # noqa: PLC0415 - torch

        self._rose_pages = KvPages(self.model_runner.kv_caches, num_blocks, give_back)
        return {"group_blocks": self._rose_pages.group_blocks, "num_bytes": self._rose_pages.num_bytes}

    @answers
    def rose_hold_pages(self, runs: Sequence[Sequence[int]]) -> int:
        """Give the pages of held blocks back; returns the bytes that are with the operating system now."""
        return int(self._rose_pages.hold(runs))

    @answers
    def rose_park(self, keeps_weights: bool, directory: str | None) -> int:  # noqa: FBT001 - called by name over the wire
        """Give the memory of the weights back; returns its bytes."""
        from rose.backends.vllm.parking import ParkedWeights  # noqa: PLC0415 - torch

        self._rose_parked = ParkedWeights(self.model_runner.model, directory)
        return int(self._rose_parked.park(keeps=keeps_weights))

    @answers
    def rose_unpark(self) -> int | None:
        """Bring the weights back; returns their bytes, ``None`` when they are lost: they are fenced then."""
        parked, self._rose_parked = getattr(self, "_rose_parked", None), None
        num_bytes = 0 if parked is None else parked.restore()
        if num_bytes is None:
            self.weight_transfer_engine.fence()
        return num_bytes

    def rose_weight_bytes(self) -> int:
        """Return the size of this worker's parameters."""
        return sum(one.numel() * one.element_size() for one in self.model_runner.model.parameters())

    @answers
    def rose_resident_sums(self) -> dict[str, list[int]] | None:
        """Return the sum of every parameter's bits, computed where it is; ``None`` where that has no room for it."""
        from rose.backends.device_codec.keys import sums_of  # noqa: PLC0415 - torch

        return sums_of(self.model_runner.model)

    @answers
    def rose_fence(self) -> None:
        """Let the weights count as lost."""
        self.weight_transfer_engine.fence()

    @answers
    def rose_stage(self, update: dict[str, Any]) -> None:
        """Begin to stage an update on a thread."""
        self.weight_transfer_engine.begin_stage(update_from_wire(update))

    @answers
    def rose_poll_stage(self) -> bool:
        """Return whether the stage is done; raises what it failed with."""
        return bool(self.weight_transfer_engine.poll_stage())

    @answers
    def rose_activate(self, is_verified: bool) -> dict[str, Any]:  # noqa: FBT001 - called by name over the wire
        """Write the staged update into the live parameters."""
        return activation_to_wire(self.weight_transfer_engine.activate(is_verified=is_verified))

    @answers
    def rose_state(self) -> list[Any]:
        """Return the version's label (or ``None``) and whether a write failed half-way."""
        return list(self.weight_transfer_engine.state())

    @answers
    def rose_target_layout(self) -> dict[str, Any]:
        """Return this worker's part of the engine's ``TargetLayout`` as plain data."""
        return dict(self.weight_transfer_engine.target_layout().to_json())

    @answers
    def rose_weight_checksums(self) -> dict[str, str]:
        """Return the digest of every checkpoint tensor that this worker holds whole."""
        return dict(self.weight_transfer_engine.checksums())

    @answers
    def rose_weight_sums(self) -> list[Any]:
        """Return name, offset, shape and sum of every box that this worker holds."""
        return [
            [name, list(box.offset), list(box.shape), list(total)]
            for name, box, total in self.weight_transfer_engine.sums()
        ]

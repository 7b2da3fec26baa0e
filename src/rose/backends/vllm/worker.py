"""What ROSE adds to vLLM's worker (``worker_extension_cls``): thin calls into its weight-transfer engine."""

from __future__ import annotations

from typing import Any

from rose.backends.vllm.wire import activation_to_wire, answers, update_from_wire


class RoseWorkerExtension:
    """Mixed into the worker by vLLM; every method is reached by ``collective_rpc`` and answers with plain data."""

    weight_transfer_engine: Any

    @answers
    def rose_init(self, version: str | None) -> None:
        """Trace the model's loader and take the weights for ``version``."""
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.init_info_cls(version=version))

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

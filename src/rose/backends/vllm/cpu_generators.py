"""Seeded sampling on CPUs.

vLLM draws a token for every row of a step and discards those of prompts that are not through; it then turns a seeded
request's generator back by CUDA's offset, which a CPU generator does not have: the engine dies (vLLM 0.32,
``gpu_model_runner._bookkeeping_sync``). Here such a generator is one that remembers its state before each step.
"""

from __future__ import annotations

from typing import Any

import torch


class RewindableGenerator(torch.Generator):  # type: ignore[misc]  # torch is untyped here
    """A CPU generator whose ``set_offset`` goes back to the state that ``remember`` noted."""

    def remember(self) -> None:
        """Note the state to go back to."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Return any number; the caller computes an offset from it that ``set_offset`` does not read."""
        return 0

    def set_offset(self, offset: int) -> None:  # noqa: ARG002 - see get_offset
        """Go back to the remembered state."""
        self.set_state(self._before)


def install() -> None:
    """Let vLLM's model runner use rewindable generators for seeded requests. Call once a process, on CPUs only."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415 - heavy

    update_states = GPUModelRunner._update_states  # noqa: SLF001 - called once before each step; there is no hook

    def update_and_remember(runner: Any, scheduler_output: Any) -> Any:
        result = update_states(runner, scheduler_output)
        _remember_all(runner)
        return result

    GPUModelRunner._update_states = update_and_remember  # noqa: SLF001 - see above


def _remember_all(runner: Any) -> None:
    batch = runner.input_batch
    for index, generator in list(batch.generators.items()):
        rewindable = generator
        if not isinstance(generator, RewindableGenerator):
            rewindable = RewindableGenerator(device="cpu")
            rewindable.set_state(generator.get_state())
            batch.generators[index] = rewindable
            runner.requests[batch.req_ids[index]].generator = rewindable
        rewindable.remember()

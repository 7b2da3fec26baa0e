"""Rank 1 of OpenRLHF's weight-sync group: joins it as one of OpenRLHF's engines would, and receives one tensor at a time.

The group is what OpenRLHF makes it: by default a stateless one (over NCCL with vLLM installed, over host memory with the stand-in), with
``--vllm.sync_with_ray`` one of ``ray.util.collective``. Received tensors are returned in host memory.
"""

from __future__ import annotations

import importlib
from typing import Any

import attrs

from rose.errors import TransferError


@attrs.define
class BroadcastMember:
    """One member of the group; all calls block and come from one thread at a time."""

    device: str
    _group: Any = None
    _group_name: str | None = None

    def join(
        self, *, address: str, port: int, rank: int, world_size: int, group_name: str, backend: str, use_ray: bool
    ) -> None:
        """Join; returns when all ranks have.

        Raises:
            TransferError: The group is not one of a trainer and one engine.
        """
        if (rank, world_size) != (1, 2):
            message = (
                f"the weight-sync group has rank {rank} of {world_size} for the pool, not rank 1 of 2: "
                "set --vllm.num_engines 1 --vllm.tensor_parallel_size 1"
            )
            raise TransferError(message)
        if use_ray:
            from ray.util import collective  # noqa: PLC0415 - heavy

            collective.init_collective_group(world_size=world_size, rank=rank, backend=backend, group_name=group_name)
            self._group_name = group_name
        else:
            groups = importlib.import_module("openrlhf.utils.distributed_util")
            self._group = groups.stateless_init_process_group(address, port, rank, world_size, self._device())

    def receive(self, dtype: Any, shape: Any) -> Any:
        """Return the tensor that rank 0 broadcasts next.

        Raises:
            TransferError: No group was joined.
        """
        import torch  # noqa: PLC0415 - heavy

        if self._group is None and self._group_name is None:
            message = "weights came before init_process_group"
            raise TransferError(message)
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if self._group_name is not None:
            from ray.util import collective  # noqa: PLC0415 - heavy

            collective.broadcast(tensor, 0, group_name=self._group_name)
        else:
            stream = torch.cuda.current_stream() if self.device != "cpu" else None
            self._group.broadcast(tensor, src=0, stream=stream)
        return tensor.cpu()

    def _device(self) -> Any:
        import torch  # noqa: PLC0415 - heavy

        return torch.device(self.device)

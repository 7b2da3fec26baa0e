"""The communicator under the name that OpenRLHF asks for. Tensors of a GPU cross through host memory, so a receiver needs no GPU."""

from __future__ import annotations

from typing import Any

from vllm.distributed.utils import TIMEOUT, StatelessProcessGroup


class PyNcclCommunicator:
    """Broadcasts over gloo."""

    def __init__(self, group: StatelessProcessGroup, device: Any = None) -> None:
        """Connect all ranks of ``group``; ``device`` is of no interest here."""
        import torch.distributed as dist

        del device
        store = dist.PrefixStore("rose", group.store)
        self._gloo = dist.ProcessGroupGloo(store, group.rank, group.world_size, TIMEOUT)
        self._rank = group.rank

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Send ``tensor`` of rank ``src`` to all others; returns when it has been."""
        import torch.distributed as dist

        del stream
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        host = tensor.detach().to("cpu").contiguous()
        self._gloo.broadcast([host], options).wait()
        if self._rank != src and host is not tensor:
            tensor.copy_(host)

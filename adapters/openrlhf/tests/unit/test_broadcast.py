"""The group of a trainer and a front, over host memory, in two processes."""

import multiprocessing
import socket

import pytest
import torch

from rose.errors import TransferError
from rose_openrlhf import workers
from rose_openrlhf.broadcast import BroadcastMember

SENT = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3).to(torch.bfloat16),
    "b": torch.ones(1, 4),
    "c": torch.tensor(3.0),
}


def as_trainer(port):
    workers.set_up()
    from openrlhf.utils.distributed_util import stateless_init_process_group

    group = stateless_init_process_group("127.0.0.1", port, 0, 2, torch.device("cpu"))
    for tensor in SENT.values():
        group.broadcast(tensor, src=0, stream=None)


def test_tensors_arrive_bit_by_bit():
    workers.set_up()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    trainer = multiprocessing.get_context("spawn").Process(target=as_trainer, args=(port,))
    trainer.start()
    try:
        member = BroadcastMember(device="cpu")
        member.join(address="127.0.0.1", port=port, rank=1, world_size=2, group_name="g", backend="nccl", use_ray=False)
        for tensor in SENT.values():
            got = member.receive(tensor.dtype, tensor.shape)
            assert got.dtype == tensor.dtype
            assert torch.equal(
                got.view(torch.uint8) if got.dim() else got, tensor.view(torch.uint8) if tensor.dim() else tensor
            )
    finally:
        trainer.join(60)
    assert trainer.exitcode == 0


@pytest.mark.parametrize(("rank", "world_size"), [(1, 3), (2, 2), (0, 2)])
def test_other_groups_are_refused(rank, world_size):
    with pytest.raises(TransferError, match="not rank 1 of 2"):
        BroadcastMember(device="cpu").join(
            address="x", port=1, rank=rank, world_size=world_size, group_name="g", backend="nccl", use_ray=False
        )


def test_tensors_before_the_group_are_refused():
    with pytest.raises(TransferError, match="before init_process_group"):
        BroadcastMember(device="cpu").receive(torch.float32, (1,))

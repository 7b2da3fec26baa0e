"""Double: signatures and field names of ROLL at 8eb27cc2dc34, by tests/make_doubles.py. Do not edit."""
# ruff: noqa
# fmt: off
# mypy: ignore-errors


def broadcast(tensor, src_rank=0, group_name='default', async_op=False):
    raise NotImplementedError('broadcast')


def init_collective_group(world_size, rank, master_addr, master_port, backend=None, group_name='default', global_ranks=None):
    raise NotImplementedError('init_collective_group')

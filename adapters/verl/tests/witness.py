"""Writes down, for tests alone, what passes between veRL's own parts, in ``$ROSE_TEST_WITNESS``:

* ``weights-STEP.safetensors``: the trainer's full tensors, gathered by veRL's own code right after each update of the rollouts' weights;
* ``samples-PID-N.pt``: every batch of trajectories as agent loops put it into the queue that the trainer reads.
"""

import itertools
import os
from pathlib import Path

import cpu_platform  # noqa: F401 - the platform, too

_folder = os.environ.get("ROSE_TEST_WITNESS")
_numbers = itertools.count()


def _watch_samples(module):
    put = module.async_kv_batch_put

    async def watched(*args, **kwargs):
        import torch

        if kwargs.get("fields") is not None:
            fields = kwargs["fields"]
            names = list(fields.keys())  # a TensorDict iterates over its rows
            rows = [{name: _plain(fields[name], row) for name in names} for row in range(len(kwargs["keys"]))]
            data = {
                "keys": list(kwargs["keys"]),
                "tags": kwargs["tags"],
                "rows": rows,
                "partition": kwargs["partition_id"],
            }
            torch.save(data, Path(_folder) / f"samples-{os.getpid()}-{next(_numbers)}.pt")
        return await put(*args, **kwargs)

    module.async_kv_batch_put = watched


def _plain(values, row):
    one = values[row]
    return getattr(one, "data", one) if type(one).__name__.startswith("NonTensor") else one


_stock = {}


async def update_weights(self, global_steps=None, mode="auto"):
    """In place of the trainers' method, and by this very name in this module: Ray pickles methods by reference."""
    result = await _stock["update_weights"](self, global_steps=global_steps, mode=mode)
    from safetensors.torch import save_file
    from torch.distributed import get_rank
    from torch.distributed.tensor import DTensor

    state = self.actor.engine.module.state_dict()
    full = {name: _whole(one, DTensor).detach().clone() for name, one in state.items()}
    if get_rank() == 0:
        save_file(full, str(Path(_folder) / f"weights-{global_steps}.safetensors"))
    return result


def _whole(tensor, sharded):
    return tensor.full_tensor() if isinstance(tensor, sharded) else tensor


def _watch_weights(module):
    _stock["update_weights"] = module.ActorRolloutRefWorker.update_weights
    update_weights.__dict__.update(_stock["update_weights"].__dict__)  # veRL's marks: how the call is dispatched
    update_weights.__dict__.pop("__wrapped__", None)
    module.ActorRolloutRefWorker.update_weights = update_weights


if _folder:
    from rose_verl.after_import import after_import

    def _fail(name, error):
        raise AssertionError(name) from error

    after_import({"transfer_queue": _watch_samples, "verl.workers.engine_workers": _watch_weights}, _fail)

"""One FSDP2 rank of the life cycle: trains a model of real shapes and publishes after each step. Started by ``life_cycle``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Train, publish and report: one JSON line a version, each after a line on standard input."""
    from torch.distributed import destroy_process_group, init_process_group  # noqa: PLC0415 - heavy

    from rose.backends.fsdp import FsdpTrainer  # noqa: PLC0415 - heavy
    from rose.registry import open_transport  # noqa: PLC0415 - after torch
    from rose.transfer.layout import TargetLayout  # noqa: PLC0415
    from rose.transfer.publisher import Publisher  # noqa: PLC0415
    from rose.transfer.sums import trainer_sums  # noqa: PLC0415
    from rose.types import TransportAddress  # noqa: PLC0415

    task = json.loads(sys.argv[1])
    rank, size = task["rank"], task["world_size"]
    init_process_group("gloo", init_method=f"file://{task['meeting']}", rank=rank, world_size=size)
    options = tuple((key, value) for key, value in task["options"])
    transport = open_transport(TransportAddress(name=task["transport"], options=options))
    model = _sharded_model(Path(task["model"]), size)
    trainer = FsdpTrainer(model)
    targets = [TargetLayout.from_json(layout) for layout in task["targets"]]
    publisher = Publisher(trainer, transport, run=task["run"], targets=targets, num_threads=1, timeout_s=300.0)
    step = _Step(model, lr=task["lr"], vocab=task["vocab"], seed=rank)
    for n, _ in enumerate(sys.stdin):
        began_s = time.perf_counter()
        loss = step.run(n) if n else None
        trained_s = time.perf_counter()
        report = publisher.publish_sync()
        answer = {
            "loss": loss,
            "train_s": trained_s - began_s,
            "publish_s": report.publish_s,
            "bytes_sent": report.bytes_sent,
            "bytes_dense": report.bytes_dense,
            "num_changed": report.num_changed,
            "num_elements": report.num_elements,
            "sums": trainer_sums(trainer),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    transport.close()
    destroy_process_group()


class _Step:
    """One real training step: forward, backward, clip, AdamW on fp32 masters."""

    def __init__(self, model: Any, *, lr: float, vocab: int, seed: int) -> None:
        import torch  # noqa: PLC0415 - heavy

        self._torch, self._model, self._vocab, self._seed = torch, model, vocab, seed
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)

    def run(self, n: int) -> float:
        torch = self._torch
        random = torch.Generator().manual_seed(1000 * n + self._seed)
        ids = torch.randint(0, self._vocab, (1, 16), generator=random)
        loss = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def _sharded_model(path: Path, world_size: int) -> Any:
    """Return the checkpoint's model with fp32 masters, sharded; every rank reads its own rows only."""
    import torch  # noqa: PLC0415 - heavy
    from safetensors import safe_open  # noqa: PLC0415 - heavy
    from torch.distributed import init_device_mesh  # noqa: PLC0415 - heavy
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415 - heavy
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - heavy
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - heavy

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).float()
    mesh = init_device_mesh("cpu", (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    model.tie_weights()
    with safe_open(path / "model.safetensors", framework="pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
            rows = file.get_slice(name)[offset[0] : offset[0] + shape[0]]
            parameter.to_local().copy_(rows.float())
    _restore_rotary(model, config)
    return model


def _restore_rotary(model: Any, config: Any) -> None:
    """Compute the rotary frequencies, which are no part of a checkpoint and were left empty."""
    rotary = model.model.rotary_emb
    fresh = type(rotary)(config=config)
    for name, buffer in fresh.named_buffers():
        getattr(rotary, name).copy_(buffer)


if __name__ == "__main__":
    main()

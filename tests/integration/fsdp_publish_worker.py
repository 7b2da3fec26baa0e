"""One rank of the FSDP2 publish test: trains a tiny Qwen3 and publishes after each step. Started by test_fsdp_publish.py."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import destroy_process_group, init_device_mesh, init_process_group
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from rose.backends.fsdp import FsdpTrainer, bits_of
from rose.registry import open_transport
from rose.testing import TrainerRecord
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher
from rose.types import TransportAddress

VOCAB, NUM_STEPS = 129, 2


def make_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).float()
    model.gain = torch.nn.Parameter(torch.ones(1))  # fewer rows than ranks: rank 1 holds nothing of it
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def full_bits(model: Any) -> dict[str, Any]:
    """Return what every engine must hold: the gathered masters in the wire dtype. A collective."""
    with torch.no_grad():
        return {
            name: bits_of((p.full_tensor() if isinstance(p, DTensor) else p).to(torch.bfloat16)).copy()
            for name, p in model.named_parameters()
        }


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, out = task["rank"], Path(task["out"])
    init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=task["world_size"])
    options = tuple((key, value) for key, value in task["options"])
    transport = open_transport(TransportAddress(name=task["transport"], options=options))
    model = make_model()
    trainer = FsdpTrainer(model)
    targets = [TargetLayout.from_json(layout) for layout in task["targets"]]
    publisher = Publisher(trainer, transport, run="fsdp", targets=targets, timeout_s=60.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    result: dict[str, Any] = {
        "record_before": TrainerRecord.of(trainer),
        "truth": [],
        "reports": [],
        "num_collectives": [],
    }
    for step in range(NUM_STEPS + 1):
        with CommDebugMode() as comms:
            result["reports"].append(publisher.publish_sync())
        result["num_collectives"].append(comms.get_total_counts())
        with CommDebugMode() as comms:
            result["truth"].append(full_bits(model))
        result["num_collectives_of_gather"] = comms.get_total_counts()
        ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result["record"] = TrainerRecord.of(trainer)
    (out / f"rank-{rank}.pkl").write_bytes(pickle.dumps(result))
    transport.close()
    destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of the Megatron-Core publish test: trains a tiny model and publishes after each step. Started by test_megatron_publish.py."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.tensor.debug import CommDebugMode

warnings.simplefilter("ignore")

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads

from rose.backends.megatron import MegatronTrainer
from rose.backends.megatron.cpu import causal_mask, cpu_megatron, make_gpt
from rose.registry import open_transport
from rose.testing import TrainerRecord
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher
from rose.types import TransportAddress


def logits_of(model: Any, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return the whole model's logits, without those of padding. A collective."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        local = model(input_ids=ids, position_ids=positions, attention_mask=causal_mask(ids)).contiguous()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    distributed.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=-1)[..., :vocab]


class Job:
    """A model, its optimizer and its data."""

    def __init__(self, task: dict[str, Any]) -> None:
        checkpoint = Path(task["checkpoint"])
        self.hf = json.loads((checkpoint / "config.json").read_text())
        self.model = make_gpt(self.hf)
        self.trainer = MegatronTrainer(self.model, family=task["family"], vocab_size=self.hf["vocab_size"])
        self.trainer.load_weights(load_file(checkpoint / "model.safetensors"))
        options = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
        self.ddp = DistributedDataParallel(self.model.config, options, self.model)
        self.trainer = MegatronTrainer(self.ddp, family=task["family"], vocab_size=self.hf["vocab_size"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=task["lr"])

    def ids(self, seed: int) -> torch.Tensor:
        return torch.randint(0, self.hf["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(seed))

    def step(self, number: int) -> float:
        self.ddp.zero_grad_buffer()
        ids = self.ids(10 * number + parallel_state.get_data_parallel_rank())
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        loss = self.ddp(input_ids=ids, position_ids=positions, attention_mask=causal_mask(ids), labels=ids).mean()
        loss.backward()
        finalize_model_grads([self.ddp])
        for parameter in self.model.parameters():
            parameter.grad = parameter.main_grad
        self.optimizer.step()
        return float(loss.detach())

    def soil_padding(self, seed: int) -> None:
        """Put garbage, another at every step, into the rows that pad the vocabulary."""
        vocab, generator = self.hf["vocab_size"], torch.Generator().manual_seed(seed)
        rank = parallel_state.get_tensor_model_parallel_rank()
        for name, parameter in self.model.named_parameters():
            if name in {"embedding.word_embeddings.weight", "output_layer.weight"}:
                real = min(max(0, vocab - rank * parameter.shape[0]), parameter.shape[0])
                with torch.no_grad():
                    parameter[real:] = torch.randn(parameter[real:].shape, generator=generator)

    def round_weights(self) -> None:
        """Make the masters what an engine holds, so that both compute from the same numbers."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, out = task["rank"], Path(task["out"])
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=task["world_size"]
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=task["tp"], expert_model_parallel_size=task["ep"], expert_tensor_parallel_size=1
    )
    cpu_megatron()
    transport = open_transport(TransportAddress(name=task["transport"], options=tuple(map(tuple, task["options"]))))
    job = Job(task)
    targets = [TargetLayout.from_json(layout) for layout in task["targets"]]
    publisher = Publisher(
        job.trainer, transport, run=task["run"], targets=targets, pointer=f"weights-{task['run']}", timeout_s=120.0
    )
    result: dict[str, Any] = {"run": task["run"], "reports": [], "records": [], "losses": [], "num_collectives": []}
    for step in range(task["num_steps"] + 1):
        job.soil_padding(step)
        with CommDebugMode() as comms:
            result["reports"].append(publisher.publish_sync())
        result["num_collectives"].append(comms.get_total_counts())
        result["records"].append(TrainerRecord.of(job.trainer))
        if step < task["num_steps"]:
            result["losses"].append(job.step(step))
    job.round_weights()
    with CommDebugMode() as comms:
        result["logits"] = logits_of(job.model, job.ids(99), job.hf["vocab_size"]).numpy()
    result["num_collectives_of_gather"] = comms.get_total_counts()
    result["ids"] = job.ids(99).numpy()
    (out / f"rank-{rank}.pkl").write_bytes(pickle.dumps(result))
    transport.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of the learner: FSDP2 or Megatron-Core over gloo, driven by JSON lines. Run by ``LearnerGroup``, never imported by the job.

Life cycle
    1. [GROUP] starts every rank with its number, the rendezvous file and the configuration; the ranks meet.
    2. [GROUP] sends the same operation to every rank (``train`` with each rank's own share); operations are collective.
    3. [RANK] does it and answers with plain data; standard output carries answers only.
    4. [GROUP] closes the standard input; the rank leaves the process group and ends.

Invariants: float32 masters, sharded; every rank does the same number of forward and backward passes; what a rank holds after an
operation depends on the seed and the operations alone. Whole weights are gathered for ``save_checkpoint`` and
``state_checksums`` only, never for ``publish``.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import attrs
import torch
import xxhash
from torch import distributed

from rose import config as configuration
from rose import registry
from rose.errors import ConfigError, RoseError
from rose.interfaces import Transport
from rose.reference.environment import Environment, SupportsDemonstrations, load_environment
from rose.reference.grpo import Surrogate, clipped_surrogate
from rose.reference.learner_config import LearnerConfig
from rose.reference.model_side import make_side
from rose.reference.policy import pad_rows, save_checkpoint
from rose.reference.tokenizer import BOS_ID, PAD_ID, WordTokenizer
from rose.reference.trajectory import derive_seed
from rose.reference.worker_process import take_over_stdout
from rose.transfer.publisher import Publisher
from rose.types import TransportAddress, WeightVersion

_LOGGER = logging.getLogger(__name__)
_GRPO_BETAS, _WARM_START_BETAS = (0.9, 0.95), (0.9, 0.98)
_FINAL_LR_FRACTION = 0.1

Row = tuple[list[int], list[int]]


class Learner:
    """The operations of one rank. The process group must be up."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self._environment: type[Environment] = load_environment(config.environment)
        self._tokenizer = WordTokenizer.for_environment(self._environment)
        self._side = make_side(config, self._tokenizer.num_ids)
        self._optimizer = self._new_optimizer(_GRPO_BETAS, config.grpo.lr)
        self._start = self._local_copy()
        self._transport: Transport | None = None
        self._publisher: Publisher | None = None
        self._published_to: tuple[str, str] | None = None

    def warm_start(self) -> dict[str, object]:
        """Imitate demonstrations; what comes out is what ``reset`` returns to."""
        settings, teacher = self._config.warm_start, self._environment()
        if not isinstance(teacher, SupportsDemonstrations):
            message = f"{self._config.environment} has no demonstrate(seed); set warm_start.num_steps to 0 or add it"
            raise ConfigError(message)
        optimizer = self._new_optimizer(_WARM_START_BETAS, settings.lr)
        losses: list[float] = []
        for step in range(settings.num_steps):
            decay = 1 - (1 - _FINAL_LR_FRACTION) * step / settings.num_steps
            _set_lr(optimizer, settings.lr * min(1.0, (step + 1) / settings.num_warm_up_steps) * decay)
            mine = range(self._side.data_rank, settings.num_episodes, self._side.num_data_ranks)
            seeds = [derive_seed("demonstration", self._config.seed, step, i) for i in mine]
            losses.append(self._imitate(optimizer, [self._demonstration(teacher, seed) for seed in seeds]))
        self._start = self._local_copy()
        self._optimizer = self._new_optimizer(_GRPO_BETAS, self._config.grpo.lr)
        return {"losses": losses}

    def train(self, lr: float, minibatches: Sequence[dict[str, Any]]) -> dict[str, object]:
        """Do one optimizer step a minibatch on this rank's shares (see ``grpo.Minibatch``)."""
        _set_lr(self._optimizer, lr)
        surrogates: list[list[Surrogate]] = []
        norms: list[float] = []
        for minibatch in minibatches:
            micro = [self._backward(rows, minibatch["divisor"]) for rows in minibatch["micro"]]
            surrogates.append(micro)
            norms.append(self._step(self._optimizer))
        return _report(surrogates, norms)

    def publish(self, run: str, address: dict[str, Any], *, anchor: bool) -> dict[str, object]:
        """Publish this rank's shard as the next version of ``run``; no rank sends another's bytes."""
        target = (run, json.dumps(address))
        if self._publisher is None or target != self._published_to:
            self._disconnect()
            options = tuple((name, value) for name, value in address["options"])
            self._transport = registry.open_transport(TransportAddress(name=address["name"], options=options))
            self._publisher = Publisher(
                self._side.trainer(), self._transport, run=run, timeout_s=self._config.timeout_s
            )
            self._published_to = target
        return _plain(self._publisher.publish_sync(anchor=anchor))

    def save_checkpoint(self, folder: str) -> None:
        """Gather the weights and write them, rank 0 only, as a Hugging Face checkpoint in bfloat16."""
        weights = self._side.whole_weights()
        if distributed.get_rank() == 0:
            architecture = self._side.architecture
            save_checkpoint(Path(folder), architecture=architecture, weights=weights, tokenizer=self._tokenizer)
        distributed.barrier()

    def state_checksums(self) -> dict[str, str]:
        """Return name -> xxh3_128 hex digest of the whole tensor's bfloat16 bytes, row-major."""
        bits = {
            name: weight.to(torch.bfloat16).view(torch.uint16) for name, weight in self._side.whole_weights().items()
        }
        return {name: xxhash.xxh3_128_hexdigest(value.contiguous().numpy().tobytes()) for name, value in bits.items()}

    def reset(self) -> None:
        """Return to the weights of the warm start (or of the seed, without one) with a fresh optimizer."""
        with torch.no_grad():
            for master, start in zip(self._side.masters(), self._start, strict=True):
                _local(master).copy_(start)
        self._side.refresh()
        self._optimizer = self._new_optimizer(_GRPO_BETAS, self._config.grpo.lr)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._transport = self._publisher = self._published_to = None

    def _new_optimizer(self, betas: tuple[float, float], lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._side.masters(), lr=lr, betas=betas, weight_decay=0.0)

    def _demonstration(self, teacher: SupportsDemonstrations, seed: int) -> Row:
        ids, mask = [BOS_ID], [0]
        for turn in teacher.demonstrate(seed):
            ids += self._tokenizer.encode(turn.observation) + self._tokenizer.encode(turn.answer)
            mask += [0] * len(turn.observation) + [1] * len(turn.answer)
        return ids, mask

    def _imitate(self, optimizer: torch.optim.AdamW, rows: Sequence[Row]) -> float:
        ids, mask = _pad_ids([row[0] for row in rows]), _pad_floats([row[1] for row in rows])
        num_tokens = self._sum_over_data(float(mask.sum()))
        loss_sum = -(self._side.token_logprobs(ids) * mask).sum()
        (loss_sum * (self._side.num_data_ranks / num_tokens)).backward()
        self._step(optimizer)
        return self._sum_over_data(loss_sum.item()) / num_tokens

    def _backward(self, rows: Sequence[dict[str, Any]], divisor: int) -> Surrogate:
        """Add the gradient of one micro-batch. Data ranks are averaged over, hence the factor; an empty one adds zeros."""
        rows = rows or [{"ids": [BOS_ID, BOS_ID], "mask": [0, 0], "logprobs": [0.0, 0.0], "advantage": 0.0}]
        grpo = self._config.grpo
        surrogate = clipped_surrogate(
            self._side.token_logprobs(_pad_ids([row["ids"] for row in rows])),
            _pad_floats([row["logprobs"] for row in rows]),
            torch.tensor([row["advantage"] for row in rows]),
            _pad_floats([row["mask"] for row in rows]),
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
        )
        (-surrogate.objective_sum * (self._side.num_data_ranks / divisor)).backward()
        return attrs.evolve(surrogate, objective_sum=surrogate.objective_sum.detach())

    def _step(self, optimizer: torch.optim.AdamW) -> float:
        self._side.collect_gradients()
        norm = self._side.clip_gradients(self._config.grpo.max_gradient_norm)
        optimizer.step()
        self._side.refresh()
        return norm

    def _sum_over_data(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        distributed.all_reduce(total, group=self._side.data_group)
        return float(total)

    def _local_copy(self) -> list[Any]:
        return [_local(parameter).clone() for parameter in self._side.masters()]


def _local(parameter: Any) -> Any:
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _pad_ids(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    return pad_rows(rows or [[BOS_ID, BOS_ID]], fill=PAD_ID, dtype=torch.long)


def _pad_floats(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return pad_rows(rows or [[0.0, 0.0]], fill=0.0, dtype=torch.float32)


def _set_lr(optimizer: torch.optim.AdamW, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _report(surrogates: Sequence[Sequence[Surrogate]], norms: Sequence[float]) -> dict[str, object]:
    """Return this rank's sums and maxima; the mismatch is that of the first minibatch, before any step."""
    first = surrogates[0] if surrogates else []
    everything = [surrogate for micro in surrogates for surrogate in micro]
    return {
        "mismatch_sum": sum(float(s.mismatch_sum) for s in first),
        "mismatch_max": max((float(s.mismatch_max) for s in first), default=0.0),
        "num_clipped": sum(int(s.num_clipped) for s in everything),
        "ratio_max": max((float(s.ratio_max) for s in everything), default=1.0),
        "objective_sum": sum(float(s.objective_sum) for s in everything),
        "gradient_norms": list(norms),
    }


def _plain(report: Any) -> dict[str, object]:
    """Return an attrs report as JSON-able data; versions become ``run:n``."""
    result = attrs.asdict(
        report,
        recurse=True,
        value_serializer=lambda _, __, value: str(value) if isinstance(value, WeightVersion) else value,
    )
    return {name: dict(value) if hasattr(value, "items") else value for name, value in result.items()}


def _trim_memory() -> None:
    """Return what an operation's tensors left in the allocator; a learner is idle for most of a step."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


def serve(learner: Learner, answers: TextIO) -> None:
    """Do operation lines ``[name, {arguments}]`` from standard input until it ends."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            reply = {"ok": getattr(learner, name)(**arguments)}
        except Exception as error:
            if not isinstance(error, RoseError):
                _LOGGER.exception("operation %s failed", name)
            reply = {"error": f"{name}: {type(error).__name__}: {error}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
        _trim_memory()


def main(rank: int, rendezvous: str, document: str) -> None:
    """Join the other ranks and serve operations.

    Args:
        rank: This rank.
        rendezvous: Path of the file over which the ranks meet; must not exist before the first rank starts.
        document: The ``LearnerConfig`` as JSON.
    """
    answers = take_over_stdout()
    logging.basicConfig(level=logging.WARNING, format=f"rank {rank}: %(levelname)s %(name)s: %(message)s")
    config = configuration.load(LearnerConfig, json.loads(document))
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=config.num_ranks,
        timeout=timedelta(seconds=config.timeout_s),
    )
    try:
        serve(Learner(config), answers)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])

"""The learner as the job sees it: all ranks behind one asyncio object. Loads no torch.

Life cycle
    1. ``async with LearnerGroup(config)`` starts one process a rank; they meet over a file of their own, on loopback.
    2. ``warm_start`` once; ``reset`` returns to what it left, as often as wanted.
    3. every step: ``train``, then ``publish``.
    4. leaving the block ends the processes.

Invariants: one operation at a time, the same on every rank; when a rank dies, fails in the middle of an operation or is late,
all ranks are ended (a rank alone would wait in a collective for ever) and every later call says why.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs

from rose.errors import TrainerError
from rose.reference.grpo import Minibatch, Sample, find_signal, plan_minibatches
from rose.reference.learner_config import LearnerConfig
from rose.reference.trajectory import Trajectory, derive_seed
from rose.reference.worker_process import WorkerProcess
from rose.types import TransportAddress

_MODULE = "rose.reference.learner"
_ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


@attrs.frozen(kw_only=True)
class TrainReport:
    """What one training step did.

    Attributes:
        num_samples: Trajectories learned from.
        num_tokens: Tokens learned from.
        num_flat_groups: Groups whose rewards were all equal; they teach nothing.
        num_failed: Failed trajectories left out.
        num_optimizer_steps: 0 when every group was flat.
        mismatch_mean: Mean ``|log p(trainer) - log p(engine)|`` before the first optimizer step.
        mismatch_max: Its maximum.
        ratio_max: Largest importance ratio met.
        clipped_fraction: Tokens whose objective the clip lowered.
        gradient_norm: Largest gradient norm before clipping.
        train_s: Wall time.
    """

    num_samples: int
    num_tokens: int
    num_flat_groups: int
    num_failed: int
    num_optimizer_steps: int
    mismatch_mean: float
    mismatch_max: float
    ratio_max: float
    clipped_fraction: float
    gradient_norm: float
    train_s: float


class LearnerGroup:
    """Controls the learner's ranks. Use as an async context manager, or ``start`` and ``close``."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self._ranks: list[WorkerProcess] = []
        self._folder: Path | None = None
        self._lock = asyncio.Lock()
        self._num_train_steps = 0
        self._why_broken: str | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the ranks and wait until all of them are ready.

        Raises:
            TrainerError: A rank could not start; carries its last error lines.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="rose-learner-"))
        document = json.dumps(attrs.asdict(self._config))
        try:
            for rank in range(self._config.num_ranks):
                process = await WorkerProcess.start(
                    _MODULE,
                    [str(rank), str(self._folder / "rendezvous"), document],
                    name=f"learner rank {rank}",
                    error_type=TrainerError,
                    environ=_ENVIRON,
                )
                self._ranks.append(process)
            await self._ask_all("reset", {})
        except BaseException:
            await self.close()
            raise

    async def warm_start(self) -> list[float]:
        """Imitate the environment's demonstrations; returns the loss of every step.

        Raises:
            TrainerError: The environment has no demonstrations, or a rank failed.
        """
        answers = await self._ask_all("warm_start", {})
        return [float(loss) for loss in answers[0]["losses"]]

    async def train(
        self, trajectories: Sequence[Trajectory], *, lr: float | None = None, num_minibatches: int | None = None
    ) -> TrainReport:
        """Do one GRPO step on the trajectories of whole groups. A step without any signal changes nothing.

        Args:
            trajectories: Of one rollout step; failed ones and flat groups are left out.
            lr: Learning rate; the configuration's by default.
            num_minibatches: Optimizer steps; the configuration's by default.

        Raises:
            TrainerError: A rank failed.
        """
        started = time.monotonic()
        grpo, signal = self._config.grpo, find_signal(trajectories)
        minibatches = plan_minibatches(
            signal.samples,
            num_minibatches=num_minibatches or grpo.num_minibatches,
            num_ranks=self._config.num_data_ranks,
            micro_rows=grpo.micro_rows,
            loss=grpo.loss,
            seed=derive_seed("minibatches", self._config.seed, self._num_train_steps),
        )
        self._num_train_steps += 1
        answers: list[Any] = []
        if minibatches:
            lr = grpo.lr if lr is None else lr
            shares = [_share(minibatches, rank, lr) for rank in range(self._config.num_data_ranks)]
            requests = [shares[rank % len(shares)] for rank in range(self._config.num_ranks)]
            answers = (await self._ask_each("train", requests))[: len(shares)]  # the others saw the same
        counts = {
            "num_samples": len(signal.samples),
            "num_flat_groups": signal.num_flat_groups,
            "num_failed": signal.num_failed,
        }
        return _to_report(answers, minibatches, counts, time.monotonic() - started)

    async def publish(self, *, run: str, address: TransportAddress, is_anchor: bool = False) -> dict[str, Any]:
        """Publish the weights as the next version of ``run`` over the transport at ``address``.

        Returns:
            Rank 0's ``rose.transfer.publisher.PublishReport`` as plain data, the version as ``run:n``.

        Raises:
            TrainerError: A rank failed. When every rank could still answer, the group lives and may publish again.
        """
        where = {"name": address.name, "options": [list(option) for option in address.options]}
        answers = await self._ask_all("publish", {"run": run, "address": where, "anchor": is_anchor})
        return dict(answers[0])

    async def save_checkpoint(self, folder: Path) -> None:
        """Write a Hugging Face checkpoint (bfloat16 weights, config, tokenizer) from the gathered weights."""
        await self._ask_all("save_checkpoint", {"folder": str(folder)})

    async def state_checksums(self) -> dict[str, str]:
        """Return tensor name -> xxh3_128 hex digest of its whole bfloat16 state, as engines report theirs."""
        return dict((await self._ask_all("state_checksums", {}))[0])

    async def reset(self) -> None:
        """Return every rank to the warm start's weights with a fresh optimizer and a fresh order of samples."""
        await self._ask_all("reset", {})
        self._num_train_steps = 0

    async def close(self) -> None:
        """End the ranks. Idempotent."""
        ranks, self._ranks = self._ranks, []
        await asyncio.gather(*(rank.close() for rank in ranks))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def _ask_all(self, operation: str, arguments: Mapping[str, Any]) -> list[Any]:
        return await self._ask_each(operation, [arguments] * self._config.num_ranks)

    async def _ask_each(self, operation: str, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        async with self._lock:
            if self._why_broken is not None or not self._ranks:
                message = f"the learner cannot {operation}: {self._why_broken or 'it was not started or is closed'}"
                raise TrainerError(message)
            questions = [rank.post([operation, a]) for rank, a in zip(self._ranks, arguments, strict=True)]
            for question in questions:
                question.add_done_callback(_note)
            try:
                return await self._collect(operation, questions)
            except asyncio.CancelledError:
                self._break(f"{operation} was cancelled half-way")
                raise

    async def _collect(self, operation: str, questions: Sequence[asyncio.Future[Any]]) -> list[Any]:
        """Wait for every answer; a dead or late rank ends them all, an error that every rank survived does not."""
        ends_s = time.monotonic() + self._config.timeout_s
        waiting = set(questions)
        while waiting and not any(rank.has_ended for rank in self._ranks):
            left_s = ends_s - time.monotonic()
            done, waiting = await asyncio.wait(waiting, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
        # A rank that died is the cause; what the others say of it (connection reset) is the consequence.
        by_cause = sorted(zip(self._ranks, questions, strict=True), key=lambda pair: not pair[0].has_ended)
        failures = [question.exception() for _, question in by_cause if question.done()]
        first = next((failure for failure in failures if failure is not None), None)
        if waiting and first is None:
            first = TrainerError(f"{operation}: no answer within {self._config.timeout_s:g} s")
        if first is None:
            return [question.result() for question in questions]
        if waiting or any(rank.has_ended for rank in self._ranks) or operation in {"train", "warm_start", "reset"}:
            self._break(str(first))
        raise first

    def _break(self, why: str) -> None:
        self._why_broken = why
        for rank in self._ranks:
            rank.kill()


def _note(question: asyncio.Future[Any]) -> None:
    """Mark a failure as seen: one failure is raised for all ranks."""
    if not question.cancelled():
        question.exception()


def _share(minibatches: Sequence[Minibatch], rank: int, lr: float) -> dict[str, Any]:
    return {
        "lr": lr,
        "minibatches": [
            {
                "divisor": minibatch.divisor,
                "micro": [[_plain(sample) for sample in rows] for rows in minibatch.shares[rank]],
            }
            for minibatch in minibatches
        ],
    }


def _plain(sample: Sample) -> dict[str, Any]:
    return {
        "ids": sample.token_ids,
        "mask": sample.mask,
        "logprobs": sample.logprobs,
        "advantage": sample.advantage,
    }


def _to_report(
    answers: Sequence[Mapping[str, Any]],
    minibatches: Sequence[Minibatch],
    counts: Mapping[str, int],
    train_s: float,
) -> TrainReport:
    num_tokens = sum(minibatch.num_tokens for minibatch in minibatches)
    num_first = minibatches[0].num_tokens if minibatches else 0
    return TrainReport(
        **counts,
        num_tokens=num_tokens,
        num_optimizer_steps=len(minibatches),
        mismatch_mean=sum(a["mismatch_sum"] for a in answers) / max(1, num_first),
        mismatch_max=max((a["mismatch_max"] for a in answers), default=0.0),
        ratio_max=max((a["ratio_max"] for a in answers), default=1.0),
        clipped_fraction=sum(a["num_clipped"] for a in answers) / max(1, num_tokens),
        gradient_norm=max((norm for a in answers for norm in a["gradient_norms"]), default=0.0),
        train_s=train_s,
    )

"""Full tensors that ROLL broadcasts, republished as changes cut for each engine.

Life cycle of one update:

1. [ROLL's rank 0] gathers a bucket, calls ``broadcast_parameter`` on every front, and broadcasts its tensors.
2. [front] receives them and copies those that it publishes; with several fronts each publishes its share.
3. [ROLL] after the last bucket, ``load_states``: no other sign says that all are there.
4. [front] ``publish``: the pass is closed, compared, coded, put into the pool's store; rank 0 lets the pool sync.

Invariant: a pass that was not closed is never published.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from roll import platforms
from roll.utils.collective import collective

from rose.errors import TransferError
from rose.frameworks import PushReport, StreamedTrainer, WeightPush
from rose_roll.options import RoseOptions

_logger = logging.getLogger("rose_roll")
Pairs = list[tuple[str, Any]]


class FullWeights:
    """One front's intake of full tensors. Calls come from one thread at a time.

    Args:
        options: Where the pool is, and time limits.
        run: Name of the launch, the same for all fronts.
        rank: This front.
        world_size: How many fronts publish together.
        dtype: What engines hold.
    """

    def __init__(self, options: RoseOptions, *, run: str, rank: int, world_size: int, dtype: str) -> None:
        self._trainer = StreamedTrainer(rank=rank, world_size=world_size, dtype=dtype)
        self._push = WeightPush(
            options.place(),
            trainer=self._trainer,
            run=run,
            publish_timeout_s=options.publish_timeout_s,
            sync_timeout_s=options.sync_timeout_s,
        )
        self._intake: Intake | None = None

    @property
    def has_news(self) -> bool:
        """Tell whether tensors came since the last publish."""
        return self._intake is not None

    def join(
        self, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, backend: str | None
    ) -> None:
        """Join a group of broadcasts; blocks until all members have."""
        collective.init_collective_group(
            world_size,
            rank=rank,
            backend=backend or platforms.current_platform.communication_backend,
            group_name=group_name,
            master_addr=master_address,
            master_port=master_port,
        )

    def receive(self, names: Sequence[str], dtypes: Sequence[Any], shapes: Sequence[Any], group_name: str) -> None:
        """Receive one bucket of broadcasts; blocks."""
        pending = []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
            tensor = torch.empty(tuple(shape), dtype=kind, device=platforms.current_platform.device_type)
            handle = collective.broadcast(tensor=tensor, src_rank=0, group_name=group_name, async_op=True)
            pending.append((name, tensor, handle))
        for _, _, handle in pending:
            handle.wait()
        self._feed([(name, tensor) for name, tensor, _ in pending])

    def take(self, serialized: Any) -> None:
        """Take one bucket that a train worker of this device serialised, by ROLL's own means."""
        from roll.utils import cuda_ipc_utils, send_recv_utils  # noqa: PLC0415 - for learners on the same device only

        send_recv_utils.monkey_patch_torch_reductions()
        if isinstance(serialized, dict):
            serialized = serialized["payload"]
        bucket = cuda_ipc_utils.MultiprocessingSerializer.deserialize(serialized)
        self._feed(send_recv_utils.named_tensors_from_bucket(**bucket))

    def publish(self) -> PushReport:
        """Close the pass, publish it, and let the pool sync; blocks.

        Raises:
            LayoutMismatchError: Tensors are not those of the first pass; names them.
            TransferError: It could not be published.
        """
        intake, self._intake = self._intake, None
        if intake is None:
            message = "no tensors came since the last publish"
            raise TransferError(message)
        intake.end()
        report = self._push.push()
        without = report.problem or f"{len(report.errors)} engines are without them"
        _logger.info("weights %s are published; %s", report.version, without)
        return report

    def close(self) -> None:
        """Let go of the pool's store."""
        self._push.close()

    def _feed(self, pairs: Pairs) -> None:
        if self._intake is None:
            self._intake = Intake(self._trainer)
        self._intake.feed(pairs)


class Intake:
    """One pass of a trainer that is fed bucket by bucket, where the trainer asks for one iterable.

    Args:
        trainer: Whose pass it is; its ``update`` runs in a thread of its own.
    """

    def __init__(self, trainer: StreamedTrainer) -> None:
        self._buckets: queue.Queue[Pairs | None] = queue.Queue()
        self._taken = threading.Semaphore(0)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._update, args=(trainer,), name="rose-roll-intake", daemon=True)
        self._thread.start()

    def feed(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Give a bucket, and wait until what is needed of it was copied.

        Raises:
            Exception: What the trainer raised.
        """
        self._buckets.put(list(pairs))
        self._taken.acquire()
        self._check()

    def end(self) -> None:
        """Say that all came.

        Raises:
            Exception: What the trainer raised.
        """
        self._buckets.put(None)
        self._thread.join()
        self._check()

    def _pairs(self) -> Iterator[tuple[str, Any]]:
        while (bucket := self._buckets.get()) is not None:
            yield from bucket
            self._taken.release()

    def _update(self, trainer: StreamedTrainer) -> None:
        try:
            trainer.update(self._pairs())
        except Exception as error:  # noqa: BLE001 - the root of a thread; raised again where it is waited for
            self._error = error
        finally:
            self._taken.release()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

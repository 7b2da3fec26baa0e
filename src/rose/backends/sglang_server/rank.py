"""The weights of one rank of an SGLang engine: a subscriber over the live parameters, and a thread that prepares updates.

Invariants:

* Live weights are written in ``activate`` only, which refuses while the thread reads them.
* A stage that failed leaves nothing staged.
* ``state`` tells the version that the live weights are, or that they are fenced.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from rose.backends.torch_weights.live_model import LiveModel
from rose.errors import EngineBusyError, EngineUnsupportedError, TransferError, VersionConflictError
from rose.transfer.sums import sink_sums
from rose.types import Activation, WeightUpdate, WeightVersion


@attrs.frozen(kw_only=True)
class RankModel:
    """The model of one rank.

    Attributes:
        module: The live model; its ``load_weights`` is traced.
        find_checkpoint: Tells where the checkpoint is that it was loaded from.
        layout_id: Name of the engine's layout.
        is_tied: The output layer shares the embedding's weights.
        is_from_checkpoint: Its weights were loaded from the checkpoint, not made up.
        problem: Why this engine cannot be updated, if so.
    """

    module: Any
    find_checkpoint: Callable[[], Path]
    layout_id: str
    is_tied: bool
    is_from_checkpoint: bool
    problem: str | None = None


class RankWeights:
    """See the module's text. Call it from the rank's own loop only.

    Args:
        model: The rank's model.
    """

    def __init__(self, model: RankModel) -> None:
        self._model = model
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rose-stage")
        self._job: Future[Any] | None = None
        self._opened: LiveModel | None = None
        self._staged: WeightVersion | None = None

    @property
    def is_open(self) -> bool:
        """Return whether ``open`` has succeeded."""
        return self._opened is not None

    @property
    def is_fenced(self) -> bool:
        """Return whether the live weights are not known to be any version."""
        return self._opened is not None and self._opened.is_fenced

    @property
    def version(self) -> WeightVersion | None:
        """Return the version of the live weights, ``None`` when they are no published one."""
        return None if self._opened is None else self._opened.version

    def open(self, version: str | None) -> None:
        """Trace the model's loader and compare live weights with the checkpoint; a later call changes nothing.

        Args:
            version: The ``run:n`` form of the version that the loaded checkpoint is, if it is one.

        Raises:
            EngineUnsupportedError: The engine is of a kind whose weights ROSE does not update.
            LayoutMismatchError: Live parameters are not what their loader makes of the checkpoint.
        """
        if self._opened is not None:
            return
        model = self._model
        if model.problem is not None:
            raise EngineUnsupportedError(model.problem)
        self._opened = LiveModel.open(
            model.module,
            model.find_checkpoint(),
            is_tied=model.is_tied,
            is_from_checkpoint=model.is_from_checkpoint,
            version=version,
        )

    def close(self) -> None:
        """Forget what ``open`` found."""
        if self._opened is not None:
            self._opened.subscriber.close()
        self._opened = None

    def begin_stage(self, update: WeightUpdate) -> None:
        """Begin to fetch, check and decode an update on the thread; replaces what was staged."""
        subscriber = self._open.subscriber
        self._staged = None

        def stage() -> None:
            subscriber.drop_staged()
            subscriber.stage(update)
            self._staged = update.target

        self._begin(stage)

    def begin_sums(self) -> None:
        """Begin to sum every box that this rank holds; the value is rows of name, offset, shape and sum."""
        sink = self._open.sink
        self._begin(
            lambda: [[name, list(box.offset), list(box.shape), list(total)] for name, box, total in sink_sums(sink)]
        )

    def begin_checksums(self) -> None:
        """Begin to digest the tensors that this rank holds whole."""
        self._begin(self._open.sink.checksums)

    def poll(self) -> dict[str, Any]:
        """Return whether what began last is done (``is_done``), and its ``value`` then.

        Raises:
            TransferError: It failed (the subclass says how), or nothing began.
        """
        if self._job is None:
            message = "nothing has begun"
            raise TransferError(message)
        if not self._job.done():
            return {"is_done": False}
        return {"is_done": True, "value": self._job.result()}

    def drop(self) -> None:
        """Forget the staged update, if any; one that is being staged ends by itself and is forgotten as well."""
        subscriber = self._open.subscriber

        def forget() -> None:
            subscriber.drop_staged()
            self._staged = None

        forget()
        if self._job is not None and not self._job.done():
            self._begin(forget)  # behind the stage that runs, which says at its end what it has staged

    def check_ready(self, target: str | None) -> str:
        """Return the version that ``activate`` would lead to.

        Args:
            target: The version that is meant; ``None``: whatever is staged.

        Raises:
            EngineBusyError: Something still reads the live weights.
            VersionConflictError: Another one than ``target`` is staged.
            TransferError: Nothing is staged.
            EngineFencedError: The weights are fenced and what is staged is no anchor.
        """
        opened = self._open
        if self._job is not None and not self._job.done():
            message = "an update is still being staged, or sums are being made; wait for it before activating"
            raise EngineBusyError(message)
        if self._staged is None:
            opened.subscriber.drop_staged()
            message = "no update is staged; call stage first"
            raise TransferError(message)
        if target not in {None, str(self._staged)}:
            message = f"{self._staged} is staged, not {target}; stage again"
            raise VersionConflictError(message)
        return str(self._staged)

    def activate(self, *, is_verified: bool) -> Activation:
        """Write the staged update. Raises what ``Subscriber.activate`` raises; ``is_fenced`` says what state is left."""
        self._staged = None
        return self._open.activate(is_verified=is_verified)

    def fence(self) -> None:
        """Let the weights count as lost: only an anchor brings them to a version again. A no-op before ``open``."""
        self._staged = None
        if self._opened is not None:
            self._opened.subscriber.fence()

    def state(self) -> dict[str, Any]:
        """Return the version's label, whether the weights are fenced, what is staged and whether the thread is busy."""
        return {
            "version": None if self.version is None else str(self.version),
            "is_fenced": self.is_fenced,
            "staged": None if self._staged is None else str(self._staged),
            "is_busy": self._job is not None and not self._job.done(),
        }

    def target_layout(self) -> dict[str, Any]:
        """Return this rank's part of the engine's ``TargetLayout`` as plain data."""
        return self._open.layout(self._model.layout_id).to_json()

    @property
    def _open(self) -> LiveModel:
        if self._opened is None:
            message = "weight updates were not begun on this engine; call begin first"
            raise TransferError(message)
        return self._opened

    def _begin(self, work: Callable[[], Any]) -> None:
        if self._job is not None:
            self._job.cancel()
        self._job = self._thread.submit(work)

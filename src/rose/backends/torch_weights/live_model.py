"""A loaded torch model whose weights are kept up to date in place: what engines share, whatever serves the model.

Invariant: after ``activate`` raised, ``is_fenced`` says whether anything was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import attrs

from rose.backends.torch_weights.checkpoint_files import find_tensors
from rose.backends.torch_weights.loaded_bits import check_loaded_bits
from rose.backends.torch_weights.sink import ParameterSink
from rose.backends.torch_weights.slices import SlicePlan, as_meta
from rose.errors import EngineFencedError, RoseError
from rose.transfer.layout import TargetLayout
from rose.transfer.subscriber import Subscriber
from rose.types import Activation, WeightVersion

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@attrs.frozen(kw_only=True, eq=False)
class LiveModel:
    """One rank's live parameters, and the subscriber that brings them along.

    Attributes:
        sink: The parameters.
        subscriber: Stages and writes updates.
        aliases: Tied names: alias -> the name that it loads from.
    """

    sink: ParameterSink
    subscriber: Subscriber
    aliases: Mapping[str, str]

    @classmethod
    def open(
        cls,
        module: Any,
        checkpoint: Path,
        *,
        is_tied: bool,
        is_from_checkpoint: bool,
        version: str | None,
        tracing: AbstractContextManager[Any] | None = None,
    ) -> Self:
        """Trace the model's own loader and compare its live weights with the checkpoint.

        Args:
            module: The model; its ``load_weights`` is traced.
            checkpoint: Folder that it was loaded from.
            is_tied: The output layer shares the embedding's weights.
            is_from_checkpoint: Its weights are still those of the checkpoint, so that they can be compared.
            version: The ``run:n`` form of the version that the checkpoint is, if it is one.
            tracing: What the loader has to run in.

        Raises:
            LayoutMismatchError: Live parameters are not what their loader makes of the checkpoint, so that they cannot be updated in
                place: packed, quantised or computed ones; names them.
        """
        label = None if version is None else WeightVersion.parse(version)
        stored = find_tensors(checkpoint)
        with tracing or nullcontext():
            plan = SlicePlan.trace(module, as_meta(stored))
        if is_from_checkpoint:
            check_loaded_bits(plan, stored, checkpoint)
        sink = ParameterSink.over(plan)
        aliases = _tied_names(sink) if is_tied else {}
        return cls(sink=sink, subscriber=Subscriber(sink, aliases=aliases, version=label), aliases=aliases)

    @property
    def is_fenced(self) -> bool:
        """Return whether the live weights are not known to be any version."""
        return self.subscriber.is_fenced

    @property
    def version(self) -> WeightVersion | None:
        """Return the version of the live weights, ``None`` when they are no published one."""
        return self.subscriber.version

    def activate(self, *, is_verified: bool) -> Activation:
        """Write the staged update; nothing may compute meanwhile. Raises what ``Subscriber.activate`` raises."""
        try:
            return self.subscriber.activate(verify=is_verified)
        except RoseError:
            raise
        except Exception as error:
            if not self.is_fenced:
                raise
            message = f"the update failed while it was written: {error!r}"
            raise EngineFencedError(message) from error

    def layout(self, layout_id: str) -> TargetLayout:
        """Return this rank's part of the engine's layout (one rank)."""
        return TargetLayout(
            layout_id=layout_id,
            tensors=tuple(self.sink.tensors().values()),
            ranks=({name: tuple(boxes) for name, boxes in self.sink.boxes().items()},),
            aliases=dict(self.aliases),
        )


def _tied_names(sink: ParameterSink) -> dict[str, str]:
    names = sink.tensors()
    embedding = next((name for name in names if name.endswith(_EMBEDDING)), None)
    return {} if embedding is None or _HEAD in names else {_HEAD: embedding}

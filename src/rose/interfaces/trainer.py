"""The trainer role: a source of weights, one object a rank.

Names are checkpoint (Hugging Face) names, so that trainer and engine never know of each other. A rank hands out its own
shard only; nothing here is a collective.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

import attrs
import numpy as np


@attrs.frozen(kw_only=True)
class TensorSpec:
    """A checkpoint tensor: its global shape and the dtype it travels in (``bfloat16``, ``float32``, ...)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(kw_only=True)
class ShardSpec:
    """The box of one tensor that one rank holds: ``offset`` and ``shape`` in global coordinates; may be empty."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Return how many elements the box holds (1 for a scalar, 0 when empty)."""
        return prod(self.shape)


class ShardBits(Protocol):
    """The bit patterns of one box, read slice by slice; a numpy array is one.

    A slice is read-only to the caller, may be a copy made for it (a cast, say), and holds until the trainer changes its
    weights. Several threads may ask at once.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the box."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the unsigned-integer type of the patterns."""

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the patterns of a part: one slice (with start and stop) a dimension; ``()`` gives a scalar box's array."""


class Trainer(ABC):
    """One rank's view of the model under training.

    Attributes:
        rank: This rank.
        world_size: How many ranks publish together.
        is_gathered: Whether the rank's box is the result of a gather that the framework made before.
    """

    rank: int
    world_size: int
    is_gathered: bool = False

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor of the whole model, the same on every rank, in a fixed order."""

    def aliases(self) -> Mapping[str, str]:
        """Return tied names: alias -> the name in ``tensors`` whose bits it shares. Only the latter is published."""
        return {}

    @abstractmethod
    def layout(self) -> Mapping[str, ShardSpec]:
        """Return which box of each tensor this rank publishes. Over all ranks the boxes cover each element once."""

    @abstractmethod
    def shards(self) -> Mapping[str, ShardBits]:
        """Return this rank's boxes as unsigned-integer bit patterns, shape as in ``layout``, wire dtype, zero copy where possible.

        A bfloat16 box is ``uint16``. What is returned shows the live weights, which the next optimizer step may change.
        """

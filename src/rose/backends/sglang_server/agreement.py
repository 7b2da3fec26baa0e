"""What the first rank of an engine decides about the next step, and all ranks do alike.

Invariant: every rank shares a word at the same point of the same iteration, so that batches, budgets and evictions are equal
on all of them.
"""

from __future__ import annotations

from typing import Any

import attrs

_NONE = -1


@attrs.frozen(kw_only=True)
class Word:
    """One decision.

    Attributes:
        may_step: Whether a step may be built now.
        takes_inputs: Whether requests that came while the first rank waited join it.
        chunk_tokens: The most prompt tokens of the step; 0 leaves SGLang's own.
        kv_budget_tokens: The KV budget that the memory policy sets; ``None`` leaves it alone.
        possible_tokens: The largest KV budget that the device could ever give; ``None`` is no limit.
        is_drained: Whether the engine must hold no request at all.
    """

    may_step: bool = False
    takes_inputs: bool = False
    chunk_tokens: int = 0
    kv_budget_tokens: int | None = None
    possible_tokens: int | None = None
    is_drained: bool = False

    def numbers(self) -> list[int]:
        """Return the word as whole numbers."""
        return [_NONE if value is None else int(value) for value in attrs.astuple(self)]

    @classmethod
    def of(cls, numbers: list[int]) -> Word:
        """Return the word of ``numbers``."""
        may_step, takes_inputs, chunk, budget, possible, is_drained = numbers
        return cls(
            may_step=bool(may_step),
            takes_inputs=bool(takes_inputs),
            chunk_tokens=chunk,
            kv_budget_tokens=None if budget == _NONE else budget,
            possible_tokens=None if possible == _NONE else possible,
            is_drained=bool(is_drained),
        )


class Ranks:
    """The tensor-parallel ranks of one engine; ``is_first`` is the one that decides."""

    def __init__(self, group: Any) -> None:
        """Take SGLang's tensor-parallel group."""
        self._group = group
        self._size = int(group.world_size)
        self.is_first = group.rank_in_group == 0

    def share(self, word: Word | None) -> Word:
        """Return the first rank's word on every rank; the others pass ``None``."""
        if self._size == 1 and word is not None:
            return word
        import torch  # noqa: PLC0415 - heavy, and only an engine over several ranks needs it

        numbers = torch.tensor((word or Word()).numbers(), dtype=torch.int64)
        torch.distributed.broadcast(numbers, src=self._group.ranks[0], group=self._group.cpu_group)
        return Word.of(numbers.tolist())

"""How an engine shares out heads, rows, vocabulary and experts over its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from rose.errors import LayoutMismatchError
from rose.transfer.engine_tables.rules import Cut

ENGINES = ("vllm", "sglang")
_VOCAB_PADDING = 64

_KEYS = {
    "heads": ("heads", "num_attention_heads"),
    "kv_heads": ("kv", "num_key_value_heads"),
    "hidden": ("hidden", "hidden_size"),
    "experts": ("experts", "num_experts", "n_routed_experts", "num_local_experts"),
}

Span = tuple[int, int]
"""Start and length along a dimension."""


@attrs.frozen(kw_only=True)
class Placement:
    """An engine's ranks and the numbers of its model.

    Attributes:
        engine: ``vllm`` or ``sglang``.
        tp: Ranks.
        ep: Groups of ranks that share out whole experts; within a group an expert is cut.
        heads: Query heads.
        kv_heads: Key and value heads; those of a model with latent attention are its query heads.
        experts: Routed experts, 0 without.
        hidden: Width of the residual stream, 0 where the config does not say; stacks of experts need it.
    """

    engine: str
    tp: int
    ep: int
    heads: int
    kv_heads: int
    experts: int
    hidden: int

    @classmethod
    def of(cls, config: Mapping[str, Any], *, engine: str, tp: int, ep: int) -> Placement:
        """Read the numbers of a model and check that it can be placed so.

        Raises:
            LayoutMismatchError: A number is missing, the engine is unknown, or heads or experts cannot be shared out.
        """
        heads = _number(config, "heads", None)
        placement = cls(
            engine=engine,
            tp=tp,
            ep=ep,
            heads=heads,
            kv_heads=_number(config, "kv_heads", heads),
            experts=_number(config, "experts", 0),
            hidden=_number(config, "hidden", 0),
        )
        problems = "; ".join(placement._problems())
        if problems:
            message = f"{engine} cannot hold this model with tp {tp}, ep {ep}: {problems}"
            raise LayoutMismatchError(message)
        return placement

    def _problems(self) -> Iterator[str]:
        if self.engine not in ENGINES:
            yield f"it is unknown; there are rules for {', '.join(ENGINES)}"
        if self.tp < 1 or self.ep < 1 or self.tp % self.ep:
            yield "both must be at least 1 and tp a multiple of ep"
            return
        if self.engine == "vllm" and self.ep not in (1, self.tp):
            yield f"its expert parallelism gives every rank whole experts, so ep must be 1 or {self.tp}"
        if self.heads % self.tp:
            yield f"{self.heads} heads are no multiple of {self.tp}"
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            yield f"{self.kv_heads} KV heads can neither be shared out over nor copied to {self.tp} ranks evenly"
        if self.ep > 1 and (self.experts < self.ep or (self.engine == "sglang" and self.experts % self.ep)):
            yield f"{self.experts} experts cannot be shared out over {self.ep} groups"

    def span(self, cut: Cut, size: int, rank: int, *, is_expert: bool) -> Span | None:
        """Return what a rank holds of a dimension of ``size``; ``None``: nothing at all.

        Raises:
            LayoutMismatchError: The dimension cannot be shared out so.
        """
        num_parts = self.tp // self.ep if is_expert else self.tp
        part = rank % num_parts
        if cut in (Cut.WHOLE, Cut.FIRST_RANK):
            return (0, size) if cut is Cut.WHOLE or part == 0 else None
        if cut is Cut.VOCAB:
            return self._vocab_span(size, rank)
        if cut is Cut.KV_HEADS and self.kv_heads < self.tp:  # neighbouring ranks hold copies of one head
            num_parts, part = self.kv_heads, rank * self.kv_heads // self.tp
        num_units = {Cut.HEADS: self.heads, Cut.KV_HEADS: self.kv_heads, Cut.GATE_UP_PAIRS: size // 2}.get(cut, size)
        return _share(size, num_parts, part, max(num_units, 1))

    def experts_of(self, rank: int) -> Span:
        """Return the first expert of a rank and how many it has; groups that have one more come first."""
        group = rank // (self.tp // self.ep)
        base, rest = divmod(self.experts, self.ep)
        return group * base + min(group, rest), base + (group < rest)

    def _vocab_span(self, size: int, rank: int) -> Span:
        padded = -(-size // _VOCAB_PADDING) * _VOCAB_PADDING
        num_rows, rest = divmod(padded, self.tp)
        if rest:
            message = f"a vocabulary of {size}, padded to {padded}, cannot be shared out over {self.tp} ranks"
            raise LayoutMismatchError(message)
        start = min(rank * num_rows, size)
        return start, min(num_rows, size - start)


def _share(size: int, num_parts: int, part: int, num_units: int) -> Span:
    """Return one of equal parts of a dimension that is so many units which are not cut."""
    if size % num_units or num_units % num_parts:
        message = f"{size} in {num_units} units cannot be shared out over {num_parts} ranks"
        raise LayoutMismatchError(message)
    return part * (size // num_parts), size // num_parts


def _number(config: Mapping[str, Any], what: str, default: int | None) -> int:
    value = next((config[key] for key in _KEYS[what] if config.get(key) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (value == 0 and default != 0):
        message = f"the model's config must have a positive whole number {' or '.join(_KEYS[what])}, got {value!r}"
        raise LayoutMismatchError(message)
    return value

"""A target layout from the names, shapes and numbers of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.engine_tables.placement import Placement, Span
from rose.transfer.engine_tables.rules import Cut, Rule, expert_of, find_rule
from rose.transfer.layout import TargetLayout

_SCALE_SUFFIX = "_scale_inv"
_BLOCK = 128
_BIAS_DIMS = 2  # of a stack of biases
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

_Boxes = tuple[tuple[ShardSpec, ...], ...]  # by rank


def table_layout(
    tensors: Sequence[TensorSpec],
    config: Mapping[str, Any],
    *,
    engine: str,
    tp: int,
    ep: int = 1,
    layout_id: str | None = None,
) -> TargetLayout:
    """Return what the ranks of an engine hold of a checkpoint, by the rules of its layers.

    Args:
        tensors: Every tensor of the checkpoint; block scales (``…weight_scale_inv``, 128 x 128 blocks) go with their weights.
        config: Numbers of the model: ``heads``, ``kv``, ``experts`` (or their names in a Hugging Face config), ``tied``.
        engine: ``vllm`` or ``sglang``.
        tp: Ranks of the engine.
        ep: Groups of ranks that share out whole experts; 1: every rank has a part of every expert.
        layout_id: Name of the layout, by default made from engine, tp and ep.

    Raises:
        LayoutMismatchError: The engine cannot hold the model so, or there is no rule for some names; names them all.
    """
    placement = Placement.of(config, engine=engine, tp=tp, ep=ep)
    is_tied = bool(config.get("tied", config.get("tie_word_embeddings", False)))
    required = tuple(spec for spec in tensors if not (is_tied and spec.name == _HEAD))
    boxes = _boxes_by_name(required, placement)
    return TargetLayout(
        layout_id=layout_id or f"{engine}-tp{tp}" + (f"-ep{ep}" if ep > 1 else ""),
        tensors=required,
        ranks=tuple({name: held[rank] for name, held in boxes.items() if held[rank]} for rank in range(tp)),
        aliases={_HEAD: _EMBEDDING} if is_tied else {},
    )


def _boxes_by_name(tensors: Sequence[TensorSpec], placement: Placement) -> dict[str, _Boxes]:
    shapes = {spec.name: spec.shape for spec in tensors}
    boxes: dict[str, _Boxes] = {}
    unknown, problems = [], []
    known: dict[tuple[Rule, int, tuple[int, ...], tuple[int, ...], bool], _Boxes] = {}  # layers are alike
    for name, shape in shapes.items():
        base = name.removesuffix(_SCALE_SUFFIX)
        rule = find_rule(base)
        if rule is None or base not in shapes:
            unknown.append(name)
            continue
        expert = expert_of(name) if rule.is_expert else 0
        key = (rule, expert, shapes[base], shape, base != name)
        try:
            if key not in known:
                scale_shape = shape if base != name else None
                known[key] = tuple(
                    _boxes(rule, expert, shapes[base], scale_shape, placement, r) for r in range(placement.tp)
                )
        except LayoutMismatchError as error:
            problems.append(f"{name} of shape {shape}: {error}")
            continue
        boxes[name] = known[key]
    if unknown:
        problems.insert(
            0, f"there is no rule for {', '.join(unknown)}; add a rule, or let the engine tell its layout itself"
        )
    if problems:
        message = f"no layout of {placement.engine} with tp {placement.tp}, ep {placement.ep}: {'; '.join(problems)}"
        raise LayoutMismatchError(message)
    return boxes


def _boxes(
    rule: Rule,
    expert: int,
    shape: tuple[int, ...],
    scale_shape: tuple[int, ...] | None,
    placement: Placement,
    rank: int,
) -> tuple[ShardSpec, ...]:
    """Return the boxes of one rank, of a tensor of this shape or of its block scales."""
    if len(shape) <= rule.dim:
        message = f"it should have more than {rule.dim} dimensions"
        raise LayoutMismatchError(message)
    spans = [(0, size) for size in shape]
    if rule.is_expert and not _has_expert(placement, rank, expert):
        return ()
    if rule.is_expert_stack:
        _check_stack(rule, shape, placement)
        spans[0] = placement.experts_of(rank)
    span = placement.span(rule.cut, shape[rule.dim], rank, is_expert=rule.is_expert or rule.is_expert_stack)
    if span is None:
        return ()
    if rule.cut not in (Cut.WHOLE, Cut.FIRST_RANK):
        spans[rule.dim] = span
    if scale_shape is not None:
        spans = _block_spans(spans, shape, scale_shape)
    box = ShardSpec(offset=tuple(start for start, _ in spans), shape=tuple(size for _, size in spans))
    return (box,) if box.num_elements else ()


def _has_expert(placement: Placement, rank: int, expert: int) -> bool:
    if expert >= placement.experts:
        message = f"the model's config has {placement.experts} experts only"
        raise LayoutMismatchError(message)
    first, num_experts = placement.experts_of(rank)
    return first <= expert < first + num_experts


def _check_stack(rule: Rule, shape: tuple[int, ...], placement: Placement) -> None:
    """Check the order of dimensions of stacked experts: the same names are also used for the transposed stacks."""
    hidden_dim = {Cut.GATE_UP_PAIRS: 1, Cut.EVEN: 2}.get(rule.cut)
    is_bias = hidden_dim is None or len(shape) == _BIAS_DIMS
    if shape[0] != placement.experts or (
        hidden_dim is not None and not is_bias and shape[hidden_dim] != placement.hidden
    ):
        message = (
            f"a stack of {placement.experts} experts must be [experts, hidden, 2 x intermediate] or [experts, intermediate, hidden]"
            f" with hidden {placement.hidden}; where it is transposed, publish checkpoint tensors through rose.transfer.source_views"
        )
        raise LayoutMismatchError(message)


def _block_spans(spans: Sequence[Span], shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> list[Span]:
    if scale_shape != tuple(-(-size // _BLOCK) for size in shape):
        message = f"scales of {_BLOCK} x {_BLOCK} blocks do not fit a weight of shape {shape}"
        raise LayoutMismatchError(message)
    blocks = []
    for (start, length), size in zip(spans, shape, strict=True):
        end = start + length
        if start % _BLOCK or (end % _BLOCK and end != size):
            message = f"elements {start} to {end} are no whole blocks of {_BLOCK}"
            raise LayoutMismatchError(message)
        blocks.append((start // _BLOCK, -(-end // _BLOCK) - start // _BLOCK))
    return blocks

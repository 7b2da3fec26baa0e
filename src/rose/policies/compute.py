"""How large a rollout step is: the size of its prefill chunk, and the device turns that one engine step stands for. Pure.

``tokens_per_token`` (M): a toy policy says in one word what the modelled agent says in M tokens. An engine step then
stands for M turns of the device. Each decodes one token of every sequence that is at a word; the step's prompt tokens go
into the first of them, one chunk each. All context lengths scale by M.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
from attrs import validators as v

from rose.interfaces.device import StepWork


@attrs.frozen(kw_only=True)
class StepShape:
    """One engine step, in engine tokens.

    Attributes:
        num_prefill_tokens: New prompt tokens.
        prefill_positions: Sum over them of the positions they attend to.
        num_decodes: Sequences that decode one token.
        decode_context_tokens: Their contexts together.
        num_completed: Sequences whose prefill ends with this step, so that they get a token as well.
        completed_context_tokens: Their contexts together.
    """

    num_prefill_tokens: int = 0
    prefill_positions: float = 0.0
    num_decodes: int = 0
    decode_context_tokens: int = 0
    num_completed: int = 0
    completed_context_tokens: int = 0


@attrs.frozen(kw_only=True)
class ChunkConfig:
    """Bounds of a prefill chunk, in tokens of the modelled model.

    Attributes:
        max_tokens: No chunk is longer (512 in the paper).
        max_step_s: Nor makes its device turn longer than this. A prompt that arrives during a turn waits for its end,
            so this bounds what a chunk adds to its first token. 16 ms is two decode turns of an 8B model on an H100 with
            short contexts; decodes of long ones take longer by themselves (16 of 13,000 tokens: 20 ms), and then a
            chunk is one granule.
        granule_tokens: Chunks are multiples of this, and at least one, whatever ``max_step_s`` says.
    """

    max_tokens: int = attrs.field(default=512, validator=v.ge(1))
    max_step_s: float = attrs.field(default=0.016, validator=v.gt(0))
    granule_tokens: int = attrs.field(default=64, validator=v.ge(1))


def device_turns(shape: StepShape, tokens_per_token: int, chunk_tokens: int) -> list[StepWork]:
    """Return the device turns of one engine step, in order.

    Args:
        shape: The step.
        tokens_per_token: M.
        chunk_tokens: Prompt tokens of one turn, as modelled; more only where M turns would not be enough.

    Returns:
        M turns; fewer, with prompt tokens alone, when no sequence gets a word.
    """
    num_left = num_prompt = shape.num_prefill_tokens * tokens_per_token
    chunk = max(chunk_tokens, shape.num_prefill_tokens)
    positions = shape.prefill_positions * tokens_per_token**2
    has_words = shape.num_decodes + shape.num_completed > 0
    turns = []
    for turn in range(tokens_per_token):
        num_new = min(chunk, num_left)
        if not num_new and not has_words:
            break
        num_decodes = shape.num_decodes + (shape.num_completed if turn else 0)
        context = shape.decode_context_tokens + (shape.completed_context_tokens if turn else 0)
        turns.append(
            StepWork(
                num_prefill_tokens=num_new,
                num_decodes=num_decodes,
                context_tokens=context * tokens_per_token + turn * num_decodes,
                prefill_positions=positions * num_new / num_prompt if num_prompt else 0.0,
            )
        )
        num_left -= num_new
    return turns


def fit_chunk(
    config: ChunkConfig, decodes: StepWork, predict_s: Callable[[StepWork], float], *, context_tokens: int = 0
) -> int:
    """Return how many engine tokens of prompts a step may add to its decodes; each is one modelled token a turn.

    Args:
        config: The bounds.
        decodes: The decode part of the step's first device turn.
        predict_s: Time of a device turn.
        context_tokens: Already computed of the prompt that the chunk goes on with.

    Returns:
        The largest chunk within the bounds, at least one granule.
    """
    granule = config.granule_tokens
    tokens = max(granule, config.max_tokens // granule * granule)
    while tokens > granule:
        positions = tokens * (context_tokens + tokens / 2)
        work = StepWork(tokens, decodes.num_decodes, decodes.context_tokens, positions)
        if predict_s(work) <= config.max_step_s:
            break
        tokens -= granule
    return tokens

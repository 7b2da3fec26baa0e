"""What a finished turn looks like to ROLL: the batch of one sequence that its own policy proxy makes, and a worker's response.

Legend of shapes: P width of the prompt as it came (left-padded), V its real tokens, R new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rose.errors import ConfigError, TurnFailedError
from rose.types import TurnResult
from rose_roll.desk import FINISH_REASONS


def unpadded(input_ids_1p: torch.Tensor, attention_mask_1p: torch.Tensor) -> tuple[int, ...]:
    """Return the tokens of a left-padded prompt."""
    return tuple(input_ids_1p[0][attention_mask_1p[0].bool()].tolist())


def sequence_tensors(
    input_ids_1p: torch.Tensor,
    attention_mask_1p: torch.Tensor,
    result: TurnResult,
    *,
    pad_token_id: int,
    has_logprobs: bool,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a prompt and its answer, padded to the right at width P + R.

    ``prompts`` and ``responses`` as they came; ``input_ids``, ``attention_mask``, ``position_ids``, ``response_mask`` int64 and
    ``prompt_mask`` bool of width P + R; ``infer_logprobs`` float32 of width P + R - 1, at index i that of token i + 1, 0 where no
    token was drawn. Every drawn token counts, also one that is the padding token.

    Raises:
        TurnFailedError: The pool gave another number of log-probs than of tokens.
    """
    prompt, mask = unpadded(input_ids_1p, attention_mask_1p), attention_mask_1p
    num_real, num_new = len(prompt), len(result.token_ids)
    width = input_ids_1p.shape[1] + num_new
    length = num_real + num_new
    row = torch.full((1, width), pad_token_id, dtype=input_ids_1p.dtype)
    row[0, :length] = torch.tensor((*prompt, *result.token_ids), dtype=row.dtype)
    attention = torch.zeros((1, width), dtype=mask.dtype)
    attention[0, :length] = 1
    response = torch.zeros_like(attention)
    response[0, num_real:length] = 1
    tensors = {
        "prompts": input_ids_1p.clone(),
        "responses": torch.tensor([result.token_ids], dtype=input_ids_1p.dtype),
        "input_ids": row,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=-1) - 1).clip(min=0),
        "prompt_mask": (attention == 1) & (response == 0),
        "response_mask": response,
    }
    if has_logprobs:
        check_logprobs(result)
        logprobs = torch.zeros((1, width - 1), dtype=torch.float32)
        logprobs[0, num_real - 1 : length - 1] = torch.tensor(result.logprobs, dtype=torch.float32)
        tensors["infer_logprobs"] = logprobs
    return tensors


def check_logprobs(result: TurnResult) -> None:
    """Refuse a result that has another number of log-probs than of tokens.

    Raises:
        TurnFailedError: Both numbers.
    """
    if len(result.logprobs) != len(result.token_ids):
        message = f"{len(result.logprobs)} log-probs came for {len(result.token_ids)} tokens; nothing is made up for those missing"
        raise TurnFailedError(message, result.hops)


def check_room(prompt_ids: Sequence[int], result: TurnResult, *, setting: str) -> None:
    """Refuse a turn that ended by itself without a token: its prompt fills the engines' context.

    Raises:
        ConfigError: Names the setting of ROLL's that is too large.
    """
    if result.token_ids or FINISH_REASONS[result.finish_reason] == "abort":
        return
    message = (
        f"a prompt of {len(prompt_ids)} tokens leaves no room in the pool's engines; "
        f"set {setting} to at most their longest context (max_model_len)"
    )
    raise ConfigError(message)


def response_payload(results: Sequence[TurnResult], *, has_logprobs: bool) -> dict[str, Any]:
    """Return a worker's response to one request: a list entry a sequence, also for one that was aborted without a token."""
    payload: dict[str, Any] = {
        "finish_reasons": [FINISH_REASONS[result.finish_reason] for result in results],
        "output_token_ids": [list(result.token_ids) for result in results],
        "output_logprobs": None,
    }
    if has_logprobs:
        for result in results:
            check_logprobs(result)
        payload["output_logprobs"] = [list(result.logprobs) for result in results]
    return payload


def object_array(values: list[Any]) -> np.ndarray[Any, np.dtype[np.object_]]:
    """Return one object a row, whatever the objects are."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array

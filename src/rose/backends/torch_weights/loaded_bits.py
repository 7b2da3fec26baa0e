"""Whether a loaded model holds its checkpoint's bits where its loader says: what in-place updates rest on.

A kernel may want its weights permuted, packed or quantised, and an engine then does so after loading, often in a parameter of
the same shape. The loader knows nothing of it and would write the next weights in the old order. No flag tells, so a
sample of what is live is compared with the files that it was loaded from.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch

from rose.backends.torch_weights.checkpoint_files import StoredTensor
from rose.backends.torch_weights.slices import Piece, SlicePlan
from rose.errors import LayoutMismatchError

_PIECES_OF_PARAMETER = 8
_RUN_ELEMENTS = 64
_NUM_NAMED = 6


def check_loaded_bits(plan: SlicePlan, stored: Mapping[str, StoredTensor], checkpoint: Path) -> None:
    """Compare a sample of every live parameter with the checkpoint that it was loaded from.

    Of each parameter a few pieces (an expert's part, a projection of a fused one), of each piece three short runs.

    Args:
        plan: Of the model, none of whose weights have changed since it was loaded.
        stored: The checkpoint's tensors.
        checkpoint: Its directory, for the message.

    Raises:
        LayoutMismatchError: Some differ; names the tensors.
    """
    differing = dict.fromkeys(
        name for name, piece in _sample(plan) if not _is_as_stored(plan, name, piece, stored[name])
    )
    if differing:
        names = ", ".join(list(differing)[:_NUM_NAMED])
        more = f" and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
        message = (
            f"the live weights of {names}{more} do not have the bits of the checkpoint in {checkpoint}: the engine has packed, permuted "
            "or quantised them for a kernel, or they changed since they were loaded. ROSE writes into live weights as the checkpoint "
            "has them. Load the model without quantization, with a kernel that takes plain weights (for experts "
            "in vLLM engine_args={'moe_backend': 'triton'} on GPUs), and initialise the transfer before anything else changes weights"
        )
        raise LayoutMismatchError(message)


def _sample(plan: SlicePlan) -> Iterator[tuple[str, Piece]]:
    """Yield some pieces of every parameter: repacking is done to a whole one."""
    held: defaultdict[int, list[tuple[str, Piece]]] = defaultdict(list)
    for name, pieces in plan.pieces.items():
        for piece in pieces:
            held[piece.live.untyped_storage().data_ptr()].append((name, piece))
    draw = random.Random(0)  # which ones does not matter, but every start shall look at the same
    for found in held.values():
        yield from draw.sample(found, min(len(found), _PIECES_OF_PARAMETER))


def _is_as_stored(plan: SlicePlan, name: str, piece: Piece, stored: StoredTensor) -> bool:
    dtype = getattr(torch, plan.tensors[name].dtype)
    for start, num_elements in _runs(piece.box.shape):
        whole = tuple(a + b for a, b in zip(start, piece.box.offset, strict=True))
        first = int(np.ravel_multi_index(whole, stored.shape)) if whole else 0
        expected = stored.read(first, num_elements).to(dtype).view(piece.live.dtype)
        live = piece.live[start[:-1]].narrow(0, start[-1], num_elements) if start else piece.live.reshape(1)
        if not torch.equal(live.cpu(), expected):
            return False
    return True


def _runs(shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield where runs along the last dimension start, and their length: at the first row, the middle and the last."""
    if not prod(shape):
        return
    if not shape:
        yield (), 1
        return
    *leading, width = shape
    num_rows, num_elements = prod(leading), min(width, _RUN_ELEMENTS)
    for row, column in {(0, 0), (num_rows // 2, (width - num_elements) // 2), (num_rows - 1, width - num_elements)}:
        place = tuple(int(i) for i in np.unravel_index(row, leading)) if leading else ()
        yield (*place, column), num_elements

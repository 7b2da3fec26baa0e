"""The Triton kernels of the device codec. Importing this needs triton; with ``TRITON_INTERPRET=1`` they run on CPU tensors.

Patterns are signed integers throughout; nothing interprets them. 64-bit offsets wherever a tensor may be longer than 2^31 bytes.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, D417, N803 - Triton's own signatures

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_changes(
    new, old, slot_positions, slot_new, slot_old, counts, num_elements, row_len, new_step, old_step,
    IS_FLAT: tl.constexpr, BLOCK: tl.constexpr, NUM_SLOTS: tl.constexpr,
):  # fmt: skip
    """Compare one block of a cell and put its changes into its slots, in order.

    Args:
        new, old: The two states, rows of ``row_len`` contiguous elements, ``new_step`` and ``old_step`` apart.
        slot_positions, slot_new, slot_old: ``[num_blocks, NUM_SLOTS]``.
        counts: ``[num_blocks]``, how many changes there are, which may be more than slots.
        num_elements, row_len, new_step, old_step: Of the cell.
        IS_FLAT: Whether rows follow one another without a gap in both states, so that nothing is divided.
        BLOCK: Elements of a block.
        NUM_SLOTS: Slots of a block.
    """
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < num_elements
    fresh_at, stale_at = at, at
    if not IS_FLAT:
        row = at // row_len
        column = at - row * row_len
        fresh_at, stale_at = row * new_step + column, row * old_step + column
    fresh = tl.load(new + fresh_at, mask=is_inside, other=0)
    stale = tl.load(old + stale_at, mask=is_inside, other=0)
    is_changed = (fresh != stale) & is_inside
    rank = tl.cumsum(is_changed.to(tl.int32), axis=0) - 1
    slot = block.to(tl.int64) * NUM_SLOTS + rank
    is_kept = is_changed & (rank < NUM_SLOTS)
    tl.store(slot_positions + slot, at.to(tl.int32), mask=is_kept)
    tl.store(slot_new + slot, fresh, mask=is_kept)
    tl.store(slot_old + slot, stale, mask=is_kept)
    tl.store(counts + block, tl.sum(is_changed.to(tl.int32), axis=0))


@triton.jit
def gather_changes(slot_positions, slot_new, slot_old, counts, ends, positions, new, old, NUM_SLOTS: tl.constexpr):
    """Move the changes of one block to where they belong among all.

    Args:
        slot_positions, slot_new, slot_old: ``[num_blocks, NUM_SLOTS]``.
        counts: ``[num_blocks]``.
        ends: ``[num_blocks]`` int64, how many changes there are up to the end of each block.
        positions, new, old: Where they go.
        NUM_SLOTS: Slots of a block.
    """
    block = tl.program_id(0)
    count = tl.load(counts + block)
    start = tl.load(ends + block) - count
    slot = tl.arange(0, NUM_SLOTS)
    is_used = slot < count
    source = block.to(tl.int64) * NUM_SLOTS + slot
    tl.store(positions + start + slot, tl.load(slot_positions + source, mask=is_used, other=0), mask=is_used)
    tl.store(new + start + slot, tl.load(slot_new + source, mask=is_used, other=0), mask=is_used)
    tl.store(old + start + slot, tl.load(slot_old + source, mask=is_used, other=0), mask=is_used)


@triton.jit
def scatter_rows(live, positions, values, num, row_len, step, BLOCK: tl.constexpr):
    """Overwrite elements of a tensor of rows.

    Args:
        live: Rows of ``row_len`` contiguous elements, ``step`` apart.
        positions: Flat positions, int32 or int64 ``[num]``, each once.
        values: New patterns ``[num]``.
        num, row_len, step: Sizes.
        BLOCK: Elements that one program writes.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = at < num
    position = tl.load(positions + at, mask=is_inside, other=0).to(tl.int64)
    row = position // row_len
    column = position - row * row_len
    tl.store(live + row * step + column, tl.load(values + at, mask=is_inside, other=0), mask=is_inside)

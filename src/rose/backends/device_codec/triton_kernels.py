"""The Triton kernels of the device codec. Importing this needs triton; with ``TRITON_INTERPRET=1`` they run on CPU tensors.

Sizes are no reason to compile a kernel anew, and for ``scatter_rows``, which runs while an engine is paused, addresses are none either.

Patterns are signed integers throughout; nothing interprets them. Sums are int64, which wraps as uint64 does. One program works on
one block of one cell; ``blocks`` has the cell of each, ``cells`` a column of numbers a cell:

0 address of the new state, 1 of the old one, 2 elements, 3 row length in the two, 4 and 5 distance of rows in the two, 6 its first block,
7 distance of rows in the tensor less the row length, 8 global position of its first element, 9 shift, 10 changes, 11 changes of all
cells before it, 12 and 13 where its low parts and codes begin, in half bytes (codes of byte planes: in bytes), 14 row length in the tensor.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202, D417, N803, PLR2004 - Triton's own signatures and constants

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_cells"])
def find_changes(
    cells, blocks, num_cells, slot_positions, slot_new, slot_old, counts,
    IS_PLAIN: tl.constexpr, BLOCK: tl.constexpr, NUM_SLOTS: tl.constexpr,
):  # fmt: skip
    """Compare one block and put its changes into its slots, in order.

    Args:
        cells, blocks, num_cells: See the module.
        slot_positions, slot_new, slot_old: ``[num_blocks, NUM_SLOTS]``.
        counts: ``[num_blocks]``, how many changes there are, which may be more than slots.
        IS_PLAIN: Whether in all cells rows follow one another without a gap, and addresses and sizes are multiples of 16.
        BLOCK: Elements of a block.
        NUM_SLOTS: Slots of a block.
    """
    block = tl.program_id(0)
    cell = cells + tl.load(blocks + block)
    new = tl.load(cell).to(slot_new.dtype)
    old = tl.load(cell + num_cells).to(slot_old.dtype)
    num_elements = tl.load(cell + 2 * num_cells)
    start = (block - tl.load(cell + 6 * num_cells)) * BLOCK
    if IS_PLAIN:
        new, old, num_elements = tl.multiple_of(new, 16), tl.multiple_of(old, 16), tl.multiple_of(num_elements, 16)
        start = tl.multiple_of(start, BLOCK)
    at = start + tl.arange(0, BLOCK)
    is_inside = at < num_elements
    fresh_at, stale_at = at, at
    if not IS_PLAIN:
        row_len = tl.load(cell + 3 * num_cells).to(tl.int32)
        place = at.to(
            tl.int32
        )  # a cell has fewer than 2^31 elements; a division of 64 bits takes several times as long
        row = (place // row_len).to(tl.int64)
        column = at - row * row_len
        fresh_at = row * tl.load(cell + 4 * num_cells) + column
        stale_at = row * tl.load(cell + 5 * num_cells) + column
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
def _mixed(state):
    """Return what splitmix64 makes of a state, its lowest bit set, all as int64."""
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (state ^ ((state >> 31) & 0x1FFFFFFFF)) | 1


@triton.jit
def _key(table, place, which: tl.constexpr):
    """Return a key of global positions; ``table`` is T, ``[2, 1024]`` int64."""
    span = place >> 10
    factor = _mixed((span + 1) * -7046029254386353131 + (3 + which))
    return tl.load(table + which * 1024 + (place & 1023)) * factor


@triton.jit
def _weighed(table, place, new, old, which: tl.constexpr, WIDTH: tl.constexpr):
    """Return the share of elements in one of the two sums; ``old`` 0 for the sum of patterns alone."""
    if WIDTH == 8:
        low = (new & 0xFFFFFFFF) - (old & 0xFFFFFFFF)
        high = ((new >> 32) & 0xFFFFFFFF) - ((old >> 32) & 0xFFFFFFFF)
        share = _key(table, 2 * place, which) * low + _key(table, 2 * place + 1, which) * high
    else:
        mask: tl.constexpr = (1 << (8 * WIDTH)) - 1
        share = _key(table, place, which) * ((new & mask) - (old & mask))
    return share


@triton.jit
def _gaps(slot_positions, source, is_used, before, lane):
    """Return positions and gaps of a block's changes; ``before`` is the position of the change before the first, -1 for none."""
    position = tl.load(slot_positions + source, mask=is_used, other=0).to(tl.int64)
    previous = tl.load(slot_positions + source - 1, mask=is_used & (lane > 0), other=0).to(tl.int64)
    return position, position - tl.where(lane > 0, previous, before) - 1


@triton.jit
def _code(new, old, WIDTH: tl.constexpr):
    """Return the 4-bit codes of differences of 1 or 2 bytes; 15 has an escape."""
    shift: tl.constexpr = 32 - 8 * WIDTH
    difference = ((new.to(tl.int32) - old.to(tl.int32)) << shift) >> shift
    code = tl.where(difference > 0, 2 * difference - 2, -2 * difference - 1)
    return tl.where(code >= 14, 15, code)


@triton.jit(do_not_specialize=["num_cells", "num_blocks"])
def measure_changes(
    cells, blocks, num_cells, slot_positions, slot_new, slot_old, ends, reached, table, totals, num_blocks,
    WIDTH: tl.constexpr, HAS_NIBBLES: tl.constexpr, NUM_SLOTS: tl.constexpr,
):  # fmt: skip
    """Say of one block how many bytes its gaps and how many escapes it has, and its share of the four sums of its cell.

    Args:
        cells, blocks, num_cells: See the module.
        slot_positions, slot_new, slot_old: ``[num_blocks, NUM_SLOTS]``.
        ends: ``[1 + num_blocks]`` int64, how many changes there are before each block, and in all.
        reached: ``[num_blocks]`` int64, the position of the last change before the block in its cell; -1 for none.
        table: T of the sums, ``[2, 1024]`` int64.
        totals: ``[6, num_blocks]`` int64: bytes of gaps, escapes, two sums of moves, two of new patterns.
        num_blocks: How many blocks there are.
        WIDTH: Bytes of an element.
        HAS_NIBBLES: Whether differences have 4-bit codes.
        NUM_SLOTS: Slots of a block.
    """
    block = tl.program_id(0)
    cell = cells + tl.load(blocks + block)
    first = tl.load(ends + block)
    lane = tl.arange(0, NUM_SLOTS)
    is_used = lane < tl.load(ends + block + 1) - first
    source = block.to(tl.int64) * NUM_SLOTS + lane
    position, gap = _gaps(slot_positions, source, is_used, tl.load(reached + block), lane)
    new = tl.load(slot_new + source, mask=is_used, other=0)
    old = tl.load(slot_old + source, mask=is_used, other=0)
    high = gap >> tl.load(cell + 9 * num_cells)
    out = totals + block
    tl.store(out, tl.sum(tl.where(is_used, high // 255 + 1, 0), axis=0))
    if HAS_NIBBLES:
        is_escape = is_used & (_code(new, old, WIDTH) == 15)
        tl.store(out + num_blocks, tl.sum(is_escape.to(tl.int64), axis=0))
    else:
        tl.store(out + num_blocks, 0)
    row_len = tl.load(cell + 14 * num_cells)
    place = position + position // row_len * tl.load(cell + 7 * num_cells) + tl.load(cell + 8 * num_cells)
    rank = first - tl.load(cell + 11 * num_cells) + lane
    fresh, stale = new.to(tl.int64), old.to(tl.int64)
    for which in tl.static_range(2):
        moved = _weighed(table, place, fresh, stale, which, WIDTH)
        alone = _weighed(table, rank, fresh, tl.zeros_like(stale), which, WIDTH)
        tl.store(out + (2 + which) * num_blocks, tl.sum(tl.where(is_used, moved, 0), axis=0))
        tl.store(out + (4 + which) * num_blocks, tl.sum(tl.where(is_used, alone, 0), axis=0))


@triton.jit(do_not_specialize=["num_cells", "num_blocks"])
def emit_changes(
    cells, blocks, num_cells, slot_positions, slot_new, slot_old, ends, reached, totals, total_ends, num_blocks,
    gaps, lows, codes, escapes,
    WIDTH: tl.constexpr, HAS_NIBBLES: tl.constexpr, IS_OVERWRITE: tl.constexpr, NUM_SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the streams of one block.

    Args:
        cells, blocks, num_cells, slot_positions, slot_new, slot_old, ends, reached, totals, num_blocks: As above.
        total_ends: ``[2, num_blocks]`` int64: bytes of gaps, and escapes, up to the end of each block.
        gaps: uint8, 255 everywhere: bytes that go on are there already.
        lows, codes: uint8, 0 everywhere: one half byte each; codes of byte planes are bytes.
        escapes: Signed elements.
        WIDTH, HAS_NIBBLES, NUM_SLOTS: As above.
        IS_OVERWRITE: Whether new patterns are sent, not differences.
    """
    block = tl.program_id(0)
    cell = cells + tl.load(blocks + block)
    first = tl.load(ends + block)
    lane = tl.arange(0, NUM_SLOTS)
    is_used = lane < tl.load(ends + block + 1) - first
    source = block.to(tl.int64) * NUM_SLOTS + lane
    _position, gap = _gaps(slot_positions, source, is_used, tl.load(reached + block), lane)
    new = tl.load(slot_new + source, mask=is_used, other=0)
    old = tl.load(slot_old + source, mask=is_used, other=0)
    rank = first - tl.load(cell + 11 * num_cells) + lane

    shift = tl.zeros_like(gap) + tl.load(cell + 9 * num_cells)
    high = gap >> shift
    length = tl.where(is_used, high // 255 + 1, 0)
    begin = tl.load(total_ends + block) - tl.load(totals + block)
    tl.store(gaps + begin + tl.cumsum(length, axis=0) - 1, (high % 255).to(tl.uint8), mask=is_used)

    low = lows + tl.load(cell + 12 * num_cells) + rank * (shift >> 2)
    tl.store(low, (gap & 15).to(tl.uint8), mask=is_used & (shift > 0))
    tl.store(low + 1, ((gap >> 4) & 15).to(tl.uint8), mask=is_used & (shift > 4))

    code_start = codes + tl.load(cell + 13 * num_cells) + rank
    if HAS_NIBBLES:
        code = _code(new, old, WIDTH)
        tl.store(code_start, code.to(tl.uint8), mask=is_used)
        is_escape = is_used & (code == 15)
        begin = tl.load(total_ends + num_blocks + block) - tl.load(totals + num_blocks + block)
        place = begin + tl.cumsum(is_escape.to(tl.int64), axis=0) - 1
        tl.store(escapes + place, new - old, mask=is_escape)
    else:
        value = new if IS_OVERWRITE else new - old
        wide = value.to(tl.int64)
        num_changed = tl.load(cell + 10 * num_cells)
        for plane in tl.static_range(WIDTH):
            piece = ((wide >> (8 * plane)) & 255).to(tl.uint8)
            tl.store(code_start + plane * num_changed, piece, mask=is_used)


@triton.jit(
    do_not_specialize=["num", "row_len", "step"], do_not_specialize_on_alignment=["live", "positions", "values"]
)
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

/* Compare, code and sum cells of one element type (ELEMENT) with one instruction set (ISA, TARGET). */

#define WIDTH (BITS / 8)

#include "find.h"
#include "sums.h"

/* Append the gaps of the `n` changes of the block that begins at flat position `at`. */
TARGET static int NAME(add_gaps)(struct coder *c, const u16 *offsets, u64 n, u64 at) {
    if (reserve(&c->short_gaps, 2 * n) || reserve(&c->long_gaps, 8)) return NO_MEMORY;
    u16 *gaps = (u16 *)(void *)(c->short_gaps.data + c->short_gaps.size);
    u64 first = at + offsets[0] - c->end;
    gaps[0] = first < LONG_GAP ? (u16)first : LONG_GAP;
    if (first >= LONG_GAP) {
        memcpy(c->long_gaps.data + c->long_gaps.size, &first, 8);
        c->long_gaps.size += 8;
    }
    for (u64 i = 1; i < n; i++) gaps[i] = (u16)(offsets[i] - offsets[i - 1] - 1);
    c->short_gaps.size += 2 * n;
    c->end = at + offsets[n - 1] + 1;
    return OK;
}

/* Append 4-bit codes and escapes; `nibble` is how many codes there were before. */
TARGET static int NAME(add_codes)(struct coder *c, u8 *restrict codes, u16 *restrict differences, const ELEMENT *news,
                                  const ELEMENT *olds, u64 n, u64 nibble) {
    const int sign_bit = WIDTH == 1 ? 7 : 15; /* used for 1 and 2 bytes only */
    u64 num_escapes = 0;
    for (u64 i = 0; i < n; i++) {
        u16 d = (u16)(ELEMENT)(news[i] - olds[i]), negative = (u16)(d >> sign_bit);
        if (WIDTH == 1) d |= (u16)-negative << 8;
        u16 code = (u16)((u16)(2 * d) ^ (u16)-negative); /* 2d, or -2d - 1 */
        code = (u16)(code - 2 * !negative);
        differences[i] = d;
        codes[i] = code > 13 ? 15 : (u8)code;
        num_escapes += code > 13;
    }
    if (reserve(&c->codes, n / 2 + 1) || reserve(&c->escapes, n * WIDTH)) return NO_MEMORY;
    u8 *out = c->codes.data + c->codes.size;
    u64 i = 0;
    if (nibble & 1) out[-1] |= (u8)(codes[i++] << 4);
    u64 num_pairs = (n - i) / 2;
    for (u64 k = 0; k < num_pairs; k++) out[k] = (u8)(codes[i + 2 * k] | codes[i + 2 * k + 1] << 4);
    i += 2 * num_pairs;
    if (i < n) out[num_pairs++] = codes[i];
    c->codes.size += num_pairs;
    if (!num_escapes) return OK;
    ELEMENT *escapes = (ELEMENT *)(void *)(c->escapes.data + c->escapes.size);
    u64 k = 0;
    for (u64 j = 0; j < n; j++) {
        escapes[k] = (ELEMENT)differences[j];
        k += codes[j] == 15;
    }
    c->escapes.size += k * WIDTH;
    return OK;
}

/* Append patterns or differences that go to byte planes. */
TARGET static int NAME(add_values)(struct coder *c, const ELEMENT *news, const ELEMENT *olds, u64 n, int is_overwrite) {
    if (reserve(&c->values, n * WIDTH)) return NO_MEMORY;
    ELEMENT *out = (ELEMENT *)(void *)(c->values.data + c->values.size);
    if (is_overwrite)
        memcpy(out, news, n * WIDTH);
    else
        for (u64 i = 0; i < n; i++) out[i] = (ELEMENT)(news[i] - olds[i]);
    c->values.size += n * WIDTH;
    return OK;
}

TARGET static int NAME(split_planes)(struct coder *c) {
    u64 n = c->num_changed;
    if (reserve(&c->codes, n * WIDTH)) return NO_MEMORY;
    const ELEMENT *values = (const ELEMENT *)(const void *)c->values.data;
    for (u64 plane = 0; plane < WIDTH; plane++) {
        u8 *out = c->codes.data + plane * n;
        for (u64 i = 0; i < n; i++) out[i] = (u8)(values[i] >> (8 * plane));
    }
    c->codes.size = n * WIDTH;
    return OK;
}

/* Give long gaps' low 16 bits their places in the list of short ones, where their marks are no longer needed. */
TARGET static void NAME(unmark_gaps)(struct coder *c) {
    u16 *gaps = (u16 *)(void *)c->short_gaps.data;
    const u8 *longs = c->long_gaps.data, *end = longs + c->long_gaps.size;
    for (; longs < end; gaps++)
        if (*gaps == LONG_GAP) {
            memcpy(gaps, longs, 2);
            longs += 8;
        }
}

TARGET INLINE u8 *NAME(put_highs)(u8 *out, const u16 *gaps, u64 n, unsigned shift, const u8 **longs) {
    for (u64 k = 0; k < n; k++) {
        u64 gap = gaps[k];
        if (__builtin_expect(gap == LONG_GAP, 0)) memcpy(&gap, *longs, 8), *longs += 8;
        u64 high = gap >> shift;
        while (__builtin_expect(high >= 510, 0)) *out++ = 255, high -= 255;
        u64 is_over = high >= 255; /* too common for a branch */
        *out = 255;
        out += is_over;
        *out++ = (u8)(high - (is_over ? 255 : 0));
    }
    return out;
}

/* Turn the lists of gaps into the stream of their high parts. */
TARGET static int NAME(write_highs)(struct coder *c, unsigned shift) {
    u64 n = c->num_changed, i = 0;
    if (reserve(&c->gaps, n + (c->end >> shift) / 255)) return NO_MEMORY;
    const u16 *gaps = (const u16 *)(const void *)c->short_gaps.data;
    const u8 *longs = c->long_gaps.data;
    u8 *out = c->gaps.data;
    for (; i + 32 <= n; i += 32) {
        u16 most = 0;
        for (u64 k = 0; k < 32; k++) most = gaps[i + k] > most ? gaps[i + k] : most;
        if (most >> shift >= 255) {
            out = NAME(put_highs)(out, gaps + i, 32, shift, &longs);
            continue;
        }
        for (u64 k = 0; k < 32; k++) out[k] = (u8)(gaps[i + k] >> shift);
        out += 32;
    }
    out = NAME(put_highs)(out, gaps + i, n - i, shift, &longs);
    c->gaps.size = (u64)(out - c->gaps.data);
    return OK;
}

TARGET static int NAME(write_lows)(struct coder *c, unsigned shift) {
    u64 n = c->num_changed;
    if (!shift) return OK;
    if (reserve(&c->lows, n)) return NO_MEMORY;
    NAME(unmark_gaps)(c);
    const u16 *gaps = (const u16 *)(const void *)c->short_gaps.data;
    u8 *restrict lows = c->lows.data;
    if (shift == 8)
        for (u64 k = 0; k < n; k++) lows[k] = (u8)gaps[k];
    else {
        for (u64 k = 0; k < n / 2; k++) lows[k] = (u8)((gaps[2 * k] & 15) | (gaps[2 * k + 1] & 15) << 4);
        if (n % 2) lows[n / 2] = (u8)(gaps[n - 1] & 15);
    }
    c->lows.size = shift == 8 ? n : (n + 1) / 2;
    return OK;
}

/* Append the changes that were listed from flat position `at` on, unless the streams are already too large. `s` has room to work. */
TARGET static int NAME(add_changes)(struct coder *c, struct scratch *s, const u16 *offsets, const ELEMENT *news,
                                    const ELEMENT *olds, u64 n, u64 at, u64 is_overwrite) {
    const int has_codes = WIDTH <= 2 && !is_overwrite;
    if (!n) return OK;
    if (c->is_coded) {
        if (NAME(add_gaps)(c, offsets, n, at)) return NO_MEMORY;
        if (has_codes ? NAME(add_codes)(c, s->nibbles, s->differences, news, olds, n, c->num_changed)
                      : NAME(add_values)(c, news, olds, n, (int)is_overwrite))
            return NO_MEMORY;
        NAME(sum_run)(news, n, c->num_changed, c->values_sum);
    }
    c->num_changed += n;
    /* Every change has at least one byte of gaps. */
    if (c->num_changed + c->codes.size + c->escapes.size + c->values.size >= c->num_elements * WIDTH) c->is_coded = 0;
    return OK;
}

/* Write the streams of everything that was added, unless they are not smaller than the cell. */
TARGET static int NAME(finish)(struct coder *c, u64 is_overwrite) {
    if (!c->num_changed) c->is_coded = 0;
    if (!c->is_coded) return OK;
    u64 unchanged = c->num_elements - c->num_changed;
    c->shift = unchanged < 96 * c->num_changed ? 0 : unchanged < 1536 * c->num_changed ? 4 : 8;
    if (NAME(write_highs)(c, (unsigned)c->shift) || NAME(write_lows)(c, (unsigned)c->shift)) return NO_MEMORY;
    if ((WIDTH > 2 || is_overwrite) && NAME(split_planes)(c)) return NO_MEMORY;
    c->is_coded = c->gaps.size + c->lows.size + c->codes.size + c->escapes.size < c->num_elements * WIDTH;
    return OK;
}

/* Find the changes of the block at flat position `at` (row, column of `where`), add up their sum; returns how many. */
TARGET static u64 NAME(scan_block)(struct scratch *s, const struct cell *cell, u64 len, u64 *where) {
    u64 count = 0, done = 0;
    ELEMENT *news = (ELEMENT *)s->fresh, *olds = (ELEMENT *)s->stale;
    while (done < len) {
        u64 row = where[0], column = where[1];
        u64 piece = cell->row_len - column < len - done ? cell->row_len - column : len - done;
        const ELEMENT *fresh = (const ELEMENT *)(const void *)(cell->fresh + row * cell->fresh_step) + column;
        const ELEMENT *stale = (const ELEMENT *)(const void *)(cell->stale + row * cell->stale_step) + column;
        u64 found = NAME(find)(fresh, stale, piece, done, s->offsets + count, news + count, olds + count,
                                s->is_dense);
        u64 place = cell->start + row * cell->stride + column;
        if (4 * found > piece) { /* dense: a plain sum is cheaper */
            u64 before[2] = {0, 0};
            NAME(sum_run)(fresh, piece, place, s->coder.sum);
            NAME(sum_run)(stale, piece, place, before);
            s->coder.sum[0] -= before[0], s->coder.sum[1] -= before[1];
        } else if (found)
            NAME(sum_changes)(s->offsets + count, news + count, olds + count, found, place - done, s->coder.sum);
        count += found;
        done += piece;
        where[1] += piece;
        if (where[1] == cell->row_len) where[0]++, where[1] = 0;
    }
    return count;
}

TARGET static int NAME(compare)(struct scratch *s, const struct cell *given) {
    struct cell cell = *given;
    if (cell.fresh_step == cell.row_len * WIDTH && cell.stale_step == cell.fresh_step && cell.stride == cell.row_len)
        cell.row_len *= cell.num_rows, cell.num_rows = 1;
    u64 num_elements = cell.num_rows * cell.row_len, where[2] = {0, 0};
    reset_coder(&s->coder, num_elements);
    s->is_dense = 0;
    for (u64 at = 0; at < num_elements; at += BLOCK) {
        u64 len = num_elements - at < BLOCK ? num_elements - at : BLOCK;
        u64 count = NAME(scan_block)(s, &cell, len, where);
        s->is_dense = 16 * count > len; /* a guess for the next block */
        if (NAME(add_changes)(&s->coder, s, s->offsets, (ELEMENT *)s->fresh, (ELEMENT *)s->stale, count, at, cell.is_overwrite))
            return NO_MEMORY;
    }
    return NAME(finish)(&s->coder, cell.is_overwrite);
}

#include "columns.h"

#undef WIDTH

/* The C side of rose.transfer.kernels; the package's text has the formats. No Python API: called through ctypes.
 *
 * Everything that depends on the element type and the instruction set is in cell.h, which is included once for each pair. Callers
 * own all memory but `struct scratch`. Whatever comes from outside (streams, positions) is checked before it is used. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "only little-endian machines are known"
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

#define INLINE static inline __attribute__((always_inline))
#define SPAN 1024     /* elements that share one factor M */
#define BLOCK 32768   /* elements compared at once; offsets in it and gaps of it fit 16 bits, its bytes the second cache */
#define SLACK 128     /* whole vectors are stored over the end of a list */
#define DIGIT_STEPS 16 /* see dot in sums.h */
#define DIGIT_ROW (SPAN + 32)
#define MAX_LANES 64
#define MAX_LISTED 4096 /* changes that a group lists before it codes them */
#define LONG_GAP 65535 /* stands in the list of short gaps for the next of the long ones */

enum { OK = 0, NO_MEMORY = 1, TOO_SHORT = 2, TOO_LONG = 3, OUT_OF_RANGE = 4, BAD_CODE = 5 };

struct buffer {
    u8 *data;
    u64 size, capacity; /* bytes */
};

/* The coding of one cell. Results first, in the order in which native.py reads them; buffers are kept between calls. */
struct coder {
    u64 num_changed, shift, is_coded, sum[2], values_sum[2];
    struct buffer gaps, lows, codes, escapes;
    struct buffer short_gaps, long_gaps, values;
    u64 num_elements;
    u64 end; /* one after the last change so far */
};

/* One of the cells that lie side by side, and its changes that are not coded yet. */
struct lane {
    struct coder coder;
    u64 begin, len; /* columns */
    u64 count;
    u16 *offsets; /* flat in the cell, from the group's `base_row` on */
    u8 *news, *olds;
};

/* Cells side by side that are compared together, row by row. */
struct group {
    struct lane lanes[MAX_LANES];
    u64 num_lanes, width, widest, num_rows, start, stride, is_overwrite;
    u64 row, base_row, num_listed;
    unsigned unit; /* all cells begin at multiples of 2^unit columns */
    u8 lane_of[BLOCK];
    struct buffer lists;
};

/* One thread's working memory. */
struct set;
struct scratch {
    struct coder coder;
    const struct set *set;
    struct group *group;
    int is_dense;
    u16 offsets[BLOCK + SLACK];
    u64 fresh[BLOCK + SLACK], stale[BLOCK + SLACK]; /* new and old patterns, in the element's own type */
    u16 differences[BLOCK + SLACK];
    u8 nibbles[BLOCK + SLACK];
};

struct cell {
    const u8 *fresh, *stale;
    u64 fresh_step, stale_step; /* bytes from row to row */
    u64 num_rows, row_len, start, stride;
    u64 is_overwrite;
};

/* ---- constants of the sums ---- */

static u32 table[SPAN][2];                                  /* keys T side by side */
static u32 table_of[2][SPAN] __attribute__((aligned(64)));  /* one key after the other */
static u64 prefix_of[2][SPAN + 1];                          /* sums of the first keys */
static u16 digits_of[2][3][DIGIT_ROW] __attribute__((aligned(64))); /* keys in digits of 11 bits, lowest first */

INLINE u64 splitmix(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

INLINE u64 factor(int lane, u64 span) { return splitmix(3 + (u64)lane, span) | 1; }

static void fill_tables(void) {
    for (int lane = 0; lane < 2; lane++)
        for (u64 i = 0; i < SPAN; i++) {
            u32 key = (u32)(splitmix(1 + (u64)lane, i) >> 32) | 1;
            table[i][lane] = table_of[lane][i] = key;
            prefix_of[lane][i + 1] = prefix_of[lane][i] + key;
            for (int k = 0; k < 3; k++) digits_of[lane][k][i] = (u16)(key >> (11 * k) & 2047);
        }
}

/* ---- growing lists ---- */

static int reserve(struct buffer *buffer, u64 num_bytes) {
    u64 needed = buffer->size + num_bytes + SLACK;
    if (needed <= buffer->capacity) return OK;
    u64 capacity = needed + needed / 2;
    u8 *data = realloc(buffer->data, capacity);
    if (!data) return NO_MEMORY;
    buffer->data = data;
    buffer->capacity = capacity;
    return OK;
}

static void release(struct buffer *buffer) {
    free(buffer->data);
    memset(buffer, 0, sizeof *buffer);
}

static void release_coder(struct coder *c) {
    release(&c->gaps), release(&c->lows), release(&c->codes), release(&c->escapes);
    release(&c->short_gaps), release(&c->long_gaps), release(&c->values);
}

static void reset_coder(struct coder *c, u64 num_elements) {
    c->num_changed = c->shift = c->end = c->sum[0] = c->sum[1] = c->values_sum[0] = c->values_sum[1] = 0;
    c->is_coded = 1;
    c->num_elements = num_elements;
    c->gaps.size = c->lows.size = c->codes.size = c->escapes.size = 0;
    c->short_gaps.size = c->long_gaps.size = c->values.size = 0;
}

/* ---- one copy of cell.h an element type and instruction set ---- */

#define JOIN_(a, b, c) a##_##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define NAME(stem) JOIN(stem, ELEMENT, ISA)

#define ISA plain
#define TARGET
#include "cells.h"
#undef ISA
#undef TARGET

#if defined(__x86_64__)
#define ISA avx2
#define HAS_AVX2
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt")))
#include "cells.h"
#undef ISA
#undef TARGET
#undef HAS_AVX2

#define ISA avx512
#define HAS_AVX512
#define TARGET __attribute__((target("avx2,bmi,bmi2,popcnt,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx512vnni")))
#include "cells.h"
#undef ISA
#undef TARGET
#undef HAS_AVX512
#endif

struct set {
    int (*compare[4])(struct scratch *, const struct cell *);
    void (*sum[4])(const u8 *, u64, u64, u64, u64, u64, u64 *);
    int (*scan_rows[4])(struct scratch *, const u8 *, u64, const u8 *, u64, u64);
    int (*finish_group[4])(struct scratch *);
};

#define EACH(stem, isa) {stem##_u8_##isa, stem##_u16_##isa, stem##_u32_##isa, stem##_u64_##isa}
#define SET(isa) {EACH(compare, isa), EACH(sum_rows, isa), EACH(scan_rows, isa), EACH(finish_group, isa)}

static const struct set sets[] = {
    SET(plain),
#if defined(__x86_64__)
    SET(avx2), SET(avx512)
#endif
};

static int best_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi2") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return 1;
#endif
    return 0;
}

static int log2_of(u64 itemsize) { return itemsize == 1 ? 0 : itemsize == 2 ? 1 : itemsize == 4 ? 2 : 3; }

/* ---- what native.py calls ---- */

#include "receive.h"

#include "places.h"

/* Prepare, once, before anything else; returns the best level this machine has: 0 plain, 1 AVX2, 2 AVX-512. */
int rose_start(void) {
    fill_tables();
    fill_pairs();
    return best_level();
}

void rose_constants(u32 *tables, u64 *factors, u64 num_spans) {
    memcpy(tables, table_of, sizeof table_of);
    for (u64 span = 0; span < num_spans; span++)
        for (int lane = 0; lane < 2; lane++) factors[lane * num_spans + span] = factor(lane, span);
}

struct scratch *rose_scratch(int level) {
    struct scratch *s = calloc(1, sizeof(struct scratch));
    if (s) s->set = &sets[level];
    return s;
}

void rose_trim(struct scratch *s) {
    release_coder(&s->coder);
    if (!s->group) return;
    for (u64 i = 0; i < MAX_LANES; i++) release_coder(&s->group->lanes[i].coder);
    release(&s->group->lists);
    free(s->group);
    s->group = NULL;
}

void rose_free(struct scratch *s) {
    rose_trim(s);
    free(s);
}

int rose_compare(struct scratch *s, u64 itemsize, const u8 *fresh, u64 fresh_step, const u8 *stale, u64 stale_step,
                 u64 num_rows, u64 row_len, u64 start, u64 stride, u64 is_overwrite) {
    struct cell cell = {fresh, stale, fresh_step, stale_step, num_rows, row_len, start, stride, is_overwrite};
    return s->set->compare[log2_of(itemsize)](s, &cell);
}

void rose_sum(int level, u64 itemsize, const u8 *bits, u64 step, u64 num_rows, u64 row_len, u64 start, u64 stride, u64 *sum) {
    sum[0] = sum[1] = 0;
    sets[level].sum[log2_of(itemsize)](bits, step, num_rows, row_len, start, stride, sum);
}

/* Begin to compare cells side by side: `lens` are their columns, together at most BLOCK. */
int rose_begin_group(struct scratch *s, u64 itemsize, const u64 *lens, u64 num_lanes, u64 num_rows, u64 start, u64 stride,
                     u64 is_overwrite) {
    if (!s->group && !(s->group = calloc(1, sizeof *s->group))) return NO_MEMORY;
    struct group *g = s->group;
    u64 begin = 0, edges = 0, widest = 0;
    for (u64 i = 0; i < num_lanes; i++) edges |= begin += lens[i], widest = widest < lens[i] ? lens[i] : widest;
    u64 room = num_lanes * (MAX_LISTED + SLACK) + BLOCK;
    g->lists.size = 0;
    if (reserve(&g->lists, room * (2 + 2 * itemsize))) return NO_MEMORY;
    u8 *next = g->lists.data, *olds = next + room * itemsize, *offsets = olds + room * itemsize;
    g->width = begin, g->widest = widest, g->num_lanes = num_lanes, g->num_rows = num_rows;
    g->start = start, g->stride = stride, g->is_overwrite = is_overwrite;
    g->row = g->base_row = g->num_listed = 0;
    g->unit = (unsigned)__builtin_ctzll(edges);
    s->is_dense = 0;
    begin = 0;
    for (u64 i = 0; i < num_lanes; begin += lens[i++]) {
        struct lane *lane = &g->lanes[i];
        u64 most = MAX_LISTED + SLACK + BLOCK / g->width * lens[i];
        reset_coder(&lane->coder, num_rows * lens[i]);
        lane->begin = begin, lane->len = lens[i], lane->count = 0;
        lane->news = next, lane->olds = olds, lane->offsets = (u16 *)(void *)offsets;
        next += most * itemsize, olds += most * itemsize, offsets += most * 2;
        memset(g->lane_of + (begin >> g->unit), (int)i, lens[i] >> g->unit);
    }
    return OK;
}

/* Compare the next rows of all its cells. */
int rose_scan_rows(struct scratch *s, u64 itemsize, const u8 *fresh, u64 fresh_step, const u8 *stale, u64 stale_step,
                   u64 num_rows) {
    return s->set->scan_rows[log2_of(itemsize)](s, fresh, fresh_step, stale, stale_step, num_rows);
}

int rose_finish_group(struct scratch *s, u64 itemsize) { return s->set->finish_group[log2_of(itemsize)](s); }

/* Return the results of one cell. */
const struct coder *rose_lane(const struct scratch *s, u64 lane) { return &s->group->lanes[lane].coder; }

/* Moving elements to and from flat positions, and what that does to a sum. */

/* Elements are found, and asked of memory, a few at a time, and used only after the next few have been found: most of them lie in a
 * cache line of their own, so that waiting for each in turn would take most of the time. They are asked for in the second cache, which
 * can wait for more of them at once than the first. */
#define FEW 256

/* From flat positions to `base + row * step + column * unit`. */
struct walk {
    u64 base, step, row_len, unit;
    u64 first, row; /* the flat position where the present row begins, and where that row lies */
};

INLINE struct walk walk_from(u64 base, u64 step, u64 num_rows, u64 row_len, u64 unit) {
    if (step == row_len * unit) row_len *= num_rows;
    struct walk walk = {base, step, row_len, unit, 0, base};
    return walk;
}

INLINE u64 find_place(struct walk *walk, u64 at) {
    u64 column = at - walk->first;
    if (column >= walk->row_len) {
        column -= walk->row_len;
        if (column < walk->row_len) /* the next row, mostly; a division takes longer */
            walk->first += walk->row_len, walk->row += walk->step;
        else {
            u64 row = at / walk->row_len;
            walk->first = row * walk->row_len, walk->row = walk->base + row * walk->step;
            column = at - walk->first;
        }
    }
    return walk->row + column * walk->unit;
}

INLINE u64 position_at(const void *positions, u64 is_wide, u64 i) {
    return is_wide ? (u64)((const int64_t *)positions)[i] : (u64)(int64_t)((const int32_t *)positions)[i];
}

INLINE int is_outside(const void *positions, u64 is_wide, u64 n, u64 total) {
    int is_bad = 0;
    if (!is_wide && total <= 0x80000000u) /* negative ones are large */
        for (u64 i = 0; i < n; i++) is_bad |= ((const u32 *)positions)[i] >= (u32)total;
    else
        for (u64 i = 0; i < n; i++) is_bad |= position_at(positions, is_wide, i) >= total;
    return is_bad;
}

INLINE u64 load(const void *from, u64 itemsize) {
    u64 value = 0;
    memcpy(&value, from, itemsize);
    return value;
}

/* ---- one pass over positions ---- */

enum { GATHER = 0, SCATTER = 1, ADD = 2 };

struct job {
    struct walk walk;
    const void *positions;
    u64 n;
    u8 *values; /* GATHER: out; SCATTER: in; ADD: differences, in */
};

INLINE void find_few(struct job *job, u64 is_wide, u64 from, u64 n, u8 **found) {
    for (u64 i = 0; i < n; i++) {
        found[i] = (u8 *)(uintptr_t)find_place(&job->walk, position_at(job->positions, is_wide, from + i));
        __builtin_prefetch(found[i], 0, 2);
    }
}

INLINE void use_few(const struct job *job, int what, u64 itemsize, u64 from, u64 n, u8 *const *found) {
    u8 *values = job->values + from * itemsize;
    for (u64 i = 0; i < n; i++) {
        u64 at = i * itemsize;
        if (what == SCATTER) memcpy(found[i], values + at, itemsize);
        if (what == GATHER) memcpy(values + at, found[i], itemsize);
        if (what == ADD) {
            u64 new = load(found[i], itemsize) + load(values + at, itemsize);
            memcpy(found[i], &new, itemsize);
        }
    }
}

INLINE void pass_as(struct job job, int what, u64 itemsize, u64 is_wide) {
    u8 *found[2][FEW];
    u64 n = job.n, ready = n < FEW ? n : FEW;
    find_few(&job, is_wide, 0, ready, found[0]);
    for (u64 at = 0, turn = 0; at < n; turn ^= 1) {
        u64 next = at + ready, num_next = n - next < FEW ? n - next : FEW;
        find_few(&job, is_wide, next, num_next, found[turn ^ 1]);
        use_few(&job, what, itemsize, at, ready, found[turn]);
        at = next, ready = num_next;
    }
}

#define PASSES(what, itemsize)                    \
    case itemsize:                                \
        if (is_wide)                              \
            pass_as(job, what, itemsize, 1);      \
        else                                      \
            pass_as(job, what, itemsize, 0);      \
        break;
#define PASS(stem, what)                                                                         \
    static void pass_##stem(struct job job, u64 itemsize, u64 is_wide) {                         \
        switch (itemsize) { PASSES(what, 1) PASSES(what, 2) PASSES(what, 4) PASSES(what, 8) }    \
    }
PASS(gather, GATHER)
PASS(scatter, SCATTER)
PASS(add, ADD)

/* Do `what` to the elements at flat positions; nothing is touched when one is out of range. */
int rose_pass(u64 what, u64 itemsize, const u8 *array, u64 step, u64 num_rows, u64 row_len, const void *positions, u64 is_wide,
              u64 n, void *values) {
    if (is_outside(positions, is_wide, n, num_rows * row_len)) return OUT_OF_RANGE;
    struct job job = {.positions = positions, .n = n, .values = values};
    job.walk = walk_from((u64)(uintptr_t)array, step, num_rows, row_len, itemsize);
    if (what == GATHER) pass_gather(job, itemsize, is_wide);
    if (what == SCATTER) pass_scatter(job, itemsize, is_wide);
    if (what == ADD) pass_add(job, itemsize, is_wide);
    return OK;
}

/* ---- the sum of changes that are at hand ---- */

/* The sum over changes so far but for those in the present span, which have no factor yet. */
struct moving {
    u64 span, part[2], sum[2];
};

INLINE void end_span(struct moving *m) {
    for (int lane = 0; lane < 2; lane++) m->sum[lane] += m->part[lane] * factor(lane, m->span), m->part[lane] = 0;
}

INLINE void add_move(struct moving *m, u64 itemsize, u64 place, u64 old, u64 new) {
    if (itemsize == 8) place *= 2;
    if (place / SPAN != m->span) {
        end_span(m);
        m->span = place / SPAN;
    }
    const u32 *keys = table[place % SPAN];
    u64 low = (new & 0xFFFFFFFFu) - (old & 0xFFFFFFFFu), high = (new >> 32) - (old >> 32);
    for (int lane = 0; lane < 2; lane++) m->part[lane] += low * keys[lane];
    if (itemsize == 8)
        for (int lane = 0; lane < 2; lane++) m->part[lane] += high * keys[2 + lane];
}

INLINE void changes_sum(u64 itemsize, const void *positions, u64 is_wide, u64 n, const u8 *olds, const u8 *news,
                        struct walk walk, u64 *sum) {
    struct moving moving = {0, {0, 0}, {0, 0}};
    for (u64 i = 0; i < n; i++) {
        u64 place = find_place(&walk, position_at(positions, is_wide, i));
        add_move(&moving, itemsize, place, load(olds + i * itemsize, itemsize), load(news + i * itemsize, itemsize));
    }
    end_span(&moving);
    sum[0] = moving.sum[0], sum[1] = moving.sum[1];
}

/* Set `sum` to by how much it moves when the elements at `positions` of a cell go from `olds` to `news`. */
int rose_changes_sum(u64 itemsize, const void *positions, u64 is_wide, u64 n, const u8 *olds, const u8 *news, u64 num_rows,
                     u64 row_len, u64 start, u64 stride, u64 *sum) {
    if (is_outside(positions, is_wide, n, num_rows * row_len)) return OUT_OF_RANGE;
    struct walk walk = walk_from(start, stride, num_rows, row_len, 1);
    if (itemsize == 2 && !is_wide)
        changes_sum(2, positions, 0, n, olds, news, walk, sum);
    else if (itemsize == 1)
        changes_sum(1, positions, is_wide, n, olds, news, walk, sum);
    else if (itemsize == 2)
        changes_sum(2, positions, is_wide, n, olds, news, walk, sum);
    else if (itemsize == 4)
        changes_sum(4, positions, is_wide, n, olds, news, walk, sum);
    else
        changes_sum(8, positions, is_wide, n, olds, news, walk, sum);
    return OK;
}

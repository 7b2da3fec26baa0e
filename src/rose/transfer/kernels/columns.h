/* Cells side by side, compared in one pass over their common rows: memory is read as it lies, and what is found is split. */

/* Give each of `n` changes of the rows from `row` on, which lie at `fresh` and `stale`, to its cell: as many at a time as lie in the
 * same cell, row and span of the sums. New and old patterns are looked up, or those listed by `find` taken. Meanwhile memory
 * fetches what comes next. */
TARGET INLINE void NAME(split_as)(struct scratch *s, const ELEMENT *fresh, const ELEMENT *stale, u64 n, u64 row, u64 piece,
                                  int is_listed) {
    enum { SCALE = sizeof(ELEMENT) / sizeof(WORD), LINE = 64 / WIDTH };
    struct group *g = s->group;
    const ELEMENT *listed_news = (const ELEMENT *)s->fresh, *listed_olds = (const ELEMENT *)s->stale;
    const ELEMENT *next_fresh = fresh + piece, *next_stale = stale + piece;
    const u16 *offsets = s->offsets;
    const u64 width = g->width;
    u64 begin = 0, place = g->start + row * g->stride;
    row -= g->base_row;
    for (u64 i = 0; i < n;) {
        u64 column = offsets[i] - begin;
        for (; column >= width; column -= width) begin += width, row++, place += g->stride;
        struct lane *lane = &g->lanes[g->lane_of[column >> g->unit]];
        u64 word = SCALE * (place + column), span = word / SPAN, to_span = (SPAN - word % SPAN) / SCALE;
        u64 end = lane->begin + lane->len - column, part[2] = {0, 0}, k = lane->count;
        end = offsets[i] + (end < to_span ? end : to_span);
        const u64 moved = row * lane->len - lane->begin - begin;
        const u32(*keys)[2] = &table[word % SPAN] - SCALE * (u64)offsets[i];
        ELEMENT *news = (ELEMENT *)(void *)lane->news, *olds = (ELEMENT *)(void *)lane->olds;
        for (; i < n && offsets[i] < end; i++, k++) {
            u64 at = offsets[i];
            ELEMENT new = is_listed ? listed_news[i] : fresh[at], old = is_listed ? listed_olds[i] : stale[at];
            __builtin_prefetch(next_fresh, 0, 2), next_fresh += LINE;
            __builtin_prefetch(next_stale, 0, 2), next_stale += LINE;
            lane->offsets[k] = (u16)(at + moved);
            news[k] = new;
            olds[k] = old;
            u64 low = (u64)(u32)new - (u32)old;
            const u32 *key = keys[SCALE * at];
            part[0] += low * key[0];
            part[1] += low * key[1];
            if (WIDTH == 8) {
                u64 high = ((u64)new >> 32) - ((u64)old >> 32);
                part[0] += high * key[2];
                part[1] += high * key[3];
            }
        }
        lane->count = k;
        for (int key = 0; key < 2; key++) lane->coder.sum[key] += part[key] * factor(key, span);
    }
}

TARGET static void NAME(split)(struct scratch *s, const ELEMENT *fresh, const ELEMENT *stale, u64 n, u64 row, u64 piece,
                               int is_listed) {
    if (is_listed)
        NAME(split_as)(s, fresh, stale, n, row, piece, 1);
    else
        NAME(split_as)(s, fresh, stale, n, row, piece, 0);
}

/* Code what the cells have listed. */
TARGET static int NAME(flush)(struct scratch *s) {
    struct group *g = s->group;
    for (u64 i = 0; i < g->num_lanes; i++) {
        struct lane *lane = &g->lanes[i];
        const ELEMENT *news = (const ELEMENT *)(const void *)lane->news, *olds = (const ELEMENT *)(const void *)lane->olds;
        u64 count = lane->count;
        lane->count = 0;
        if (NAME(add_changes)(&lane->coder, s, lane->offsets, news, olds, count, g->base_row * lane->len, g->is_overwrite))
            return NO_MEMORY;
    }
    g->base_row = g->row;
    g->num_listed = 0;
    return OK;
}

TARGET static int NAME(scan_rows)(struct scratch *s, const u8 *fresh, u64 fresh_step, const u8 *stale, u64 stale_step,
                                  u64 num_rows) {
    struct group *g = s->group;
    ELEMENT *news = (ELEMENT *)s->fresh, *olds = (ELEMENT *)s->stale;
    const u64 width = g->width, most = BLOCK / width;
    const int is_plain = fresh_step == width * WIDTH && stale_step == fresh_step;
    for (u64 done = 0, len; done < num_rows; done += len) {
        len = num_rows - done < most ? num_rows - done : most;
        /* Offsets from the lists' begin stay below BLOCK. */
        if (g->num_listed > MAX_LISTED || (g->row + len - g->base_row) * g->widest > BLOCK)
            if (NAME(flush)(s)) return NO_MEMORY;
        u64 count = 0, piece = is_plain ? len : 1;
        for (u64 row = 0; row < len; row += piece) {
            const ELEMENT *a = (const ELEMENT *)(const void *)(fresh + (done + row) * fresh_step);
            const ELEMENT *b = (const ELEMENT *)(const void *)(stale + (done + row) * stale_step);
            u64 found = NAME(find_offsets)(a, b, piece * width, s->offsets, news, olds, s->is_dense);
            NAME(split)(s, a, b, found, g->row + row, piece * width, LISTS_ALL || s->is_dense);
            count += found;
        }
        s->is_dense = 16 * count > len * width;
        g->num_listed += count;
        g->row += len;
    }
    return OK;
}

TARGET static int NAME(finish_group)(struct scratch *s) {
    struct group *g = s->group;
    if (NAME(flush)(s)) return NO_MEMORY;
    for (u64 i = 0; i < g->num_lanes; i++)
        if (NAME(finish)(&g->lanes[i].coder, g->is_overwrite)) return NO_MEMORY;
    return OK;
}

#undef LISTS_ALL

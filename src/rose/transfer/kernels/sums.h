/* State sums: of runs of elements (sum_run), of whole cells (sum_rows), of changes (sum_changes). */

/* dot: for both keys, the sum of `n` elements times their keys from `first` on; all within one span. */

#if defined(HAS_AVX512) && BITS <= 16

/* Keys are cut into digits of 11 bits, so that sums of 16-bit products fit 32 bits for DIGIT_STEPS vectors. 16-bit elements are
 * made signed by taking away 2^15, which is put back at the end. */
TARGET static void NAME(dot)(const ELEMENT *bits, u64 first, u64 n, u64 *total) {
    __m512i wide[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (u64 i = 0; i < n;) {
        u64 stop = n - i < 32 * DIGIT_STEPS ? n : i + 32 * DIGIT_STEPS;
        __m512i sums[6];
        for (int k = 0; k < 6; k++) sums[k] = _mm512_setzero_si512();
        for (; i < stop; i += 32) {
            __mmask32 mask = stop - i < 32 ? ((u32)1 << (stop - i)) - 1 : 0xFFFFFFFFu;
#if BITS == 8
            __m512i x = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, bits + i));
#else
            __m512i x = _mm512_maskz_loadu_epi16(mask, bits + i);
            x = _mm512_maskz_sub_epi16(mask, x, _mm512_set1_epi16(-32768));
#endif
            const u16 *digits = digits_of[0][0] + first + i;
            for (int k = 0; k < 6; k++)
                sums[k] = _mm512_dpwssd_epi32(sums[k], x, _mm512_loadu_si512(digits + (u64)k * DIGIT_ROW));
        }
        for (int k = 0; k < 6; k++) {
            __m512i low = _mm512_cvtepi32_epi64(_mm512_castsi512_si256(sums[k]));
            __m512i high = _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(sums[k], 1));
            __m512i sum = _mm512_slli_epi64(_mm512_add_epi64(low, high), 11 * (unsigned)(k % 3));
            wide[k / 3] = _mm512_add_epi64(wide[k / 3], sum);
        }
    }
    for (int lane = 0; lane < 2; lane++) {
        total[lane] = (u64)_mm512_reduce_add_epi64(wide[lane]);
        if (BITS == 16) total[lane] += (prefix_of[lane][first + n] - prefix_of[lane][first]) << 15;
    }
}

#elif defined(HAS_AVX512)

TARGET static void NAME(dot)(const u32 *bits, u64 first, u64 n, u64 *total) {
    __m512i sums[4];
    for (int k = 0; k < 4; k++) sums[k] = _mm512_setzero_si512();
    for (u64 i = 0; i < n; i += 16) {
        __mmask16 mask = n - i < 16 ? (__mmask16)((1u << (n - i)) - 1) : 0xFFFF;
        __m512i x = _mm512_maskz_loadu_epi32(mask, bits + i), odd = _mm512_srli_epi64(x, 32);
        for (int lane = 0; lane < 2; lane++) {
            __m512i keys = _mm512_maskz_loadu_epi32(mask, table_of[lane] + first + i);
            sums[2 * lane] = _mm512_add_epi64(sums[2 * lane], _mm512_mul_epu32(x, keys));
            keys = _mm512_srli_epi64(keys, 32);
            sums[2 * lane + 1] = _mm512_add_epi64(sums[2 * lane + 1], _mm512_mul_epu32(odd, keys));
        }
    }
    for (int lane = 0; lane < 2; lane++)
        total[lane] = (u64)_mm512_reduce_add_epi64(_mm512_add_epi64(sums[2 * lane], sums[2 * lane + 1]));
}

#else

TARGET static void NAME(dot)(const WORD *bits, u64 first, u64 n, u64 *total) {
    for (int lane = 0; lane < 2; lane++) {
        const u32 *keys = table_of[lane] + first;
        u64 sum = 0;
        for (u64 i = 0; i < n; i++) sum += (u64)(u32)bits[i] * keys[i];
        total[lane] = sum;
    }
}

#endif

/* Add the sum of `n` elements that lie one after the other from global position `at`. */
TARGET static void NAME(sum_run)(const ELEMENT *bits, u64 n, u64 at, u64 *sum) {
    const WORD *words = (const WORD *)(const void *)bits;
    n *= sizeof(ELEMENT) / sizeof(WORD), at *= sizeof(ELEMENT) / sizeof(WORD);
    while (n) {
        u64 first = at % SPAN, len = SPAN - first < n ? SPAN - first : n, total[2];
        NAME(dot)(words, first, len, total);
        for (int lane = 0; lane < 2; lane++) sum[lane] += total[lane] * factor(lane, at / SPAN);
        words += len, at += len, n -= len;
    }
}

TARGET static void NAME(sum_rows)(const u8 *bits, u64 step, u64 num_rows, u64 row_len, u64 start, u64 stride, u64 *sum) {
    if (step == row_len * WIDTH && stride == row_len) row_len *= num_rows, num_rows = row_len > 0;
    for (u64 row = 0; row < num_rows; row++)
        NAME(sum_run)((const ELEMENT *)(const void *)(bits + row * step), row_len, start + row * stride, sum);
}

/* Add what `n` changes at `at + offsets[i]` words after the first span's begin make; `factors` from that span on. */
TARGET static void NAME(add_moves)(const u16 *offsets, const ELEMENT *news, const ELEMENT *olds, u64 n, u64 at,
                                   const u64 (*factors)[2], u64 *sum) {
    u64 part[2] = {0, 0};
    for (u64 i = 0; i < n; i++) {
        u64 place = at + sizeof(ELEMENT) / sizeof(WORD) * offsets[i];
        const u32 *keys = table[place % SPAN];
        const u64 *scales = factors[place / SPAN];
        u64 low = (u64)(u32)news[i] - (u32)olds[i];
        u64 moved[2] = {low * keys[0], low * keys[1]};
        if (WIDTH == 8) {
            u64 high = ((u64)news[i] >> 32) - ((u64)olds[i] >> 32);
            moved[0] += high * keys[2];
            moved[1] += high * keys[3];
        }
        part[0] += moved[0] * scales[0];
        part[1] += moved[1] * scales[1];
    }
    sum[0] += part[0];
    sum[1] += part[1];
}

/* Add by how much the sum moves with `n` changes at global positions `at + offsets[i]`. Factors are looked up for every change:
 * a branch where a span ends would be mispredicted nearly every time. */
TARGET static void NAME(sum_changes)(const u16 *offsets, const ELEMENT *news, const ELEMENT *olds, u64 n, u64 at, u64 *sum) {
    enum { SCALE = sizeof(ELEMENT) / sizeof(WORD) };
    u64 first = SCALE * (at + offsets[0]) / SPAN, num_spans = SCALE * (at + offsets[n - 1]) / SPAN + 1 - first;
    u64 factors[SCALE * BLOCK / SPAN + 1][2];
    for (u64 i = 0; i < num_spans; i++)
        for (int lane = 0; lane < 2; lane++) factors[i][lane] = factor(lane, first + i);
    NAME(add_moves)(offsets, news, olds, n, SCALE * at - first * SPAN, (const u64(*)[2])factors, sum);
}

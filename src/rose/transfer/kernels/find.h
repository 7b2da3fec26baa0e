/* find: list where `n` elements differ: offsets (`base` for the first element), new and old patterns; returns how many.
 * Whole vectors are stored, so lists need SLACK. No branch depends on what is found but in plain C and AVX2. */

#if defined(HAS_AVX512)

#if BITS == 8
#define LOAD(mask, from) _mm512_maskz_loadu_epi8(mask, from)
#define DIFFER(a, b) _mm512_cmpneq_epi8_mask(a, b)
#define PACK(mask, a) _mm512_maskz_compress_epi8(mask, a)
#define COUNT(mask) (u64) __builtin_popcountll(mask)
typedef __mmask64 NAME(mask);
#elif BITS == 16
#define LOAD(mask, from) _mm512_maskz_loadu_epi16(mask, from)
#define DIFFER(a, b) _mm512_cmpneq_epi16_mask(a, b)
#define PACK(mask, a) _mm512_maskz_compress_epi16(mask, a)
#define COUNT(mask) (u64) __builtin_popcount(mask)
typedef __mmask32 NAME(mask);
#elif BITS == 32
#define LOAD(mask, from) _mm512_maskz_loadu_epi32(mask, from)
#define DIFFER(a, b) _mm512_cmpneq_epi32_mask(a, b)
#define PACK(mask, a) _mm512_maskz_compress_epi32(mask, a)
#define COUNT(mask) (u64) __builtin_popcount(mask)
typedef __mmask16 NAME(mask);
#else
#define LOAD(mask, from) _mm512_maskz_loadu_epi64(mask, from)
#define DIFFER(a, b) _mm512_cmpneq_epi64_mask(a, b)
#define PACK(mask, a) _mm512_maskz_compress_epi64(mask, a)
#define COUNT(mask) (u64) __builtin_popcount(mask)
typedef __mmask8 NAME(mask);
#endif

/* Patterns are listed with the offsets where changes are many (`is_dense`); few are looked up afterwards, which is cheaper than a
 * whole vector of them for every vector compared. What is listed is compressed in a register and stored whole: a compressing
 * store is microcode on some processors. */
TARGET INLINE u64 NAME(put)(__m512i a, __m512i b, __m512i place, u16 *offsets, ELEMENT *news, ELEMENT *olds, int is_dense) {
    NAME(mask) mask = DIFFER(a, b);
#if BITS == 8
    u32 low = (u32)mask, high = (u32)(mask >> 32);
    _mm512_storeu_si512(offsets, _mm512_maskz_compress_epi16(low, place));
    __m512i upper = _mm512_add_epi16(place, _mm512_set1_epi16(32));
    _mm512_storeu_si512(offsets + __builtin_popcount(low), _mm512_maskz_compress_epi16(high, upper));
#elif BITS == 16
    _mm512_storeu_si512(offsets, _mm512_maskz_compress_epi16(mask, place));
#elif BITS == 32
    _mm256_storeu_si256((__m256i *)(void *)offsets, _mm256_maskz_compress_epi16(mask, _mm512_castsi512_si256(place)));
#else
    _mm_storeu_si128((__m128i *)(void *)offsets, _mm_maskz_compress_epi16(mask, _mm512_castsi512_si128(place)));
#endif
    if (is_dense) {
        _mm512_storeu_si512(news, PACK(mask, a));
        _mm512_storeu_si512(olds, PACK(mask, b));
    }
    return COUNT(mask);
}

TARGET INLINE u64 NAME(find_as)(const ELEMENT *fresh, const ELEMENT *stale, u64 n, u64 base, u16 *offsets, ELEMENT *news,
                                ELEMENT *olds, int is_dense) {
    enum { LANES = 64 / WIDTH };
    u64 count = 0, i = 0;
    const __m512i lanes = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11,
                                           10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i place = _mm512_add_epi16(lanes, _mm512_set1_epi16((short)base));
    const __m512i step = _mm512_set1_epi16(LANES);
    for (; i + LANES <= n; i += LANES) {
        __m512i a = _mm512_loadu_si512(fresh + i), b = _mm512_loadu_si512(stale + i);
        count += NAME(put)(a, b, place, offsets + count, news + count, olds + count, is_dense);
        place = _mm512_add_epi16(place, step);
    }
    if (i < n) {
        NAME(mask) rest = (NAME(mask))(((u64)1 << (n - i)) - 1);
        __m512i a = LOAD(rest, fresh + i), b = LOAD(rest, stale + i);
        count += NAME(put)(a, b, place, offsets + count, news + count, olds + count, is_dense);
    }
    return count;
}

TARGET static u64 NAME(find)(const ELEMENT *fresh, const ELEMENT *stale, u64 n, u64 base, u16 *restrict offsets,
                             ELEMENT *restrict news, ELEMENT *restrict olds, int is_dense) {
    if (is_dense) return NAME(find_as)(fresh, stale, n, base, offsets, news, olds, 1);
    u64 count = NAME(find_as)(fresh, stale, n, base, offsets, news, olds, 0);
    for (u64 i = 0; i < count; i++) {
        u64 at = offsets[i] - base;
        news[i] = fresh[at];
        olds[i] = stale[at];
    }
    return count;
}

/* Only offsets, from 0 on, unless `is_dense`. */
#define LISTS_ALL 0
TARGET static u64 NAME(find_offsets)(const ELEMENT *fresh, const ELEMENT *stale, u64 n, u16 *restrict offsets,
                                     ELEMENT *restrict news, ELEMENT *restrict olds, int is_dense) {
    if (is_dense) return NAME(find_as)(fresh, stale, n, 0, offsets, news, olds, 1);
    return NAME(find_as)(fresh, stale, n, 0, offsets, news, olds, 0);
}

#undef LOAD
#undef DIFFER
#undef PACK
#undef COUNT

#else

#if defined(HAS_AVX2)
#if BITS == 8
#define SAME(a, b) _mm256_cmpeq_epi8(a, b)
#define FIRST_BYTES 0xFFFFFFFFu
#elif BITS == 16
#define SAME(a, b) _mm256_cmpeq_epi16(a, b)
#define FIRST_BYTES 0x55555555u
#elif BITS == 32
#define SAME(a, b) _mm256_cmpeq_epi32(a, b)
#define FIRST_BYTES 0x11111111u
#else
#define SAME(a, b) _mm256_cmpeq_epi64(a, b)
#define FIRST_BYTES 0x01010101u
#endif
#endif

TARGET static u64 NAME(find)(const ELEMENT *fresh, const ELEMENT *stale, u64 n, u64 base, u16 *offsets, ELEMENT *news,
                             ELEMENT *olds, int is_dense) {
    (void)is_dense;
    u64 count = 0, i = 0;
#if defined(HAS_AVX2)
    enum { LANES = 32 / WIDTH };
    for (; i + LANES <= n; i += LANES) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(fresh + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(stale + i));
        for (u32 mask = ~(u32)_mm256_movemask_epi8(SAME(a, b)) & FIRST_BYTES; mask; mask &= mask - 1) {
            u64 j = i + (u64)__builtin_ctz(mask) / WIDTH;
            offsets[count] = (u16)(base + j);
            news[count] = fresh[j];
            olds[count++] = stale[j];
        }
    }
#else
    for (; i + 8 <= n; i += 8) {
        if (!memcmp(fresh + i, stale + i, 8 * WIDTH)) continue;
        for (u64 j = i; j < i + 8; j++) {
            offsets[count] = (u16)(base + j);
            news[count] = fresh[j];
            olds[count] = stale[j];
            count += fresh[j] != stale[j];
        }
    }
#endif
    for (; i < n; i++) {
        offsets[count] = (u16)(base + i);
        news[count] = fresh[i];
        olds[count] = stale[i];
        count += fresh[i] != stale[i];
    }
    return count;
}

#define LISTS_ALL 1
TARGET static u64 NAME(find_offsets)(const ELEMENT *fresh, const ELEMENT *stale, u64 n, u16 *offsets, ELEMENT *news,
                                     ELEMENT *olds, int is_dense) {
    return NAME(find)(fresh, stale, n, 0, offsets, news, olds, is_dense);
}

#undef SAME
#undef FIRST_BYTES

#endif

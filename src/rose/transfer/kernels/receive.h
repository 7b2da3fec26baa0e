/* Reading streams back. */

/* Whether any byte is 255: adding 1 to each byte's low 7 bits carries into the top bit, set already. */
INLINE int has_255(u64 eight) {
    const u64 tops = 0x8080808080808080u;
    return (eight & ((eight & ~tops) + 0x0101010101010101u) & tops) != 0;
}

/* Where reading has come to: bytes of gaps, and one after the last position. */
struct reading {
    const u8 *gaps, *lows;
    u64 num_bytes, at, end;
};

INLINE void put_position(struct reading *r, u64 i, u64 high, unsigned shift, void *out, int is_wide) {
    u64 low = shift == 0 ? 0 : shift == 8 ? r->lows[i] : r->lows[i / 2] >> (4 * (i % 2)) & 15;
    r->end += (high << shift | low) + 1;
    if (is_wide)
        ((int64_t *)out)[i] = (int64_t)(r->end - 1);
    else
        ((int32_t *)out)[i] = (int32_t)(u32)(r->end - 1);
}

/* Load the next eight bytes if all of them are gaps to read at once. */
INLINE int next_eight(const struct reading *r, u64 i, u64 n, u64 *eight) {
    if (n - i < 8 || r->num_bytes - r->at < 8 || i % 2) return 0;
    memcpy(eight, r->gaps + r->at, 8);
    return !has_255(*eight);
}

INLINE int read_one(struct reading *r, u64 i, unsigned shift, void *out, int is_wide) {
    if (r->at >= r->num_bytes) return TOO_SHORT;
    u64 high = r->gaps[r->at++];
    if (__builtin_expect(high == 255, 0)) {
        u8 next;
        do {
            if (r->at >= r->num_bytes) return TOO_SHORT;
            next = r->gaps[r->at++];
            high += next;
        } while (next == 255);
    }
    put_position(r, i, high, shift, out, is_wide);
    return OK;
}

INLINE int end_of(const struct reading *r, u64 num_elements) {
    if (r->at != r->num_bytes) return TOO_LONG;
    return r->end > num_elements ? OUT_OF_RANGE : OK; /* ascending, so the last one tells */
}

INLINE int read_gaps(struct reading r, unsigned shift, u64 n, u64 num_elements, void *out, int is_wide) {
    for (u64 i = 0, eight; i < n;) {
        if (next_eight(&r, i, n, &eight)) {
            for (u64 k = 0; k < 8; k++) put_position(&r, i + k, eight >> (8 * k) & 255, shift, out, is_wide);
            i += 8, r.at += 8;
            continue;
        }
        int failed = read_one(&r, i++, shift, out, is_wide);
        if (failed) return failed;
    }
    return end_of(&r, num_elements);
}

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,bmi,bmi2")))

/* Eight positions of 32 bits at a time, where none of their gaps is long. */
TARGET INLINE int read_gaps_avx2(struct reading r, unsigned shift, u64 n, u64 num_elements, void *out) {
    for (u64 i = 0, eight; i < n;) {
        if (!next_eight(&r, i, n, &eight)) {
            int failed = read_one(&r, i++, shift, out, 0);
            if (failed) return failed;
            continue;
        }
        u64 low = 0;
        if (shift == 4) memcpy(&low, r.lows + i / 2, 4), low = _pdep_u64(low, 0x0F0F0F0F0F0F0F0Fu);
        if (shift == 8) memcpy(&low, r.lows + i, 8);
        __m256i x = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)eight)), (int)shift);
        if (shift) x = _mm256_or_si256(x, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)low)));
        x = _mm256_add_epi32(x, _mm256_set1_epi32(1));
        x = _mm256_add_epi32(x, _mm256_slli_si256(x, 4));
        x = _mm256_add_epi32(x, _mm256_slli_si256(x, 8));
        __m256i lower = _mm256_permutevar8x32_epi32(x, _mm256_set1_epi32(3));
        x = _mm256_add_epi32(x, _mm256_blend_epi32(_mm256_setzero_si256(), lower, 0xF0));
        __m256i places = _mm256_add_epi32(x, _mm256_set1_epi32((int)(u32)(r.end - 1)));
        _mm256_storeu_si256((__m256i *)(void *)((int32_t *)out + i), places);
        r.end += (u32)_mm256_extract_epi32(x, 7); /* at most 2^19 */
        i += 8, r.at += 8;
    }
    return end_of(&r, num_elements);
}

TARGET static int read_gaps_with_avx2(struct reading r, unsigned shift, u64 n, u64 num_elements, void *out) {
    if (shift == 0) return read_gaps_avx2(r, 0, n, num_elements, out);
    if (shift == 4) return read_gaps_avx2(r, 4, n, num_elements, out);
    return read_gaps_avx2(r, 8, n, num_elements, out);
}
#undef TARGET
#endif

/* `lows` has the length that `n` and `shift` say; the caller has checked. */
int rose_read_gaps(int level, const u8 *gaps, u64 num_bytes, const u8 *lows, u64 shift, u64 n, u64 num_elements, void *out,
                   u64 is_wide) {
    struct reading r = {gaps, lows, num_bytes, 0, 0};
    if (is_wide) return read_gaps(r, (unsigned)shift, n, num_elements, out, 1);
#if defined(__x86_64__)
    if (level) return read_gaps_with_avx2(r, (unsigned)shift, n, num_elements, out);
#endif
    (void)level;
    if (shift == 0) return read_gaps(r, 0, n, num_elements, out, 0);
    if (shift == 4) return read_gaps(r, 4, n, num_elements, out, 0);
    return read_gaps(r, 8, n, num_elements, out, 0);
}

/* The two differences that a byte of codes stands for, and whether it has a code that needs a closer look. */
static u8 pairs_u8[256][2];
static u16 pairs_u16[256][2];
static u8 is_special[256];

static void fill_pairs(void) {
    for (int byte = 0; byte < 256; byte++)
        for (int k = 0; k < 2; k++) {
            int code = byte >> (4 * k) & 15, difference = code % 2 ? -(code / 2) - 1 : code / 2 + 1;
            pairs_u8[byte][k] = (u8)difference;
            pairs_u16[byte][k] = (u16)difference;
            is_special[byte] |= code >= 14;
        }
}

#define READ_CODES(type)                                                                                          \
    static int read_codes_##type(const u8 *codes, u64 n, const u8 *escapes, u64 num_bytes, type *out) {             \
        u64 at = 0;                                                                                                \
        for (u64 i = 0; i < n; i += 2) {                                                                           \
            u64 byte = codes[i / 2], num = n - i < 2 ? 1 : 2;                                                        \
            if (__builtin_expect(num == 2, 1))                                                                     \
                memcpy(out + i, pairs_##type[byte], sizeof pairs_##type[byte]);                                      \
            else                                                                                                   \
                out[i] = pairs_##type[byte][0];                                                                    \
            if (__builtin_expect(!is_special[byte], 1)) continue;                                                  \
            for (u64 k = 0; k < num; k++) {                                                                        \
                u64 code = byte >> (4 * k) & 15;                                                                   \
                if (code < 14) continue;                                                                           \
                if (code == 14) return BAD_CODE;                                                                   \
                if (num_bytes - at < sizeof(type)) return TOO_SHORT;                                                \
                memcpy(&out[i + k], escapes + at, sizeof(type));                                                   \
                at += sizeof(type);                                                                                \
                if ((type)(out[i + k] + 7) < 15) return BAD_CODE; /* has a code of its own, or is no change */      \
            }                                                                                                      \
        }                                                                                                          \
        return at == num_bytes ? OK : TOO_LONG;                                                                    \
    }
READ_CODES(u8)
READ_CODES(u16)

int rose_read_codes(u64 itemsize, const u8 *codes, u64 n, const u8 *escapes, u64 num_bytes, void *out) {
    if (itemsize == 1) return read_codes_u8(codes, n, escapes, num_bytes, out);
    return read_codes_u16(codes, n, escapes, num_bytes, out);
}

#define READ_PLANES(type)                                                                                         \
    static int read_planes_##type(const u8 *planes, u64 n, int may_be_zero, type *out) {                            \
        u64 num_zeros = 0;                                                                                         \
        for (u64 i = 0; i < n; i++) {                                                                              \
            type value = 0;                                                                                        \
            for (unsigned k = 0; k < sizeof(type); k++) value = (type)(value | (type)((type)planes[k * n + i] << (8 * k))); \
            out[i] = value;                                                                                        \
            num_zeros += !value;                                                                                   \
        }                                                                                                          \
        return num_zeros && !may_be_zero ? BAD_CODE : OK;                                                          \
    }
READ_PLANES(u8)
READ_PLANES(u16)
READ_PLANES(u32)
READ_PLANES(u64)

int rose_read_planes(u64 itemsize, const u8 *planes, u64 n, int may_be_zero, void *out) {
    if (itemsize == 1) return read_planes_u8(planes, n, may_be_zero, out);
    if (itemsize == 2) return read_planes_u16(planes, n, may_be_zero, out);
    if (itemsize == 4) return read_planes_u32(planes, n, may_be_zero, out);
    return read_planes_u64(planes, n, may_be_zero, out);
}

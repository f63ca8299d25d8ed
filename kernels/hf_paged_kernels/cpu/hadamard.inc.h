/* Rows times a Hadamard matrix of +1 and -1, by sums and differences: n * log2(n) of them for n elements.
 *
 * Contract: included once for each instruction set; all give the same bits. Elements that lie 1 apart are added and
 * subtracted first, then those 2 apart, 4 apart and so on, which is one tree of sums for each element of the result,
 * whatever the vectors' length is. Sums alone follow sums, and the factor comes last, so that there is nothing that a
 * compiler could join into one rounding. A vector may hold several parts: the steps inside it stop at a part's size.
 */

/* Elements of a row that are looked at together, a multiple of every part; vectors that stay in registers. */
enum { ROTATED_TOGETHER = LARGEST_PART, KEPT = LANES == 16 ? 4 : 8, KEPT_FLOATS = KEPT * LANES };
_Static_assert(ROTATED_TOGETHER % KEPT_FLOATS == 0 && KEPT % 2 == 0, "what stays in registers fills the buffer");

/* Where a number is subtracted, in steps of 1, 2, 4 and 8 elements inside of a vector. */
#define MINUS INT32_MIN
static const int32_t subtracted[4][16] = {
    {0, MINUS, 0, MINUS, 0, MINUS, 0, MINUS, 0, MINUS, 0, MINUS, 0, MINUS, 0, MINUS},
    {0, 0, MINUS, MINUS, 0, 0, MINUS, MINUS, 0, 0, MINUS, MINUS, 0, 0, MINUS, MINUS},
    {0, 0, 0, 0, MINUS, MINUS, MINUS, MINUS, 0, 0, 0, 0, MINUS, MINUS, MINUS, MINUS},
    {0, 0, 0, 0, 0, 0, 0, 0, MINUS, MINUS, MINUS, MINUS, MINUS, MINUS, MINUS, MINUS},
};
#undef MINUS

/* Element i of the result is element i ^ (1 << STEP) of x. */
INLINE vf vf_swap(const int STEP, vf x) {
#if defined(HF_AVX512)
    __m512 y = (__m512)x;
    if (STEP == 0) return (vf)_mm512_permute_ps(y, 0xb1);
    if (STEP == 1) return (vf)_mm512_permute_ps(y, 0x4e);
    if (STEP == 2) return (vf)_mm512_shuffle_f32x4(y, y, 0xb1);
    return (vf)_mm512_shuffle_f32x4(y, y, 0x4e);
#elif defined(HF_AVX2)
    __m256 y = (__m256)x;
    if (STEP == 0) return (vf)_mm256_permute_ps(y, 0xb1);
    if (STEP == 1) return (vf)_mm256_permute_ps(y, 0x4e);
    return (vf)_mm256_permute2f128_ps(y, y, 1);
#elif LANES == 4
    if (STEP == 0) return (vf){x[1], x[0], x[3], x[2]};
    return (vf){x[2], x[3], x[0], x[1]};
#endif
}

INLINE vf vf_step(const int STEP, vf x) {
    return vf_swap(STEP, x) + (vf)((vi)x ^ vi_load(subtracted[STEP]));
}

/* The steps inside of a vector. */
INLINE vf vf_rotate(vf x, int64_t part) {
    x = vf_step(0, x);
    if (part > 2) x = vf_step(1, x);
#if LANES > 4
    if (part > 4) x = vf_step(2, x);
#endif
#if LANES > 8
    if (part > 8) x = vf_step(3, x);
#endif
    return x;
}

/* One step between vectors. */
INLINE void rotate_across(const int APART, vf *x) {
    UNROLLED
    for (int i = 0; i < KEPT; i++) {
        if (i & APART) continue;
        const vf low = x[i], high = x[i + APART];
        x[i] = low + high;
        x[i + APART] = low - high;
    }
}

/* The steps that need KEPT vectors and no more, and the factor where those are all. `from` and `to` may be the same. */
INLINE void rotate_kept(const int64_t PART, const float *from, float *to, float factor) {
    vf x[KEPT];
    UNROLLED
    for (int i = 0; i < KEPT; i++) x[i] = vf_rotate(vf_load(from + i * LANES), PART);
    if (PART > LANES) rotate_across(1, x);
    if (PART > 2 * LANES) rotate_across(2, x);
#if LANES < 16
    if (PART > 4 * LANES) rotate_across(4, x);
#endif
    if (PART <= KEPT_FLOATS) {
        UNROLLED
        for (int i = 0; i < KEPT; i++) x[i] *= factor;
    }
    UNROLLED
    for (int i = 0; i < KEPT; i++) vf_store(to + i * LANES, x[i]);
}

INLINE void rotate_all_kept(const int64_t PART, const float *from, float *to, int64_t size, float factor) {
    for (int64_t i = 0; i < size; i += KEPT_FLOATS) rotate_kept(PART, from + i, to + i, factor);
}

/* One row, whose elements lie side by side, part by part. */
static void rotate(const struct rotating *r, const char *row, char *to) {
    float x[ROTATED_TOGETHER];
    const int64_t part = r->part, bytes = storages[r->type].size, to_bytes = storages[r->to_type].size;
    const float factor = (float)r->factor;
    for (int64_t d = 0; d < r->row; d += ROTATED_TOGETHER) {
        const int64_t left = r->row - d, count = left < ROTATED_TOGETHER ? left : ROTATED_TOGETHER;
        const int64_t size = (count + KEPT_FLOATS - 1) / KEPT_FLOATS * KEPT_FLOATS;
        const float *from = x;
        float *kept = x;
        if (r->type == FLOAT32 && size == count) /* as it lies */
            from = (const float *)(row + d * bytes);
        else
            widen_plain[r->type](row + d * bytes, count, size, 1, x);
        const int direct = r->to_type == FLOAT32 && size == count && part <= KEPT_FLOATS;
        if (direct) kept = (float *)(to + d * to_bytes);
        /* Constants for the sizes that heads mostly have: then nothing is asked for each vector. */
        if (part > KEPT_FLOATS)
            rotate_all_kept(2 * KEPT_FLOATS, from, kept, size, factor);
        else if (part == KEPT_FLOATS)
            rotate_all_kept(KEPT_FLOATS, from, kept, size, factor);
        else
            rotate_all_kept(part, from, kept, size, factor);
        if (direct) continue;
        for (int64_t apart = KEPT_FLOATS; apart < part; apart *= 2) {
            const float last = 2 * apart == part ? factor : 1;
            for (int64_t begin = 0; begin < size; begin += 2 * apart)
                for (int64_t i = begin; i < begin + apart; i += LANES) {
                    const vf low = vf_load(x + i), high = vf_load(x + i + apart);
                    vf_store(x + i, (low + high) * last);
                    vf_store(x + i + apart, (low - high) * last);
                }
        }
        narrow_plain[r->to_type](x, count, to + d * to_bytes);
    }
}

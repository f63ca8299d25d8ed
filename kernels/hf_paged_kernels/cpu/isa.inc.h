/* Both kernels, the writing of codes and the rotation of rows, for the instruction set that the including file has
 * switched on.
 *
 * Contract: LANES, ISA and ISA_NAME are set, and HF_BF16_PAIRS where bfloat16 is multiplied in pairs. Everything is
 * static but one table, `ISA`.
 */
#include "paged.h"
#include "vec.h"
#include "codes.h"

/* Sums of four vectors, side by side. */
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float *sums) {
#if defined(HF_AVX2)
    __m256 ab = _mm256_hadd_ps((__m256)a, (__m256)b), cd = _mm256_hadd_ps((__m256)c, (__m256)d);
    __m256 abcd = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#elif defined(HF_AVX512)
    __m512 ac = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)c), _mm512_unpackhi_ps((__m512)a, (__m512)c));
    __m512 bd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)b, (__m512)d), _mm512_unpackhi_ps((__m512)b, (__m512)d));
    __m512 abcd = _mm512_add_ps(_mm512_unpacklo_ps(ac, bd), _mm512_unpackhi_ps(ac, bd));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd),
                                _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1)));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    sums[0] = vf_sum(a);
    sums[1] = vf_sum(b);
    sums[2] = vf_sum(c);
    sums[3] = vf_sum(d);
#endif
}

/* Ask for `count` rows of `bytes` bytes. The blocks of a sequence lie anywhere, so no processor guesses the next one:
 * each loop asks for what the next loop reads, a few rows at a time, as many as it reads itself. */
INLINE void prefetch_rows(const char *const *rows, int count, int64_t bytes) {
    for (int t = 0; t < count; t++)
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(rows[t] + byte);
}

#include "sums.inc.h"

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define NAME(name) JOIN(name, TYPE)

#define S float
#define TYPE f32
#define LOAD2 load2_f32
#define EXACT2 load2_f32
#define STORE2 store2_f32
#define PAIRED 0
#define CODES 0
#include "kernels.inc.h"

#define S bf16
#define TYPE bf16
#define LOAD2 load2_bf16
#define EXACT2 load2_bf16
#define STORE2 store2_bf16
#if defined(HF_BF16_PAIRS)
#define PAIRED 1
#else
#define PAIRED 0
#endif
#define CODES 0
#include "kernels.inc.h"

#define S f16
#define TYPE f16
#define LOAD2 load2_f16
#define EXACT2 load2_f16
#define STORE2 store2_f16
#define PAIRED 0
#define CODES 0
#include "kernels.inc.h"

#define S code
#define TYPE e4m3
#define LOAD2 load2_e4m3
#define EXACT2 exact2_e4m3
#define PAIRED 0
#define CODES 1
#include "kernels.inc.h"

#define S code
#define TYPE e5m2
#define LOAD2 load2_e5m2
#define EXACT2 exact2_e5m2
#define PAIRED 0
#define CODES 1
#include "kernels.inc.h"

#define S code
#define TYPE int8
#define LOAD2 load2_int8
#define EXACT2 exact2_int8
#define PAIRED 0
#define CODES 1
#include "kernels.inc.h"

/* bfloat16 beside codes: queries and outputs in the order of those. */
#define S bf16
#define TYPE plain_bf16
#define LOAD2 load2_plain_bf16
#define EXACT2 load2_plain_bf16
#define STORE2 store2_plain_bf16
#define CODES 0
#include "rows.inc.h"

typedef void widen_function(const char *row, int64_t count, int64_t size, float factor, float *to);
typedef void narrow_function(const float *from, int64_t count, char *row);
typedef void score_function(int rows, const char *const *k, int count, const float *q, int64_t dim, int64_t dk,
                            float *scores, const char *const *next, int64_t next_bytes);
typedef void sum_function(int rows, const char *const *v, int count, const float *weights, int64_t dim, int64_t dv,
                          float *out, const char *const *next, int num_next, int64_t next_bytes);

/* What a storage type of K or V can do, by its number. A task looks its functions up once for each tile, so that there
 * is one copy of them for each type, and not for each of its combinations with two others. */
static const struct storage {
    int64_t size; /* bytes of an element */
    widen_function *widen;
    score_function *score;
    sum_function *sum;
    int (*holds_nan)(const char *const *rows, int count, int64_t dim); /* NULL: `score` and `sum` take any number */
} storages[NUM_TYPES] = {
    {4, widen_f32, score_f32, sum_f32, NULL},
    {2, widen_bf16, score_bf16, sum_bf16, NULL},
    {2, widen_f16, score_f16, sum_f16, NULL},
    {1, widen_e4m3, score_e4m3, sum_e4m3, holds_nan_e4m3},
    {1, widen_e5m2, score_e5m2, sum_e5m2, NULL},
    {1, widen_int8, score_int8, sum_int8, holds_nan_int8},
};
/* Queries and outputs as they lie; beside a bfloat16 K or V they are in its order instead. */
static widen_function *const widen_plain[] = {widen_f32, widen_plain_bf16, widen_f16};
static narrow_function *const narrow_plain[] = {narrow_f32, narrow_plain_bf16, narrow_f16};

#include "task.inc.h"
#include "few.inc.h"
#include "tile.inc.h"
#include "encode.inc.h"
#include "hadamard.inc.h"

const struct isa ISA = {
    .name = ISA_NAME,
    .few = few,
    .tile = tile,
    .finish = finish,
    .encode = encode,
    .word_sum = word_sum,
    .rotate = rotate,
};

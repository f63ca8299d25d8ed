/* Both kernels for every storage type, for the instruction set that the including file has switched on.
 *
 * Contract: LANES, ISA and ISA_NAME are set, and HF_BF16_PAIRS where bfloat16 is multiplied in pairs. Everything is
 * static but one table, `ISA`.
 */
#include "paged.h"
#include "vec.h"

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

#include "sums.inc.h"

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define NAME(name) JOIN(name, TYPE)

#define S float
#define TYPE f32
#define LOAD2 load2_f32
#define STORE2 store2_f32
#define PAIRED 0
#include "kernels.inc.h"

#define S bf16
#define TYPE bf16
#define LOAD2 load2_bf16
#define STORE2 store2_bf16
#if defined(HF_BF16_PAIRS)
#define PAIRED 1
#else
#define PAIRED 0
#endif
#include "kernels.inc.h"

#define S f16
#define TYPE f16
#define LOAD2 load2_f16
#define STORE2 store2_f16
#define PAIRED 0
#include "kernels.inc.h"

const struct isa ISA = {
    .name = ISA_NAME,
    .few = {few_f32, few_bf16, few_f16},
    .tile = {tile_f32, tile_bf16, tile_f16},
    .finish = {finish_f32, finish_bf16, finish_f16},
    .word_sum = word_sum,
};

/* Vectors of LANES floats, in the compiler's own vector types, and the few operations that need more.
 *
 * Contract: the including file sets LANES (4, 8 or 16), and HF_AVX2, HF_AVX512 or HF_NEON where it has switched that
 * on. A storage type is read two vectors at a time (2 * LANES elements) in an order of its own: bfloat16 as the even
 * and the odd elements (two cheap operations instead of a shuffle), the others as they lie. Queries are put in the
 * order of K, sums of V come in the order of V; `store2` undoes it. `load2_tail` reads fewer elements, never beyond
 * the row, and gives zeros for the rest: next to a row may lie NaN.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(HF_AVX2) || defined(HF_AVX512)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(HF_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
/* Before a loop of constant length whose sums must stay in registers. */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint16_t bf16;
typedef struct { uint16_t bits; } f16; /* a struct: so that the two kinds of 16 bits are two types */

typedef int32_t vi_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE vf vf_load(const float *p) { return *(const vf_any *)p; }
INLINE void vf_store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vi vi_load(const int32_t *p) { return *(const vi_any *)p; }
INLINE vf vf_set(float x) { return x - (vf){0}; }
INLINE vi vi_set(int32_t x) { return x - (vi){0}; }
INLINE vu vu_set(uint32_t x) { return x - (vu){0}; }
INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

INLINE vf vf_max(vf a, vf b) { /* the second where one is NaN */
#if defined(HF_AVX512)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(HF_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#elif LANES == 4 && defined(__SSE2__)
    return (vf)_mm_max_ps((__m128)a, (__m128)b);
#else
    return vf_select(a > b, a, b);
#endif
}

INLINE float vf_top(vf x) {
    float top = x[0];
    for (int i = 1; i < LANES; i++) top = x[i] > top ? x[i] : top;
    return top;
}

/* Always in this order: a sum must not depend on what the compiler makes of it. */
INLINE float vf_sum(vf x) {
    float part[LANES];
    vf_store(part, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* e**x for x <= 0 (or up to 88), NaN kept; below -87.3 exactly 0. Cody and Waite reduction to |r| <= ln(2) / 2, then
 * a polynomial fitted for relative error (3e-9 before rounding). */
INLINE vf vf_exp(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2**23: adding it rounds to an integer */
    vf shifted = x * 1.44269504088896341f + magic;
    vf n = shifted - magic;
    vf r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    vf p = vf_set(0.001381459878757596f);
    p = p * r + 0.008368716575205326f;
    p = p * r + 0.04166838899254799f;
    p = p * r + 0.1666652113199234f;
    p = p * r + 0.4999999403953552f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vf power = (vf)(((vu)shifted << 23) + 0x3f800000u); /* the low bits of `shifted` are n */
    return (vf)((vi)(p * power) & ~(x < -87.3f));
}

/* Odd Taylor series where 1 - 2 / (e**2x + 1) would cancel. */
INLINE vf vf_tanh(vf x) {
    vf size = (vf)((vi)x & 0x7fffffff), square = x * x;
    vf small = vf_set(-1382.0f / 155925.0f);
    small = small * square + 62.0f / 2835.0f;
    small = small * square - 17.0f / 315.0f;
    small = small * square + 2.0f / 15.0f;
    small = small * square - 1.0f / 3.0f;
    small = small * square * x + x;
    vf decay = vf_exp(-2.0f * size); /* e**-2|x| is at most 1: no overflow */
    vf large = (1.0f - decay) / (1.0f + decay);
    large = (vf)((vi)large | ((vi)x & (int32_t)0x80000000));
    return vf_select(size < 0.35f, small, large);
}

/* -- storage types -------------------------------------------------------------------------------- */

INLINE void load2_f32(const float *p, vf *a, vf *b) {
    *a = vf_load(p);
    *b = vf_load(p + LANES);
}
INLINE void store2_f32(float *p, vf a, vf b) {
    vf_store(p, a);
    vf_store(p + LANES, b);
}

INLINE void load2_bf16(const bf16 *p, vf *even, vf *odd) {
    vu pair = *(const vu_any *)p;
    *even = (vf)(pair << 16);
    *odd = (vf)(pair & 0xffff0000u);
}
/* bfloat16 as it lies, for what has no part in that order. */
INLINE void load2_plain_bf16(const bf16 *p, vf *a, vf *b) {
    *a = (vf)(__builtin_convertvector(*(const vh_any *)p, vu) << 16);
    *b = (vf)(__builtin_convertvector(*(const vh_any *)(p + LANES), vu) << 16);
}
/* sums[i] + a[2i] * b[2i] + a[2i + 1] * b[2i + 1] over 2 * LANES bfloat16 in each of a and b. */
INLINE vf vf_dot_bf16(vf sums, vu a, vu b) {
#if defined(HF_AVX512_BF16)
    return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    vf even, odd, other_even, other_odd;
    load2_bf16((const bf16 *)&a, &even, &odd);
    load2_bf16((const bf16 *)&b, &other_even, &other_odd);
    return sums + odd * other_odd + even * other_even;
#endif
}
INLINE vu bf16_bits(vf x) { /* rounded to nearest even, in the high half; NaN stays NaN */
    vu bits = (vu)x;
    vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    vu nan = (vu)(x != x);
    return (rounded & ~nan) | ((bits | 0x400000u) & nan);
}
INLINE void store2_bf16(bf16 *p, vf even, vf odd) {
    *(vu_any *)p = (bf16_bits(even) >> 16) | (bf16_bits(odd) & 0xffff0000u);
}

INLINE void store2_plain_bf16(bf16 *p, vf a, vf b) {
    *(vh_any *)p = __builtin_convertvector(bf16_bits(a) >> 16, vh);
    *(vh_any *)(p + LANES) = __builtin_convertvector(bf16_bits(b) >> 16, vh);
}

INLINE vf vf_of_f16(vh half) {
#if defined(HF_AVX512)
    return (vf)_mm512_cvtph_ps((__m256i)half);
#elif defined(HF_AVX2)
    return (vf)_mm256_cvtph_ps((__m128i)half);
#elif defined(HF_NEON)
    return (vf)vcvt_f32_f16((float16x4_t)half);
#else
    vu bits = __builtin_convertvector(half, vu);
    vu magnitude = (bits & 0x7fffu) << 13;
    vf value = (vf)magnitude * 0x1p112f; /* moves the exponent's bias, denormals included */
    vu special = (vu)(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
    return (vf)((vu)value | special | ((bits & 0x8000u) << 16));
#endif
}
INLINE vf f16_load(const f16 *p) { return vf_of_f16(*(const vh_any *)p); }
INLINE void f16_store(f16 *p, vf x) {
#if defined(HF_AVX512)
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HF_AVX2)
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HF_NEON)
    vst1_f16((float16_t *)p, vcvt_f16_f32((float32x4_t)x));
#else
    vu bits = (vu)x, sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    vu normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* A denormal is a multiple of 2**-24: adding 0.5, whose last bit is 2**-24, rounds to that and leaves the
     * multiple in the low bits. */
    vu small = (vu)((vf)magnitude + 0.5f) - 0x3f000000u;
    vu is_small = (vu)((vi)magnitude < (113 << 23)), is_large = (vu)((vi)magnitude >= 0x477ff000);
    vu is_nan = (vu)((vi)magnitude > 0x7f800000);
    vu half = (small & is_small) | (normal & ~is_small);
    half = (half & ~is_large) | (0x7c00u & is_large) | (0x200u & is_nan);
    *(vh_any *)p = __builtin_convertvector(half | sign, vh);
#endif
}
INLINE void load2_f16(const f16 *p, vf *a, vf *b) {
    *a = f16_load(p);
    *b = f16_load(p + LANES);
}
INLINE void store2_f16(f16 *p, vf a, vf b) {
    f16_store(p, a);
    f16_store(p + LANES, b);
}

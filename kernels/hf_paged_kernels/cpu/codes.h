/* The 8-bit formats: two vectors of numbers from codes, two vectors of codes from numbers, and the codes for NaN.
 *
 * Contract: `load2_*` reads 2 * LANES codes as they lie, as numbers in units of the format (see `unit_of`), right for
 * every code but those that stand for NaN; `exact2_*` is right for them as well, at a few instructions more. So a
 * loop that asked `holds_nan_*` first may use the former. `encode_codes` is bit for bit `quantize` of the package.
 *
 * e4m3 and float16 differ in the width of their exponents alone: the bits of a code, moved, are a float16 that is 2**-8
 * times the number, denormals included. e5m2 is the upper half of a float16. Neither needs a denormal float32, which
 * processors may be told to take for 0, and which some multiply slowly.
 */

typedef uint8_t code;
typedef int8_t vc __attribute__((vector_size(LANES)));
typedef int8_t vc_any __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t vs __attribute__((vector_size(2 * LANES)));
/* As many codes as one register holds. */
typedef int8_t vb __attribute__((vector_size(4 * LANES)));
typedef int8_t vb_any __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* What a number from `load2_*` or `exact2_*` is to be multiplied with. */
INLINE float unit_of(int64_t type) { return type == FP8_E4M3 ? 256.0f : 1.0f; }

INLINE void load2_e4m3(const code *p, vf *a, vf *b) {
#if defined(HF_AVX512)
    __m512i half = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p)), 7);
    half = _mm512_and_si512(half, _mm512_set1_epi16((int16_t)0xbf80)); /* the sign reaches down to bit 14 */
    *a = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
    *b = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
#elif defined(HF_AVX2)
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    half = _mm256_and_si256(half, _mm256_set1_epi16((int16_t)0xbf80)); /* the sign reaches down to bit 14 */
    *a = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
    *b = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#else
    vf *to[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        vs wide = __builtin_convertvector(*(const vc_any *)(p + i * LANES), vs);
        *to[i] = vf_of_f16((vh)((wide << 7) & (int16_t)0xbf80));
    }
#endif
}

INLINE void load2_e5m2(const code *p, vf *a, vf *b) {
#if defined(HF_AVX512)
    __m512i half = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p)), 8);
    *a = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(half));
    *b = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
#elif defined(HF_AVX2)
    __m128i codes = _mm_loadu_si128((const __m128i *)p), zero = _mm_setzero_si128();
    *a = (vf)_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, codes));
    *b = (vf)_mm256_cvtph_ps(_mm_unpackhi_epi8(zero, codes));
#else
    vf *to[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        vs wide = __builtin_convertvector(*(const vc_any *)(p + i * LANES), vs);
        *to[i] = vf_of_f16((vh)(wide << 8));
    }
#endif
}
#define exact2_e5m2 load2_e5m2 /* its NaN are float16's */

INLINE vi int8_wide(const code *p) {
#if defined(HF_AVX512)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(HF_AVX2)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    return __builtin_convertvector(*(const vc_any *)p, vi);
#endif
}
INLINE void load2_int8(const code *p, vf *a, vf *b) {
    *a = __builtin_convertvector(int8_wide(p), vf);
    *b = __builtin_convertvector(int8_wide(p + LANES), vf);
}

/* NaN where a code, under a mask, is the one that stands for it. */
INLINE vf with_nan(vf x, const code *p, int32_t mask, int32_t nan) {
    return (vf)((vi)x | (((int8_wide(p) & mask) == nan) & 0x7fc00000));
}
INLINE void exact2_e4m3(const code *p, vf *a, vf *b) {
    load2_e4m3(p, a, b);
    *a = with_nan(*a, p, 0x7f, 0x7f);
    *b = with_nan(*b, p + LANES, 0x7f, 0x7f);
}
INLINE void exact2_int8(const code *p, vf *a, vf *b) {
    load2_int8(p, a, b);
    *a = with_nan(*a, p, -1, -128);
    *b = with_nan(*b, p + LANES, -1, -128);
}

/* The larger of each of two magnitudes, of e4m3 and of int8: codes for NaN have the largest, 127 and 128. */
INLINE vb larger_e4m3(vb most, vb codes) {
    codes &= 0x7f;
#if defined(HF_AVX512)
    return (vb)_mm512_max_epu8((__m512i)most, (__m512i)codes);
#elif defined(HF_AVX2)
    return (vb)_mm256_max_epu8((__m256i)most, (__m256i)codes);
#else
    vb larger = codes > most;
    return (codes & larger) | (most & ~larger);
#endif
}
/* The least stands for the magnitude: it is what tells -128 from the others. */
INLINE vb larger_int8(vb least, vb codes) {
#if defined(HF_AVX512)
    return (vb)_mm512_min_epi8((__m512i)least, (__m512i)codes);
#elif defined(HF_AVX2)
    return (vb)_mm256_min_epi8((__m256i)least, (__m256i)codes);
#else
    vb smaller = codes < least;
    return (codes & smaller) | (least & ~smaller);
#endif
}

/* Whether a code of `count` rows stands for NaN. Rows of a block lie side by side, and are looked through as one. */
INLINE int holds_nan(const int TYPE, const char *const *rows, int count, int64_t dim) {
    const int64_t width = sizeof(vb);
    vb most[2] = {{0}, {0}};
    for (int t = 0; t < count;) {
        const char *run = rows[t];
        int64_t size = dim, i = 0;
        for (t++; t < count && rows[t] == run + size; t++) size += dim;
#define LOOK(n, at) most[n] = TYPE == INT8 ? larger_int8(most[n], at) : larger_e4m3(most[n], at)
        for (; i + 4 * width <= size; i += 4 * width) {
            LOOK(0, *(const vb_any *)(run + i));
            LOOK(1, *(const vb_any *)(run + i + width));
            LOOK(0, *(const vb_any *)(run + i + 2 * width));
            LOOK(1, *(const vb_any *)(run + i + 3 * width));
        }
        for (; i + width <= size; i += width) LOOK(0, *(const vb_any *)(run + i));
        if (i < size) {
            vb rest = {0};
            memcpy(&rest, run + i, size - i);
            LOOK(0, rest);
        }
#undef LOOK
    }
    const int8_t nan = TYPE == INT8 ? -128 : 127;
    vb found = (most[0] == nan) | (most[1] == nan);
    uint64_t words[sizeof(vb) / 8], any = 0;
    memcpy(words, &found, sizeof words);
    for (unsigned i = 0; i < sizeof(vb) / 8; i++) any |= words[i];
    return any != 0;
}
static int holds_nan_e4m3(const char *const *rows, int count, int64_t dim) {
    return holds_nan(FP8_E4M3, rows, count, dim);
}
static int holds_nan_int8(const char *const *rows, int count, int64_t dim) {
    return holds_nan(INT8, rows, count, dim);
}

/* -- from numbers --------------------------------------------------------------------------------- */

/* The low bytes of a and b. */
INLINE void store2_codes(code *p, vu a, vu b) {
#if defined(HF_AVX2)
    __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)(a & 0xffu), (__m256i)(b & 0xffu)), 0xd8);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
#elif defined(HF_AVX512)
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)a));
    _mm_storeu_si128((__m128i *)(p + LANES), _mm512_cvtepi32_epi8((__m512i)b));
#else
    *(vc_any *)p = __builtin_convertvector((vi)a, vc);
    *(vc_any *)(p + LANES) = __builtin_convertvector((vi)b, vc);
#endif
}

/* Codes of x / scale in the low bytes. The quotient is made as such, and no sum here follows a product that a compiler
 * might join it with: the codes are the same everywhere. A sum with a power of two, where the grid's step is the last
 * bit, rounds to that grid, to nearest even. */
INLINE vu vf_encode(const int TYPE, vf x, vf scale) {
    vf y = x / scale;
    vi infinite = ((vi)x & 0x7fffffff) == 0x7f800000, nan = y != y;
    vu sign = ((vu)y >> 24) & 0x80u;
    vi size = (vi)y & 0x7fffffff;
    if (TYPE == INT8) {
        const vi most = vi_set(0x42fe0000); /* 127 */
        size = (vi)vf_select(size > most, (vf)most, (vf)size);
        vf rounded = (vf)((vu)size | (sign << 24)) + 12582912.0f; /* 1.5 * 2**23 */
        return (vu)vf_select(nan | infinite, (vf)vu_set(0x80), (vf)((vu)rounded & 0xffu));
    }
    /* bits of the mantissa, difference of the exponents' biases, the largest number, where a number's step is that of the
     * denormals up to the least normal number */
    const int mantissa = TYPE == FP8_E4M3 ? 3 : 2, bias = TYPE == FP8_E4M3 ? 120 : 112, shift = 23 - mantissa;
    const vi most = vi_set(TYPE == FP8_E4M3 ? 0x43e00000 : 0x47600000); /* 448 and 57344 */
    const float step = TYPE == FP8_E4M3 ? 16384.0f : 128.0f; /* its last bit is 2**-9 and 2**-16 */
    const uint32_t step_bits = TYPE == FP8_E4M3 ? 0x46800000 : 0x43000000;
    size = (vi)vf_select(size > most, (vf)most, (vf)size);
    vu bits = (vu)size;
    vu normal = ((bits + ((1u << (shift - 1)) - 1) + ((bits >> shift) & 1u)) >> shift) - ((uint32_t)bias << mantissa);
    vu small = (vu)((vf)size + step) - step_bits;
    vu codes = (vu)vf_select(size < ((bias + 1) << 23), (vf)small, (vf)normal) | sign;
    if (TYPE == FP8_E5M2) codes = (vu)vf_select(infinite, (vf)(sign | 0x7cu), (vf)codes);
    return (vu)vf_select(TYPE == FP8_E5M2 ? nan : (nan | infinite), (vf)vu_set(0x7f), (vf)codes);
}

/* What bytes add up to, so that a change of them shows: the sum of words[i] * weights[i] modulo 2**64.
 *
 * Contract: included once for each instruction set; all give the same. Words and weights have 32 bits. A weight is odd,
 * so a change of one word always changes the sum: the product of two numbers below 2**32 is below 2**64.
 */

static uint64_t word_sum(const uint32_t *words, const uint32_t *weights, int64_t count) {
    uint64_t sum = 0;
    int64_t i = 0;
#if defined(HF_AVX512)
    __m512i even = _mm512_setzero_si512(), odd = even;
    for (; i + 16 <= count; i += 16) {
        __builtin_prefetch((const char *)(words + i) + 2048);
        __m512i x = _mm512_loadu_si512(words + i), w = _mm512_loadu_si512(weights + i);
        even = _mm512_add_epi64(even, _mm512_mul_epu32(x, w));
        odd = _mm512_add_epi64(odd, _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(w, 32)));
    }
    uint64_t parts[8];
    _mm512_storeu_si512(parts, _mm512_add_epi64(even, odd));
    for (int lane = 0; lane < 8; lane++) sum += parts[lane];
#elif defined(HF_AVX2)
    __m256i even = _mm256_setzero_si256(), odd = even;
    for (; i + 8 <= count; i += 8) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(words + i));
        __m256i w = _mm256_loadu_si256((const __m256i *)(weights + i));
        __builtin_prefetch((const char *)(words + i) + 2048); /* processors look no further than a page */
        even = _mm256_add_epi64(even, _mm256_mul_epu32(x, w));
        odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(w, 32)));
    }
    uint64_t parts[4];
    _mm256_storeu_si256((__m256i *)parts, _mm256_add_epi64(even, odd));
    for (int lane = 0; lane < 4; lane++) sum += parts[lane];
#endif
    for (; i < count; i++) { /* which compilers turn into vectors of their own */
        uint32_t word;
        memcpy(&word, words + i, sizeof word);
        sum += (uint64_t)word * weights[i];
    }
    return sum;
}

/* A sum of what a stretch of memory contains, as fast as it can be read; for telling whether weights changed.
 *
 * Contract: exact, and the same for any number of threads and any instruction set. A change of any one 32-bit word
 * changes it; other changes are missed with a probability of 2**-32 or less, as long as they are not made for it.
 */
#include <string.h>

#include "paged.h"

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* An odd number for each stretch (the mixing step of SplitMix64, Steele et al. 2014). Odd numbers are invertible modulo
 * 2**64, so no difference is multiplied away. */
static uint64_t odd(uint64_t number) {
    uint64_t mixed = (number + 1) * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return (mixed ^ (mixed >> 31)) | 1;
}

/* What hf_paged_content_sum takes as weights: SUM_WORDS odd numbers. */
EXPORT void hf_paged_sum_weights(uint32_t *weights) {
    for (int i = 0; i < SUM_WORDS; i++) weights[i] = (uint32_t)(odd(~(uint64_t)i) >> 32) | 1;
}

EXPORT uint64_t hf_paged_content_sum(const char *data, int64_t num_bytes, const uint32_t *weights, int num_threads) {
    const int64_t bytes = SUM_WORDS * 4;
    word_sum_function *word_sum = chosen_isa()->word_sum;
    const int64_t whole = num_bytes / bytes, words = num_bytes % bytes / 4;
    const int64_t worth = num_bytes / 200000 + 1;
    const int threads = (int)(num_threads < worth ? num_threads : worth);
    uint64_t sum = 0;
    (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
    for (int64_t piece = 0; piece < whole; piece++)
        sum += odd(piece) * word_sum((const uint32_t *)(data + piece * bytes), weights, SUM_WORDS);
    sum += odd(whole) * word_sum((const uint32_t *)(data + whole * bytes), weights, words);
    uint32_t last = 0;
    memcpy(&last, data + whole * bytes + words * 4, num_bytes % 4);
    return sum + odd(whole + 1) * ((uint64_t)last * weights[0] + (uint64_t)num_bytes);
}

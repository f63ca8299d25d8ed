/* Sums of what stretches of memory contain, as fast as they can be read; for telling whether weights changed.
 *
 * Contract: exact, and the same for any number of threads and any instruction set. A change of any one 32-bit word
 * changes it; other changes are missed with a probability of 2**-32 or less, as long as they are not made for it.
 */
#include <string.h>

#include "entry.h"
#include "paged.h"

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

enum { PIECE_BYTES = SUM_WORDS * 4 };

static uint64_t piece_sum(const char *data, int64_t num_bytes, int64_t piece, const uint32_t *weights) {
    const char *from = data + piece * PIECE_BYTES;
    int64_t left = num_bytes - piece * PIECE_BYTES;
    if (left >= PIECE_BYTES) return odd(piece) * chosen_isa()->word_sum((const uint32_t *)from, weights, SUM_WORDS);
    uint32_t last = 0; /* the bytes that fill no word */
    memcpy(&last, from + left / 4 * 4, left % 4);
    uint64_t sum = odd(piece) * chosen_isa()->word_sum((const uint32_t *)from, weights, left / 4);
    return sum + odd(piece + 1) * ((uint64_t)last * weights[0] + (uint64_t)num_bytes);
}

/* A sum for each of `count` stretches of memory. The threads share the pieces of all of them evenly. */
EXPORT void hf_paged_content_sums(int64_t count, const char *const *data, const int64_t *num_bytes,
                                  const uint32_t *weights, int num_threads, uint64_t *sums) {
    int64_t pieces = 0;
    for (int64_t i = 0; i < count; i++) {
        pieces += num_bytes[i] / PIECE_BYTES + 1; /* the last one is not full, and may be empty */
        sums[i] = 0;
    }
    const int64_t worth = pieces / 12 + 1;
    const int threads = (int)(num_threads < worth ? num_threads : worth);
    chosen_isa(); /* once, not by several threads */
    (void)threads;
#pragma omp parallel num_threads(threads)
    {
        const int64_t mine = omp_get_thread_num(), others = omp_get_num_threads();
        const int64_t from = pieces * mine / others, to = pieces * (mine + 1) / others;
        int64_t first = 0; /* number of the stretch's first piece */
        for (int64_t i = 0; i < count; i++) {
            const int64_t own = num_bytes[i] / PIECE_BYTES + 1;
            int64_t piece = from > first ? from - first : 0, end = to - first < own ? to - first : own;
            uint64_t sum = 0;
            const int some = piece < end;
            for (; piece < end; piece++) sum += piece_sum(data[i], num_bytes[i], piece, weights);
            first += own;
            if (some) {
#pragma omp atomic
                sums[i] += sum; /* integers: in any order */
            }
        }
    }
}

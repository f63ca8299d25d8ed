/* Rows of a tensor times a Hadamard matrix: the entry point.
 *
 * Contract: every row by itself, in one order of sums (hadamard.inc.h), so that a row's bits depend on neither the rows
 * beside it nor the instruction set nor the number of threads.
 */
#include "entry.h"
#include "paged.h"

/* Rows number `from` to `to` of all of them. */
static void rotate_rows(const struct rotating *r, const struct isa *isa, int64_t from, int64_t to) {
    const int64_t *shape = r->shape, *strides = r->strides, bytes = r->row * (r->to_type == FLOAT32 ? 4 : 2);
    if (from >= to) return; /* maybe a shape of 0 */
    int64_t third = from % shape[2], second = from / shape[2] % shape[1], first = from / shape[2] / shape[1];
    char *out = r->to + from * bytes;
    while (from < to) {
        const char *row = r->from + first * strides[0] + second * strides[1] + third * strides[2];
        for (; third < shape[2] && from < to; third++, from++) {
            isa->rotate(r, row, out);
            row += strides[2];
            out += bytes;
        }
        third = 0;
        if (++second == shape[1]) {
            second = 0;
            first++;
        }
    }
}

EXPORT void hf_paged_rotate(const struct rotating *r) {
    const struct isa *isa = chosen_isa();
    const int64_t rows = r->shape[0] * r->shape[1] * r->shape[2];
    /* Waking a thread costs some microseconds, in which a core rotates some ten thousand elements. */
    const int64_t worth = rows * r->row / 50000 + 1;
    const int threads = (int)(r->num_threads < worth ? r->num_threads : worth);
    if (threads <= 1) { /* nor is a region of one thread free */
        rotate_rows(r, isa, 0, rows);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        const int64_t mine = omp_get_thread_num(), others = omp_get_num_threads();
        rotate_rows(r, isa, rows * mine / others, rows * (mine + 1) / others);
    }
}

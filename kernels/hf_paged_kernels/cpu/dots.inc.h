/* Few query rows over a tile of positions, by dot products; the rows of K, or of V, have one storage type S.
 *
 * Contract: included once for each type, after its rows.inc.h, with PAIRED set. PAIRED: the processor multiplies pairs of
 * bfloat16, and q holds such pairs. Sums and q lie in LOAD2's order.
 */

/* Scores of TOKENS rows of K against ROWS queries, dot products over `dim` elements; q rows are `dk` floats. */
INLINE void NAME(dots)(const int TOKENS, const int ROWS, const char *const *rows, const float *q, int64_t dim, int64_t dk,
                       float *scores) {
    const S *const *k = (const S *const *)rows;
    vf sums[4][4];
    UNROLLED
    for (int t = 0; t < TOKENS; t++)
        UNROLLED
        for (int r = 0; r < ROWS; r++) sums[t][r] = vf_set(0);
    int64_t d = 0;
    for (; PAIRED && d < dim; d += 2 * LANES) {
        UNROLLED
        for (int t = 0; t < TOKENS; t++) {
            S row[2 * LANES];
            if (d + 2 * LANES > dim) NAME(copy_tail)(k[t] + d, (int)(dim - d), row);
            vu pairs = *(const vu_any *)(d + 2 * LANES > dim ? row : k[t] + d);
            UNROLLED
            for (int r = 0; r < ROWS; r++)
                sums[t][r] = vf_dot_bf16(sums[t][r], *(const vu_any *)(q + r * dk + d / 2), pairs);
        }
    }
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        UNROLLED
        for (int t = 0; t < TOKENS; t++) {
            vf a, b;
            LOAD2(k[t] + d, &a, &b);
            UNROLLED
            for (int r = 0; r < ROWS; r++) {
                sums[t][r] += a * vf_load(q + r * dk + d);
                sums[t][r] += b * vf_load(q + r * dk + d + LANES);
            }
        }
    }
    if (d < dim) {
        UNROLLED
        for (int t = 0; t < TOKENS; t++) {
            S row[2 * LANES];
            vf a, b;
            NAME(copy_tail)(k[t] + d, (int)(dim - d), row);
            LOAD2(row, &a, &b);
            UNROLLED
            for (int r = 0; r < ROWS; r++) {
                sums[t][r] += a * vf_load(q + r * dk + d);
                sums[t][r] += b * vf_load(q + r * dk + d + LANES);
            }
        }
    }
    UNROLLED
    for (int r = 0; r < ROWS; r++) {
        if (TOKENS == 2 && ROWS == 4) {
            float pairs[4];
            if (r % 2) continue;
            vf_sum4(sums[0][r], sums[1][r], sums[0][r + 1], sums[1][r + 1], pairs);
            memcpy(scores + r * TILE_POSITIONS, pairs, 2 * sizeof(float));
            memcpy(scores + (r + 1) * TILE_POSITIONS, pairs + 2, 2 * sizeof(float));
        } else if (TOKENS == 4)
            vf_sum4(sums[0][r], sums[1][r], sums[2][r], sums[3][r], scores + r * TILE_POSITIONS);
        else
            UNROLLED
            for (int t = 0; t < TOKENS; t++) scores[r * TILE_POSITIONS + t] = vf_sum(sums[t][r]);
    }
}

INLINE void NAME(score_rows)(const int ROWS, const char *const *k, int count, const float *q, int64_t dim, int64_t dk,
                             float *scores, const char *const *next, int64_t next_bytes) {
    const int TOKENS = ROWS == 4 ? 2 : 4; /* as many sums as fit 16 registers beside what they come from */
    int t = 0;
    for (; t + TOKENS <= count; t += TOKENS) {
        prefetch_rows(next + t, TOKENS, next_bytes);
        NAME(dots)(TOKENS, ROWS, k + t, q, dim, dk, scores + t);
    }
    prefetch_rows(next + t, count - t, next_bytes);
    for (; t < count; t++) NAME(dots)(1, ROWS, k + t, q, dim, dk, scores + t);
}

/* out[r][n] += sum over t of weights[r][t] * v[t][n], for PAIRS * 2 * LANES columns from n on. */
INLINE void NAME(add_values)(const int ROWS, const int PAIRS, const char *const *rows, int count, const float *weights,
                             int64_t n, int tail, int64_t dv, float *out, const char *const *next, int num_next,
                             int64_t next_bytes) {
    const S *const *v = (const S *const *)rows;
    vf sums[4][8];
    UNROLLED
    for (int r = 0; r < ROWS; r++)
        UNROLLED
        for (int p = 0; p < 2 * PAIRS; p++) sums[r][p] = vf_load(out + r * dv + n + p * LANES);
    for (int t = 0; t < count; t++) {
        if (t < num_next) prefetch_rows(next + t, 1, next_bytes);
        UNROLLED
        for (int p = 0; p < PAIRS; p++) {
            vf a, b;
            S row[2 * LANES];
            if (tail) NAME(copy_tail)(v[t] + n, tail, row);
            LOAD2(tail ? row : v[t] + n + p * 2 * LANES, &a, &b);
            UNROLLED
            for (int r = 0; r < ROWS; r++) {
                float w = weights[r * TILE_POSITIONS + t];
                sums[r][2 * p] += a * w;
                sums[r][2 * p + 1] += b * w;
            }
        }
    }
    UNROLLED
    for (int r = 0; r < ROWS; r++)
        UNROLLED
        for (int p = 0; p < 2 * PAIRS; p++) vf_store(out + r * dv + n + p * LANES, sums[r][p]);
}

INLINE void NAME(sum_rows)(const int ROWS, const char *const *v, int count, const float *weights, int64_t dim,
                           int64_t dv, float *out, const char *const *next, int num_next, int64_t next_bytes) {
    int64_t n = 0;
    for (; ROWS < 4 && n + 4 * LANES <= dim; n += 4 * LANES, num_next = 0)
        NAME(add_values)(ROWS, 2, v, count, weights, n, 0, dv, out, next, num_next, next_bytes);
    for (; n + 2 * LANES <= dim; n += 2 * LANES, num_next = 0)
        NAME(add_values)(ROWS, 1, v, count, weights, n, 0, dv, out, next, num_next, next_bytes);
    if (n < dim) NAME(add_values)(ROWS, 1, v, count, weights, n, (int)(dim - n), dv, out, next, num_next, next_bytes);
}

/* Calls CALL(r, rows done so far) for all rows, a few at a time: one more of them where each vector costs several
 * instructions to make of codes. */
#define ALL_ROWS(rows, CALL)                                   \
    for (int r = 0; r < rows; r += CODES ? 4 : 3) {            \
        switch (rows - r) {                                    \
        case 1: CALL(1); break;                                \
        case 2: CALL(2); break;                                \
        case 3: CALL(3); break;                                \
        default: CALL(CODES ? 4 : 3);                          \
        }                                                      \
    }

/* Scores of `count` rows of K against `rows` queries: [row][position]. */
static void NAME(score)(int rows, const char *const *k, int count, const float *q, int64_t dim, int64_t dk,
                        float *scores, const char *const *next, int64_t next_bytes) {
#define CALL(n) NAME(score_rows)(n, k, count, q + r * dk, dim, dk, scores + r * TILE_POSITIONS, next, r ? 0 : next_bytes)
    ALL_ROWS(rows, CALL)
#undef CALL
}

/* out[row] += sum of `count` rows of V, weighted by weights[row][position]. */
static void NAME(sum)(int rows, const char *const *v, int count, const float *weights, int64_t dim, int64_t dv,
                      float *out, const char *const *next, int num_next, int64_t next_bytes) {
#define CALL(n) \
    NAME(sum_rows)(n, v, count, weights + r * TILE_POSITIONS, dim, dv, out + r * dv, next, r ? 0 : num_next, next_bytes)
    ALL_ROWS(rows, CALL)
#undef CALL
}
#undef ALL_ROWS

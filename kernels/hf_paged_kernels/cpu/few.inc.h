/* Few query rows over many positions, by dot products: decode. Included once for each storage type S.
 *
 * Contract: one query of one sequence and KV head, its group of at most MAX_FEW_ROWS heads. A tile of positions is
 * scored for all heads while its rows of K lie in the cache, then weighted and summed with its rows of V: every
 * row is read from memory once. Softmax runs along (Milakov and Gimelshein 2018, arXiv 1805.02867): when
 * a tile raises the maximum, what was summed before is scaled down.
 */

/* Scores of TOKENS rows of K against ROWS queries, dot products over `dim` elements; q rows are `dk` floats. */
INLINE void NAME(dots)(const int TOKENS, const int ROWS, const S *const *k, const float *q, int64_t dim, int64_t dk,
                       float *scores) {
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
            vf a, b;
            NAME(load2_tail)(k[t] + d, (int)(dim - d), &a, &b);
            UNROLLED
            for (int r = 0; r < ROWS; r++) {
                sums[t][r] += a * vf_load(q + r * dk + d);
                sums[t][r] += b * vf_load(q + r * dk + d + LANES);
            }
        }
    }
    UNROLLED
    for (int r = 0; r < ROWS; r++) {
        if (TOKENS == 4)
            vf_sum4(sums[0][r], sums[1][r], sums[2][r], sums[3][r], scores + r * TILE_POSITIONS);
        else
            UNROLLED
            for (int t = 0; t < TOKENS; t++) scores[r * TILE_POSITIONS + t] = vf_sum(sums[t][r]);
    }
}

/* Ask for `count` rows of `bytes` bytes. The blocks of a sequence lie anywhere, so no processor guesses the next one:
 * each loop asks for what the next loop reads, a few rows at a time, as many as it reads itself. */
INLINE void NAME(prefetch)(const S *const *rows, int count, int64_t bytes) {
    for (int t = 0; t < count; t++)
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch((const char *)rows[t] + byte);
}

INLINE void NAME(score_rows)(const int ROWS, const S *const *k, int count, const float *q, int64_t dim, int64_t dk,
                             float *scores, const S *const *next, int64_t next_bytes) {
    int t = 0;
    for (; t + 4 <= count; t += 4) {
        NAME(prefetch)(next + t, 4, next_bytes);
        NAME(dots)(4, ROWS, k + t, q, dim, dk, scores + t);
    }
    NAME(prefetch)(next + t, count - t, next_bytes);
    for (; t < count; t++) NAME(dots)(1, ROWS, k + t, q, dim, dk, scores + t);
}

/* out[r][n] += sum over t of weights[r][t] * v[t][n], for PAIRS * 2 * LANES columns from n on. */
INLINE void NAME(add_values)(const int ROWS, const int PAIRS, const S *const *v, int count, const float *weights,
                             int64_t n, int tail, int64_t dv, float *out, const S *const *next, int num_next,
                             int64_t next_bytes) {
    vf sums[4][8];
    UNROLLED
    for (int r = 0; r < ROWS; r++)
        UNROLLED
        for (int p = 0; p < 2 * PAIRS; p++) sums[r][p] = vf_load(out + r * dv + n + p * LANES);
    for (int t = 0; t < count; t++) {
        if (t < num_next) NAME(prefetch)(next + t, 1, next_bytes);
        UNROLLED
        for (int p = 0; p < PAIRS; p++) {
            vf a, b;
            if (tail)
                NAME(load2_tail)(v[t] + n, tail, &a, &b);
            else
                LOAD2(v[t] + n + p * 2 * LANES, &a, &b);
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

INLINE void NAME(sum_rows)(const int ROWS, const S *const *v, int count, const float *weights, int64_t dim, int64_t dv,
                           float *out, const S *const *next, int num_next, int64_t next_bytes) {
    int64_t n = 0;
    for (; n + 4 * LANES <= dim; n += 4 * LANES, num_next = 0)
        NAME(add_values)(ROWS, 2, v, count, weights, n, 0, dv, out, next, num_next, next_bytes);
    for (; n + 2 * LANES <= dim; n += 2 * LANES, num_next = 0)
        NAME(add_values)(ROWS, 1, v, count, weights, n, 0, dv, out, next, num_next, next_bytes);
    if (n < dim) NAME(add_values)(ROWS, 1, v, count, weights, n, (int)(dim - n), dv, out, next, num_next, next_bytes);
}

static void NAME(few)(const struct attention *a, const struct task *task, void *scratch) {
    const int64_t dk = padded(a->head_dim), dv = padded(a->head_dim_v);
    const int rows = (int)(task->row_to - task->row_from);
    float *q = scratch, *out = q + MAX_FEW_ROWS * dk, *scores = out + MAX_FEW_ROWS * dv;
    float *top = scores + MAX_FEW_ROWS * TILE_POSITIONS, *total = top + MAX_FEW_ROWS;
    const int64_t k_bytes = a->head_dim * (int64_t)sizeof(S), v_bytes = a->head_dim_v * (int64_t)sizeof(S);
    const S *k_rows[2][TILE_POSITIONS], *v_rows[2][TILE_POSITIONS]; /* of this tile and the next */
    int turn = 0, count = tile_count(task, task->from);

    for (int r = 0; r < rows; r++) {
        NAME(load_query)(a, task, task->row_from + r, q + r * dk, 1);
        top[r] = -INFINITY;
        total[r] = 0;
    }
    memset(out, 0, sizeof(float) * rows * dv);

    NAME(find_rows)(a, task, task->from, count, k_rows[0], v_rows[0]);
    NAME(prefetch)(k_rows[0], count < 16 ? count : 16, k_bytes);
    for (int64_t from = task->from; from < task->to; from += TILE_POSITIONS, turn = !turn) {
        const S *const *k = k_rows[turn], *const *v = v_rows[turn], *const *next = k_rows[!turn];
        const int num_next = tile_count(task, from + TILE_POSITIONS);
        if (num_next) NAME(find_rows)(a, task, from + TILE_POSITIONS, num_next, k_rows[!turn], v_rows[!turn]);
        for (int r = 0; r < rows; r += 3) {
            float *s = scores + r * TILE_POSITIONS;
            const int64_t bytes = r ? 0 : v_bytes;
            switch (rows - r) {
            case 1: NAME(score_rows)(1, k, count, q + r * dk, a->head_dim, dk, s, v, bytes); break;
            case 2: NAME(score_rows)(2, k, count, q + r * dk, a->head_dim, dk, s, v, bytes); break;
            default: NAME(score_rows)(3, k, count, q + r * dk, a->head_dim, dk, s, v, bytes);
            }
        }
        for (int r = 0; r < rows; r++) {
            float *s = scores + r * TILE_POSITIONS;
            for (int t = 0; (PAIRED || a->softcap > 0) && t < count; t += LANES) {
                vf x = vf_load(s + t);
                if (PAIRED) x *= (float)a->scale;
                if (a->softcap > 0) x = vf_tanh(x * (float)(1 / a->softcap)) * (float)a->softcap;
                vf_store(s + t, x);
            }
            for (int t = count; t % LANES; t++) s[t] = -INFINITY; /* weight 0 */
            vf largest = vf_set(-INFINITY);
            for (int t = 0; t < count; t += LANES) largest = vf_max(largest, vf_load(s + t));
            float highest = vf_top(largest);
            if (highest > top[r]) {
                float factor = vf_exp(vf_set(top[r] - highest))[0];
                total[r] *= factor;
                for (int64_t n = 0; n < dv; n += LANES)
                    vf_store(out + r * dv + n, vf_load(out + r * dv + n) * factor);
                top[r] = highest;
            }
            float base = top[r] == -INFINITY ? 0 : top[r];
            vf sum = vf_set(0);
            for (int t = 0; t < count; t += LANES) {
                vf weight = vf_exp(vf_load(s + t) - base);
                vf_store(s + t, weight);
                sum += weight;
            }
            total[r] += vf_sum(sum);
        }
        for (int r = 0; r < rows; r += 3) {
            const float *weights = scores + r * TILE_POSITIONS;
            float *sums = out + r * dv;
            const int ahead = r ? 0 : num_next;
            switch (rows - r) {
            case 1: NAME(sum_rows)(1, v, count, weights, a->head_dim_v, dv, sums, next, ahead, k_bytes); break;
            case 2: NAME(sum_rows)(2, v, count, weights, a->head_dim_v, dv, sums, next, ahead, k_bytes); break;
            default: NAME(sum_rows)(3, v, count, weights, a->head_dim_v, dv, sums, next, ahead, k_bytes);
            }
        }
        count = num_next;
    }
    for (int r = 0; r < rows; r++) NAME(finish)(a, task, task->row_from + r, out + r * dv, top[r], total[r]);
}

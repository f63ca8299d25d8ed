/* Many query rows over a run of positions, as small matrix products: prefill.
 *
 * Contract: up to TILE_ROWS rows (queries x heads of a KV head) lie in the lanes of vectors, so that scores come
 * out as [position][row]: the softmax then runs over whole vectors, K is read one number at a time just as
 * it lies in its block, V a vector at a time, and neither is transposed or, in float32, copied. The narrower types
 * are widened one tile of TILE_POSITIONS at a time, codes with their scales.
 */

/* scores[t][m] = sum over d of k[t][d] * q[d][m], for TOKENS rows of K and two vectors of queries. PAIRED: k and q
 * hold pairs of bfloat16, d counts pairs. */
INLINE void tile_scores(const int PAIRED, const int TOKENS, const float *const *k, const float *q, int64_t dim, float *scores) {
    vf sums[8][2];
    UNROLLED
    for (int t = 0; t < TOKENS; t++) sums[t][0] = sums[t][1] = vf_set(0);
    for (int64_t d = 0; PAIRED && d < dim; d++) {
        vu q0 = *(const vu_any *)(q + d * TILE_ROWS), q1 = *(const vu_any *)(q + d * TILE_ROWS + LANES);
        UNROLLED
        for (int t = 0; t < TOKENS; t++) {
            uint32_t pair;
            memcpy(&pair, (const char *)k[t] + 4 * d, 4);
            sums[t][0] = vf_dot_bf16(sums[t][0], q0, pair - (vu){0});
            sums[t][1] = vf_dot_bf16(sums[t][1], q1, pair - (vu){0});
        }
    }
    for (int64_t d = 0; !PAIRED && d < dim; d++) {
        vf q0 = vf_load(q + d * TILE_ROWS), q1 = vf_load(q + d * TILE_ROWS + LANES);
        UNROLLED
        for (int t = 0; t < TOKENS; t++) {
            float x = k[t][d];
            sums[t][0] += q0 * x;
            sums[t][1] += q1 * x;
        }
    }
    UNROLLED
    for (int t = 0; t < TOKENS; t++) {
        vf_store(scores + t * TILE_ROWS, sums[t][0]);
        vf_store(scores + t * TILE_ROWS + LANES, sums[t][1]);
    }
}

/* out[m][n] = out[m][n] * factor[m] + sum over t of weights[t][m] * v[t][n], for ROWS rows and two vectors of columns.
 * The sum of a tile starts at 0: over ten thousand positions a single running sum would lose 1e-5 to rounding. */
INLINE void tile_values(const int ROWS, const float *const *v, int count, const float *weights,
                        const float *factor, int64_t n, float *out, int64_t dv) {
    vf sums[8][2];
    UNROLLED
    for (int m = 0; m < ROWS; m++) sums[m][0] = sums[m][1] = vf_set(0);
    for (int t = 0; t < count; t++) {
        vf v0 = vf_load(v[t] + n), v1 = vf_load(v[t] + n + LANES);
        UNROLLED
        for (int m = 0; m < ROWS; m++) {
            float w = weights[t * TILE_ROWS + m];
            sums[m][0] += v0 * w;
            sums[m][1] += v1 * w;
        }
    }
    UNROLLED
    for (int m = 0; m < ROWS; m++) {
        vf_store(out + m * dv + n, vf_load(out + m * dv + n) * factor[m] + sums[m][0]);
        vf_store(out + m * dv + n + LANES, vf_load(out + m * dv + n + LANES) * factor[m] + sums[m][1]);
    }
}

/* Calls CALL(n) with the constant 1..BATCH nearest to what is left: the compiler unrolls each. */
#define WITH_CONSTANT(left, CALL)  \
    switch (left) {                \
    case 1: CALL(1); break;        \
    case 2: CALL(2); break;        \
    case 3: CALL(3); break;        \
    case 4: CALL(4); break;        \
    case 5: CALL(5); break;        \
    default: CALL(6);              \
    }
enum { BATCH = 6 }; /* 6 x 2 sums, 2 loaded vectors and a broadcast fill 16 registers */

/* Softmax weights of one vector of rows, in place; the rows' statistics go along. */
INLINE void tile_weights(const struct attention *a, float *scores, int count, int64_t position, int masked,
                               const int32_t *first, const int32_t *last, float *top, float *total, float *factor) {
    const float cap = (float)a->softcap, per_cap = a->softcap > 0 ? (float)(1 / a->softcap) : 0;
    const int paired = is_paired(a);
    vf old = vf_load(top), highest = old;
    for (int t = 0; t < count; t++) {
        vf x = vf_load(scores + t * TILE_ROWS);
        if (paired) x *= (float)a->scale;
        if (cap > 0) x = vf_tanh(x * per_cap) * cap;
        if (masked) {
            vi at = vi_set((int32_t)(position + t));
            x = vf_select((at >= vi_load(first)) & (at <= vi_load(last)), x, vf_set(-INFINITY));
        }
        if (paired || cap > 0 || masked) vf_store(scores + t * TILE_ROWS, x);
        highest = vf_max(highest, x);
    }
    vf base = vf_select(highest == -INFINITY, vf_set(0), highest);
    vf scale = vf_exp(old - base), sum = vf_set(0);
    for (int t = 0; t < count; t++) {
        vf weight = vf_exp(vf_load(scores + t * TILE_ROWS) - base);
        vf_store(scores + t * TILE_ROWS, weight);
        sum += weight;
    }
    vf_store(top, highest);
    vf_store(factor, scale);
    vf_store(total, vf_load(total) * scale + sum);
}

static void tile(const struct attention *a, const struct task *task, void *scratch) {
    const int64_t dk = padded(a->head_dim), dv = padded(a->head_dim_v);
    const int64_t group = a->num_heads / a->num_kv_heads;
    const int rows = (int)(task->row_to - task->row_from), lanes = (rows + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    float *q = scratch, *scores = q + dk * TILE_ROWS, *out = scores + TILE_POSITIONS * TILE_ROWS;
    float *k_wide = out + TILE_ROWS * dv, *v_wide = k_wide + TILE_POSITIONS * dk;
    float *top = v_wide + TILE_POSITIONS * dv, *total = top + TILE_ROWS, *factor = total + TILE_ROWS;
    int32_t *first = (int32_t *)(factor + TILE_ROWS), *last = first + TILE_ROWS;
    const char *k[TILE_POSITIONS], *v[TILE_POSITIONS];
    const float *k_rows[TILE_POSITIONS], *v_rows[TILE_POSITIONS];
    float k_scales[TILE_POSITIONS] = {0}, v_scales[TILE_POSITIONS] = {0};
    const struct storage *key = &storages[a->key_type], *value = &storages[a->value_type];
    /* float32 rows are read where they lie, V's only if no vector leaves the row; so are pairs. */
    const int paired = is_paired(a);
    const int k_direct = paired ? a->head_dim % 2 == 0 : a->key_type == FLOAT32;
    const int v_direct = a->value_type == FLOAT32 && a->head_dim_v % (2 * LANES) == 0;
    const int64_t dim = paired ? (a->head_dim + 1) / 2 : k_direct ? a->head_dim : dk; /* padding: 0 on both sides */
    const int64_t dim_v = (a->head_dim_v + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;

    for (int m = 0; m < lanes; m++) {
        int64_t row = task->row_from + (m < rows ? m : 0); /* lanes beyond the rows repeat the first; never stored */
        int64_t position = task->position + row / group;
        load_query(a, task, row, q + m, TILE_ROWS);
        first[m] = (int32_t)first_seen(a, task->seq, position);
        last[m] = (int32_t)position;
        top[m] = -INFINITY;
        total[m] = 0;
    }
    memset(out, 0, sizeof(float) * lanes * dv);
    /* What every row sees needs no mask. */
    const int64_t all_from = first_seen(a, task->seq, task->position + (task->row_to - 1) / group);
    const int64_t all_to = task->position + task->row_from / group + 1;

    for (int64_t from = task->from; from < task->to; from += TILE_POSITIONS) {
        const int count = tile_count(task, from);
        find_rows(a, task, from, count, k, v);
        if (a->k_scale)
            find_scales(a, task, from, count, a->k_scale, a->k_scale_per_slot, unit_of(a->key_type), k_scales);
        if (a->v_scale)
            find_scales(a, task, from, count, a->v_scale, a->v_scale_per_slot, unit_of(a->value_type), v_scales);
        for (int t = 0; t < count; t++) {
            k_rows[t] = k_direct ? (const float *)k[t] : k_wide + t * dk;
            v_rows[t] = v_direct ? (const float *)v[t] : v_wide + t * dv;
            if (paired && !k_direct) {
                memset(k_wide + t * dk, 0, dk * sizeof(bf16));
                memcpy(k_wide + t * dk, k[t], a->head_dim * sizeof(bf16));
            } else if (!k_direct) {
                key->widen(k[t], a->head_dim, dk, k_scales[t], k_wide + t * dk);
            }
            if (!v_direct) value->widen(v[t], a->head_dim_v, dv, v_scales[t], v_wide + t * dv);
        }
        for (int m = 0; m < lanes; m += 2 * LANES) {
            for (int t = 0; t < count; t += BATCH) {
#if defined(HF_BF16_PAIRS)
#define CALL(n) tile_scores(1, n, k_rows + t, q + m, dim, scores + t * TILE_ROWS + m)
                if (paired) {
                    WITH_CONSTANT(count - t, CALL)
                    continue;
                }
#undef CALL
#endif
#define CALL(n) tile_scores(0, n, k_rows + t, q + m, dim, scores + t * TILE_ROWS + m)
                WITH_CONSTANT(count - t, CALL)
#undef CALL
            }
            const int masked = from < all_from || from + count > all_to;
            for (int half = m; half < m + 2 * LANES; half += LANES)
                tile_weights(a, scores + half, count, from, masked, first + half, last + half, top + half,
                                   total + half, factor + half);
        }
        for (int64_t n = 0; n < dim_v; n += 2 * LANES) {
            for (int m = 0; m < rows; m += BATCH) {
#define CALL(r) tile_values(r, v_rows, count, scores + m, factor + m, n, out + m * dv, dv)
                WITH_CONSTANT(rows - m, CALL)
#undef CALL
            }
        }
    }
    for (int m = 0; m < rows; m++) finish(a, task, task->row_from + m, out + m * dv, top[m], total[m]);
}
#undef WITH_CONSTANT

/* Few query rows over many positions, by dot products: decode.
 *
 * Contract: one query of one sequence and KV head, its group of at most MAX_FEW_ROWS heads. A tile of positions is
 * scored for all heads while its rows of K lie in the cache, then weighted and summed with its rows of V: every
 * row is read from memory once. Softmax runs along (Milakov and Gimelshein 2018, arXiv 1805.02867): when
 * a tile raises the maximum, what was summed before is scaled down. Scales of codes are applied to scores and weights,
 * one for each position, never to rows.
 */

/* Products take the codes of finite numbers alone. A tile with a code for NaN in it, which is rare, is read as float32:
 * returns its rows and their type. */
static int64_t rows_of_numbers(int64_t type, const char *const *rows, int count, int64_t dim, float *wide,
                               const char **wide_rows, const char *const **use) {
    *use = rows;
    if (!storages[type].holds_nan || !storages[type].holds_nan(rows, count, dim)) return type;
    const int64_t size = padded(dim);
    for (int t = 0; t < count; t++) {
        storages[type].widen(rows[t], dim, size, 1, wide + t * size);
        wide_rows[t] = (const char *)(wide + t * size);
    }
    *use = wide_rows;
    return FLOAT32;
}

/* Scores of one head become weights, and its sums so far fit them. */
INLINE void few_weights(const struct attention *a, float *s, int count, const float *k_scales, const float *v_scales,
                        float *out, int64_t dv, float *top, float *total) {
    const int paired = is_paired(a);
    for (int t = 0; (paired || k_scales || a->softcap > 0) && t < count; t += LANES) {
        vf x = vf_load(s + t);
        if (paired) x *= (float)a->scale;
        if (k_scales) x *= vf_load(k_scales + t);
        if (a->softcap > 0) x = vf_tanh(x * (float)(1 / a->softcap)) * (float)a->softcap;
        vf_store(s + t, x);
    }
    for (int t = count; t % LANES; t++) s[t] = -INFINITY; /* weight 0 */
    vf largest = vf_set(-INFINITY);
    for (int t = 0; t < count; t += LANES) largest = vf_max(largest, vf_load(s + t));
    float highest = vf_top(largest);
    if (highest > *top) {
        float factor = vf_exp(vf_set(*top - highest))[0];
        *total *= factor;
        for (int64_t n = 0; n < dv; n += LANES) vf_store(out + n, vf_load(out + n) * factor);
        *top = highest;
    }
    float base = *top == -INFINITY ? 0 : *top;
    vf sum = vf_set(0);
    for (int t = 0; t < count; t += LANES) {
        vf weight = vf_exp(vf_load(s + t) - base);
        sum += weight;
        vf_store(s + t, v_scales ? weight * vf_load(v_scales + t) : weight);
    }
    *total += vf_sum(sum);
}

static void few(const struct attention *a, const struct task *task, void *scratch) {
    const int64_t dk = padded(a->head_dim), dv = padded(a->head_dim_v);
    const int rows = (int)(task->row_to - task->row_from);
    float *q = scratch, *out = q + MAX_FEW_ROWS * dk, *scores = out + MAX_FEW_ROWS * dv;
    float *top = scores + MAX_FEW_ROWS * TILE_POSITIONS, *total = top + MAX_FEW_ROWS;
    float *wide = total + MAX_FEW_ROWS;
    const int64_t k_bytes = a->head_dim * storages[a->key_type].size;
    const int64_t v_bytes = a->head_dim_v * storages[a->value_type].size;
    const char *k_rows[2][TILE_POSITIONS], *v_rows[2][TILE_POSITIONS]; /* of this tile and the next */
    const char *wide_rows[TILE_POSITIONS], *const *use;
    float scales[2][TILE_POSITIONS], *k_scales = a->k_scale ? scales[0] : NULL, *v_scales = a->v_scale ? scales[1] : NULL;
    int turn = 0, count = tile_count(task, task->from);

    for (int r = 0; r < rows; r++) {
        load_query(a, task, task->row_from + r, q + r * dk, 1);
        top[r] = -INFINITY;
        total[r] = 0;
    }
    memset(out, 0, sizeof(float) * rows * dv);

    find_rows(a, task, task->from, count, k_rows[0], v_rows[0]);
    prefetch_rows(k_rows[0], count < 16 ? count : 16, k_bytes);
    for (int64_t from = task->from; from < task->to; from += TILE_POSITIONS, turn = !turn) {
        const char *const *k = k_rows[turn], *const *v = v_rows[turn], *const *next = k_rows[!turn];
        const int num_next = tile_count(task, from + TILE_POSITIONS);
        if (num_next) find_rows(a, task, from + TILE_POSITIONS, num_next, k_rows[!turn], v_rows[!turn]);
        if (k_scales)
            find_scales(a, task, from, count, a->k_scale, a->k_scale_per_slot, unit_of(a->key_type), k_scales);
        if (v_scales)
            find_scales(a, task, from, count, a->v_scale, a->v_scale_per_slot, unit_of(a->value_type), v_scales);
        int64_t type = rows_of_numbers(a->key_type, k, count, a->head_dim, wide, wide_rows, &use);
        storages[type].score(rows, use, count, q, a->head_dim, dk, scores, v, v_bytes);
        for (int r = 0; r < rows; r++)
            few_weights(a, scores + r * TILE_POSITIONS, count, k_scales, v_scales, out + r * dv, dv, top + r, total + r);
        type = rows_of_numbers(a->value_type, v, count, a->head_dim_v, wide, wide_rows, &use);
        storages[type].sum(rows, use, count, scores, a->head_dim_v, dv, out, next, num_next, k_bytes);
        count = num_next;
    }
    for (int r = 0; r < rows; r++) finish(a, task, task->row_from + r, out + r * dv, top[r], total[r]);
}

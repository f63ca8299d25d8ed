/* What both kernels do for a task, whatever the storage types are: queries, addresses of K and V, scales, results. */

/* Whether K's rows are multiplied in pairs of bfloat16: then queries stay bfloat16, and the scale is applied to the
 * scores. */
INLINE int is_paired(const struct attention *a) {
#if defined(HF_BF16_PAIRS)
    return a->key_type == BFLOAT16;
#else
    (void)a;
    return 0;
#endif
}

/* Query row f of a task, padded with zeros: times the scale and in the order of K, element d at to[d * stride];
 * paired: as it is, elements 2d and 2d + 1 in the bits of to[d * stride]. */
static void load_query(const struct attention *a, const struct task *task, int64_t f, float *to, int64_t stride) {
    const int64_t group = a->num_heads / a->num_kv_heads, size = padded(a->head_dim);
    const int64_t token = task->token + f / group, head = task->kv_head * group + f % group;
    const int64_t bytes = storages[a->type].size;
    const char *from = (const char *)a->query + (token * a->query_stride_token + head * a->query_stride_head) * bytes;
    const float scale = (float)a->scale;
    if (is_paired(a)) {
        for (int64_t d = 0; d < size; d += 2) {
            bf16 pair[2] = {0};
            if (d < a->head_dim) memcpy(pair, from + d * 2, d + 1 < a->head_dim ? 4 : 2);
            memcpy(to + d / 2 * stride, pair, 4);
        }
        return;
    }
    widen_function *widen = a->key_type == BFLOAT16 ? widen_bf16 : widen_plain[a->type];
    float part[8 * LANES];
    for (int64_t d = 0; d < size; d += 8 * LANES) {
        const int count = size - d < 8 * LANES ? (int)(size - d) : 8 * LANES;
        widen(from + d * bytes, d < a->head_dim ? a->head_dim - d : 0, count, 1, part);
        if (stride == 1)
            for (int i = 0; i < count; i += LANES) vf_store(to + d + i, vf_load(part + i) * scale);
        else
            for (int i = 0; i < count; i++) to[(d + i) * stride] = part[i] * scale;
    }
}

/* Where the rows of K and V of `count` positions from `from` on lie. 64-bit all the way: a pool may hold more than
 * 2**31 elements. */
INLINE void find_rows(const struct attention *a, const struct task *task, int64_t from, int count, const char **k,
                      const char **v) {
    const int32_t *table = a->block_tables + task->seq * a->table_stride_seq;
    const int64_t k_bytes = a->head_dim * storages[a->key_type].size;
    const int64_t v_bytes = a->head_dim_v * storages[a->value_type].size;
    int64_t entry = from / a->block_size, offset = from % a->block_size;
    for (int t = 0; t < count; entry++, offset = 0) {
        int64_t block = table[entry * a->table_stride_block];
        int64_t slot = (block * a->num_kv_heads + task->kv_head) * a->block_size + offset;
        if (a->k_scale_per_slot) __builtin_prefetch(a->k_scale + slot);
        if (a->v_scale_per_slot) __builtin_prefetch(a->v_scale + slot);
        for (; t < count && offset < a->block_size; t++, offset++, slot++) {
            k[t] = (const char *)a->key_cache + slot * k_bytes;
            v[t] = (const char *)a->value_cache + slot * v_bytes;
        }
    }
}

/* What `load2` of K (or V) of those positions is to be multiplied with; 0 behind them. */
INLINE void find_scales(const struct attention *a, const struct task *task, int64_t from, int count,
                        const float *scale, int64_t per_slot, float unit, float *to) {
    const int32_t *table = a->block_tables + task->seq * a->table_stride_seq;
    int64_t entry = from / a->block_size, offset = from % a->block_size;
    for (int t = 0; t < count; entry++, offset = 0) {
        const int left = count - t;
        const int run = a->block_size - offset < left ? (int)(a->block_size - offset) : left;
        const int64_t block = table[entry * a->table_stride_block];
        const float *at = scale + task->kv_head;
        if (per_slot) at = scale + (block * a->num_kv_heads + task->kv_head) * a->block_size + offset;
        int i = 0;
        for (; per_slot && i + LANES <= run; i += LANES) vf_store(to + t + i, vf_load(at + i) * unit);
        for (; i < run; i++) to[t + i] = at[per_slot ? i : 0] * unit;
        t += run;
    }
    for (int t = count; t % LANES; t++) to[t] = 0;
}

/* The result of row f, or its part of a split one, from the weighted sum of V, the largest score and the sum of
 * weights. A row that saw nothing has top -inf and total 0. */
static void finish(const struct attention *a, const struct task *task, int64_t f, float *out, float top, float total) {
    const int64_t dv = padded(a->head_dim_v);
    if (task->partial) {
        float *partial = task->partial + (f - task->row_from) * (dv + 2);
        memcpy(partial, out, dv * sizeof(float));
        partial[dv] = top;
        partial[dv + 1] = total;
        return;
    }
    const int64_t group = a->num_heads / a->num_kv_heads, head = task->kv_head * group + f % group;
    const int64_t row = (task->token + f / group) * a->num_heads + head;
    if (a->sinks && a->sinks[head] != -INFINITY) { /* one more term of the denominator; NaN makes all NaN */
        float sink = a->sinks[head];
        if (sink > top) {
            float factor = expf(top - sink);
            for (int64_t n = 0; n < dv; n++) out[n] *= factor;
            total = total * factor + expf(sink - sink); /* 1, or NaN where the sink is infinite */
            top = sink;
        } else {
            total += expf(sink - top);
        }
    }
    float inverse = total == 0 ? 1 : 1 / total;
    for (int64_t n = 0; n < dv; n += LANES) vf_store(out + n, vf_load(out + n) * inverse);
    narrow_function *narrow = a->value_type == BFLOAT16 ? narrow_bf16 : narrow_plain[a->type];
    narrow(out, a->head_dim_v, (char *)a->out + row * a->head_dim_v * storages[a->type].size);
    if (a->lse) a->lse[row] = total == 0 ? -INFINITY : top + logf(total);
}

/* Rows of queries, keys, values and outputs of one storage type S: where they lie, and to and from float32.
 *
 * Contract: included once for each type, with S, TYPE (the suffix), LOAD2, STORE2 and PAIRED set. PAIRED: the processor
 * multiplies pairs of bfloat16, so queries stay bfloat16 and the scale is applied to the scores.
 */

/* count < 2 * LANES elements, zeros behind them. */
INLINE void NAME(copy_tail)(const S *p, int count, S *row) {
    memset(row, 0, 2 * LANES * sizeof(S));
    int i = 0;
    for (; i + 8 <= count; i += 8) memcpy(row + i, p + i, 8 * sizeof(S));
    for (; i < count; i++) row[i] = p[i];
}
INLINE void NAME(load2_tail)(const S *p, int count, vf *a, vf *b) {
    S row[2 * LANES];
    NAME(copy_tail)(p, count, row);
    LOAD2(row, a, b);
}

/* `count` elements as float32 into to[0 : size], in LOAD2's order, zeros behind them. */
INLINE void NAME(widen)(const S *from, int64_t count, int64_t size, float *to) {
    for (int64_t d = 0; d < size; d += 2 * LANES) {
        vf a = vf_set(0), b = a;
        if (d + 2 * LANES <= count)
            LOAD2(from + d, &a, &b);
        else if (d < count)
            NAME(load2_tail)(from + d, (int)(count - d), &a, &b);
        vf_store(to + d, a);
        vf_store(to + d + LANES, b);
    }
}

/* Query row f of a task, padded with zeros: times the scale and in LOAD2's order, element d at to[d * stride];
 * PAIRED: as it is, elements 2d and 2d + 1 in the bits of to[d * stride]. */
INLINE void NAME(load_query)(const struct attention *a, const struct task *task, int64_t f, float *to,
                             int64_t stride) {
    const int64_t group = a->num_heads / a->num_kv_heads, size = padded(a->head_dim);
    const int64_t token = task->token + f / group, head = task->kv_head * group + f % group;
    const S *from = (const S *)a->query + token * a->query_stride_token + head * a->query_stride_head;
    const float scale = (float)a->scale;
    for (int64_t d = 0; PAIRED && d < size; d += 2) {
        S pair[2] = {0};
        if (d < a->head_dim) memcpy(pair, from + d, (d + 1 < a->head_dim ? 2 : 1) * sizeof(S));
        memcpy(to + d / 2 * stride, pair, sizeof pair < 4 ? sizeof pair : 4);
    }
    for (int64_t d = 0; !PAIRED && d < size; d += 2 * LANES) {
        float pair[2 * LANES];
        NAME(widen)(from + d, d < a->head_dim ? a->head_dim - d : 0, 2 * LANES, pair);
        for (int i = 0; i < 2 * LANES; i++) to[(d + i) * stride] = pair[i] * scale;
    }
}

/* Where the rows of K and V of `count` positions from `from` on lie. 64-bit all the way: a pool may hold more than
 * 2**31 elements. */
INLINE void NAME(find_rows)(const struct attention *a, const struct task *task, int64_t from, int count,
                            const S **k, const S **v) {
    const int32_t *table = a->block_tables + task->seq * a->table_stride_seq;
    int64_t entry = from / a->block_size, offset = from % a->block_size;
    for (int t = 0; t < count; entry++, offset = 0) {
        int64_t block = table[entry * a->table_stride_block];
        int64_t slot = (block * a->num_kv_heads + task->kv_head) * a->block_size + offset;
        for (; t < count && offset < a->block_size; t++, offset++, slot++) {
            k[t] = (const S *)a->key_cache + slot * a->head_dim;
            v[t] = (const S *)a->value_cache + slot * a->head_dim_v;
        }
    }
}

/* Store `count` floats, which lie in LOAD2's order, as S. */
INLINE void NAME(narrow)(const float *from, int64_t count, S *to) {
    int64_t d = 0;
    for (; d + 2 * LANES <= count; d += 2 * LANES) STORE2(to + d, vf_load(from + d), vf_load(from + d + LANES));
    if (d < count) {
        S row[2 * LANES];
        STORE2(row, vf_load(from + d), vf_load(from + d + LANES));
        memcpy(to + d, row, (count - d) * sizeof(S));
    }
}

/* The result of row f, or its part of a split one, from the weighted sum of V, the largest score and the sum of
 * weights. A row that saw nothing has top -inf and total 0. */
static void NAME(finish)(const struct attention *a, const struct task *task, int64_t f, float *out, float top,
                         float total) {
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
    NAME(narrow)(out, a->head_dim_v, (S *)a->out + row * a->head_dim_v);
    if (a->lse) a->lse[row] = total == 0 ? -INFINITY : top + logf(total);
}

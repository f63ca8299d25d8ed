/* Rows of one storage type S, to and from float32.
 *
 * Contract: included once for each type, with S, TYPE (the suffix), LOAD2 and EXACT2 set, and for types of outputs
 * STORE2. EXACT2 is LOAD2 but for 8-bit codes (codes.h).
 */

/* count < 2 * LANES elements, zeros behind them. */
INLINE void NAME(copy_tail)(const S *p, int count, S *row) {
    memset(row, 0, 2 * LANES * sizeof(S));
    int i = 0;
    for (; i + 8 <= count; i += 8) memcpy(row + i, p + i, 8 * sizeof(S));
    for (; i < count; i++) row[i] = p[i];
}

/* `count` elements as float32, times `factor` where they are codes, into to[0 : size], in LOAD2's order, zeros behind
 * them. `to` has room for a multiple of 2 * LANES. */
static void NAME(widen)(const char *row, int64_t count, int64_t size, float factor, float *to) {
    const S *from = (const S *)row;
    for (int64_t d = 0; d < size; d += 2 * LANES) {
        vf a = vf_set(0), b = a;
        if (d + 2 * LANES <= count) {
            EXACT2(from + d, &a, &b);
        } else if (d < count) {
            S tail[2 * LANES];
            NAME(copy_tail)(from + d, (int)(count - d), tail);
            EXACT2(tail, &a, &b);
        }
        vf_store(to + d, CODES ? a * factor : a);
        vf_store(to + d + LANES, CODES ? b * factor : b);
    }
}

#if defined(STORE2)
/* Store `count` floats, which lie in LOAD2's order, as S. */
static void NAME(narrow)(const float *from, int64_t count, char *row) {
    S *to = (S *)row;
    int64_t d = 0;
    for (; d + 2 * LANES <= count; d += 2 * LANES) STORE2(to + d, vf_load(from + d), vf_load(from + d + LANES));
    if (d < count) {
        S tail[2 * LANES];
        STORE2(tail, vf_load(from + d), vf_load(from + d + LANES));
        memcpy(to + d, tail, (count - d) * sizeof(S));
    }
}
#endif

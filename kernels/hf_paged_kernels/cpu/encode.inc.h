/* Rows of keys and values as 8-bit codes. */

enum { ENCODE_PART = 256 }; /* elements at a time */

INLINE void encode_part(const int TYPE, const float *x, const float *scales, int count, code *to) {
    for (int d = 0; d < count; d += 2 * LANES) {
        vu a = vf_encode(TYPE, vf_load(x + d), vf_load(scales + d));
        vu b = vf_encode(TYPE, vf_load(x + d + LANES), vf_load(scales + d + LANES));
        store2_codes(to + d, a, b);
    }
}

/* The largest magnitude among finite numbers and `largest`. Bits of magnitudes are in the order of the numbers. */
INLINE vi largest_finite(const float *x, int count, vi largest) {
    for (int d = 0; d < count; d += LANES) {
        vi size = (vi)vf_load(x + d) & 0x7fffffff;
        size &= size < 0x7f800000;
        largest = (vi)vf_select(size > largest, (vf)size, (vf)largest);
    }
    return largest;
}

static void encode(const struct rows_writing *w, const char *row, float *scale, char *codes) {
    static const float most[NUM_TYPES] = {[FP8_E4M3] = 448, [FP8_E5M2] = 57344, [INT8] = 127};
    const int64_t bytes = storages[w->type].size;
    float x[ENCODE_PART], scales[ENCODE_PART];
    if (w->scale_kind == PER_SLOT) {
        vi largest = vi_set(0);
        for (int64_t d = 0; d < w->head_dim; d += ENCODE_PART) {
            const int64_t left = w->head_dim - d;
            const int size = (int)padded(left < ENCODE_PART ? left : ENCODE_PART);
            widen_plain[w->type](row + d * bytes, left, size, 1, x);
            largest = largest_finite(x, size, largest);
        }
        int32_t top = 0;
        for (int i = 0; i < LANES; i++) top = largest[i] > top ? largest[i] : top;
        float size;
        memcpy(&size, &top, sizeof size);
        size /= most[w->cache_type];
        *scale = size > 0x1p-126f ? size : 0x1p-126f;
    }
    for (int64_t d = 0; d < w->head_dim; d += ENCODE_PART) {
        const int64_t left = w->head_dim - d;
        const int count = (int)(left < ENCODE_PART ? left : ENCODE_PART), size = (int)padded(count);
        code part[ENCODE_PART];
        widen_plain[w->type](row + d * bytes, count, size, 1, x);
        for (int i = 0; i < size; i++) scales[i] = w->scale_kind != PER_CHANNEL ? *scale : i < count ? scale[d + i] : 1;
        switch (w->cache_type) {
        case FP8_E4M3: encode_part(FP8_E4M3, x, scales, size, part); break;
        case FP8_E5M2: encode_part(FP8_E5M2, x, scales, size, part); break;
        default: encode_part(INT8, x, scales, size, part);
        }
        memcpy(codes + d, part, count);
    }
}

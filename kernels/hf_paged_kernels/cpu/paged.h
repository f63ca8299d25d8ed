/* What the C files share: the arguments of a call, one task of it, and the table of one instruction set.
 *
 * Contract: plain pointers and counts. The Python wrapper has checked shapes, dtypes and contiguity; it fills
 * `struct attention` as one run of 8-byte fields (so its order is the wrapper's FIELDS), and all sizes count
 * elements unless a name says bytes. Nothing here knows torch or Python.
 */
#ifndef HF_PAGED_H
#define HF_PAGED_H

#include <stdint.h>

/* Storage types, as the wrapper numbers them. Queries and outputs have one of the first three; each of the caches has
 * that type too ("own"), or one of the 8-bit formats: then a number is decode(code) * scale. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, FP8_E4M3 = 3, FP8_E5M2 = 4, INT8 = 5, NUM_TYPES = 6 };

/* Query rows of one tile task, and cache positions that are scored at a time: with head_dim 64 and float32 what a
 * task touches again and again (queries, scores, outputs, one tile of K and V) is 130 KiB, which fits any L2. */
enum { TILE_ROWS = 96, TILE_POSITIONS = 64 };
/* A single query over a longer sequence is split into parts of this many positions, whatever the number of
 * threads is, so that the result does not depend on it. */
enum { SPLIT_POSITIONS = 512 };
/* Up to this many query heads a KV head are scored by dot products; more (or several queries) by tiles. */
enum { MAX_FEW_ROWS = 11 };

struct attention {
    const void *query;           /* [T, H, Dk], strides below, elements of a row adjacent */
    const void *key_cache;       /* [num_blocks, KH, block_size, Dk] contiguous */
    const void *value_cache;     /* [num_blocks, KH, block_size, Dv] contiguous */
    const int32_t *block_tables; /* [S, MB], strides below */
    const int32_t *seq_lens;     /* [S] contiguous */
    const int32_t *query_start;  /* [S + 1] contiguous, or NULL: query row s belongs to sequence s */
    const int32_t *seq_starts;   /* [S] contiguous, or NULL */
    const float *sinks;          /* [H] contiguous, or NULL */
    void *out;                   /* [T, H, Dv] contiguous */
    float *lse;                  /* [T, H] contiguous, or NULL */
    const float *k_scale;        /* NULL: own. Else [KH], or per slot [num_blocks, KH, block_size], contiguous */
    const float *v_scale;        /* likewise */
    int64_t type, key_type, value_type;
    int64_t k_scale_per_slot, v_scale_per_slot; /* whether it is that */
    int64_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, head_dim_v;
    int64_t num_blocks, block_size, max_blocks;
    int64_t query_stride_token, query_stride_head, table_stride_seq, table_stride_block;
    int64_t sliding_window; /* 0: off */
    double scale, softcap;  /* softcap 0: off */
    int64_t num_threads;
};
_Static_assert(sizeof(struct attention) == 34 * 8, "the wrapper packs 34 fields of 8 bytes: 64-bit platforms only");

/* A run of query rows of one sequence and KV head over a run of its positions. Row f of a sequence's chunk and
 * KV head is query f / group, head f % group of the group: the heads that share K lie side by side. */
struct task {
    int64_t seq, kv_head;
    int64_t token;             /* row of `query` that holds the chunk's first query */
    int64_t position;          /* position of that query */
    int64_t row_from, row_to;  /* rows f of this task */
    int64_t from, to;          /* positions to attend, every one of them seen by some row */
    float *partial;            /* NULL: write the result. Else [rows][head_dim_v padded + 2]: out, max, sum */
};

typedef void task_function(const struct attention *, const struct task *, void *scratch);
/* out [padded head_dim_v] is the weighted sum of V of row f, top its largest score, total its sum of weights. */
typedef void finish_function(const struct attention *, const struct task *, int64_t f, float *out, float top,
                             float total);
/* Sum of words[i] * weights[i] modulo 2**64; words may lie at any address. */
typedef uint64_t word_sum_function(const uint32_t *words, const uint32_t *weights, int64_t count);
/* Words that weights are there for: 16 KiB, half of a first-level cache. */
enum { SUM_WORDS = 4096 };

/* One of K and V for reshape_and_cache: rows [T, KH, D], elements of a row adjacent, strides in bytes. */
struct rows_writing {
    const char *rows;
    char *cache;   /* [num_blocks, KH, block_size, D] contiguous */
    float *scales; /* NULL where the cache has the rows' type; else as scale_kind says */
    int64_t scale_kind, type, cache_type, head_dim, row_bytes, token_bytes, head_bytes; /* row_bytes: in the cache */
};
enum { PER_SLOT = 0, PER_HEAD = 1, PER_CHANNEL = 2 }; /* [num_blocks, KH, block_size], written; [KH]; [KH, D] */
/* One row as 8-bit codes; `scale`: where the slot's scale lies, or the head's one, or its D ones. */
typedef void encode_function(const struct rows_writing *, const char *row, float *scale, char *codes);

/* Rows in equal parts, each times a Hadamard matrix and a factor: see hadamard.c. Fields of 8 bytes, which the wrapper
 * packs. Strides count bytes; elements of a row are adjacent, and results contiguous. */
struct rotating {
    const char *from;
    char *to;
    int64_t type, to_type; /* float32, or `to_type` the same as `type` */
    int64_t shape[3], row; /* [.., .., .., row] */
    int64_t strides[3], part;
    double factor;
    int64_t num_threads;
};
_Static_assert(sizeof(struct rotating) == 14 * 8, "the wrapper packs 14 fields of 8 bytes");
typedef void rotate_function(const struct rotating *, const char *row, char *to);
enum { LARGEST_PART = 1024 };

struct isa {
    const char *name;
    task_function *few, *tile;
    finish_function *finish;
    encode_function *encode;
    word_sum_function *word_sum;
    rotate_function *rotate;
};

/* The instruction set in use. */
const struct isa *chosen_isa(void);

/* Compilers before GCC 10 do not know avx512bf16; avx512 does without. */
#if defined(__x86_64__) && (defined(__clang__) || !defined(__GNUC__) || __GNUC__ >= 10)
#define HF_KNOWS_AVX512_BF16 1
#else
#define HF_KNOWS_AVX512_BF16 0
#endif

extern const struct isa isa_baseline, isa_avx2, isa_avx512, isa_avx512_bf16, isa_neon;

/* A head's row in scratch is padded to this many floats: two vectors of the widest instruction set. */
static inline int64_t padded(int64_t count) { return (count + 31) / 32 * 32; }

/* Positions of the tile of a task that begins at `from`; 0 past the end. */
static inline int tile_count(const struct task *task, int64_t from) {
    int64_t left = task->to - from;
    return left <= 0 ? 0 : left < TILE_POSITIONS ? (int)left : TILE_POSITIONS;
}

/* First position that the query at `position` sees. */
static inline int64_t first_seen(const struct attention *a, int64_t seq, int64_t position) {
    int64_t first = a->sliding_window ? position - a->sliding_window + 1 : 0;
    int64_t start = a->seq_starts ? a->seq_starts[seq] : 0;
    first = first > start ? first : start;
    return first > 0 ? first : 0;
}

/* Bytes of scratch that a task of either kind may use, a multiple of 64. */
static inline int64_t scratch_bytes(const struct attention *a) {
    int64_t dk = padded(a->head_dim), dv = padded(a->head_dim_v);
    int64_t tile = dk * TILE_ROWS                  /* queries, transposed */
                   + TILE_POSITIONS * TILE_ROWS    /* scores */
                   + TILE_ROWS * dv                /* outputs */
                   + TILE_POSITIONS * (dk + dv)    /* K and V as float32, for the narrower types */
                   + 5 * TILE_ROWS;                /* max, sum, factor, first and last position of each row */
    int64_t few = MAX_FEW_ROWS * (dk + dv + TILE_POSITIONS + 2)
                  + TILE_POSITIONS * (dk > dv ? dk : dv); /* a tile of K or V as float32, where codes stand for NaN */
    return (tile > few ? tile : few) * (int64_t)sizeof(float);
}

#endif

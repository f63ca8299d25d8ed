/* The entry points: which instruction set, which tasks, which threads.
 *
 * Contract: `hf_paged_attention` serves both operators. It cuts the work into tasks by the lengths alone, runs them
 * in any order on any number of threads, and joins split rows in one order, so the bits of a result depend on
 * neither. Returns 0, or -1 with `struct fault` filled in; then the output is not to be used.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"
#include "paged.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* -- instruction set ------------------------------------------------------------------------------ */

static const struct isa *known[] = {
#if HF_KNOWS_AVX512_BF16
    &isa_avx512_bf16,
#endif
#if defined(__x86_64__)
    &isa_avx512, &isa_avx2,
#elif defined(__aarch64__)
    &isa_neon,
#endif
    &isa_baseline,
};
enum { NUM_KNOWN = sizeof known / sizeof known[0] };
static const struct isa *chosen;

#if defined(__x86_64__)
/* GCC before 11 and clang before 18 do not know "f16c" as a name of __builtin_cpu_supports. */
static int has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static int runs_here(const struct isa *isa) {
#if defined(__x86_64__)
#if HF_KNOWS_AVX512_BF16
    if (isa == &isa_avx512_bf16) return runs_here(&isa_avx512) && __builtin_cpu_supports("avx512bf16");
#endif
    if (isa == &isa_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (isa == &isa_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
    (void)isa;
    return 1;
}

/* Choose by name, or the best for NULL or "". Returns the name, or NULL where that one is unknown here. */
EXPORT const char *hf_paged_use(const char *name) {
    for (int i = 0; i < NUM_KNOWN; i++)
        if (runs_here(known[i]) && (!name || !*name || !strcmp(name, known[i]->name))) {
            chosen = known[i];
            return chosen->name;
        }
    return NULL;
}

const struct isa *chosen_isa(void) {
    if (!chosen) hf_paged_use(NULL);
    return chosen;
}

/* Name of the i-th instruction set that runs here, best first; NULL past the last. */
EXPORT const char *hf_paged_isa(int i) {
    for (int j = 0; j < NUM_KNOWN; j++)
        if (runs_here(known[j]) && i-- == 0) return known[j]->name;
    return NULL;
}

/* -- tasks ---------------------------------------------------------------------------------------- */

/* The wrapper's, for its error messages. */
struct fault {
    int64_t kind; /* 1: query_start, 2: seq_lens, 3: block_tables, 4: memory, 5: slot or block id */
    int64_t index, entry, value;
};

static int fail(struct fault *fault, int64_t kind, int64_t index, int64_t entry, int64_t value) {
    *fault = (struct fault){kind, index, entry, value};
    return -1;
}

/* What one sequence asks for. */
struct plan {
    int64_t token, position, num_queries; /* first query row, its position, how many */
    int64_t parts;                        /* of each KV head's positions; more than 1 only for a single query */
    int64_t tiles;                        /* of each KV head's rows */
    int64_t first_task, first_part;       /* sums over the sequences before */
};

static struct plan plan_of(const struct attention *a, int64_t seq) {
    struct plan p = {seq, 0, 1, 1, 1, 0, 0};
    if (a->query_start) {
        p.token = a->query_start[seq];
        p.num_queries = a->query_start[seq + 1] - p.token;
    }
    p.position = a->seq_lens[seq] - p.num_queries;
    int64_t rows = p.num_queries * (a->num_heads / a->num_kv_heads);
    if (p.num_queries <= 0 || a->seq_lens[seq] <= 0 || first_seen(a, seq, p.position) >= a->seq_lens[seq]) {
        p.parts = p.tiles = 0; /* nothing is seen */
    } else if (p.num_queries > 1) {
        p.tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    } else {
        int64_t seen = a->seq_lens[seq] - first_seen(a, seq, p.position);
        p.parts = (seen + SPLIT_POSITIONS - 1) / SPLIT_POSITIONS;
        p.tiles = rows <= MAX_FEW_ROWS ? 1 : (rows + TILE_ROWS - 1) / TILE_ROWS;
    }
    return p;
}

/* Every table entry that a query of the sequence reads, checked before anything is read through it. */
static int check_table(const struct attention *a, int64_t seq, const struct plan *p, struct fault *fault) {
    const int32_t *table = a->block_tables + seq * a->table_stride_seq;
    int64_t entry = first_seen(a, seq, p->position) / a->block_size;
    for (; entry * a->block_size < a->seq_lens[seq]; entry++) {
        int64_t block = table[entry * a->table_stride_block];
        if (block < 0 || block >= a->num_blocks) return fail(fault, 3, seq, entry, block);
    }
    return 0;
}

static void run_task(const struct attention *a, const struct plan *plans, int64_t number, float *partials,
                     void *scratch) {
    int64_t low = 0, high = a->num_seqs; /* the last sequence whose first task is not after this one */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (plans[middle].first_task <= number)
            low = middle;
        else
            high = middle;
    }
    const struct plan *p = &plans[low];
    const int64_t group = a->num_heads / a->num_kv_heads, rows = p->num_queries * group;
    int64_t rest = number - p->first_task;
    int64_t tile = p->tiles - 1 - rest % p->tiles; /* the last rows see most: longest first */
    int64_t part = rest / p->tiles % p->parts, kv_head = rest / p->tiles / p->parts;
    struct task task = {
        .seq = low, .kv_head = kv_head, .token = p->token, .position = p->position,
        .row_from = tile * TILE_ROWS, .row_to = (tile + 1) * TILE_ROWS < rows ? (tile + 1) * TILE_ROWS : rows,
    };
    task.from = first_seen(a, low, p->position + task.row_from / group);
    task.to = p->position + (task.row_to - 1) / group + 1;
    if (p->parts > 1) {
        int64_t first = task.from + part * SPLIT_POSITIONS, row_floats = padded(a->head_dim_v) + 2;
        task.from = first;
        task.to = first + SPLIT_POSITIONS < task.to ? first + SPLIT_POSITIONS : task.to;
        task.partial = partials + ((p->first_part + kv_head * p->parts + part) * group + task.row_from) * row_floats;
    }
    const int few = p->num_queries == 1 && rows <= MAX_FEW_ROWS;
    (few ? chosen->few : chosen->tile)(a, &task, scratch);
}

/* The parts of each row of a split sequence, joined by one task that has no positions of its own: it takes the
 * parts as they come, first to last. */
static void join_parts(const struct attention *a, const struct plan *p, const float *partials, float *scratch) {
    const int64_t group = a->num_heads / a->num_kv_heads, dv = padded(a->head_dim_v), size = dv + 2;
    for (int64_t kv_head = 0; kv_head < a->num_kv_heads; kv_head++) {
        for (int64_t row = 0; row < group; row++) {
            const float *parts = partials + ((p->first_part + kv_head * p->parts) * group + row) * size;
            float top = -INFINITY, total = 0;
            for (int64_t i = 0; i < p->parts; i++)
                top = parts[i * group * size + dv] > top ? parts[i * group * size + dv] : top;
            float base = top == -INFINITY ? 0 : top;
            memset(scratch, 0, dv * sizeof(float));
            for (int64_t i = 0; i < p->parts; i++) {
                const float *part = parts + i * group * size;
                float factor = expf(part[dv] - base);
                for (int64_t n = 0; n < dv; n++) scratch[n] += part[n] * factor;
                total += part[dv + 1] * factor;
            }
            struct task task = {.kv_head = kv_head, .token = p->token};
            chosen->finish(a, &task, row, scratch, top, total);
        }
    }
}

/* Rows that see nothing: zeros, and -inf or the sink. */
static void write_nothing(const struct attention *a, int64_t token) {
    const int64_t size = a->type == FLOAT32 ? 4 : 2, row = a->num_heads * a->head_dim_v * size;
    memset((char *)a->out + token * row, 0, row);
    for (int64_t h = 0; a->lse && h < a->num_heads; h++)
        a->lse[token * a->num_heads + h] = a->sinks ? a->sinks[h] : -INFINITY;
}

/* Of one thread; a call allocates this much for each of its threads. */
EXPORT int64_t hf_paged_scratch_bytes(const struct attention *a) { return scratch_bytes(a); }

EXPORT int hf_paged_attention(const struct attention *a, struct fault *fault) {
    chosen_isa();
    const int64_t group = a->num_heads / a->num_kv_heads, capacity = a->max_blocks * a->block_size;
    struct plan *plans = malloc((a->num_seqs + 1) * sizeof *plans);
    if (!plans) return fail(fault, 4, 0, 0, (a->num_seqs + 1) * sizeof *plans);
    int64_t tasks = 0, parts = 0, splits = 0, work = 0, end = 0;
    int status = 0;
    for (int64_t s = 0; s < a->num_seqs && !status; s++) {
        struct plan p = plan_of(a, s);
        if (p.token < end || p.num_queries < 0 || p.token + p.num_queries > a->num_tokens)
            status = fail(fault, 1, s, 0, p.token + p.num_queries);
        else if (a->seq_lens[s] > capacity)
            status = fail(fault, 2, s, 0, a->seq_lens[s]);
        else if (p.tiles)
            status = check_table(a, s, &p, fault);
        if (status) break;
        for (int64_t t = end; t < p.token; t++) write_nothing(a, t); /* rows of no sequence */
        end = p.token + p.num_queries;
        for (int64_t t = p.token; !p.tiles && t < end; t++) write_nothing(a, t);
        p.first_task = tasks;
        p.first_part = parts;
        tasks += p.tiles * p.parts * a->num_kv_heads;
        if (p.parts > 1) {
            parts += p.parts * a->num_kv_heads;
            splits++;
        }
        work += p.tiles ? p.num_queries * a->seq_lens[s] : 0;
        plans[s] = p;
    }
    for (int64_t t = end; !status && t < a->num_tokens; t++) write_nothing(a, t);
    float *partials = NULL;
    if (!status && parts) {
        int64_t bytes = parts * group * (padded(a->head_dim_v) + 2) * (int64_t)sizeof(float);
        partials = malloc(bytes);
        if (!partials) status = fail(fault, 4, 0, 0, bytes);
    }
    /* Waking a thread costs some microseconds, in which a core makes some hundred thousand products. */
    int64_t worth = work * a->num_heads * (a->head_dim + a->head_dim_v) / 100000 + 1;
    int threads = (int)(a->num_threads < worth ? a->num_threads : worth);
    char *scratch = NULL;
    if (!status && tasks && !(scratch = aligned_alloc(64, scratch_bytes(a) * threads)))
        status = fail(fault, 4, 0, 0, scratch_bytes(a) * threads);
    if (!status && tasks) {
#pragma omp parallel num_threads(threads)
        {
            char *mine = scratch + omp_get_thread_num() * scratch_bytes(a);
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < tasks; i++) run_task(a, plans, i, partials, mine);
            if (splits) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t s = 0; s < a->num_seqs; s++)
                    if (plans[s].parts > 1) join_parts(a, &plans[s], partials, (float *)mine);
            }
        }
    }
    free(scratch);
    free(partials);
    free(plans);
    return status;
}

/* -- writes --------------------------------------------------------------------------------------- */

struct writing {
    const int64_t *slot_mapping; /* [T] contiguous; negative: writes nothing */
    int64_t num_tokens, num_kv_heads, num_blocks, block_size, num_threads;
    struct rows_writing rows[2]; /* keys and values */
};
_Static_assert(sizeof(struct writing) == 26 * 8, "the wrapper packs 26 fields of 8 bytes");

static void write_rows(const struct writing *w, const struct rows_writing *rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t t = 0; t < w->num_tokens; t++) {
        if (w->slot_mapping[t] < 0) continue;
        int64_t block = w->slot_mapping[t] / w->block_size, offset = w->slot_mapping[t] % w->block_size;
        for (int64_t h = 0; h < w->num_kv_heads; h++) {
            const int64_t slot = (block * w->num_kv_heads + h) * w->block_size + offset;
            const char *from = rows->rows + t * rows->token_bytes + h * rows->head_bytes;
            char *to = rows->cache + slot * rows->row_bytes;
            if (!rows->scales) {
                memcpy(to, from, rows->row_bytes);
                continue;
            }
            const int64_t at = rows->scale_kind == PER_SLOT ? slot : rows->scale_kind == PER_HEAD ? h : h * rows->head_dim;
            chosen->encode(rows, from, rows->scales + at, to);
        }
    }
}

EXPORT int hf_paged_reshape_and_cache(const struct writing *w, struct fault *fault) {
    chosen_isa();
    const int64_t num_slots = w->num_blocks * w->block_size;
    for (int64_t t = 0; t < w->num_tokens; t++)
        if (w->slot_mapping[t] >= num_slots) return fail(fault, 5, t, 0, w->slot_mapping[t]);
    int64_t cost = 0; /* of a token and head, in bytes copied: codes take longer to make than copies */
    for (int i = 0; i < 2; i++) cost += w->rows[i].row_bytes * (w->rows[i].scales ? 8 : 1);
    int64_t worth = w->num_tokens * w->num_kv_heads * cost / 200000 + 1;
    int threads = (int)(w->num_threads < worth ? w->num_threads : worth);
    for (int i = 0; i < 2; i++) write_rows(w, &w->rows[i], threads);
    return 0;
}

/* One of the arrays. Where a destination is also a source, the sources are read first, into `held`. */
static void copy_pairs(char *cache, const int64_t *pairs, int64_t num_pairs, int64_t block_bytes, char *held,
                       int threads) {
    if (held) {
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t i = 0; i < num_pairs; i++)
            memcpy(held + i * block_bytes, cache + pairs[2 * i] * block_bytes, block_bytes);
    }
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < num_pairs; i++) {
        const char *from = held ? held + i * block_bytes : cache + pairs[2 * i] * block_bytes;
        if (pairs[2 * i] != pairs[2 * i + 1]) memcpy(cache + pairs[2 * i + 1] * block_bytes, from, block_bytes);
    }
}

/* pairs [N, 2] contiguous: source, destination. arrays: K, V and their scales, those that there are. */
EXPORT int hf_paged_copy_blocks(int64_t num_arrays, void *const *arrays, const int64_t *block_bytes,
                                const int64_t *pairs, int64_t num_pairs, int64_t num_blocks, int64_t num_threads,
                                struct fault *fault) {
    for (int64_t i = 0; i < 2 * num_pairs; i++)
        if (pairs[i] < 0 || pairs[i] >= num_blocks) return fail(fault, 5, i / 2, i % 2, pairs[i]);
    char *is_source = calloc(num_blocks, 1), *held = NULL;
    if (!is_source) return fail(fault, 4, 0, 0, num_blocks);
    int overlap = 0;
    for (int64_t i = 0; i < num_pairs; i++) is_source[pairs[2 * i]] = 1;
    for (int64_t i = 0; i < num_pairs; i++)
        overlap |= is_source[pairs[2 * i + 1]] && pairs[2 * i] != pairs[2 * i + 1];
    free(is_source);
    int64_t largest = 0, sum = 0;
    for (int64_t i = 0; i < num_arrays; i++) {
        largest = block_bytes[i] > largest ? block_bytes[i] : largest;
        sum += block_bytes[i];
    }
    if (overlap && !(held = malloc(num_pairs * largest))) return fail(fault, 4, 0, 0, num_pairs * largest);
    int64_t worth = num_pairs * sum / 200000 + 1;
    int threads = (int)(num_threads < worth ? num_threads : worth);
    for (int64_t i = 0; i < num_arrays; i++) copy_pairs(arrays[i], pairs, num_pairs, block_bytes[i], held, threads);
    free(held);
    return 0;
}

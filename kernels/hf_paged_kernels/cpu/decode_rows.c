/* What a step of decoding changes in the rows of a batch: a block for those that need one, a token more for each.
 *
 * Contract: one thread, no allocation, all or nothing for each group of layers. decode_rows.py says what the arrays
 * are. The loops touch every row in every step, right after a forward has emptied the caches: hence plain arrays.
 */
#include <stdint.h>

#include "entry.h"

/* Every field has 8 bytes; decode_rows.py fills them in. */
typedef struct {
    int64_t slots, covered; /* int64 [rows] */
    int64_t tables;         /* int32 [rows, columns] */
    int64_t dirty;          /* uint8 [rows] */
    int64_t columns;
    int64_t next;   /* int32 [num_next]: ids of the blocks that may be taken, in this order */
    int64_t takers; /* int64 [num_next]: key of the row that took each */
    int64_t num_next, num_taken;
} Group;

typedef struct {
    int64_t num_computed, num_tokens, last_token, max_tokens, keys; /* int64 [rows] */
    int64_t seq_lens;                                               /* int32 [rows] */
    int64_t eos;                                                    /* int64 [rows, eos_columns] */
    int64_t recent;                                                 /* int64 [.., rows] */
    int64_t ended;                                                  /* int64 [rows] */
    int64_t groups;                                                 /* Group [num_groups] */
    int64_t num_groups, rows, eos_columns, block_size, count, unserved;
} Rows;

#define AT(type, field) ((type *)(intptr_t)(field))

/* 1 where every row of the group has a block for its next token, now or before. */
static int reserve(const Rows *rows, Group *group) {
    const int64_t count = rows->count, size = rows->block_size, columns = group->columns;
    const int64_t *const computed = AT(int64_t, rows->num_computed), *const keys = AT(int64_t, rows->keys);
    int64_t *const covered = AT(int64_t, group->covered), short_rows = 0;
    for (int64_t row = 0; row < count; row++) {
        if (computed[row] < covered[row]) continue;
        /* A block that is partly filled may have to be copied first, and a table may have to become wider. */
        if (covered[row] % size || covered[row] / size >= columns) return 0;
        short_rows++;
    }
    if (short_rows == 0) return 1;
    if (short_rows > group->num_next - group->num_taken) return 0;
    for (int64_t row = 0; row < count; row++) {
        if (computed[row] < covered[row]) continue;
        const int64_t taken = group->num_taken++;
        const int32_t block = AT(int32_t, group->next)[taken];
        AT(int64_t, group->takers)[taken] = keys[row];
        AT(int32_t, group->tables)[row * columns + covered[row] / size] = block;
        AT(int64_t, group->slots)[row] = block * size;
        AT(uint8_t, group->dirty)[row] = 1;
        covered[row] += size;
    }
    return 1;
}

/* A block for the next token of each row: the largest length with that token, or -1 where some row has none, and
 * `unserved` then has a bit for each such group, which is as it was. */
EXPORT int64_t hf_paged_reserve(Rows *rows) {
    const int64_t *const computed = AT(int64_t, rows->num_computed);
    int64_t longest = 0;
    for (int64_t row = 0; row < rows->count; row++)
        if (computed[row] >= longest) longest = computed[row] + 1;
    rows->unserved = 0;
    for (int64_t group = 0; group < rows->num_groups; group++)
        if (!reserve(rows, AT(Group, rows->groups) + group)) rows->unserved |= (int64_t)1 << group;
    return rows->unserved ? -1 : longest;
}

/* One token more in every row, noted in `recent[step]`; how many rows that ends, which `ended` lists. */
EXPORT int64_t hf_paged_advance(Rows *rows, const int64_t *newest, int64_t step) {
    const int64_t count = rows->count, columns = rows->eos_columns;
    const int64_t *const most = AT(int64_t, rows->max_tokens);
    int64_t *const last = AT(int64_t, rows->last_token);
    const int64_t *eos = AT(int64_t, rows->eos);
    int64_t *const computed = AT(int64_t, rows->num_computed), *const tokens = AT(int64_t, rows->num_tokens);
    int64_t *const recent = AT(int64_t, rows->recent) + step * rows->rows;
    int64_t *const ended = AT(int64_t, rows->ended), num_ended = 0;
    int32_t *const lens = AT(int32_t, rows->seq_lens);
    for (int64_t row = 0; row < count; row++, eos += columns) {
        computed[row]++;
        lens[row]++;
        recent[row] = last[row] = newest[row];
        int ends = ++tokens[row] >= most[row];
        for (int64_t column = 0; column < columns; column++) ends |= eos[column] == last[row];
        if (ends) ended[num_ended++] = row;
    }
    for (int64_t group = 0; group < rows->num_groups; group++) {
        int64_t *const slots = AT(int64_t, AT(Group, rows->groups)[group].slots);
        for (int64_t row = 0; row < count; row++) slots[row]++;
    }
    return num_ended;
}

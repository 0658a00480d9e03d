/* Attention of many queries a sequence over keys and values in pages.

   out[t, h] = sum over keys j that t sees of softmax(scale · q[t, h] · k[j]) v[j],   t sees j: t - window < j <= t

   Under a soft cap a score s becomes cap · tanh(s / cap).

   A task is QUERIES queries and up to HEADS query heads that share a key/value head. It takes KEYS keys at a time, from
   positions that are multiples of KEYS: they are copied out of their pages and folded into a running softmax
   (https://arxiv.org/abs/2205.14135) of each tile of rows. Rows are lanes, so a row's result has the same bits whatever
   is beside it: in any batch, with any number of threads, and however a prompt is cut into chunks.

   Words are multiplied: fp32 numbers or, of queries in bf16 if the processor can, pairs of bf16. Neighbours in a query and
   a key make a pair, and neighbouring keys, whose probabilities then become bf16, in probabilities and values. What is
   held in 8 bits becomes bf16 first. By AMX values are multiplied from the left, so they are turned as well.

   Legend: T queries of all sequences, S sequences, Hq query heads, Hkv key/value heads, d head dim (a multiple of 8); a
   row is one head of one query.
*/

#include "../common/floats.h"
#include "../common/pairs.h"
#include "../common/reserve.h"
#include "../common/wide.h"
#include "prefill_tiles.h"

enum { QUERIES = 64, HEADS = 4, KEYS = 64, PARTS = 3, ROWS = PARTS * WIDTH, STEP = 4 };
enum { TILES = (QUERIES * HEADS + ROWS - 1) / ROWS, ALIGNMENT = 64, CODES = 2, MOST_D = 256 };

/* What is multiplied, and how. */
typedef enum { NUMBERS, PAIRS, PAIRS_BY_AMX } Form;

typedef struct {
    int64_t table;   /* row of the block tables */
    int64_t start;   /* of its queries among all T */
    int64_t queries;
    int64_t length;  /* keys in the cache */
} Sequence;

/* The same for all layers of a step. */
typedef struct {
    int64_t num_tasks, page, window, table_stride; /* slots of a page; no window: the longest; from row to row */
    const int32_t *tables;                         /* [B, max_pages] */
    const Sequence *sequences;                     /* [S] */
    const int64_t *owners, *firsts;                /* [tasks]: whose queries they are, and the first of them */
} Plan;

typedef struct {
    int64_t kind, slot, head; /* FP32, BF16 or CODES; strides */
    const void *rows;         /* [slots, Hkv, d] */
    const float *scales;      /* [slots, Hkv] of CODES */
} Cached;

typedef struct {
    const Plan *plan;
    int64_t dtype, heads, kv_heads, d, q_token, q_head; /* strides; out is contiguous */
    const void *q;                                      /* [T, Hq, d] */
    void *out;                                          /* [T, Hq, d] */
    Cached k, v;
    const float *values; /* [256]: what each of CODES stands for */
    float scale;         /* by log2(e), so that probabilities are powers of two */
    float limit;         /* the soft cap, by log2(e); 0: none */
} Batch;

/* What a thread works with. */
typedef struct {
    float *queries, *k, *v;           /* words [TILES, d, ROWS], [KEYS, d] twice; of pairs half of d, d, and of KEYS */
    float *turned;                    /* v as [d, KEYS / 2], by AMX */
    float *sums;                      /* [TILES, d, ROWS] */
    Wide scores[KEYS][PARTS];
    Wide top[TILES][PARTS], total[TILES][PARTS]; /* highest score so far, sum of 2^(score - top) */
    Lanes last[TILES][PARTS];         /* position of each row's own key; -1: there is no such row */
    const Sequence *owner;
    int64_t first, count, head, heads; /* its queries within the sequence; its query heads */
} Task;

INLINE int64_t own_key(const Task *task, int64_t row) {
    return task->owner->length - task->owner->queries + task->first + row / task->heads;
}

INLINE const void *query_of(const Batch *batch, const Task *task, int64_t row) {
    int64_t token = task->owner->start + task->first + row / task->heads, head = task->head + row % task->heads;
    return at(batch->dtype, batch->q, token * batch->q_token + head * batch->q_head);
}

/* Turns the rows so that neighbours lie side by side, numbers times the scale; lanes without a row are zero and see
   nothing. */
INLINE void begin(const Batch *batch, Task *task, const Form form) {
    int64_t rows = task->count * task->heads, d = batch->d, words = form == NUMBERS ? d : d / 2;
    float query[MOST_D];
    for (int64_t row = 0; row < TILES * ROWS && row / ROWS * ROWS < rows; row++) {
        int64_t tile = row / ROWS, lane = row % ROWS;
        float *to = task->queries + tile * words * ROWS + lane;
        ((int32_t *)task->last[tile])[lane] = row < rows ? own_key(task, row) : -1;
        if (row >= rows)
            memset(query, 0, sizeof(float) * words);
        else if (form != NUMBERS)
            memcpy(query, query_of(batch, task, row), sizeof(float) * words);
        else
            for (int64_t c = 0; c < d; c += LANES)
                put_floats(query + c, times(load(batch->dtype, at(batch->dtype, query_of(batch, task, row), c)),
                                            every(batch->scale)));
        for (int64_t c = 0; c < words; c++) to[c * ROWS] = query[c];
        ((float *)task->top[tile])[lane] = -__builtin_inff();
        ((float *)task->total[tile])[lane] = 0;
    }
    memset(task->sums, 0, sizeof(float) * d * ROWS * ((rows + ROWS - 1) / ROWS));
}

INLINE const void *row_of(const Cached *cached, int64_t slot, int64_t head) {
    int64_t size = cached->kind == CODES ? 1 : size_of(cached->kind);
    return (const char *)cached->rows + (slot * cached->slot + head * cached->head) * size;
}

/* As fp32; of no slot, zeros. */
INLINE void copy_row(const Batch *batch, const Cached *cached, int64_t slot, int64_t head, float *to) {
    int64_t d = batch->d;
    if (slot < 0) {
        memset(to, 0, sizeof(float) * d);
        return;
    }
    const void *row = row_of(cached, slot, head);
    if (cached->kind == CODES) {
        float scale = cached->scales[slot * batch->kv_heads + head];
        for (int64_t c = 0; c < d; c++) to[c] = batch->values[((const uint8_t *)row)[c]] * scale;
        return;
    }
    for (int64_t c = 0; c < d; c += LANES) put_floats(to + c, load(cached->kind, at(cached->kind, row, c)));
}

/* A row in bf16: where it lies or, of codes, made in `to`. */
INLINE const uint16_t *halves_of(const Batch *batch, const Cached *cached, int64_t slot, int64_t head, uint16_t *to) {
    static const uint16_t nothing[MOST_D];
    if (slot < 0) return nothing;
    if (cached->kind == BF16) return row_of(cached, slot, head);
    float numbers[MOST_D];
    copy_row(batch, cached, slot, head, numbers);
    for (int64_t c = 0; c < batch->d; c += LANES) store(BF16, to + c, rounded(BF16, floats_at(numbers + c)));
    return to;
}

/* Two keys in bf16, and their values as pairs of neighbouring keys. */
INLINE void copy_pair(const Batch *batch, const int64_t *slots, int64_t head, float *k, float *v) {
    uint16_t made[2][MOST_D];
    const uint16_t *values[2];
    for (int i = 0; i < 2; i++) {
        memcpy(k + i * batch->d / 2, halves_of(batch, &batch->k, slots[i], head, made[i]), sizeof(uint16_t) * batch->d);
        values[i] = halves_of(batch, &batch->v, slots[i], head, made[i]);
    }
    for (int64_t c = 0; c < batch->d; c += LANES) put_in_pairs(values[0] + c, values[1] + c, v + c);
}

/* Keys and values of KEYS positions; where no row of the task looks they are zero, whatever lies there. */
INLINE void copy_keys(
    const Batch *batch, Task *task, int64_t kv_head, int64_t first, int64_t low, int64_t high, const Form form
) {
    const Plan *plan = batch->plan;
    const int32_t *table = plan->tables + task->owner->table * plan->table_stride;
    int64_t d = batch->d;
    for (int64_t j = 0; j < KEYS; j += 2) {
        int64_t slots[2];
        for (int i = 0; i < 2; i++) {
            int64_t position = first + j + i;
            bool seen = position >= low && position < high;
            slots[i] = seen ? table[position / plan->page] * plan->page + position % plan->page : -1;
        }
        if (form != NUMBERS) {
            copy_pair(batch, slots, kv_head, task->k + j * d / 2, task->v + j * d / 2);
            continue;
        }
        for (int i = 0; i < 2; i++) {
            copy_row(batch, &batch->k, slots[i], kv_head, task->k + (j + i) * d);
            copy_row(batch, &batch->v, slots[i], kv_head, task->v + (j + i) * d);
        }
    }
    if (form != PAIRS_BY_AMX) return;
    for (int64_t pair = 0; pair < KEYS / 2; pair += SIDE)
        for (int64_t c = 0; c < d; c += SIDE)
            turn_words(task->v + pair * d + c, d, task->turned + c * KEYS / 2 + pair, KEYS / 2);
}

/* The scores of a tile's rows, of so many words, at keys [low, high) of those copied. */
INLINE void score(
    Task *task, const float *queries, int64_t words, float scale, int64_t low, int64_t high, const Form form
) {
    if (form == PAIRS_BY_AMX) {
        for (int64_t j = low; j < high; j += SIDE)
            multiply_tiles(task->k + j * words, 4 * words, queries, words, (float *)task->scores[j], false);
        for (int64_t j = low; j < high; j++)
            UNROLLED(int w = 0; w < PARTS; w++) task->scores[j][w] *= scale;
        return;
    }
    for (int64_t j = low; j < high; j += STEP) {
        Wide sums[STEP][PARTS] = {0};
        const float *key = task->k + j * words;
        for (int64_t c = 0; c < words; c++) {
            Wide query[PARTS];
            UNROLLED(int w = 0; w < PARTS; w++) query[w] = ((const Wide *)(queries + c * ROWS))[w];
            UNROLLED(int i = 0; i < STEP; i++)
                UNROLLED(int w = 0; w < PARTS; w++)
                    sums[i][w] = plus_product(form != NUMBERS, sums[i][w], query[w], key[i * words + c]);
        }
        UNROLLED(int i = 0; i < STEP; i++)
            UNROLLED(int w = 0; w < PARTS; w++) task->scores[j + i][w] = sums[i][w] * scale;
    }
}

INLINE void cap(Task *task, float limit, int64_t low, int64_t high) {
    for (int64_t j = low; j < high; j++)
        UNROLLED(int w = 0; w < PARTS; w++) task->scores[j][w] = soft_capped(task->scores[j][w], limit);
}

/* Scores of keys that a row does not see become -inf; `first` is the position of the first key copied. */
INLINE void hide(Task *task, const Lanes *last, int64_t window, int64_t first, int64_t low, int64_t high) {
    for (int64_t j = low; j < high; j++)
        UNROLLED(int w = 0; w < PARTS; w++) {
            Lanes distance = last[w] - (int32_t)(first + j);
            Lanes seen = (distance >= 0) & (distance < (int32_t)window);
            task->scores[j][w] = chosen(seen, task->scores[j][w], all(-__builtin_inff()));
        }
}

/* Scores become probabilities times 2^-top, as words. `shrink`: what the sums so far are to be multiplied with. */
INLINE void exponentiate(Task *task, int64_t tile, int64_t low, int64_t high, Wide *shrink, const Form form) {
    Wide top[PARTS], finite[PARTS], total[PARTS];
    UNROLLED(int w = 0; w < PARTS; w++) top[w] = task->top[tile][w];
    for (int64_t j = low; j < high; j++)
        UNROLLED(int w = 0; w < PARTS; w++) top[w] = highest_of(top[w], task->scores[j][w]);
    UNROLLED(int w = 0; w < PARTS; w++) {
        finite[w] = chosen(top[w] == all(-__builtin_inff()), all(0), top[w]); /* of a row that has seen no key */
        shrink[w] = exp2_wide(task->top[tile][w] - finite[w]);
        total[w] = all(0);
    }
    for (int64_t j = low; j < high; j += 2)
        UNROLLED(int w = 0; w < PARTS; w++) {
            Wide even = exp2_wide(task->scores[j][w] - finite[w]), odd = exp2_wide(task->scores[j + 1][w] - finite[w]);
            if (form != NUMBERS) {
                Wide pair = task->scores[j / 2][w] = paired(even, odd);
                even = first_of_pairs(pair), odd = second_of_pairs(pair);
            } else {
                task->scores[j][w] = even, task->scores[j + 1][w] = odd;
            }
            total[w] = total[w] + even + odd;
        }
    UNROLLED(int w = 0; w < PARTS; w++) {
        task->top[tile][w] = top[w];
        task->total[tile][w] = task->total[tile][w] * shrink[w] + total[w];
    }
}

/* A running sum goes on from what it is, times its `shrink`, which mostly is 1. */
INLINE void mix_by_amx(Task *task, float *out, int64_t d, int64_t low, int64_t high, const Wide *shrink) {
    Lanes shrunk = {0};
    UNROLLED(int w = 0; w < PARTS; w++) shrunk |= shrink[w] != all(1);
    if (any_lane(shrunk))
        for (int64_t c = 0; c < d; c++)
            UNROLLED(int w = 0; w < PARTS; w++) ((Wide *)(out + c * ROWS))[w] *= shrink[w];
    for (int64_t c = 0; c < d; c += SIDE)
        multiply_tiles(
            task->turned + c * KEYS / 2 + low, 2 * KEYS, (float *)task->scores[low], high - low, out + c * ROWS, true);
}

/* `low` and `high` of words. */
INLINE void mix(Task *task, float *out, int64_t d, int64_t low, int64_t high, const Wide *shrink, const Form form) {
    if (form == PAIRS_BY_AMX) {
        mix_by_amx(task, out, d, low, high, shrink);
        return;
    }
    for (int64_t c = 0; c < d; c += STEP) {
        Wide sums[STEP][PARTS] = {0}, *so_far = (Wide *)(out + c * ROWS);
        for (int64_t j = low; j < high; j++) {
            const float *value = task->v + j * d + c;
            UNROLLED(int i = 0; i < STEP; i++)
                UNROLLED(int w = 0; w < PARTS; w++)
                    sums[i][w] = plus_product(form != NUMBERS, sums[i][w], task->scores[j][w], value[i]);
        }
        UNROLLED(int i = 0; i < STEP; i++)
            UNROLLED(int w = 0; w < PARTS; w++)
                so_far[i * PARTS + w] = so_far[i * PARTS + w] * shrink[w] + sums[i][w];
    }
}

/* Folds the keys that were copied, from position `first` on, into a tile of rows. */
INLINE void attend(const Batch *batch, Task *task, int64_t tile, int64_t first, const Form form) {
    const int64_t step = form == PAIRS_BY_AMX ? 2 * SIDE : STEP;
    const bool in_pairs = form != NUMBERS;
    int64_t d = batch->d, words = in_pairs ? d / 2 : d, window = batch->plan->window, rows = task->count * task->heads;
    int64_t earliest = own_key(task, tile * ROWS), latest = own_key(task, smaller(rows, (tile + 1) * ROWS) - 1);
    int64_t low = larger(0, earliest - window + 1 - first) / step * step;
    int64_t high = smaller(KEYS, (latest + step - first) / step * step);
    if (low >= high) return;
    Wide shrink[PARTS];
    score(task, task->queries + tile * words * ROWS, words, in_pairs ? batch->scale : 1, low, high, form);
    if (batch->limit > 0) cap(task, batch->limit, low, high);
    if (first + high - 1 > earliest || first + low <= latest - window)
        hide(task, task->last[tile], window, first, low, high);
    exponentiate(task, tile, low, high, shrink, form);
    if (in_pairs) low /= 2, high /= 2;
    mix(task, task->sums + tile * d * ROWS, d, low, high, shrink, form);
}

/* What the rows have found; a row that saw no key is zero. */
INLINE void end(const Batch *batch, const Task *task) {
    int64_t d = batch->d;
    for (int64_t row = 0; row < task->count * task->heads; row++) {
        int64_t tile = row / ROWS, lane = row % ROWS, token = task->owner->start + task->first + row / task->heads;
        const float *sums = task->sums + tile * d * ROWS + lane;
        float total = ((const float *)task->total[tile])[lane], share = total > 0 ? 1 / total : 0, part[LANES];
        void *to = (void *)at(batch->dtype, batch->out, (token * batch->heads + task->head + row % task->heads) * d);
        for (int64_t c = 0; c < d; c += LANES) {
            for (int i = 0; i < LANES; i++) part[i] = sums[(c + i) * ROWS] * share;
            store(batch->dtype, (void *)at(batch->dtype, to, c), rounded(batch->dtype, floats_at(part)));
        }
    }
}

INLINE void attend_all(const Batch *batch, Task *task, int64_t kv_head, const Form form) {
    begin(batch, task, form);
    int64_t rows = task->count * task->heads;
    int64_t low = larger(0, own_key(task, 0) - batch->plan->window + 1), high = own_key(task, rows - 1) + 1;
    for (int64_t first = low / KEYS * KEYS; first < high; first += KEYS) {
        copy_keys(batch, task, kv_head, first, low, high, form);
        for (int64_t tile = 0; tile * ROWS < rows; tile++) attend(batch, task, tile, first, form);
    }
    end(batch, task);
}

static void work(const Batch *batch, Task *task, int64_t number, int64_t kv_head, int64_t head, int64_t heads) {
    const Plan *plan = batch->plan;
    task->owner = plan->sequences + plan->owners[number];
    task->first = plan->firsts[number];
    task->count = smaller(QUERIES, task->owner->queries - task->first);
    task->head = head;
    task->heads = heads;
    if (!HAS_PAIRS || batch->dtype != BF16)
        attend_all(batch, task, kv_head, NUMBERS);
    else if (HAS_AMX && has_tiles() && batch->d % (2 * SIDE) == 0)
        attend_all(batch, task, kv_head, PAIRS_BY_AMX);
    else
        attend_all(batch, task, kv_head, PAIRS);
}

static Task *task_for(int64_t d) {
    size_t rows = sizeof(float) * TILES * ROWS * d, keys = sizeof(float) * KEYS * d;
    size_t head = (sizeof(Task) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    Task *task = reserve(head + 2 * rows + 3 * keys);
    if (!task) return NULL;
    task->queries = (float *)((char *)task + head);
    task->sums = task->queries + TILES * ROWS * d;
    task->k = task->sums + TILES * ROWS * d;
    task->v = task->k + KEYS * d;
    task->turned = task->v + KEYS * d;
    return task;
}

/* Writes the rows of out that are queries of these sequences. Returns how many threads found no memory. */
int attend_prefill(const Batch *batch, int threads) {
    int64_t group = batch->heads / batch->kv_heads, parts = (group + HEADS - 1) / HEADS;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        Task *task = task_for(batch->d);
        failed += !task;
        if (has_tiles()) begin_tiles();
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t left = batch->plan->num_tasks; left > 0; left--) /* first late queries, which see the most keys */
            for (int64_t part = 0; part < batch->kv_heads * parts; part++) {
                int64_t kv_head = part / parts, done = part % parts * HEADS;
                if (task) work(batch, task, left - 1, kv_head, kv_head * group + done, smaller(HEADS, group - done));
            }
        if (has_tiles()) end_tiles();
    }
    return failed;
}

/* Attention of a few queries a sequence over paged keys and values: what its C sources share.

   out[t, h] = sum over keys j that t sees of softmax(scale · q[t, h] · k[j]) v[j]

   Under a soft cap a score s becomes cap · tanh(s / cap).

   Keys are worked on by CHUNK, cut at multiples of CHUNK of their positions, and the chunks of a query are merged in
   their order: its result has the same bits whatever is beside it and however many threads there are. Scores,
   probabilities and sums are fp32. Keys and values are read from where they lie, once for all query heads that share
   them.

   Before this a source defines Number, in which q, k, v and out are; after it `score`, `exponentiate`, `mix` and `merge`.

   Legend: S sequences, T queries of all sequences, Hq query heads, Hkv key/value heads, G query heads per key/value
   head, d head dim (a multiple of 64).
*/

#ifndef DECODE_H
#define DECODE_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../common/inline.h"
#include "../common/wide.h"

enum { CHUNK = 256, HEADS = 4, MOST_HEADS = 16, KEYS = 4, BLOCK = 16, COLUMNS = 64, LINE = 64 };

typedef struct {
    int64_t table;     /* row of the block tables */
    int64_t start;     /* of its queries among all T */
    int64_t queries;
    int64_t first_key; /* position of the first key that any of its queries sees */
    int64_t length;    /* keys in the cache */
    int64_t part;      /* of the first query and the first chunk; chunk after chunk, a part for each query */
} Sequence;

/* Whose queries a pass has: [B + 1] borders, [B] keys with those of the queries, [B] rows of the block tables, by their
   own numbers if null. */
typedef struct {
    const int32_t *borders, *lengths, *rows;
    int64_t count, most_queries, window; /* B; more than so many queries of a sequence are not meant; 0: no window */
} Lengths;

/* How many sequences, tasks and parts there are. */
typedef struct {
    int64_t sequences, tasks, parts;
} Sizes;

/* The same for all layers of a step; another step may change it in its place. */
typedef struct {
    int64_t num_sequences, num_tasks, page, window, table_stride; /* slots of a page; 0: no window; from row to row */
    const int32_t *tables;      /* [B, max_pages] */
    const Sequence *sequences;  /* [S] */
    const int64_t *owners;      /* [tasks]: whose chunk of keys it is */
    const int64_t *numbers;     /* [tasks]: which chunk, 0 begins at position 0 */
    float *parts;               /* [parts, Hq, d + 2]: sums of values, the highest score, the sum of probabilities */
} Plan;

typedef struct {
    const Plan *plan;
    int64_t heads, kv_heads, d;             /* Hq, Hkv */
    int64_t q_stride, k_stride, v_stride;   /* from query to query, slot to slot */
    const Number *q, *k, *v;                /* [T, Hq, d]; [slots, Hkv, d], twice */
    Number *out;                            /* [T, Hq, d] */
    float scale;                            /* by log2(e), so that probabilities are powers of two */
    float limit;                            /* the soft cap, over the scale alone; 0: none */
} Batch;

INLINE float *part_of(const Batch *batch, int64_t part, int64_t head) {
    return batch->plan->parts + (part * batch->heads + head) * (batch->d + 2);
}

/* Scores of `heads` neighbouring query heads at the keys of `count` slots, CHUNK from head to head; each head's are
   filled up to whole KEYS. */
INLINE void score(const Batch *batch, int heads, const Number *q, const Number *k, const int64_t *slots, int64_t count,
                  float *scores);

/* Puts scores, still without their scale, under the cap; those up to whole registers must be readable. */
INLINE void cap(float *scores, int64_t count, float limit) {
    for (int64_t j = 0; j < count; j += WIDTH) {
        Wide some;
        memcpy(&some, scores + j, sizeof(some));
        some = soft_capped(some, limit);
        memcpy(scores + j, &some, sizeof(some));
    }
}

/* Scores become probabilities times 2^-highest. Returns their sum; scores from `count` on must be readable. */
INLINE float exponentiate(float *scores, int64_t count, float scale, float *highest);

/* Adds the values of `count` slots to COLUMNS columns of the sums of `heads` neighbouring query heads, or begins them. */
INLINE void mix(const Batch *batch, int heads, const Number *v, const int64_t *slots, int64_t count, const float *p,
                float *out, int64_t out_stride, bool begins);

/* One head of one query, from its parts. */
INLINE void merge(const Batch *batch, const Sequence *owner, int64_t query, int64_t head);

/* How many heads from `head` on are worked on at once: they share a key/value head. */
INLINE int64_t at_once(const Batch *batch, int64_t head, int64_t end) {
    int64_t group = batch->heads / batch->kv_heads;
    return smaller(HEADS, smaller(end - head, group - head % group));
}

/* Has one key/value head's numbers of these slots brought near. */
INLINE void fetch(const Batch *batch, const Number *numbers, int64_t stride, const int64_t *slots, int64_t count) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t c = 0; c < batch->d; c += LINE / sizeof(Number))
            __builtin_prefetch(numbers + slots[j] * stride + c);
}

INLINE void score_heads_at_once(const Batch *batch, int64_t heads, const Number *q, const Number *k, const int64_t *slots,
                                int64_t count, float *scores) {
    switch (heads) {
    case 1: score(batch, 1, q, k, slots, count, scores); break;
    case 2: score(batch, 2, q, k, slots, count, scores); break;
    case 3: score(batch, 3, q, k, slots, count, scores); break;
    default: score(batch, 4, q, k, slots, count, scores);
    }
}

INLINE void mix_heads_at_once(const Batch *batch, int64_t heads, const Number *v, const int64_t *slots, int64_t count,
                              const float *p, float *out, bool begins) {
    int64_t width = batch->d + 2;
    for (int64_t c = 0; c < batch->d; c += COLUMNS)
        switch (heads) {
        case 1: mix(batch, 1, v + c, slots, count, p, out + c, width, begins); break;
        case 2: mix(batch, 2, v + c, slots, count, p, out + c, width, begins); break;
        case 3: mix(batch, 3, v + c, slots, count, p, out + c, width, begins); break;
        default: mix(batch, 4, v + c, slots, count, p, out + c, width, begins);
        }
}

/* Query heads [first, end) of one query over the keys of these slots: BLOCK after BLOCK, each for all heads, so that
   what lies together in memory is read together. */
INLINE void attend(const Batch *batch, int64_t token, int64_t first, int64_t end, const int64_t *slots, int64_t count,
                   float *out) {
    float p[MOST_HEADS * CHUNK];
    int64_t d = batch->d, width = d + 2, group = batch->heads / batch->kv_heads;
    const Number *q = batch->q + token * batch->q_stride;
    for (int64_t j = 0; j < count; j += BLOCK)
        for (int64_t head = first, heads; head < end; head += heads) {
            int64_t keys = smaller(BLOCK, count - j), next = j + keys;
            const Number *k = batch->k + head / group * d;
            heads = at_once(batch, head, end);
            fetch(batch, k, batch->k_stride, slots + next, smaller(BLOCK, count - next));
            score_heads_at_once(batch, heads, q + head * d, k, slots + j, keys, p + (head - first) * CHUNK + j);
        }
    for (int64_t h = 0; first + h < end; h++) {
        if (batch->limit > 0) cap(p + h * CHUNK, count, batch->limit);
        out[h * width + d + 1] = exponentiate(p + h * CHUNK, count, batch->scale, out + h * width + d);
    }
    for (int64_t j = 0; j < count; j += BLOCK)
        for (int64_t head = first, heads; head < end; head += heads) {
            int64_t keys = smaller(BLOCK, count - j), next = j + keys, h = head - first;
            const Number *v = batch->v + head / group * d;
            heads = at_once(batch, head, end);
            fetch(batch, v, batch->v_stride, slots + next, smaller(BLOCK, count - next));
            mix_heads_at_once(batch, heads, v, slots + j, keys, p + h * CHUNK + j, out + h * width, !j);
        }
}

/* Where keys and values of `count` positions from `first` on lie. */
INLINE void find_slots(const Plan *plan, const int32_t *table, int64_t first, int64_t count, int64_t *slots) {
    for (int64_t j = 0; j < count;) {
        int64_t within = (first + j) % plan->page, stop = smaller(count, j + plan->page - within);
        int64_t slot = table[(first + j) / plan->page] * plan->page + within;
        while (j < stop) slots[j++] = slot++;
    }
}

/* What the queries of a sequence find in one chunk of its keys. */
INLINE void attend_chunk(const Batch *batch, int64_t task) {
    const Plan *plan = batch->plan;
    const Sequence *owner = plan->sequences + plan->owners[task];
    int64_t first = plan->numbers[task] * CHUNK, slots[CHUNK];
    int64_t skipped = plan->numbers[task] - owner->first_key / CHUNK;
    const int32_t *table = plan->tables + owner->table * plan->table_stride;
    find_slots(plan, table, first, smaller(CHUNK, owner->length - first), slots);
    for (int64_t query = 0; query < owner->queries; query++) {
        int64_t end = owner->length - owner->queries + query + 1; /* one past the query's own key */
        int64_t low = plan->window ? larger(0, end - plan->window - first) : 0, high = smaller(CHUNK, end - first);
        int64_t part = owner->part + skipped * owner->queries + query, token = owner->start + query, count = high - low;
        if (count <= 0) { /* later drafts see keys here, or earlier ones under a window */
            for (int64_t head = 0; head < batch->heads; head++) part_of(batch, part, head)[batch->d] = -__builtin_inff();
            continue;
        }
        for (int64_t head = 0; head < batch->heads; head += MOST_HEADS) {
            int64_t last = smaller(batch->heads, head + MOST_HEADS);
            attend(batch, token, head, last, slots + low, count, part_of(batch, part, head));
        }
    }
}

/* Lays out who is attended to in decoding: sequences, and their chunks of keys as tasks. Writes no more than `room` of
   each, and says how many there are. */
void plan_decode(const Lengths *given, int64_t room, Sequence *sequences, int64_t *owners, int64_t *numbers,
                 Sizes *found) {
    Sizes n = {0};
    for (int64_t i = 0; i < given->count; i++) {
        int64_t start = given->borders[i], queries = given->borders[i + 1] - start, length = given->lengths[i];
        if (queries <= 0 || queries > smaller(length, given->most_queries)) continue;
        int64_t first_key = given->window ? larger(0, length - queries - given->window + 1) : 0;
        int64_t first = first_key / CHUNK, end = (length + CHUNK - 1) / CHUNK;
        for (int64_t number = first; number < end; number++, n.tasks++)
            if (n.tasks < room) owners[n.tasks] = n.sequences, numbers[n.tasks] = number;
        if (n.sequences < room)
            sequences[n.sequences] =
                (Sequence){given->rows ? given->rows[i] : i, start, queries, first_key, length, n.parts};
        n.parts += (end - first) * queries;
        n.sequences++;
    }
    *found = n;
}

/* The rows of out that are queries of these sequences. */
void attend_decode(const Batch *batch, int threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < batch->plan->num_tasks; task++) attend_chunk(batch, task);
#pragma omp for collapse(2) schedule(static)
        for (int64_t i = 0; i < batch->plan->num_sequences; i++)
            for (int64_t head = 0; head < batch->heads; head++)
                for (int64_t query = 0; query < batch->plan->sequences[i].queries; query++)
                    merge(batch, batch->plan->sequences + i, query, head);
    }
}

#endif

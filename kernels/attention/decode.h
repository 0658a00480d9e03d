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

#include <stdint.h>
#include <string.h>

#include "../common/inline.h"
#include "../common/wide.h"

enum { CHUNK = 256, HEADS = 4, KEYS = 4, COLUMNS = 64, AHEAD = 16 };

typedef struct {
    int64_t table;     /* row of the block tables */
    int64_t start;     /* of its queries among all T */
    int64_t queries;
    int64_t first_key; /* position of the first key that any of its queries sees */
    int64_t length;    /* keys in the cache */
    int64_t part;      /* of the first query and the first chunk; chunk after chunk, a part for each query */
} Sequence;

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

/* Scores of `heads` neighbouring query heads at keys [0, count) of these slots; each row is filled up to whole KEYS. */
INLINE void score(const Batch *batch, int heads, const Number *q, const Number *k, const int64_t *slots, int64_t count,
                  float scores[HEADS][CHUNK]);

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

/* COLUMNS columns of the sums of values, for `heads` neighbouring query heads. */
INLINE void mix(const Batch *batch, int heads, const Number *v, const int64_t *slots, int64_t count,
                float p[HEADS][CHUNK], float *out, int64_t out_stride);

/* One head of one query, from its parts. */
INLINE void merge(const Batch *batch, const Sequence *owner, int64_t query, int64_t head);

/* `heads` query heads from `head` on, which share a key/value head, of one query over the keys of these slots. */
INLINE void attend(const Batch *batch, int heads, int64_t token, int64_t head, int64_t kv_head, const int64_t *slots,
                   int64_t count, float *out) {
    float p[HEADS][CHUNK];
    int64_t width = batch->d + 2;
    const Number *q = batch->q + token * batch->q_stride + head * batch->d;
    score(batch, heads, q, batch->k + kv_head * batch->d, slots, count, p);
    if (batch->limit > 0)
        for (int h = 0; h < heads; h++) cap(p[h], count, batch->limit);
    UNROLLED(int h = 0; h < heads; h++)
        out[h * width + batch->d + 1] = exponentiate(p[h], count, batch->scale, out + h * width + batch->d);
    for (int64_t c = 0; c < batch->d; c += COLUMNS)
        mix(batch, heads, batch->v + kv_head * batch->d + c, slots, count, p, out + c, width);
}

/* What the queries of a sequence find in one chunk of its keys. */
INLINE void attend_chunk(const Batch *batch, int64_t task) {
    const Plan *plan = batch->plan;
    const Sequence *owner = plan->sequences + plan->owners[task];
    int64_t first = plan->numbers[task] * CHUNK, slots[CHUNK], group = batch->heads / batch->kv_heads;
    int64_t skipped = plan->numbers[task] - owner->first_key / CHUNK;
    const int32_t *table = plan->tables + owner->table * plan->table_stride;
    for (int64_t j = 0; j < CHUNK && first + j < owner->length; j++)
        slots[j] = table[(first + j) / plan->page] * plan->page + (first + j) % plan->page;
    for (int64_t query = 0; query < owner->queries; query++) {
        int64_t end = owner->length - owner->queries + query + 1; /* one past the query's own key */
        int64_t low = plan->window ? larger(0, end - plan->window - first) : 0, high = smaller(CHUNK, end - first);
        int64_t part = owner->part + skipped * owner->queries + query, token = owner->start + query, count = high - low;
        if (count <= 0) { /* later drafts see keys here, or earlier ones under a window */
            for (int64_t head = 0; head < batch->heads; head++) part_of(batch, part, head)[batch->d] = -__builtin_inff();
            continue;
        }
        for (int64_t kv_head = 0; kv_head < batch->kv_heads; kv_head++)
            for (int64_t done = 0; done < group;) {
                int64_t head = kv_head * group + done, heads = smaller(HEADS, group - done);
                float *out = part_of(batch, part, head);
                switch (heads) {
                case 1: attend(batch, 1, token, head, kv_head, slots + low, count, out); break;
                case 2: attend(batch, 2, token, head, kv_head, slots + low, count, out); break;
                case 3: attend(batch, 3, token, head, kv_head, slots + low, count, out); break;
                default: attend(batch, 4, token, head, kv_head, slots + low, count, out);
                }
                done += heads;
            }
    }
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

/* Attention of a few bf16 queries a sequence over paged keys and values, for x86 processors with AVX-512 BF16.

   out[t, h] = sum over keys j that t sees of softmax(scale · q[t, h] · k[j]) v[j]

   Keys are worked on by CHUNK, cut at multiples of CHUNK of their positions, and the chunks of a query are merged in
   their order: its result has the same bits whatever is beside it and however many threads there are. Scores,
   probabilities and sums are fp32. Keys and values are read from where they lie, once for all query heads that share
   them.

   Legend: S sequences, T queries of all sequences, Hq query heads, Hkv key/value heads, G query heads per key/value
   head, d head dim (a multiple of 64).
*/

#include "../common/lanes.h"

enum { CHUNK = 256, HEADS = 4, KEYS = 4, COLUMNS = 64, AHEAD = 16 };

typedef struct {
    int64_t table;     /* row of the block tables */
    int64_t start;     /* of its queries among all T */
    int64_t queries;
    int64_t first_key; /* position of the first key that any of its queries sees */
    int64_t length;    /* keys in the cache */
    int64_t part;      /* of the first query and the first chunk; chunk after chunk, a part for each query */
} Sequence;

typedef struct {
    int64_t num_sequences, num_tasks;
    int64_t heads, kv_heads, d, page, window;           /* Hq, Hkv; slots of a page; 0: no window */
    int64_t q_stride, k_stride, v_stride, table_stride; /* from query to query, slot to slot, row to row */
    const uint16_t *q, *k, *v;  /* [T, Hq, d]; [slots, Hkv, d], twice */
    const int32_t *tables;      /* [B, max_pages] */
    const Sequence *sequences;  /* [S] */
    const int64_t *owners;      /* [tasks]: whose chunk of keys it is */
    const int64_t *numbers;     /* [tasks]: which chunk, 0 begins at position 0 */
    float *parts;               /* [parts, Hq, d + 2]: sums of values, the highest score, the sum of probabilities */
    uint16_t *out;              /* [T, Hq, d] */
    float scale;                /* by log2(e), so that probabilities are powers of two */
} Batch;

INLINE float *part_of(const Batch *batch, int64_t part, int64_t head) {
    return batch->parts + (part * batch->heads + head) * (batch->d + 2);
}

/* 2^x for x <= 0, to 2e-7; 0 below 2^-126, and NaN of NaN. */
INLINE __m512 exp2_lanes(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole), y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_NLT_UQ), y, whole);
}

/* Scores of `heads` neighbouring query heads at keys [0, count) of these slots; each row is filled up to whole KEYS. */
INLINE void score(const Batch *batch, int heads, const uint16_t *q, const uint16_t *k, const int64_t *slots,
                  int64_t count, float scores[HEADS][CHUNK]) {
    for (int64_t j = 0; j < count; j += KEYS) {
        const uint16_t *key[KEYS];
        __m512 sums[HEADS][KEYS];
        UNROLLED(int i = 0; i < KEYS; i++) {
            key[i] = k + slots[smaller(j + i, count - 1)] * batch->k_stride;
            _mm_prefetch((const char *)(k + slots[smaller(j + i + AHEAD, count - 1)] * batch->k_stride), _MM_HINT_T0);
            UNROLLED(int h = 0; h < heads; h++) sums[h][i] = _mm512_setzero_ps();
        }
        for (int64_t c = 0; c < batch->d; c += 32) {
            __m512bh keys[KEYS];
            UNROLLED(int i = 0; i < KEYS; i++) keys[i] = (__m512bh)_mm512_loadu_si512(key[i] + c);
            UNROLLED(int h = 0; h < heads; h++) {
                __m512bh query = (__m512bh)_mm512_loadu_si512(q + h * batch->d + c);
                UNROLLED(int i = 0; i < KEYS; i++) sums[h][i] = _mm512_dpbf16_ps(sums[h][i], query, keys[i]);
            }
        }
        UNROLLED(int h = 0; h < heads; h++) _mm_storeu_ps(scores[h] + j, sums_of_lanes(sums[h]));
    }
}

/* Scores become probabilities times 2^-highest. Returns their sum; scores from `count` on must be readable. */
INLINE float exponentiate(float *scores, int64_t count, float scale, float *highest) {
    __m512 top = _mm512_set1_ps(-__builtin_inff()), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j += 16) {
        __mmask16 mask = (1u << smaller(16, count - j)) - 1;
        __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(scale));
        _mm512_storeu_ps(scores + j, scaled);
        top = _mm512_mask_max_ps(top, mask, top, scaled);
    }
    *highest = _mm512_reduce_max_ps(top);
    for (int64_t j = 0; j < count; j += 16) {
        __mmask16 mask = (1u << smaller(16, count - j)) - 1;
        __m512 p = exp2_lanes(_mm512_sub_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(*highest)));
        _mm512_storeu_ps(scores + j, p);
        sum = _mm512_mask_add_ps(sum, mask, sum, p);
    }
    return _mm512_reduce_add_ps(sum);
}

/* COLUMNS columns of the sums of values, for `heads` neighbouring query heads. */
INLINE void mix(const Batch *batch, int heads, const uint16_t *v, const int64_t *slots, int64_t count,
                float p[HEADS][CHUNK], float *out, int64_t out_stride) {
    __m512 sums[HEADS][COLUMNS / 16];
    UNROLLED(int h = 0; h < heads; h++)
        UNROLLED(int c = 0; c < COLUMNS / 16; c++) sums[h][c] = _mm512_setzero_ps();
    for (int64_t j = 0; j < count; j++) {
        const uint16_t *value = v + slots[j] * batch->v_stride;
        _mm_prefetch((const char *)(v + slots[smaller(j + AHEAD, count - 1)] * batch->v_stride), _MM_HINT_T0);
        UNROLLED(int c = 0; c < COLUMNS / 16; c++) {
            __m512 values = widen(_mm256_loadu_si256((const __m256i *)(value + 16 * c)));
            UNROLLED(int h = 0; h < heads; h++)
                sums[h][c] = _mm512_fmadd_ps(_mm512_set1_ps(p[h][j]), values, sums[h][c]);
        }
    }
    UNROLLED(int h = 0; h < heads; h++)
        UNROLLED(int c = 0; c < COLUMNS / 16; c++) _mm512_storeu_ps(out + h * out_stride + 16 * c, sums[h][c]);
}

/* `heads` query heads from `head` on, which share a key/value head, of one query over the keys of these slots. */
INLINE void attend(const Batch *batch, int heads, int64_t token, int64_t head, int64_t kv_head, const int64_t *slots,
                   int64_t count, float *out) {
    float p[HEADS][CHUNK];
    int64_t width = batch->d + 2;
    const uint16_t *q = batch->q + token * batch->q_stride + head * batch->d;
    score(batch, heads, q, batch->k + kv_head * batch->d, slots, count, p);
    UNROLLED(int h = 0; h < heads; h++)
        out[h * width + batch->d + 1] = exponentiate(p[h], count, batch->scale, out + h * width + batch->d);
    for (int64_t c = 0; c < batch->d; c += COLUMNS)
        mix(batch, heads, batch->v + kv_head * batch->d + c, slots, count, p, out + c, width);
}

/* What the queries of a sequence find in one chunk of its keys. */
INLINE void attend_chunk(const Batch *batch, int64_t task) {
    const Sequence *owner = batch->sequences + batch->owners[task];
    int64_t first = batch->numbers[task] * CHUNK, slots[CHUNK], group = batch->heads / batch->kv_heads;
    int64_t skipped = batch->numbers[task] - owner->first_key / CHUNK;
    const int32_t *table = batch->tables + owner->table * batch->table_stride;
    for (int64_t j = 0; j < CHUNK && first + j < owner->length; j++)
        slots[j] = table[(first + j) / batch->page] * batch->page + (first + j) % batch->page;
    for (int64_t query = 0; query < owner->queries; query++) {
        int64_t end = owner->length - owner->queries + query + 1; /* one past the query's own key */
        int64_t low = batch->window ? larger(0, end - batch->window - first) : 0, high = smaller(CHUNK, end - first);
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

/* One head of one query, from its parts. */
INLINE void merge(const Batch *batch, const Sequence *owner, int64_t query, int64_t head) {
    int64_t d = batch->d, chunks = (owner->length + CHUNK - 1) / CHUNK - owner->first_key / CHUNK;
    uint16_t *out = batch->out + ((owner->start + query) * batch->heads + head) * d;
    float highest = -__builtin_inff();
    for (int64_t i = 0; i < chunks; i++) {
        float top = part_of(batch, owner->part + i * owner->queries + query, head)[d];
        highest = top > highest ? top : highest;
    }
    for (int64_t c = 0; c < d; c += 16) {
        __m512 sum = _mm512_setzero_ps(), total = _mm512_setzero_ps();
        for (int64_t i = 0; i < chunks; i++) {
            const float *part = part_of(batch, owner->part + i * owner->queries + query, head);
            if (part[d] == -__builtin_inff()) continue;
            __m512 weight = exp2_lanes(_mm512_set1_ps(part[d] - highest));
            sum = _mm512_fmadd_ps(weight, _mm512_loadu_ps(part + c), sum);
            total = _mm512_fmadd_ps(weight, _mm512_set1_ps(part[d + 1]), total);
        }
        _mm256_storeu_si256((__m256i *)(out + c), (__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(sum, total)));
    }
}

/* The rows of out that are queries of these sequences. */
void attend_decode(const Batch *batch, int threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < batch->num_tasks; task++) attend_chunk(batch, task);
#pragma omp for collapse(2) schedule(static)
        for (int64_t i = 0; i < batch->num_sequences; i++)
            for (int64_t head = 0; head < batch->heads; head++)
                for (int64_t query = 0; query < batch->sequences[i].queries; query++)
                    merge(batch, batch->sequences + i, query, head);
    }
}

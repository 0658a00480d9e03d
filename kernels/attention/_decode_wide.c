/* Attention of a few fp32 queries a sequence over paged keys and values. */

#include "../common/floats.h"

typedef float Number;

#include "decode.h"

/* Four registers hold a head's COLUMNS for two heads at once, and their keys' sums. */
enum { PAIR = 2, REGISTERS = COLUMNS / LANES };

INLINE void score_heads(const Batch *batch, const int heads, const float *q, const float *k, const int64_t *slots,
                        int64_t count, float *scores) {
    for (int64_t j = 0; j < count; j += KEYS) {
        const float *key[KEYS];
        Floats sums[PAIR][KEYS];
        UNROLLED(int i = 0; i < KEYS; i++) {
            key[i] = k + slots[smaller(j + i, count - 1)] * batch->k_stride;
            UNROLLED(int h = 0; h < heads; h++) sums[h][i] = every(0);
        }
        for (int64_t c = 0; c < batch->d; c += LANES)
            UNROLLED(int h = 0; h < heads; h++) {
                Floats query = floats_at(q + h * batch->d + c);
                UNROLLED(int i = 0; i < KEYS; i++)
                    sums[h][i] = times_plus(query, floats_at(key[i] + c), sums[h][i]);
            }
        UNROLLED(int h = 0; h < heads; h++)
            UNROLLED(int i = 0; i < KEYS; i++) scores[h * CHUNK + j + i] = sum_of_lanes(sums[h][i]);
    }
}

INLINE void score(const Batch *batch, int heads, const float *q, const float *k, const int64_t *slots, int64_t count,
                  float *scores) {
    for (int h = 0; h < heads; h += PAIR)
        if (heads - h == 1)
            score_heads(batch, 1, q + h * batch->d, k, slots, count, scores + h * CHUNK);
        else
            score_heads(batch, PAIR, q + h * batch->d, k, slots, count, scores + h * CHUNK);
}

INLINE float exponentiate(float *scores, int64_t count, float scale, float *highest) {
    float top = -__builtin_inff();
    for (int64_t j = 0; j < count; j++) {
        scores[j] *= scale;
        if (scores[j] > top || scores[j] != scores[j]) top = scores[j]; /* a NaN stays */
    }
    *highest = top;
    Floats sum = every(0);
    for (int64_t j = 0; j < count; j += LANES) {
        Floats p = exp2_lanes(minus(load_some(FP32, scores + j, count - j), every(top)));
        store_some(FP32, scores + j, p, count - j);
        sum = plus(sum, load_some(FP32, scores + j, count - j));
    }
    return sum_of_lanes(sum);
}

INLINE void mix(const Batch *batch, int heads, const float *v, const int64_t *slots, int64_t count,
                const float *p, float *out, int64_t out_stride, bool begins) {
    for (int h = 0; h < heads; h++) {
        Floats sums[REGISTERS];
        UNROLLED(int c = 0; c < REGISTERS; c++)
            sums[c] = begins ? every(0) : floats_at(out + h * out_stride + LANES * c);
        for (int64_t j = 0; j < count; j++) {
            const float *value = v + slots[j] * batch->v_stride;
            Floats weight = every(p[h * CHUNK + j]);
            UNROLLED(int c = 0; c < REGISTERS; c++)
                sums[c] = times_plus(weight, floats_at(value + LANES * c), sums[c]);
        }
        UNROLLED(int c = 0; c < REGISTERS; c++) put_floats(out + h * out_stride + LANES * c, sums[c]);
    }
}

INLINE void merge(const Batch *batch, const Sequence *owner, int64_t query, int64_t head) {
    int64_t d = batch->d, chunks = (owner->length + CHUNK - 1) / CHUNK - owner->first_key / CHUNK;
    float *out = batch->out + ((owner->start + query) * batch->heads + head) * d, highest = -__builtin_inff();
    for (int64_t i = 0; i < chunks; i++) {
        float top = part_of(batch, owner->part + i * owner->queries + query, head)[d];
        if (top > highest || top != top) highest = top;
    }
    for (int64_t c = 0; c < d; c += LANES) {
        Floats sum = every(0), total = every(0);
        for (int64_t i = 0; i < chunks; i++) {
            const float *part = part_of(batch, owner->part + i * owner->queries + query, head);
            if (part[d] == -__builtin_inff()) continue;
            Floats weight = exp2_lanes(every(part[d] - highest));
            sum = times_plus(weight, floats_at(part + c), sum);
            total = times_plus(weight, every(part[d + 1]), total);
        }
        put_floats(out + c, over(sum, total));
    }
}

/* Head norms, rotation and the write into pages.

   A token's heads of q, k and v are read once; q' and the pages are written once. Every step rounds as it does by itself
   (kernels/rms_norm.py, rotary.py), so the results are the same bits. Numbers are fp32 or bf16.

   Legend: T tokens, Hq query heads, Hkv key/value heads, d head dim (a multiple of 16).
*/

#include "../common/floats.h"

/* Below this many tokens a second thread costs more than it saves. */
enum { ALONE = 16 };

typedef struct {
    int64_t dtype, tokens, heads, kv_heads, d;
    int64_t q_token, q_head, k_token, k_head, v_token, v_head, table_token; /* strides; the others are contiguous */
    const void *q, *k, *v;                                                  /* [T, Hq, d]; [T, Hkv, d], twice */
    const void *q_weight, *k_weight;                                        /* [d]; null: no norm */
    const float *cos, *sin;                                                 /* [T, d]; null: no rotation */
    const int64_t *slots;                                                   /* [T]; negative: no place in the pages */
    void *out, *k_pages, *v_pages;                                          /* [T, Hq, d]; [slots, Hkv, d], twice */
    float eps;
} Batch;

/* LANES numbers of a head, from `c` on, as the norm leaves them. */
INLINE Floats part_of(int dtype, const void *head, const void *weight, float factor, int64_t c) {
    Floats x = load(dtype, at(dtype, head, c));
    return weight ? normalized(dtype, x, factor, load(dtype, at(dtype, weight, c))) : x;
}

INLINE void write_head(int dtype, const Batch *batch, int64_t token, const void *head, const void *weight, void *to) {
    int64_t half = batch->d / 2;
    float factor = weight ? inverse_rms(dtype, head, batch->d, batch->eps) : 1;
    const float *cos = batch->cos + token * batch->table_token, *sin = batch->sin + token * batch->table_token;
    for (int64_t c = 0; c < half; c += LANES) {
        Floats x = part_of(dtype, head, weight, factor, c), other = part_of(dtype, head, weight, factor, half + c);
        if (batch->cos) {
            Floats first = times(x, load(FP32, cos + c)), second = times(other, load(FP32, cos + half + c));
            first = rounded(dtype, times_plus(other, load(FP32, sin + c), first));
            other = rounded(dtype, times_plus(x, load(FP32, sin + half + c), second));
            x = first;
        }
        store(dtype, (void *)at(dtype, to, c), x);
        store(dtype, (void *)at(dtype, to, half + c), other);
    }
}

INLINE void write_token(int dtype, const Batch *batch, int64_t token) {
    int64_t d = batch->d, slot = batch->slots[token];
    for (int64_t head = 0; head < batch->heads && batch->out; head++)
        write_head(dtype, batch, token, at(dtype, batch->q, token * batch->q_token + head * batch->q_head),
                   batch->q_weight, (void *)at(dtype, batch->out, (token * batch->heads + head) * d));
    for (int64_t head = 0; head < batch->kv_heads && slot >= 0; head++) {
        int64_t place = (slot * batch->kv_heads + head) * d;
        write_head(dtype, batch, token, at(dtype, batch->k, token * batch->k_token + head * batch->k_head),
                   batch->k_weight, (void *)at(dtype, batch->k_pages, place));
        memcpy((void *)at(dtype, batch->v_pages, place),
               at(dtype, batch->v, token * batch->v_token + head * batch->v_head), d * size_of(dtype));
    }
}

void rotate_and_write(const Batch *batch, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && batch->tokens > ALONE)
    for (int64_t token = 0; token < batch->tokens; token++)
        if (batch->dtype == FP32)
            write_token(FP32, batch, token);
        else
            write_token(BF16, batch, token);
}

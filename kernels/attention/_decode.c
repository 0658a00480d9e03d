/* Attention of a few bf16 queries a sequence over paged keys and values, for x86 processors with AVX-512 BF16. */

#include "../common/lanes.h"

typedef uint16_t Number;

#include "decode.h"

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

INLINE void score(const Batch *batch, int heads, const uint16_t *q, const uint16_t *k, const int64_t *slots,
                  int64_t count, float *scores) {
    for (int64_t j = 0; j < count; j += KEYS) {
        const uint16_t *key[KEYS];
        __m512 sums[HEADS][KEYS];
        UNROLLED(int i = 0; i < KEYS; i++) {
            key[i] = k + slots[smaller(j + i, count - 1)] * batch->k_stride;
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
        UNROLLED(int h = 0; h < heads; h++) _mm_storeu_ps(scores + h * CHUNK + j, sums_of_lanes(sums[h]));
    }
}

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

INLINE void mix(const Batch *batch, int heads, const uint16_t *v, const int64_t *slots, int64_t count,
                const float *p, float *out, int64_t out_stride, bool begins) {
    __m512 sums[HEADS][COLUMNS / 16];
    UNROLLED(int h = 0; h < heads; h++)
        UNROLLED(int c = 0; c < COLUMNS / 16; c++)
            sums[h][c] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(out + h * out_stride + 16 * c);
    for (int64_t j = 0; j < count; j++) {
        const uint16_t *value = v + slots[j] * batch->v_stride;
        UNROLLED(int c = 0; c < COLUMNS / 16; c++) {
            __m512 values = widen(_mm256_loadu_si256((const __m256i *)(value + 16 * c)));
            UNROLLED(int h = 0; h < heads; h++)
                sums[h][c] = _mm512_fmadd_ps(_mm512_set1_ps(p[h * CHUNK + j]), values, sums[h][c]);
        }
    }
    UNROLLED(int h = 0; h < heads; h++)
        UNROLLED(int c = 0; c < COLUMNS / 16; c++) _mm512_storeu_ps(out + h * out_stride + 16 * c, sums[h][c]);
}

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

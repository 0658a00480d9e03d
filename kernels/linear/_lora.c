/* Low-rank adapters beside a linear layer, for a few bf16 rows on x86 processors with AVX-512 BF16.

   y'[t] = y[t] + scale_s · B_s z[t],  z[t] = A_s x[t] in fp32,  s = slots[t], the adapter of row t

   Sums are fp32, in an order that depends on K and R alone, and y' is rounded once: a row has the same bits whatever
   rows are beside it and however many threads there are. A row with a negative slot keeps its bits.

   Legend: T rows, K inputs, N outputs, S adapters, R rank; Z is R rounded up to a multiple of 16.
*/

#include "../common/lanes.h"

enum { RANKS = 4, MOST_ROWS = 32 };

typedef struct {
    int64_t t, n, k, rank;
    int64_t x_stride, y_stride; /* from row to row */
    const uint16_t *x, *y;      /* [T, K], [T, N] */
    const uint16_t *a, *b;      /* [S, R, K], [S, N, R] */
    const float *scales;        /* [S] */
    const int32_t *slots;       /* [T]; null: all rows have adapter 0 */
    float *z;                   /* [T, Z], zeros */
    uint16_t *out;              /* [T, N] */
} Rows;

INLINE int32_t slot_of(const Rows *rows, int64_t t) { return rows->slots ? rows->slots[t] : 0; }

INLINE int64_t padded_rank(const Rows *rows) { return (rows->rank + 15) / 16 * 16; }

/* z[t, r] for RANKS ranks from r on; those beyond R again the last one, and not stored. */
INLINE void shrink(const Rows *rows, int64_t t, int64_t r) {
    const uint16_t *x = rows->x + t * rows->x_stride, *a[RANKS];
    __m512 sums[RANKS];
    UNROLLED(int i = 0; i < RANKS; i++) {
        a[i] = rows->a + (slot_of(rows, t) * rows->rank + smaller(r + i, rows->rank - 1)) * rows->k;
        sums[i] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < rows->k; k += 32) {
        __mmask32 mask = k + 32 <= rows->k ? 0xffffffff : (1u << (rows->k - k)) - 1;
        __m512bh inputs = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + k);
        UNROLLED(int i = 0; i < RANKS; i++)
            sums[i] = _mm512_dpbf16_ps(sums[i], inputs, (__m512bh)_mm512_maskz_loadu_epi16(mask, a[i] + k));
    }
    float *z = rows->z + t * padded_rank(rows) + r;
    _mm_mask_storeu_ps(z, (1 << smaller(RANKS, rows->rank - r)) - 1, sums_of_lanes(sums));
}

/* 16 ranks from r on of B for 16 outputs from n on, fp32, with the outputs as lanes. Ranks beyond R are zeros, outputs
   beyond N the last one again. */
INLINE void load_turned(const Rows *rows, int64_t slot, int64_t n, int64_t r, __m512 *ranks) {
    const uint16_t *b = rows->b + slot * rows->n * rows->rank + r;
    __mmask16 mask = (1u << smaller(16, rows->rank - r)) - 1;
    __m512i pairs[8], fours[8];
    UNROLLED(int i = 0; i < 8; i++) { /* two ranks are 32 bits; rows 8 apart lie in one register */
        int64_t here = smaller(n + i, rows->n - 1) * rows->rank, far = smaller(n + i + 8, rows->n - 1) * rows->rank;
        __m512i half = _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(mask, b + here));
        pairs[i] = _mm512_inserti64x4(half, _mm256_maskz_loadu_epi16(mask, b + far), 1);
    }
    UNROLLED(int i = 0; i < 8; i += 4) {
        __m512i low01 = _mm512_unpacklo_epi32(pairs[i], pairs[i + 1]);
        __m512i high01 = _mm512_unpackhi_epi32(pairs[i], pairs[i + 1]);
        __m512i low23 = _mm512_unpacklo_epi32(pairs[i + 2], pairs[i + 3]);
        __m512i high23 = _mm512_unpackhi_epi32(pairs[i + 2], pairs[i + 3]);
        fours[i] = _mm512_unpacklo_epi64(low01, low23);
        fours[i + 1] = _mm512_unpackhi_epi64(low01, low23);
        fours[i + 2] = _mm512_unpacklo_epi64(high01, high23);
        fours[i + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
    const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    UNROLLED(int i = 0; i < 8; i++) {
        __m512i both = _mm512_permutex2var_epi64(fours[i % 4], i < 4 ? even : odd, fours[i % 4 + 4]);
        ranks[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
        ranks[2 * i + 1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
    }
}

/* y' of up to MOST_ROWS rows from t on, and 16 outputs from n on. */
INLINE void expand(const Rows *rows, int64_t t, int64_t n) {
    int64_t end = smaller(t + MOST_ROWS, rows->t), width = padded_rank(rows);
    __m512 sums[MOST_ROWS], ranks[16];
    for (int64_t i = 0; i < MOST_ROWS; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t r = 0; r < rows->rank; r += 16) {
        int32_t loaded = -1;
        for (int64_t row = t; row < end; row++) {
            int32_t slot = slot_of(rows, row);
            if (slot < 0) continue;
            if (slot != loaded) load_turned(rows, loaded = slot, n, r, ranks);
            const float *z = rows->z + row * width + r;
            __m512 sum = sums[row - t];
            _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)
                sum = _mm512_fmadd_ps(_mm512_set1_ps(z[i]), ranks[i], sum);
            sums[row - t] = sum;
        }
    }
    __mmask16 mask = (1u << smaller(16, rows->n - n)) - 1;
    for (int64_t row = t; row < end; row++) {
        __m256i bits = _mm256_maskz_loadu_epi16(mask, rows->y + row * rows->y_stride + n);
        int32_t slot = slot_of(rows, row);
        if (slot >= 0) {
            __m512 y = widen(bits);
            y = _mm512_fmadd_ps(_mm512_set1_ps(rows->scales[slot]), sums[row - t], y);
            bits = (__m256i)_mm512_cvtneps_pbh(y);
        }
        _mm256_mask_storeu_epi16(rows->out + row * rows->n + n, mask, bits);
    }
}

/* All of y'. */
void add_adapters(const Rows *rows, int threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for collapse(2) schedule(static)
        for (int64_t r = 0; r < rows->rank; r += RANKS)
            for (int64_t t = 0; t < rows->t; t++)
                if (slot_of(rows, t) >= 0) shrink(rows, t, r);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < rows->n; n += 16)
            for (int64_t t = 0; t < rows->t; t += MOST_ROWS) expand(rows, t, n);
    }
}

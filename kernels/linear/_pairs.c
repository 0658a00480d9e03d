/* Products of bf16 rows with a bf16 weight, for x86 processors with AVX-512 BF16.

   y[t, n] = b[n] + sum over k of x[t, k] * W[n, k], in fp32 from k = 0 on and rounded once: a row of y has the same bits
   whatever rows are beside it and however many threads there are.

   The weight lies in panels of OUTPUTS outputs. A word is the pair of two inputs, a lane an output: a register of words
   times the same pair of a row of x in every lane adds to 16 sums. A tile of TOKENS rows and a panel has 24 registers of
   sums; a panel stays in the second cache for all tiles of a chunk of rows.

   Legend: T rows of x, N outputs, K inputs (even), P panels.
*/

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../common/lanes.h"

enum { LANES = 16, PARTS = 3, OUTPUTS = LANES * PARTS, TOKENS = 8, CHUNK = 256, AHEAD = 16 };

typedef struct {
    int64_t n, k;
    const uint32_t *panels; /* [P, K / 2, OUTPUTS] */
    const uint16_t *bias;   /* [N], or none */
} Weight;

INLINE __mmask16 lanes_until(int64_t end, int part) {
    int64_t count = end - part * LANES;
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (1 << count) - 1;
}

/* Columns of y from n on, of `tokens` rows x [K / 2, tokens]; `is_first`: nobody has read the panel before. */
INLINE void tile(const Weight *w, int64_t n, const uint32_t *x, uint16_t *y, const int tokens, const int is_first) {
    __m512 sums[TOKENS][PARTS];
    UNROLLED(int i = 0; i < PARTS; i++) {
        __m512 start = _mm512_setzero_ps();
        if (w->bias) start = widen(_mm256_maskz_loadu_epi16(lanes_until(w->n - n, i), w->bias + n + i * LANES));
        UNROLLED(int t = 0; t < tokens; t++) sums[t][i] = start;
    }
    const uint32_t *panel = w->panels + n * w->k / 2;
    for (int64_t pair = 0; pair < w->k / 2; pair++, panel += OUTPUTS, x += tokens) {
        __m512bh weights[PARTS];
        UNROLLED(int i = 0; i < PARTS; i++) {
            if (is_first) _mm_prefetch(panel + AHEAD * OUTPUTS + i * LANES, _MM_HINT_T0);
            weights[i] = (__m512bh)_mm512_loadu_si512(panel + i * LANES);
        }
        UNROLLED(int t = 0; t < tokens; t++) {
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(x[t]);
            UNROLLED(int i = 0; i < PARTS; i++) sums[t][i] = _mm512_dpbf16_ps(sums[t][i], inputs, weights[i]);
        }
    }
    UNROLLED(int t = 0; t < tokens; t++)
        UNROLLED(int i = 0; i < PARTS; i++)
            _mm256_mask_storeu_epi16(y + t * w->n + n + i * LANES, lanes_until(w->n - n, i),
                                     (__m256i)_mm512_cvtneps_pbh(sums[t][i]));
}

INLINE void tile_of(const Weight *w, int64_t n, const uint32_t *x, uint16_t *y, int64_t tokens, const int is_first) {
    switch (tokens) {
    case 1: tile(w, n, x, y, 1, is_first); break;
    case 2: tile(w, n, x, y, 2, is_first); break;
    case 3: tile(w, n, x, y, 3, is_first); break;
    case 4: tile(w, n, x, y, 4, is_first); break;
    case 5: tile(w, n, x, y, 5, is_first); break;
    case 6: tile(w, n, x, y, 6, is_first); break;
    case 7: tile(w, n, x, y, 7, is_first); break;
    case 8: tile(w, n, x, y, 8, is_first); break;
    }
}

/* Columns of y from n on, of `rows` rows of x as tiles. */
static void columns(const Weight *w, int64_t n, const uint32_t *x, uint16_t *y, int64_t rows) {
    tile_of(w, n, x, y, smaller(rows, TOKENS), 1);
    for (int64_t t = TOKENS; t < rows; t += TOKENS)
        tile_of(w, n, x + t * w->k / 2, y + t * w->n, smaller(rows - t, TOKENS), 0);
}

/* Rows of x as a tile, [K / 2, tokens]. */
static void pack(const uint16_t *x, int64_t stride, uint32_t *to, int64_t tokens, int64_t pairs) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t pair = 0; pair < pairs; pair++)
            memcpy(to + pair * tokens + t, x + t * stride + 2 * pair, sizeof *to);
}

/* y [rows, N] of x [rows, K], both bf16. Returns 0, or 1 without memory. */
int pairs_product(const Weight *w, const uint16_t *inputs, int64_t stride, uint16_t *y, int64_t rows, int threads) {
    int64_t pairs = w->k / 2;
    uint32_t *x = malloc(rows * pairs * sizeof *x);
    if (rows && !x) return 1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t += TOKENS)
            pack(inputs + t * stride, stride, x + t * pairs, smaller(rows - t, TOKENS), pairs);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t t = 0; t < rows; t += CHUNK)
            for (int64_t n = 0; n < w->n; n += OUTPUTS)
                columns(w, n, x + t * pairs, y + t * w->n, smaller(rows - t, CHUNK));
    }
    free(x);
    return 0;
}

/* Rows of bf16 times a panel of PANEL_OUTPUTS outputs, for x86 processors with AVX-512 BF16.

   Of a panel, [K / 2, PANEL_OUTPUTS], a word is a pair of inputs, and a lane an output: a register of words times the
   same pair of a row of x in every lane adds to 16 sums. A tile of TILE_ROWS rows has 24 registers of sums. They begin
   with k = 0 and the bias: a row of y has the same bits whatever rows are beside it.

   Legend: T rows of x, N outputs, K inputs (even).
*/

#ifndef PANELS_H
#define PANELS_H

#include "../common/lanes.h"

enum { WORDS = 16, PANEL_WORDS = 3, PANEL_OUTPUTS = WORDS * PANEL_WORDS, TILE_ROWS = 8, PANELS_AHEAD = 16 };

/* Those of WORDS lanes, from one on, that are among the first `count`. */
INLINE __mmask16 lanes_until(int64_t count, int from) {
    return count - from >= WORDS ? 0xffff : count <= from ? 0 : (1 << (count - from)) - 1;
}

/* Where products of a panel go: so many of its columns, from number `at` of y on, in rows that lie `stride` apart, after
   `bias`, or none. y is bf16, or fp32 where it keeps sums as they are. */
typedef struct {
    void *y;
    int64_t at, stride, count;
    const uint16_t *bias;
    int64_t keeps_sums;
} Columns;

/* Those lanes of sums that are shown, as numbers of y from `at` on. */
INLINE void store_lanes(void *y, int64_t at, __mmask16 shown, __m512 sums, int64_t keeps_sums) {
    if (keeps_sums) {
        _mm512_mask_storeu_ps((float *)y + at, shown, sums);
        return;
    }
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(sums);
    if (shown == 0xffff) _mm256_storeu_si256((__m256i *)((uint16_t *)y + at), rounded);
    else _mm256_mask_storeu_epi16((uint16_t *)y + at, shown, rounded);
}

/* `tokens` rows x [K / 2, tokens] times a panel; `is_first`: nobody has read the panel before. */
INLINE void panel_tile(const uint32_t *panel, int64_t pairs, const uint32_t *x, Columns to, const int tokens,
                       const int is_first) {
    __m512 sums[TILE_ROWS][PANEL_WORDS];
    UNROLLED(int i = 0; i < PANEL_WORDS; i++) {
        __m512 start = _mm512_setzero_ps();
        if (to.bias) start = widen(_mm256_maskz_loadu_epi16(lanes_until(to.count, i * WORDS), to.bias + i * WORDS));
        UNROLLED(int t = 0; t < tokens; t++) sums[t][i] = start;
    }
    for (int64_t pair = 0; pair < pairs; pair++, panel += PANEL_OUTPUTS, x += tokens) {
        __m512bh weights[PANEL_WORDS];
        UNROLLED(int i = 0; i < PANEL_WORDS; i++) {
            if (is_first) _mm_prefetch(panel + PANELS_AHEAD * PANEL_OUTPUTS + i * WORDS, _MM_HINT_T0);
            weights[i] = (__m512bh)_mm512_loadu_si512(panel + i * WORDS);
        }
        UNROLLED(int t = 0; t < tokens; t++) {
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(x[t]);
            UNROLLED(int i = 0; i < PANEL_WORDS; i++) sums[t][i] = _mm512_dpbf16_ps(sums[t][i], inputs, weights[i]);
        }
    }
    UNROLLED(int t = 0; t < tokens; t++)
        UNROLLED(int i = 0; i < PANEL_WORDS; i++)
            store_lanes(to.y, to.at + t * to.stride + i * WORDS, lanes_until(to.count, i * WORDS), sums[t][i],
                        to.keeps_sums);
}

INLINE void panel_tile_of(const uint32_t *panel, int64_t pairs, const uint32_t *x, Columns to, int64_t tokens,
                          const int is_first) {
    switch (tokens) {
    case 1: panel_tile(panel, pairs, x, to, 1, is_first); break;
    case 2: panel_tile(panel, pairs, x, to, 2, is_first); break;
    case 3: panel_tile(panel, pairs, x, to, 3, is_first); break;
    case 4: panel_tile(panel, pairs, x, to, 4, is_first); break;
    case 5: panel_tile(panel, pairs, x, to, 5, is_first); break;
    case 6: panel_tile(panel, pairs, x, to, 6, is_first); break;
    case 7: panel_tile(panel, pairs, x, to, 7, is_first); break;
    case 8: panel_tile(panel, pairs, x, to, 8, is_first); break;
    }
}

/* `rows` rows of x, as tiles, times a panel. */
static void panel_product(const uint32_t *panel, int64_t pairs, const uint32_t *x, Columns to, int64_t rows) {
    panel_tile_of(panel, pairs, x, to, smaller(rows, TILE_ROWS), 1);
    for (int64_t t = TILE_ROWS; t < rows; t += TILE_ROWS) {
        to.at += TILE_ROWS * to.stride;
        panel_tile_of(panel, pairs, x + t * pairs, to, smaller(rows - t, TILE_ROWS), 0);
    }
}

#endif

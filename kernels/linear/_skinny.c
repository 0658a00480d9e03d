/* Products of a few rows with a quantized weight, and its rows expanded, for x86 processors with AVX-512 BF16 and VBMI.

   y[t, n] = sum over k of x[t, k] * W[n, k]. Sums are fp32, in an order that depends on K alone: a row of y has the same
   bits whatever rows are beside it and however many threads there are.

   Weights are read as they are stored (kernels/linear/quantization.py), once from memory for all rows of x. In registers 32
   neighbours of a row become bf16 at a time; their products are one vdpbf16ps, and a sum has 16 lanes until its end. For
   more than MOST_TOKENS rows of x they become so in the cache, once for all of them.

   Legend: N outputs, K inputs (a multiple of 32), G groups of a row of W; a tile: TOKENS rows of x, OUTPUTS rows of W.
*/

#include <stdlib.h>

#include "../common/lanes.h"
#include "decode.h"

enum { MOST_TOKENS = 8 }; /* of a tile */

/* STEP inputs from k on of TOKENS rows of x, times those of OUTPUTS rows of W, which are an even or an odd step. */
INLINE void multiply_step(int format, const uint8_t *const *codes, int64_t bytes, int64_t k, const __m512i *key,
                          const int is_odd, const uint16_t *x, __m512 sums[8][4], const int TOKENS, const int OUTPUTS) {
    __m512i weights[4];
    UNROLLED(int i = 0; i < OUTPUTS; i++) {
        const uint8_t *here = codes[i] + bytes_of(format, k);
        /* The same place of the next tile: the processor's own prefetch ends with a page, a row or two. */
        _mm_prefetch(here + OUTPUTS * bytes, _MM_HINT_T0);
        weights[i] = decode(format, here, key[i], is_odd);
    }
    UNROLLED(int t = 0; t < TOKENS; t++) {
        __m512bh inputs = (__m512bh)_mm512_loadu_si512(x + k * TOKENS + t * STEP);
        UNROLLED(int i = 0; i < OUTPUTS; i++)
            sums[t][i] = _mm512_dpbf16_ps(sums[t][i], inputs, (__m512bh)weights[i]);
    }
}

/* Columns of y from n on are the sums of lanes, of four registers at once; beyond the end the last one again. */
INLINE void store_sums(const Weight *w, int64_t n, __m512 sums[8][4], void *y, int64_t rows, const int TOKENS,
                       const int OUTPUTS) {
    UNROLLED(int first = 0; first < TOKENS * OUTPUTS; first += 4) {
        __m512 four[4];
        UNROLLED(int j = 0; j < 4; j++) four[j] = sums[(first + j) % TOKENS][(first + j) / TOKENS];
        __m128 wide = sums_of_lanes(four);
        uint64_t bits = _mm_cvtsi128_si64((__m128i)_mm_cvtneps_pbh(wide));
        UNROLLED(int j = 0; j < 4; j++) {
            int64_t t = (first + j) % TOKENS, i = (first + j) / TOKENS, at = t * w->n + smaller(n + i, w->n - 1);
            if (t >= rows) continue;
            if (w->keeps_sums) ((float *)y)[at] = ((const float *)&wide)[j];
            else ((uint16_t *)y)[at] = (uint16_t)(bits >> 16 * j);
        }
    }
}

/* OUTPUTS columns of y from n on, of TOKENS rows of x, [K / 32, TOKENS, 32]; the first `rows` of them are stored. */
INLINE void tile(int format, const Weight *w, int64_t n, const uint16_t *x, void *y, int64_t rows, const int TOKENS,
                 const int OUTPUTS) {
    int64_t size = group_of(format, w), together = groups_of_key(format, w), bytes = bytes_of(format, w->k), k = 0;
    int64_t output[4];
    const uint8_t *codes[4];
    Constants constants[4];
    __m512 sums[8][4];
    UNROLLED(int i = 0; i < OUTPUTS; i++) {
        output[i] = smaller(n + i, w->n - 1); /* beyond the end the last one again */
        codes[i] = w->codes + output[i] * bytes;
        UNROLLED(int t = 0; t < TOKENS; t++) sums[t][i] = _mm512_setzero_ps();
    }
    for (int64_t first = 0; k < w->k; first += BLOCK) {
        UNROLLED(int i = 0; i < OUTPUTS; i++) read_constants(format, w, output[i], first, OUTPUTS, &constants[i]);
        for (int64_t group = 0; group < BLOCK && k < w->k; group += together) {
            __m512i key[4];
            UNROLLED(int i = 0; i < OUTPUTS; i++)
                key[i] = group_key(format, &constants[i], group, group + together - 1);
            int64_t end = smaller((first + group + together) * size, w->k);
            for (; k < end; k += 2 * STEP) {
                multiply_step(format, codes, bytes, k, key, 0, x, sums, TOKENS, OUTPUTS);
                if (k + STEP < end) multiply_step(format, codes, bytes, k + STEP, key, 1, x, sums, TOKENS, OUTPUTS);
            }
            k = end;
        }
    }
    store_sums(w, n, sums, y, rows, TOKENS, OUTPUTS);
}

/* The same of rows of W that lie decoded, in mixed order. */
INLINE void tile_of_decoded(const Weight *w, int64_t n, const uint16_t *weights, const uint16_t *x, void *y,
                            int64_t rows, const int TOKENS, const int OUTPUTS) {
    __m512 sums[8][4];
    UNROLLED(int t = 0; t < TOKENS; t++)
        UNROLLED(int i = 0; i < OUTPUTS; i++) sums[t][i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < w->k; k += STEP, weights += STEP) {
        __m512bh here[4];
        UNROLLED(int i = 0; i < OUTPUTS; i++) here[i] = (__m512bh)_mm512_loadu_si512(weights + i * w->k);
        UNROLLED(int t = 0; t < TOKENS; t++) {
            __m512bh inputs = (__m512bh)_mm512_loadu_si512(x + k * TOKENS + t * STEP);
            UNROLLED(int i = 0; i < OUTPUTS; i++) sums[t][i] = _mm512_dpbf16_ps(sums[t][i], inputs, here[i]);
        }
    }
    store_sums(w, n, sums, y, rows, TOKENS, OUTPUTS);
}

/* How many outputs a tile has: 24 sums, and what a step needs beside them, fill the 32 registers. */
INLINE int outputs_of(int64_t tokens) { return tokens == MOST_TOKENS ? 3 : 4; }

INLINE void tile_of(int format, const Weight *w, int64_t n, const uint16_t *x, void *y, int64_t rows,
                    int64_t tokens) {
    switch (tokens) {
    case 1: tile(format, w, n, x, y, rows, 1, outputs_of(1)); break;
    case 4: tile(format, w, n, x, y, rows, 4, outputs_of(4)); break;
    case MOST_TOKENS: tile(format, w, n, x, y, rows, MOST_TOKENS, outputs_of(MOST_TOKENS)); break;
    }
}

/* Columns of y from n on, of all rows of x: a tile, or several, for which rows of W are decoded once. */
INLINE void columns_of(int format, const Weight *w, int64_t n, const uint16_t *x, void *y, int64_t rows,
                    int64_t tokens) {
    if (rows <= tokens) {
        tile_of(format, w, n, x, y, rows, tokens);
        return;
    }
    const int outputs = outputs_of(MOST_TOKENS);
    uint16_t decoded[outputs * w->k];
    for (int64_t i = 0; i < outputs; i++)
        decode_row(format, w, smaller(n + i, w->n - 1), 0, w->k, outputs, decoded + i * w->k, STEP, 1);
    for (int64_t t = 0; t < rows; t += MOST_TOKENS)
        tile_of_decoded(w, n, decoded, x + t * w->k, row_of_y(w, y, t), rows - t, MOST_TOKENS, outputs);
}

/* The same of any format. */
INLINE void columns(const Weight *all, int64_t n, const uint16_t *x, void *y, int64_t rows, int64_t tokens) {
    _Alignas(4) int8_t codes[rows_bytes(all, outputs_of(tokens))];
    Weight bytes;
    const Weight *w = in_rows(all, n, outputs_of(tokens), codes, &bytes);
    switch (format_of(w)) {
    case NF4: columns_of(NF4, w, n, x, y, rows, tokens); break;
    case INT4: columns_of(INT4, w, n, x, y, rows, tokens); break;
    case INT8: columns_of(INT8, w, n, x, y, rows, tokens); break;
    case FP8: columns_of(FP8, w, n, x, y, rows, tokens); break;
    case INT4_FROM_MINIMA: columns_of(INT4_FROM_MINIMA, w, n, x, y, rows, tokens); break;
    case INT8_SIXTEENS: columns_of(INT8_SIXTEENS, w, n, x, y, rows, tokens); break;
    }
}

/* How many rows of x a tile has. */
INLINE int64_t tokens_of(int64_t rows) { return rows == 1 ? 1 : rows <= 4 ? 4 : MOST_TOKENS; }

/* x [rows, K] as [⌈rows / tokens⌉, K / 32, tokens, 32]: the same 32 elements of a tile's rows become neighbours, since
   rows 8 KiB apart would fight for lines of the cache. They are in mixed order; what is beyond the last row is zero. */
INLINE void pack_tiles(int format, const uint16_t *x, int64_t x_stride, uint16_t *out, int64_t rows, int64_t k,
                       int64_t tokens) {
    for (int64_t t = 0; t < (rows + tokens - 1) / tokens * tokens; t++)
        for (int64_t c = 0; c < k; c += STEP) {
            __m512i numbers = t < rows ? _mm512_loadu_si512(x + t * x_stride + c) : _mm512_setzero_si512();
            uint16_t *to = out + t / tokens * tokens * k + c * tokens + t % tokens * STEP;
            _mm512_storeu_si512(to, mixed(format, numbers));
        }
}

/* y [rows, N] of x [rows, K] in bf16. Returns 0, or 1 without memory. */
int skinny_product(const Weight *w, const uint16_t *inputs, int64_t stride, void *y, int64_t rows, int threads) {
    int64_t tokens = tokens_of(rows);
    uint16_t *x = malloc((rows + tokens - 1) / tokens * tokens * w->k * sizeof *x);
    if (rows && !x) return 1;
    pack_tiles(w->format, inputs, stride, x, rows, w->k, tokens);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < w->n; n += outputs_of(tokens)) columns(w, n, x, y, rows, tokens);
    free(x);
    return 0;
}

typedef uint16_t Number;

INLINE void expand_row(const Weight *all, int64_t n, uint16_t *row) {
    _Alignas(4) int8_t codes[rows_bytes(all, 1)];
    Weight bytes;
    const Weight *w = in_rows(all, n, 1, codes, &bytes);
    switch (format_of(w)) {
    case NF4: decode_row(NF4, w, n, 0, w->k, 1, row, STEP, 0); break;
    case INT4: decode_row(INT4, w, n, 0, w->k, 1, row, STEP, 0); break;
    case INT8: decode_row(INT8, w, n, 0, w->k, 1, row, STEP, 0); break;
    case FP8: decode_row(FP8, w, n, 0, w->k, 1, row, STEP, 0); break;
    case INT4_FROM_MINIMA: decode_row(INT4_FROM_MINIMA, w, n, 0, w->k, 1, row, STEP, 0); break;
    case INT8_SIXTEENS: decode_row(INT8_SIXTEENS, w, n, 0, w->k, 1, row, STEP, 0); break;
    }
}

#include "expand.h"

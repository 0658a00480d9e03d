/* Products of rows in bf16 with a weight in NF4 or FP8, for x86 processors with AMX BF16 beside what _skinny.c needs.

   y[t, n] = sum over k of x[t, k] * W[n, k]. Sums are fp32, in an order that depends on K alone: a row of y has the same
   bits whatever rows are beside it and however many threads there are.

   A tile of W is 16 outputs by 32 inputs, as `decode_row` writes them; one of x is 16 pairs of inputs by 16 rows; their
   product adds to 16 outputs by 16 rows of fp32. A CHUNK of inputs of outputs is decoded once for as many rows of x as
   the cache holds, and multiplied before the next is decoded.

   Legend: T rows of x, N outputs, K inputs (a multiple of STEP).
*/

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "../common/amx.h"
#include "decode.h"
#include "../common/reserve.h"

enum { TILE = SIDE * STEP, OUTPUTS = 2 * SIDE, ROWS = 2 * SIDE };
enum { CHUNK = 256 }; /* inputs decoded at once for a few rows of x: they stay in the first-level cache */
enum { CACHE = 1 << 20 }; /* bytes of x that stay in the second-level cache while all of W passes by */
/* Registers: sums of the first and second outputs by the first and second rows, outputs, rows. */
#define SUMS_11 0
#define SUMS_12 1
#define SUMS_21 2
#define SUMS_22 3
#define OUTPUTS_1 4
#define OUTPUTS_2 5
#define ROWS_1 6
#define ROWS_2 7

/* Whatever has SIDE registers keeps them only if every loop over them is unrolled. */
#define SIXTEEN_TIMES(i) _Pragma("GCC unroll 16") for (int i = 0; i < SIDE; i++)

/* 16 x 16 numbers of 32 bits. */
INLINE void transpose(__m512i r[SIDE]) {
    __m512i t[SIDE];
    _Pragma("GCC unroll 16") for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    _Pragma("GCC unroll 16") for (int i = 0; i < SIDE; i += 4) { /* column 4 * lane + c of rows i to i + 3 in r[i + c] */
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    UNROLLED(int c = 0; c < 4; c++) {
        __m512i even = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), odd = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        __m512i evens = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        __m512i odds = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
        t[c] = _mm512_shuffle_i32x4(even, evens, 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(odd, odds, 0x88);
        t[8 + c] = _mm512_shuffle_i32x4(even, evens, 0xdd);
        t[12 + c] = _mm512_shuffle_i32x4(odd, odds, 0xdd);
    }
    memcpy(r, t, sizeof t);
}

/* 16 rows of x as tiles [K / STEP, 16 pairs in mixed order, 16 rows, 2]; what is beyond `rows` is zero. */
INLINE void pack_rows(int format, const uint16_t *x, int64_t stride, int64_t rows, int64_t k, uint16_t *out) {
    for (int64_t c = 0; c < k; c += STEP, out += TILE) {
        __m512i pairs[SIDE];
        SIXTEEN_TIMES(t)
            pairs[t] = t < rows ? mixed(format, _mm512_loadu_si512(x + t * stride + c)) : _mm512_setzero_si512();
        transpose(pairs);
        SIXTEEN_TIMES(i) _mm512_store_si512(out + i * STEP, pairs[i]);
    }
}

/* Sums of OUTPUTS outputs and SIDE rows as y from output n on, of which `rows` rows are left. */
INLINE void store_sums(const float *sums, const Weight *w, int64_t n, void *y, int64_t rows) {
    __m512i low[SIDE], high[SIDE];
    SIXTEEN_TIMES(i) low[i] = _mm512_load_si512(sums + i * SIDE);
    SIXTEEN_TIMES(i) high[i] = _mm512_load_si512(sums + (SIDE + i) * SIDE);
    transpose(low);
    transpose(high);
    __mmask32 shown = w->n - n >= OUTPUTS ? 0xffffffff : (1u << (w->n - n)) - 1;
    for (int64_t t = 0; t < smaller(rows, SIDE); t++) {
        void *row = row_of_y(w, y, t);
        if (w->keeps_sums) {
            _mm512_mask_storeu_epi32((float *)row + n, shown, low[t]);
            _mm512_mask_storeu_epi32((float *)row + n + SIDE, shown >> SIDE, high[t]);
            continue;
        }
        __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_castsi512_ps(high[t]), _mm512_castsi512_ps(low[t]));
        _mm512_mask_storeu_epi16((uint16_t *)row + n, shown, (__m512i)rounded);
    }
}

/* Inputs k to `end` of OUTPUTS outputs from n on, decoded into [2, chunk / STEP, 16, STEP]. */
INLINE void decode_chunk(int format, const Weight *w, int64_t n, int64_t k, int64_t end, int64_t chunk, uint16_t *out) {
    for (int64_t i = 0; i < OUTPUTS; i++) { /* beyond the end the last one again */
        uint16_t *row = out + i / SIDE * SIDE * chunk + i % SIDE * STEP;
        decode_row(format, w, smaller(n + i, w->n - 1), k, end, OUTPUTS, row, TILE, 1);
    }
}

INLINE void clear_sums(void) {
    _tile_zero(SUMS_11);
    _tile_zero(SUMS_21);
    _tile_zero(SUMS_12);
    _tile_zero(SUMS_22);
}

/* Adds to the sums `inputs` inputs of OUTPUTS outputs and of ROWS rows, or of SIDE: each second half of both comes so many
   numbers after the first. */
INLINE void multiply(const uint16_t *outputs, int64_t second_outputs, const uint16_t *x, int64_t second_rows,
                     int64_t inputs, int is_wide) {
    for (int64_t at = 0; at < SIDE * inputs; at += TILE) {
        _tile_loadd(OUTPUTS_1, outputs + at, 64);
        _tile_loadd(ROWS_1, x + at, 64);
        _tile_dpbf16ps(SUMS_11, OUTPUTS_1, ROWS_1);
        _tile_loadd(OUTPUTS_2, outputs + second_outputs + at, 64);
        _tile_dpbf16ps(SUMS_21, OUTPUTS_2, ROWS_1);
        if (!is_wide) continue;
        _tile_loadd(ROWS_2, x + second_rows + at, 64);
        _tile_dpbf16ps(SUMS_12, OUTPUTS_1, ROWS_2);
        _tile_dpbf16ps(SUMS_22, OUTPUTS_2, ROWS_2);
    }
}

/* The sums as y from output n on, of which `rows` rows are left. */
INLINE void take_sums(const Weight *w, int64_t n, void *y, int64_t rows) {
    _Alignas(64) float sums[2 * SIDE * SIDE];
    _tile_stored(SUMS_11, sums, 64);
    _tile_stored(SUMS_21, sums + SIDE * SIDE, 64);
    store_sums(sums, w, n, y, rows);
    if (rows <= SIDE) return;
    _tile_stored(SUMS_12, sums, 64);
    _tile_stored(SUMS_22, sums + SIDE * SIDE, 64);
    store_sums(sums, w, n, row_of_y(w, y, SIDE), rows - SIDE);
}

/* Inputs decoded at once for so many rows of x: one ROWS keeps its sums from chunk to chunk, several take turns. */
INLINE int64_t chunk_of(const Weight *w, int64_t rows) { return rows > ROWS ? w->k : smaller(CHUNK, w->k); }

/* OUTPUTS columns of y from n on, of the rows whose tiles are `packed`. */
INLINE void multiply_outputs(const Weight *w, int64_t n, const uint16_t *packed, uint16_t *decoded, void *y,
                             int64_t rows) {
    int64_t chunk = chunk_of(w, rows);
    for (int64_t k = 0; k < w->k; k += chunk) {
        int64_t end = smaller(k + chunk, w->k);
        if (w->format == NF4) decode_chunk(NF4, w, n, k, end, chunk, decoded);
        else decode_chunk(FP8, w, n, k, end, chunk, decoded);
        for (int64_t t = 0; t < rows; t += ROWS) {
            if (k == 0) clear_sums();
            multiply(decoded, SIDE * chunk, packed + t * w->k + SIDE * k, SIDE * w->k, end - k, rows - t > SIDE);
            if (end == w->k) take_sums(w, n, row_of_y(w, y, t), rows - t);
        }
    }
}

/* `rows` rows of x, put into `packed` as tiles, times all of W, of which each thread decodes a chunk into `decoded`. */
INLINE void multiply_rows(const Weight *w, const uint16_t *x, int64_t stride, uint16_t *packed, uint16_t *decoded,
                          void *y, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
    {
        uint16_t *own = decoded + omp_get_thread_num() * OUTPUTS * chunk_of(w, rows);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t += SIDE)
            pack_rows(w->format, x + t * stride, stride, rows - t, w->k, packed + t * w->k);
        _tile_loadconfig(&FULL_TILES);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < w->n; n += OUTPUTS) multiply_outputs(w, n, packed, own, y, rows);
        _tile_release();
    }
}

/* y [rows, N] of x [rows, K] in bf16. Returns 0, or 1 without memory. */
int tiled_product(const Weight *w, const uint16_t *x, int64_t stride, void *y, int64_t rows, int threads) {
    int64_t fitting = larger(1, CACHE / (ROWS * w->k * (int64_t)sizeof *x)), needed = (rows + ROWS - 1) / ROWS;
    int64_t parts = larger(1, (needed + fitting - 1) / fitting); /* alike: for each all of W is decoded */
    int64_t at_once = (needed + parts - 1) / parts * ROWS;
    uint16_t *packed = reserve((at_once + (int64_t)threads * OUTPUTS) * w->k * sizeof *packed);
    if (!packed) return 1;
    for (int64_t t = 0; t < rows; t += at_once)
        multiply_rows(w, x + t * stride, stride, packed, packed + at_once * w->k, row_of_y(w, y, t),
                      smaller(at_once, rows - t), threads);
    return 0;
}

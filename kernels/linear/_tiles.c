/* Products of rows in bf16 with a quantized weight, for x86 processors with AMX BF16 beside what _skinny.c needs.

   y[t, n] = sum over k of x[t, k] * W[n, k]. Sums are fp32, in an order that depends on K alone: a row of y has the same
   bits whatever rows are beside it and however many threads there are.

   A tile of W is 16 outputs by 32 inputs, as `decode_row` writes them; one of x is 16 pairs of inputs by 16 rows; their
   product adds to 16 outputs by 16 rows of fp32. Outputs are decoded once for as many rows of x as the cache holds.

   Legend: T rows of x, N outputs, K inputs (a multiple of STEP).
*/

#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "decode.h"

enum { SIDE = 16, TILE = SIDE * STEP, OUTPUTS = 2 * SIDE, ROWS = 2 * SIDE };
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

/* Shapes of the tile registers, as `ldtilecfg` reads them. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_of_row[16];
    uint8_t rows[16];
} Tiles;

static const Tiles FULL_TILES = {
    .palette = 1, .bytes_of_row = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* Asks the system for the registers, which it gives a process that asks. Returns 0, or 1 where it refuses. */
int permit_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0;
}

INLINE __mmask16 first_lanes(int64_t count) { return count >= SIDE ? 0xffff : (1 << count) - 1; }

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

/* 16 rows of x as tiles [K / STEP, 16 pairs, 16 rows, 2]; what is beyond `rows` is zero. */
INLINE void pack_rows(const uint16_t *x, int64_t stride, int64_t rows, int64_t k, uint16_t *out) {
    for (int64_t c = 0; c < k; c += STEP, out += TILE) {
        __m512i pairs[SIDE];
        SIXTEEN_TIMES(t)
            pairs[t] = t < rows ? _mm512_loadu_si512(x + t * stride + c) : _mm512_setzero_si512();
        transpose(pairs);
        SIXTEEN_TIMES(i) _mm512_store_si512(out + i * STEP, pairs[i]);
    }
}

/* A tile of sums as the first `columns` columns of y. */
INLINE void store_sums(const float *sums, uint16_t *y, int64_t stride, int64_t rows, int64_t columns) {
    __m512i lanes[SIDE];
    SIXTEEN_TIMES(i) lanes[i] = _mm512_load_si512(sums + i * SIDE);
    transpose(lanes);
    for (int64_t t = 0; t < smaller(rows, SIDE); t++)
        _mm256_mask_storeu_epi16(y + t * stride, first_lanes(columns),
                                 (__m256i)_mm512_cvtneps_pbh(_mm512_castsi512_ps(lanes[t])));
}

/* OUTPUTS outputs from n on, decoded into [2, K / STEP, 16, STEP]. */
INLINE void decode_outputs(int format, const Weight *w, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < OUTPUTS; i++) /* beyond the end the last one again */
        decode_row(format, w, smaller(n + i, w->n - 1), OUTPUTS, out + i / SIDE * SIDE * w->k + i % SIDE * STEP, TILE);
}

/* They times ROWS rows, of which `x` are tiles. */
INLINE void multiply(const uint16_t *outputs, const uint16_t *x, int64_t k, uint16_t *y, int64_t stride, int64_t rows,
                     int64_t columns) {
    const uint16_t *second_outputs = outputs + SIDE * k, *second_rows = x + SIDE * k;
    _Alignas(64) float sums[4][SIDE * SIDE];
    int is_wide = rows > SIDE;
    _tile_zero(SUMS_11);
    _tile_zero(SUMS_21);
    _tile_zero(SUMS_12);
    _tile_zero(SUMS_22);
    for (int64_t at = 0; at < SIDE * k; at += TILE) {
        _tile_loadd(OUTPUTS_1, outputs + at, 64);
        _tile_loadd(ROWS_1, x + at, 64);
        _tile_dpbf16ps(SUMS_11, OUTPUTS_1, ROWS_1);
        _tile_loadd(OUTPUTS_2, second_outputs + at, 64);
        _tile_dpbf16ps(SUMS_21, OUTPUTS_2, ROWS_1);
        if (!is_wide) continue;
        _tile_loadd(ROWS_2, second_rows + at, 64);
        _tile_dpbf16ps(SUMS_12, OUTPUTS_1, ROWS_2);
        _tile_dpbf16ps(SUMS_22, OUTPUTS_2, ROWS_2);
    }
    _tile_stored(SUMS_11, sums[0], 64);
    _tile_stored(SUMS_21, sums[1], 64);
    store_sums(sums[0], y, stride, rows, columns);
    if (columns > SIDE) store_sums(sums[1], y + SIDE, stride, rows, columns - SIDE);
    if (!is_wide) return;
    _tile_stored(SUMS_12, sums[2], 64);
    _tile_stored(SUMS_22, sums[3], 64);
    y += SIDE * stride;
    store_sums(sums[2], y, stride, rows - SIDE, columns);
    if (columns > SIDE) store_sums(sums[3], y + SIDE, stride, rows - SIDE, columns - SIDE);
}

/* `rows` rows of x, put into `packed` as tiles, times all of W, put into `decoded` by each thread. */
INLINE void multiply_block(const Weight *w, const uint16_t *x, int64_t stride, uint16_t *packed, uint16_t *decoded,
                           uint16_t *y, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
    {
        uint16_t *outputs = decoded + omp_get_thread_num() * OUTPUTS * w->k;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rows; t += SIDE)
            pack_rows(x + t * stride, stride, rows - t, w->k, packed + t * w->k);
        _tile_loadconfig(&FULL_TILES);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < w->n; n += OUTPUTS) {
            switch (format_of(w)) {
            case NF4: decode_outputs(NF4, w, n, outputs); break;
            case INT4: decode_outputs(INT4, w, n, outputs); break;
            case INT8: decode_outputs(INT8, w, n, outputs); break;
            case FP8: decode_outputs(FP8, w, n, outputs); break;
            case INT4_FROM_MINIMA: decode_outputs(INT4_FROM_MINIMA, w, n, outputs); break;
            case INT8_SIXTEENS: decode_outputs(INT8_SIXTEENS, w, n, outputs); break;
            }
            for (int64_t t = 0; t < rows; t += ROWS)
                multiply(outputs, packed + t * w->k, w->k, y + t * w->n + n, w->n, rows - t, w->n - n);
        }
        _tile_release();
    }
}

/* y [rows, N] of x [rows, K], both bf16. Returns 0, or 1 without memory. */
int tiled_product(const Weight *w, const uint16_t *x, int64_t stride, uint16_t *y, int64_t rows, int threads) {
    int64_t fitting = larger(1, CACHE / (ROWS * w->k * (int64_t)sizeof *x)), needed = (rows + ROWS - 1) / ROWS;
    int64_t at_once = smaller(fitting, needed) * ROWS;
    uint16_t *packed = aligned_alloc(64, (at_once + (int64_t)threads * OUTPUTS) * w->k * sizeof *packed);
    if (!packed) return 1;
    for (int64_t t = 0; t < rows; t += at_once)
        multiply_block(w, x + t * stride, stride, packed, packed + at_once * w->k, y + t * w->n,
                       smaller(at_once, rows - t), threads);
    free(packed);
    return 0;
}

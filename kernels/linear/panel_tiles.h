/* The products of panels.h on x86 processors with AMX, of any number of rows.

   16 words of a panel by 16 outputs are a tile, and so are 16 rows of x by as many words. Of up to 16 rows the panel's three
   parts are multiplied side by side, and rows that nobody wants take no time; of more, two parts by two tiles of rows,
   then the third. Sums begin with k = 0; the bias is added to them: a row of y has the same bits whatever rows are beside
   it.

   Legend: as in panels.h; S steps of 16 words.
*/

#ifndef PANEL_TILES_H
#define PANEL_TILES_H

#include "../common/amx.h"
#include "panels.h"

enum { TILE_WORDS = SIDE * WORDS, PANEL_BYTES = 4 * PANEL_OUTPUTS };
enum { ROWS_A_STEP = 2 };
enum { AT_ONCE = 256 }; /* rows for which a panel is read once: they stay in the second cache */
enum { PACKED_ROWS = 4 * AT_ONCE }; /* so many are packed, then multiplied, which bounds the memory that they take */

INLINE int takes_tiles(int64_t pairs) { return has_tiles() && pairs % WORDS == 0; }

#ifdef __AMX_BF16__

/* For products of so many rows. Registers 0 to 3 have sums or, of up to SIDE rows, rows; 4 to 6 parts of a panel. */
INLINE void begin_tiles(int64_t rows) {
    Tiles tiles = FULL_TILES;
    for (int i = 0; i < 4; i++) tiles.rows[i] = smaller(rows, SIDE);
    _tile_loadconfig(&tiles);
}

INLINE void end_tiles(void) { _tile_release(); }

/* 16 rows of x as tiles [S, SIDE, WORDS]; beyond `rows` whatever was there. */
INLINE void pack_for_tiles(const uint16_t *x, int64_t stride, int64_t pairs, uint32_t *to, int64_t rows) {
    for (int64_t t = 0; t < smaller(rows, SIDE); t++)
        for (int64_t pair = 0; pair < pairs; pair += WORDS)
            _mm512_storeu_si512(to + pair * SIDE + t * WORDS, _mm512_loadu_si512(x + t * stride + 2 * pair));
}

/* The step after this one is wanted soon. */
INLINE void fetch_next(const uint32_t *panel) {
    panel += PANEL_WORDS * TILE_WORDS;
    for (int i = 0; i < PANEL_WORDS * WORDS; i++) _mm_prefetch(panel + i * WORDS, _MM_HINT_T0);
}

/* Sums [PANEL_WORDS, SIDE, WORDS] of `rows` rows, at most SIDE, as columns of y. */
INLINE void store_parts(const float *sums, Columns to, int64_t rows) {
    __mmask16 shown[PANEL_WORDS];
    __m512 start[PANEL_WORDS];
    UNROLLED(int i = 0; i < PANEL_WORDS; i++) {
        shown[i] = lanes_until(to.count, i * WORDS);
        start[i] = _mm512_setzero_ps();
        if (to.bias) start[i] = widen(_mm256_maskz_loadu_epi16(shown[i], to.bias + i * WORDS));
    }
    for (int64_t t = 0; t < smaller(rows, SIDE); t++, sums += WORDS, to.at += to.stride)
        UNROLLED(int i = 0; i < PANEL_WORDS; i++) {
            __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + i * TILE_WORDS), start[i]);
            store_lanes(to.y, to.at + i * WORDS, shown[i], sum, to.keeps_sums);
        }
}

/* Where sums will be stored, in rows so many bytes apart: one fetched so early is there by then. Returns the row behind
   `ROWS_A_STEP` more. */
INLINE const char *fetch_rows(const char *y, int64_t stride) {
    UNROLLED(int i = 0; i < ROWS_A_STEP; i++, y += stride) {
        __builtin_prefetch(y, 1);
        __builtin_prefetch(y + PANEL_OUTPUTS * sizeof(uint16_t) - 1, 1);
    }
    return y;
}

/* Up to SIDE rows, x [S, SIDE, WORDS], times a panel: sums [PANEL_WORDS, SIDE, WORDS]. `is_first`: nobody has read the
   panel before. */
INLINE void sum_parts(const uint32_t *panel, int64_t pairs, const uint32_t *x, float *sums, const int is_first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    for (int64_t pair = 0; pair < pairs; pair += WORDS, panel += PANEL_WORDS * TILE_WORDS, x += TILE_WORDS) {
        _tile_loadd(3, x, 64);
        if (is_first) fetch_next(panel);
        _tile_loadd(4, panel, PANEL_BYTES);
        _tile_dpbf16ps(0, 3, 4);
        _tile_loadd(5, panel + WORDS, PANEL_BYTES);
        _tile_dpbf16ps(1, 3, 5);
        _tile_loadd(6, panel + 2 * WORDS, PANEL_BYTES);
        _tile_dpbf16ps(2, 3, 6);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE_WORDS, 64);
    _tile_stored(2, sums + 2 * TILE_WORDS, 64);
}

/* Two tiles of rows times two parts of a panel: sums [2, PANEL_WORDS, SIDE, WORDS], for rows of y so many bytes apart. */
INLINE void sum_two_parts(
    const uint32_t *panel, int64_t pairs, const uint32_t *x, float *sums, const char *y, int64_t stride,
    const int is_first
) {
    const char *end = y + 2 * SIDE * stride;
    float *second_sums = sums + PANEL_WORDS * TILE_WORDS;
    const uint32_t *second = x + SIDE * pairs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t pair = 0; pair < pairs; pair += WORDS, panel += PANEL_WORDS * TILE_WORDS) {
        _tile_loadd(4, panel, PANEL_BYTES);
        _tile_loadd(6, x + SIDE * pair, 64);
        _tile_dpbf16ps(0, 6, 4);
        _tile_loadd(5, panel + WORDS, PANEL_BYTES);
        _tile_dpbf16ps(1, 6, 5);
        _tile_loadd(7, second + SIDE * pair, 64);
        if (is_first) fetch_next(panel);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 7, 5);
        if (y != end) y = fetch_rows(y, stride);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE_WORDS, 64);
    _tile_stored(2, second_sums, 64);
    _tile_stored(3, second_sums + TILE_WORDS, 64);
}

/* Two or four tiles of rows times the last part: one sum alone would wait for itself. */
INLINE void sum_last_part(const uint32_t *panel, int64_t pairs, const uint32_t *x, float *sums, const int tiles) {
    const int64_t next = SIDE * pairs, apart = PANEL_WORDS * TILE_WORDS;
    panel += 2 * WORDS;
    sums += 2 * TILE_WORDS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t pair = 0; pair < pairs; pair += WORDS, panel += PANEL_WORDS * TILE_WORDS, x += TILE_WORDS) {
        _tile_loadd(4, panel, PANEL_BYTES);
        _tile_loadd(5, x, 64);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, x + next, 64);
        _tile_dpbf16ps(1, 6, 4);
        if (tiles == 2) continue;
        _tile_loadd(7, x + 2 * next, 64);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, x + 3 * next, 64);
        _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + apart, 64);
    if (tiles == 2) return;
    _tile_stored(2, sums + 2 * apart, 64);
    _tile_stored(3, sums + 3 * apart, 64);
}

/* Up to four tiles of rows times a panel. */
INLINE void product_of_four(const uint32_t *panel, int64_t pairs, const uint32_t *x, Columns to, int64_t rows,
                            const int is_first) {
    const int64_t apart = PANEL_WORDS * TILE_WORDS, size = to.keeps_sums ? sizeof(float) : sizeof(uint16_t);
    const char *y = (const char *)to.y + to.at * size;
    int64_t stride = to.stride * size;
    _Alignas(64) float sums[4 * PANEL_WORDS * TILE_WORDS];
    int64_t tiles = (rows + SIDE - 1) / SIDE;
    if (tiles > 1) sum_two_parts(panel, pairs, x, sums, y, stride, is_first);
    if (tiles == 4) {
        sum_two_parts(panel, pairs, x + 2 * SIDE * pairs, sums + 2 * apart, y + 2 * SIDE * stride, stride, 0);
        sum_last_part(panel, pairs, x, sums, 4);
    } else if (tiles > 1) {
        sum_last_part(panel, pairs, x, sums, 2);
    }
    if (tiles % 2)
        sum_parts(panel, pairs, x + (tiles - 1) * SIDE * pairs, sums + (tiles - 1) * apart, is_first && tiles == 1);
    for (int64_t tile = 0; tile < tiles; tile++, to.at += SIDE * to.stride)
        store_parts(sums + tile * apart, to, rows - tile * SIDE);
}

/* `rows` rows of x, as tiles, times a panel. */
static void product_by_tiles(const uint32_t *panel, int64_t pairs, const uint32_t *x, Columns to, int64_t rows) {
    product_of_four(panel, pairs, x, to, smaller(rows, 4 * SIDE), 1);
    for (int64_t t = 4 * SIDE; t < rows; t += 4 * SIDE) {
        to.at += 4 * SIDE * to.stride;
        product_of_four(panel, pairs, x + t * pairs, to, smaller(rows - t, 4 * SIDE), 0);
    }
}

#else

INLINE void begin_tiles(int64_t rows) {}
INLINE void end_tiles(void) {}
INLINE void pack_for_tiles(const uint16_t *x, int64_t stride, int64_t pairs, uint32_t *to, int64_t rows) {}
INLINE void sum_parts(const uint32_t *panel, int64_t pairs, const uint32_t *x, float *sums, const int is_first) {}
INLINE void product_by_tiles(const uint32_t *panel, int64_t pairs, const uint32_t *x, Columns to, int64_t rows) {}

#endif

#endif

/* Products of pairs by AMX for `_prefill.c`, whose tiles of rows are three of the registers' side by side. */

#ifndef PREFILL_TILES_H
#define PREFILL_TILES_H

#include <stdbool.h>

#include "../common/amx.h"

#define UNROLLED_16 _Pragma("GCC unroll 16") for

#if defined(__AMX_BF16__) && defined(__AVX512F__)

INLINE void begin_tiles(void) { _tile_loadconfig(&FULL_TILES); }
INLINE void end_tiles(void) { _tile_release(); }

/* sums [SIDE, 3 · SIDE] = left [SIDE, words] · right [words, 3 · SIDE], or more of them. A row of `left` begins so many
   bytes behind the one before; `words` is a multiple of SIDE. */
INLINE void multiply_tiles(
    const float *left, int64_t bytes, const float *right, int64_t words, float *sums, const bool more
) {
    enum { ROW = 3 * SIDE, ROW_BYTES = 4 * ROW };
    if (more) {
        _tile_loadd(0, sums, ROW_BYTES);
        _tile_loadd(1, sums + SIDE, ROW_BYTES);
        _tile_loadd(2, sums + 2 * SIDE, ROW_BYTES);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
    }
    for (int64_t word = 0; word < words; word += SIDE, right += SIDE * ROW) {
        _tile_loadd(3, left + word, bytes);
        _tile_loadd(4, right, ROW_BYTES);
        _tile_dpbf16ps(0, 3, 4);
        _tile_loadd(5, right + SIDE, ROW_BYTES);
        _tile_dpbf16ps(1, 3, 5);
        _tile_loadd(6, right + 2 * SIDE, ROW_BYTES);
        _tile_dpbf16ps(2, 3, 6);
    }
    _tile_stored(0, sums, ROW_BYTES);
    _tile_stored(1, sums + SIDE, ROW_BYTES);
    _tile_stored(2, sums + 2 * SIDE, ROW_BYTES);
}

/* Turns SIDE by SIDE words: where bit b of a row's and a lane's number differ, they change places, bit after bit. */
INLINE void turn_words(const float *from, int64_t from_row, float *to, int64_t to_row) {
    __m512i rows[SIDE], lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    UNROLLED_16(int i = 0; i < SIDE; i++) rows[i] = _mm512_loadu_si512(from + i * from_row);
    UNROLLED_16(int bit = 1; bit < SIDE; bit *= 2) {
        __m512i bits = _mm512_set1_epi32(bit), low = _mm512_andnot_si512(bits, lanes);
        __mmask16 high = _mm512_test_epi32_mask(lanes, bits);
        /* Of the first row lanes without the bit, then the second's; of lanes with it the same. */
        __m512i firsts = _mm512_mask_or_epi32(low, high, low, _mm512_set1_epi32(SIDE));
        __m512i seconds = _mm512_or_si512(firsts, bits);
        UNROLLED_16(int i = 0; i < SIDE; i++) {
            if (i & bit) continue;
            __m512i first = rows[i], second = rows[i | bit];
            rows[i] = _mm512_permutex2var_epi32(first, firsts, second);
            rows[i | bit] = _mm512_permutex2var_epi32(first, seconds, second);
        }
    }
    UNROLLED_16(int i = 0; i < SIDE; i++) _mm512_storeu_si512(to + i * to_row, rows[i]);
}

#else

INLINE void begin_tiles(void) {}
INLINE void end_tiles(void) {}
INLINE void multiply_tiles(
    const float *left, int64_t bytes, const float *right, int64_t words, float *sums, const bool more
) {}
INLINE void turn_words(const float *from, int64_t from_row, float *to, int64_t to_row) {}

#endif

#endif

/* Words that are two bf16 numbers, the first in the lower half, beside words that are one fp32 number.

   HAS_PAIRS: whether the processor multiplies pairs, in registers of WIDTH words.
*/

#ifndef PAIRS_H
#define PAIRS_H

#include <stdbool.h>

#include "wide.h"

#if defined(__AVX512BF16__) && WIDTH == 16

#include <immintrin.h>

enum { HAS_PAIRS = true };

INLINE Wide plus_pairs(Wide sum, Wide a, float b) {
    return (Wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_ps(b));
}

/* To the nearest bf16, ties to even. */
INLINE Wide paired(Wide first, Wide second) {
    static const int16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (Wide)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), halves);
}

/* Of 8 neighbours each: the first of either, the second, and so on. */
INLINE void put_in_pairs(const uint16_t *first, const uint16_t *second, void *to) {
    __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)first));
    __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)second));
    _mm256_storeu_si256(to, _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
}

#else

enum { HAS_PAIRS = false };

INLINE Wide plus_pairs(Wide sum, Wide a, float b) { return sum; }
INLINE Wide paired(Wide first, Wide second) { return first; }
INLINE void put_in_pairs(const uint16_t *first, const uint16_t *second, void *to) {}

#endif

INLINE Wide first_of_pairs(Wide pairs) { return (Wide)((Lanes)pairs << 16); }
INLINE Wide second_of_pairs(Wide pairs) { return (Wide)((Lanes)pairs & (int32_t)0xffff0000); }

/* sum + a · b of numbers, or of pairs: both products of each. */
INLINE Wide plus_product(bool in_pairs, Wide sum, Wide a, float b) {
    return in_pairs ? plus_pairs(sum, a, b) : sum + a * b;
}

#endif

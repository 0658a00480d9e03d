/* What the C sources of all folders share: registers of 16 fp32 lanes. */

#ifndef LANES_H
#define LANES_H

#include <immintrin.h>
#include <stdint.h>

#include "inline.h"

/* The sums of the 16 lanes of four registers. */
INLINE __m128 sums_of_lanes(const __m512 *wide) {
    __m128 part[4];
    UNROLLED(int i = 0; i < 4; i++) {
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(wide[i]), _mm512_extractf32x8_ps(wide[i], 1));
        part[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    _MM_TRANSPOSE4_PS(part[0], part[1], part[2], part[3]);
    return _mm_add_ps(_mm_add_ps(part[0], part[1]), _mm_add_ps(part[2], part[3]));
}

/* 16 bf16 numbers as fp32. */
INLINE __m512 widen(__m256i bits) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)); }

#endif

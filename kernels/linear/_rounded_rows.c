/* Rows of bf16 as the numbers that they are rounded to in 8 bits. */

#include "round.h"

enum { MANY_ROWS = 64 };

/* s * q of neighbours in bf16 that share a scale, in bf16. */
INLINE void round_group(const uint16_t *x, int64_t count, uint16_t *out) {
    float scale = scale_of(BF16, x, count);
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    __m512 scales = _mm512_set1_ps(scale), lowest = _mm512_set1_ps(-128), highest = _mm512_set1_ps(127);
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + i)));
        __m512 scaled = _mm512_div_ps(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)), scales);
        __m512i q = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(scaled, lowest), highest));
        __m256bh y = _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_cvtepi32_ps(q), scales));
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)y);
    }
#else
    for (int64_t i = 0; i < count; i += LANES) {
        Floats q = to_floats(round_lanes(load(BF16, x + i), scale));
        store(BF16, out + i, rounded(BF16, times(q, every(scale))));
    }
#endif
}

/* s * q of rows of bf16, in bf16, of which `group` neighbours share a scale. */
void rounded_rows(const uint16_t *x, int64_t stride, int64_t k, int64_t group, uint16_t *out, int64_t rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > MANY_ROWS)
    for (int64_t t = 0; t < rows; t++)
        for (int64_t start = 0; start < k; start += group)
            round_group(x + t * stride + start, group, out + t * k + start);
}

/* How numbers are rounded to 8 bits, as `round_activations` of kernels/linear/rounded.py has it, for x86 processors with
   AVX2 and FMA. */

#ifndef ROUND_H
#define ROUND_H

#include "../common/floats.h"

/* The largest magnitude; NaN beside a NaN, which a maximum would forget. */
INLINE float largest(int dtype, const void *x, int64_t count) {
    __m256 most = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f), broken = _mm256_setzero_ps();
    for (int64_t i = 0; i < count; i += LANES) {
        __m256 lanes = load(dtype, at(dtype, x, i));
        broken = _mm256_or_ps(broken, _mm256_cmp_ps(lanes, lanes, _CMP_UNORD_Q));
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, lanes));
    }
    if (_mm256_movemask_ps(broken)) return __builtin_nanf("");
    float lanes[LANES], found = 0;
    _mm256_storeu_ps(lanes, most);
    UNROLLED(int i = 0; i < LANES; i++) found = lanes[i] > found ? lanes[i] : found;
    return found;
}

/* s of neighbours, and below q. */
INLINE float scale_of(int dtype, const void *x, int64_t count) {
    float scale = largest(dtype, x, count) / 127.5f;
    return scale < 1e-30f ? 1e-30f : scale; /* NaN stays */
}

INLINE __m256i round_lanes(__m256 x, float scale) {
    __m256 scaled = _mm256_div_ps(x, _mm256_set1_ps(scale));
    return _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(scaled, _mm256_set1_ps(-128)), _mm256_set1_ps(127)));
}

/* q of neighbours, and its sum. */
INLINE int32_t round_neighbours(const float *x, float scale, const int count, int32_t *q) {
    int32_t sum = 0;
    for (int i = 0; i < count; i += LANES)
        _mm256_storeu_si256((__m256i *)(q + i), round_lanes(_mm256_loadu_ps(x + i), scale));
    for (int i = 0; i < count; i++) sum += q[i];
    return sum;
}

#endif

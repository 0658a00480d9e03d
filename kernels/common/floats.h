/* Rows of fp32 or bf16 numbers as 8 fp32 lanes at a time, for x86 processors with AVX2 and FMA. */

#ifndef FLOATS_H
#define FLOATS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "inline.h"

#define LANES 8

/* In the order of DTYPES in kernels/common/floats_cpu.py. */
enum { FP32, BF16 };

INLINE int64_t size_of(int dtype) { return dtype == FP32 ? 4 : 2; }

/* Element `i` of a row. */
INLINE const void *at(int dtype, const void *row, int64_t i) { return (const char *)row + i * size_of(dtype); }

INLINE __m256 load(int dtype, const void *from) {
    if (dtype == FP32) return _mm256_loadu_ps(from);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16));
}

/* As the dtype holds it: bf16 to the nearest, ties to even. */
INLINE __m256 rounded(int dtype, __m256 x) {
    if (dtype == FP32) return x;
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256 nearest = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff0000)));
    __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(nearest, quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

/* Of numbers that are `rounded`. */
INLINE void store(int dtype, void *to, __m256 x) {
    if (dtype == FP32) {
        _mm256_storeu_ps(to, x);
        return;
    }
    __m256i halves = _mm256_srli_epi32(_mm256_castps_si256(x), 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 8);
    _mm_storeu_si128(to, _mm256_castsi256_si128(packed));
}

/* The same of the first `count` lanes; the others are zero. */
INLINE __m256 load_some(int dtype, const void *from, int64_t count) {
    if (count >= LANES) return load(dtype, from);
    char whole[LANES * 4] = {0};
    memcpy(whole, from, count * size_of(dtype));
    return load(dtype, whole);
}

INLINE void store_some(int dtype, void *to, __m256 x, int64_t count) {
    char whole[LANES * 4];
    store(dtype, count >= LANES ? to : whole, x);
    if (count < LANES) memcpy(to, whole, count * size_of(dtype));
}

INLINE float sum_of_lanes(__m256 wide) {
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
}

/* 2^x, to 2e-7; 0 below 2^-126, no more than 2^126, and NaN of NaN. */
INLINE __m256 exp2_lanes(__m256 x) {
    __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-126), _CMP_LT_OQ);
    x = _mm256_min_ps(_mm256_set1_ps(126), x); /* of a NaN the second operand */
    __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_sub_ps(x, whole), y = _mm256_set1_ps(1.5403530e-4f);
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1.3333558e-3f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(9.6181291e-3f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(5.5504109e-2f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(2.4022651e-1f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(6.9314718e-1f));
    y = _mm256_fmadd_ps(y, f, _mm256_set1_ps(1));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(tiny, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

/* 1 / rms of a row, which holds `size` numbers. */
INLINE float inverse_rms(int dtype, const void *row, int64_t size, float eps) {
    __m256 sums[4];
    UNROLLED(int i = 0; i < 4; i++) sums[i] = _mm256_setzero_ps();
    for (int64_t c = 0; c < size; c += 4 * LANES)
        UNROLLED(int i = 0; i < 4; i++) {
            int64_t left = size - c - i * LANES;
            if (left <= 0) break;
            __m256 x = load_some(dtype, at(dtype, row, c + i * LANES), left);
            sums[i] = _mm256_fmadd_ps(x, x, sums[i]);
        }
    __m256 sum = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3]));
    return 1 / __builtin_sqrtf(sum_of_lanes(sum) / size + eps);
}

/* x · factor, rounded, times weight, rounded. */
INLINE __m256 normalized(int dtype, __m256 x, float factor, __m256 weight) {
    return rounded(dtype, _mm256_mul_ps(rounded(dtype, _mm256_mul_ps(x, _mm256_set1_ps(factor))), weight));
}

#endif

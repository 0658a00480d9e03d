/* Eight lanes of 32 bits, for x86 processors with AVX2, FMA and F16C. What each function does is said in eight_lanes.h. */

#include <immintrin.h>

typedef __m256 Floats;
typedef __m256i Ints;

INLINE Floats every(float x) { return _mm256_set1_ps(x); }
INLINE Floats floats_at(const float *from) { return _mm256_loadu_ps(from); }
INLINE void put_floats(float *to, Floats x) { _mm256_storeu_ps(to, x); }

INLINE Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE Floats times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats lesser(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Floats greater(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats magnitudes(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

INLINE Floats to_whole(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE Ints to_ints(Floats x) { return _mm256_cvtps_epi32(x); }
INLINE Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
INLINE Ints bits_of(Floats x) { return _mm256_castps_si256(x); }
INLINE Floats of_bits(Ints x) { return _mm256_castsi256_ps(x); }

INLINE float sum_of_lanes(Floats wide) {
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
}

INLINE Ints below(Floats a, Floats b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
INLINE Ints is_nan(Floats x) { return bits_of(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
INLINE Floats either(Ints mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, of_bits(mask)); }
INLINE Floats zero_where(Ints mask, Floats x) { return _mm256_andnot_ps(of_bits(mask), x); }
INLINE Ints either_mask(Ints a, Ints b) { return _mm256_or_si256(a, b); }
INLINE int any(Ints mask) { return _mm256_movemask_ps(of_bits(mask)) != 0; }

INLINE Ints every_int(int32_t x) { return _mm256_set1_epi32(x); }
INLINE void put_ints(int32_t *to, Ints x) { _mm256_storeu_si256((__m256i *)to, x); }
INLINE Ints sum_of_ints(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Ints difference_of_ints(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
INLINE Ints common_bits(Ints a, Ints b) { return _mm256_and_si256(a, b); }
INLINE Ints shifted_left(Ints x, const int bits) { return _mm256_slli_epi32(x, bits); }
INLINE Ints shifted_right(Ints x, const int bits) { return _mm256_srli_epi32(x, bits); }

INLINE Ints ints_of_halves(const uint16_t *from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}
INLINE void put_halves(uint16_t *to, Ints x) {
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 8);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
}

INLINE Ints ints_of_bytes(const uint8_t *from) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)); }
INLINE Ints ints_of_signed(const uint8_t *from) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)); }

/* Sign, exponent and mantissa at their places in fp16, subnormal numbers too. */
INLINE Floats e4m3_by_256(const uint8_t *from) {
    __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16((short)0xbf80)));
}

INLINE float fp16_at(const void *from) { return _cvtsh_ss(*(const uint16_t *)from); }

INLINE void split_fp16(Ints pairs, Floats *first, Floats *second) {
    __m256i low = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)), high = _mm256_srli_epi32(pairs, 16);
    __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
    *first = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    *second = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}

INLINE Floats looked_up(const float *table, Ints codes) {
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), codes);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

INLINE void put_in_turns(float *to, Floats even, Floats odd) {
    __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
    _mm256_storeu_ps(to, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps(to + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

/* 16 bytes of each of eight rows as 4 registers, which have 4 bytes of every row. */
INLINE void fours_of_rows(const uint8_t *from, int64_t stride, Ints *out) {
    __m256i rows[4], pairs[4];
    UNROLLED(int i = 0; i < 4; i++)
        rows[i] = _mm256_loadu2_m128i((const __m128i *)(from + (i + 4) * stride), (const __m128i *)(from + i * stride));
    UNROLLED(int i = 0; i < 2; i++) {
        pairs[i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[i + 2] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    UNROLLED(int i = 0; i < 2; i++) {
        out[2 * i] = _mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]);
        out[2 * i + 1] = _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]);
    }
}

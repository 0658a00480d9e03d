/* Weights of all formats as bf16, 32 neighbours of a row at a time, for x86 processors with AVX-512 BF16 and VBMI.

   They are `dequantize(torch.bfloat16)` to the bit: products of code and scale in fp32, rounded once (to 0 below 1.2e-38).
*/

#ifndef DECODE_H
#define DECODE_H

#include <immintrin.h>
#include <stdint.h>

#include "weights.h"

#define STEP 32 /* weights decoded at once */

/* INT8 with a scale for 16 codes, beside the formats of weights.h: its groups are taken as 32 codes with two scales. */
enum { INT8_SIXTEENS = ASYMMETRIC + 1 };

INLINE int format_of(const Weight *w) { return w->format == INT8 && w->group == STEP / 2 ? INT8_SIXTEENS : w->format; }

INLINE int64_t group_of(int format, const Weight *w) { return format == INT8_SIXTEENS ? STEP : w->group; }

static const float INTEGERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* What the codes of a group stand for, fp32: in four bits 16 values, in eight the scale in every lane; of INT8_SIXTEENS
   the first scale in the even lanes, the second in the odd ones. */
INLINE __m512 group_values(int format, const Weight *w, int64_t index) {
    if (format == INT8_SIXTEENS) {
        __m512 first = _mm512_set1_ps(number_of(w, w->scales, 2 * index));
        return _mm512_mask_blend_ps(0xaaaa, first, _mm512_set1_ps(number_of(w, w->scales, 2 * index + 1)));
    }
    __m512 scale = _mm512_set1_ps(number_of(w, w->scales, index));
    if (format == INT8) return scale;
    if (format == FP8) return _mm512_mul_ps(scale, _mm512_set1_ps(256)); /* it is read as fp16 of 1/256 of its value */
    __m512 values = _mm512_loadu_ps(format == NF4 ? NF4_VALUES : INTEGERS);
    if (format == INT4_FROM_MINIMA)
        return _mm512_fmadd_ps(values, scale, _mm512_set1_ps(number_of(w, w->minima, index)));
    if (format == INT4) values = _mm512_sub_ps(values, _mm512_set1_ps(w->zeros ? w->zeros[index] : 8));
    return _mm512_mul_ps(values, scale);
}

/* The same as `decode` needs it: 16 values become bf16, twice, for a look-up of 32 codes. */
INLINE __m512i group_key(int format, __m512 values) {
    if (!has_four_bits(format)) return _mm512_castps_si512(values);
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(values);
    return _mm512_inserti64x4(_mm512_castsi256_si512(rounded), rounded, 1);
}

/* 32 codes of four bits, each the lowest bits of 16; other codes are above. A look-up takes the lowest 4 bits, or 5 in
   a table of 32 values, whose halves are equal. */
INLINE __m512i code_starts(int format, const uint8_t *codes) {
    /* Two bytes come into each 64 bits, which are shifted four ways. */
    __m512i pairs = _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)codes));
    int64_t high_nibble_first = 0x0008000c00000004, low_nibble_first = 0x000c000800040000;
    return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(format == NF4 ? high_nibble_first : low_nibble_first), pairs);
}

/* 32 codes of eight bits times their scale, fp32. */
INLINE void scale_8bit(int format, const uint8_t *codes, __m512 scale, __m512 *low, __m512 *high) {
    if (format != FP8) {
        *low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
        *high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes + 1)));
    } else {
        /* Sign, exponent and mantissa at their places in fp16, subnormal numbers too. */
        __m512i shifted = _mm512_slli_epi16(_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes)), 7);
        __m512i halves = _mm512_and_si512(shifted, _mm512_set1_epi16((short)0xbf80));
        *low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        *high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    }
    int is_paired = format == INT8_SIXTEENS;
    *low = _mm512_mul_ps(*low, is_paired ? _mm512_moveldup_ps(scale) : scale);
    *high = _mm512_mul_ps(*high, is_paired ? _mm512_movehdup_ps(scale) : scale);
}

/* 32 neighbours of a row of W, bf16. */
INLINE __m512i decode(int format, const uint8_t *codes, __m512i key) {
    if (has_four_bits(format)) return _mm512_permutexvar_epi16(code_starts(format, codes), key);
    __m512 low, high;
    scale_8bit(format, codes, _mm512_castsi512_ps(key), &low, &high);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* A row of W: each STEP neighbours lie `stride` numbers after those before them. `next` rows on another is wanted soon. */
INLINE void decode_row(int format, const Weight *w, int64_t n, int64_t next, uint16_t *out, int64_t stride) {
    int64_t size = group_of(format, w), groups = (w->k + size - 1) / size, k = 0;
    const uint8_t *codes = w->codes + n * bytes_of(format, w->k);
    int64_t ahead = next * bytes_of(format, w->k);
    for (int64_t group = 0; group < groups; group++) {
        __m512i key = group_key(format, group_values(format, w, n * groups + group));
        for (int64_t end = smaller(k + size, w->k); k < end; k += STEP, out += stride) {
            const uint8_t *here = codes + bytes_of(format, k);
            _mm_prefetch(here + ahead, _MM_HINT_T0);
            _mm512_storeu_si512(out, decode(format, here, key));
        }
    }
}

#endif

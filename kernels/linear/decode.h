/* Weights of all formats as bf16, 32 neighbours of a row at a time, for x86 processors with AVX-512 BF16 and VBMI.

   They are `dequantize(torch.bfloat16)` to the bit: products of code and scale in fp32, rounded once (to 0 below 1.2e-38).
*/

#ifndef DECODE_H
#define DECODE_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "weights.h"

enum { STEP = 32, BLOCK = 16 }; /* weights decoded at once; groups whose constants are read at once */

/* INT8 with a scale for 16 codes, beside the formats of weights.h: its groups are taken as 32 codes with two scales. */
enum { INT8_SIXTEENS = ASYMMETRIC + 1 };

INLINE int format_of(const Weight *w) { return w->format == INT8 && w->group == STEP / 2 ? INT8_SIXTEENS : w->format; }

INLINE int64_t group_of(int format, const Weight *w) { return format == INT8_SIXTEENS ? STEP : w->group; }

/* So many groups have one key: in four bits at least two steps. */
INLINE int64_t groups_of_key(int format, const Weight *w) { return has_four_bits(format) && w->group == STEP ? 2 : 1; }

/* Of BLOCK groups of a row of W. In memory, since a number reaches all lanes of a register from there at no cost. */
typedef struct {
    float scales[2 * BLOCK]; /* of INT8_SIXTEENS two a group, else one */
    float shifts[BLOCK];     /* minima, or zeros of INT4 */
} Constants;

static const float INTEGERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

INLINE __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1; }

/* The first `count` numbers from `index` on, at most 16, fp32; then zeros. */
INLINE __m512 numbers_of(const Weight *w, const void *numbers, int64_t index, int64_t count) {
    const char *place = place_of(w, numbers, index);
    if (!w->is_half) return _mm512_maskz_loadu_ps(first_lanes(count), place);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), place));
}

/* Those of row n from a group on; beyond its last one zeros. `next` rows on they are wanted soon. */
INLINE void read_constants(int format, const Weight *w, int64_t n, int64_t group, int64_t next, Constants *out) {
    int64_t size = group_of(format, w), groups = (w->k + size - 1) / size, scales = format == INT8_SIXTEENS ? 2 : 1;
    int64_t index = n * groups + group, count = groups - group;
    _mm_prefetch(place_of(w, w->scales, scales * (index + next * groups)), _MM_HINT_T0);
    __m512 first = numbers_of(w, w->scales, scales * index, scales * count);
    if (format == FP8) first = _mm512_mul_ps(first, _mm512_set1_ps(256)); /* it is read as fp16 of 1/256 of its value */
    _mm512_storeu_ps(out->scales, first);
    if (format == INT8_SIXTEENS)
        _mm512_storeu_ps(out->scales + BLOCK, numbers_of(w, w->scales, 2 * index + BLOCK, 2 * count - BLOCK));
    if (format == INT4_FROM_MINIMA) {
        _mm_prefetch(place_of(w, w->minima, index + next * groups), _MM_HINT_T0);
        _mm512_storeu_ps(out->shifts, numbers_of(w, w->minima, index, count));
    }
    if (format == INT4) {
        __m512i zeros = _mm512_set1_epi32(8);
        if (w->zeros) zeros = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(first_lanes(count), w->zeros + index));
        _mm512_storeu_ps(out->shifts, _mm512_cvtepi32_ps(zeros));
    }
}

/* The 16 numbers that four bits stand for in a group, fp32. */
INLINE __m512 group_values(int format, const Constants *constants, int64_t group) {
    __m512 scale = _mm512_set1_ps(constants->scales[group]), shift = _mm512_set1_ps(constants->shifts[group]);
    if (format == NF4) return _mm512_mul_ps(_mm512_loadu_ps(NF4_VALUES), scale);
    __m512 values = _mm512_loadu_ps(INTEGERS);
    if (format == INT4_FROM_MINIMA) return _mm512_fmadd_ps(values, scale, shift);
    return _mm512_mul_ps(_mm512_sub_ps(values, shift), scale);
}

/* What `decode` needs to know of a group and the `last` one, which may be the same: in four bits their numbers in
   bf16, those for even steps below those for odd ones; in eight the scale in every lane; of INT8_SIXTEENS the first
   scale in the even lanes, the second in the odd ones. */
INLINE __m512i group_key(int format, const Constants *constants, int64_t group, int64_t last) {
    if (has_four_bits(format))
        return (__m512i)_mm512_cvtne2ps_pbh(group_values(format, constants, last),
                                            group_values(format, constants, group));
    if (format != INT8_SIXTEENS) return _mm512_castps_si512(_mm512_set1_ps(constants->scales[group]));
    double pair;
    memcpy(&pair, constants->scales + 2 * group, sizeof pair);
    return _mm512_castpd_si512(_mm512_set1_pd(pair));
}

/* 32 codes of four bits in mixed order, each the lowest bits of 16; other codes are above. */
INLINE __m512i code_starts(int format, const uint8_t *codes) {
    /* All of them come into each 128 bits, where 16 bits have four; those are shifted by a different one in each. */
    __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)codes));
    const int64_t four = 0x0004000400040004; /* times one, in all 16 bits of 64 */
    int64_t first = format == NF4 ? four : 0, second = four - first; /* of NF4 the high half of a byte is first */
    int64_t third = first + 2 * four, last = second + 2 * four;
    return _mm512_srlv_epi16(all, _mm512_setr_epi64(first, first, second, second, third, third, last, last));
}

/* 32 numbers in mixed order: every fourth from the first on, then from the second on and so on. So `decode` gives
   those of four bits; of eight they are as they were. */
INLINE __m512i mixed(int format, __m512i numbers) {
    if (!has_four_bits(format)) return numbers;
    const __m512i order = _mm512_set_epi16(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2, 29, 25, 21, 17,
                                           13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    return _mm512_permutexvar_epi16(order, numbers);
}

/* Such numbers in their own order. */
INLINE __m512i unmixed(int format, __m512i numbers) {
    if (!has_four_bits(format)) return numbers;
    const __m512i order = _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3,
                                           26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
    return _mm512_permutexvar_epi16(order, numbers);
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

/* 32 neighbours of a row of W in mixed order, bf16; an even or an odd step of their key. */
INLINE __m512i decode(int format, const uint8_t *codes, __m512i key, int is_odd) {
    if (has_four_bits(format)) {
        const __m512i code = _mm512_set1_epi16(15);
        const int and_then_or = 0xea;
        __m512i upper = _mm512_set1_epi16(is_odd ? 16 : 0);
        __m512i index = _mm512_ternarylogic_epi64(code_starts(format, codes), code, upper, and_then_or);
        return _mm512_permutexvar_epi16(index, key);
    }
    __m512 low, high;
    scale_8bit(format, codes, _mm512_castsi512_ps(key), &low, &high);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* Inputs `start` to `stop` of a row of W: each STEP neighbours, mixed or in order, lie `stride` numbers after those
   before them. `start` is a multiple of two steps. `next` rows on another row is wanted soon. */
INLINE void decode_row(int format, const Weight *w, int64_t n, int64_t start, int64_t stop, int64_t next, uint16_t *out,
                       int64_t stride, const int is_mixed) {
    int64_t size = group_of(format, w), together = groups_of_key(format, w), k = start;
    int64_t ahead = next * bytes_of(format, w->k);
    const uint8_t *codes = w->codes + n * bytes_of(format, w->k) + bytes_of(format, start);
    Constants constants;
    for (int64_t first = start / size; k < stop; first += BLOCK) {
        read_constants(format, w, n, first, next, &constants);
        for (int64_t group = 0; group < BLOCK && k < stop; group += together) {
            __m512i key = group_key(format, &constants, group, group + together - 1);
            int64_t end = smaller((first + group + together) * size, stop);
            for (; k < end; k += 2 * STEP)
                UNROLLED(int i = 0; i < 2; i++) {
                    if (i && k + STEP == end) break;
                    _mm_prefetch(codes + ahead, _MM_HINT_T0);
                    __m512i weights = decode(format, codes, key, i);
                    _mm512_storeu_si512(out, is_mixed ? weights : unmixed(format, weights));
                    codes += bytes_of(format, STEP);
                    out += stride;
                }
            k = end;
        }
    }
}

#endif

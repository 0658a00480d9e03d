/* Products of a few fp32 rows with a quantized weight, and its rows expanded, for x86 processors with AVX2, FMA and F16C.

   y[t, n] = sum over k of x[t, k] * W[n, k], where W is `dequantize(torch.float32)` to the bit. Sums are fp32, in an order
   that depends on K alone: a row of y has the same bits whatever rows are beside it and however many threads there are.

   Weights are read as they are stored (kernels/linear/quantization.py), once from memory for all rows of x. In registers 8
   neighbours of a row become fp32 at a time, and a sum has 8 lanes until its end.

   Legend: N outputs, K inputs (a multiple of 32), G groups of a row of W; a tile: TOKENS rows of x, OUTPUTS rows of W.
*/

#include <immintrin.h>

#include "weights.h"

#define STEP 32 /* weights decoded between two looks at the clock of groups */
#define LANES 8

/* What the codes of a group stand for: (code - zero) * scale, or a value of the table times the scale, plus minimum. */
typedef struct {
    __m256 scale, minimum;
    __m256i zero;
} Group;

INLINE Group group_of(int format, const Weight *w, int64_t index) {
    float scale = number_of(w, w->scales, index);
    if (format == FP8) scale *= 256; /* it is read as fp16 of 1/256 of its value */
    float minimum = format == INT4_FROM_MINIMA ? number_of(w, w->minima, index) : 0;
    int zero = format != INT4 ? 0 : w->zeros ? w->zeros[index] : 8;
    return (Group){_mm256_set1_ps(scale), _mm256_set1_ps(minimum), _mm256_set1_epi32(zero)};
}

/* The values of NF4 at 8 codes. */
INLINE __m256 nf4_values(__m256i codes) {
    __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NF4_VALUES), codes);
    __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(NF4_VALUES + LANES), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

/* 8 codes, a byte each, as the numbers that they stand for. */
INLINE __m256 values_of(int format, __m128i bytes, Group group) {
    __m256 numbers;
    if (format == NF4) {
        numbers = nf4_values(_mm256_cvtepu8_epi32(bytes));
    } else if (format == FP8) {
        /* Sign, exponent and mantissa at their places in fp16, subnormal numbers too. */
        __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
        numbers = _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16((short)0xbf80)));
    } else if (format == INT4_FROM_MINIMA) {
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), group.scale, group.minimum);
    } else {
        __m256i codes = format == INT8 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
        numbers = _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, group.zero));
    }
    return _mm256_mul_ps(numbers, group.scale);
}

/* 16 codes from the `half` of 32 neighbours, a byte each. */
INLINE __m128i bytes_of_half(int format, const uint8_t *codes, int half) {
    if (!has_four_bits(format)) return _mm_loadu_si128((const __m128i *)codes + half);
    __m128i pairs = _mm_loadu_si128((const __m128i *)codes), mask = _mm_set1_epi8(15);
    __m128i low = _mm_and_si128(pairs, mask), high = _mm_and_si128(_mm_srli_epi16(pairs, 4), mask);
    if (format == NF4) return half ? _mm_unpackhi_epi8(high, low) : _mm_unpacklo_epi8(high, low);
    return half ? _mm_unpackhi_epi8(low, high) : _mm_unpacklo_epi8(low, high);
}

INLINE float sum_of_lanes(__m256 wide) {
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(wide), _mm256_extractf128_ps(wide, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
}

/* OUTPUTS columns of y from n on, of TOKENS rows of x, [K / 32, TOKENS, 32]; the first `rows` of them are stored. */
INLINE void tile(int format, const Weight *w, int64_t n, const float *x, float *y, int64_t rows, const int TOKENS,
                 const int OUTPUTS) {
    int64_t groups = (w->k + w->group - 1) / w->group, bytes = bytes_of(format, w->k), k = 0;
    int64_t output[4];
    __m256 sums[4][4];
    UNROLLED(int i = 0; i < OUTPUTS; i++) {
        output[i] = smaller(n + i, w->n - 1); /* beyond the end the last one again */
        UNROLLED(int t = 0; t < TOKENS; t++) sums[t][i] = _mm256_setzero_ps();
    }
    for (int64_t index = 0; index < groups; index++) {
        Group group[4];
        UNROLLED(int i = 0; i < OUTPUTS; i++) group[i] = group_of(format, w, output[i] * groups + index);
        for (int64_t end = smaller(k + w->group, w->k); k < end; k += STEP)
            UNROLLED(int half = 0; half < 2; half++) {
                UNROLLED(int i = 0; i < OUTPUTS; i++) {
                    const uint8_t *here = w->codes + output[i] * bytes + bytes_of(format, k);
                    __m128i codes = bytes_of_half(format, here, half);
                    __m256 first = values_of(format, codes, group[i]);
                    __m256 second = values_of(format, _mm_srli_si128(codes, LANES), group[i]);
                    UNROLLED(int t = 0; t < TOKENS; t++) {
                        const float *inputs = x + k * TOKENS + t * STEP + half * 2 * LANES;
                        sums[t][i] = _mm256_fmadd_ps(_mm256_loadu_ps(inputs), first, sums[t][i]);
                        sums[t][i] = _mm256_fmadd_ps(_mm256_loadu_ps(inputs + LANES), second, sums[t][i]);
                    }
                }
            }
    }
    UNROLLED(int t = 0; t < TOKENS; t++) {
        if (t >= rows) break;
        UNROLLED(int i = 0; i < OUTPUTS; i++) y[t * w->n + output[i]] = sum_of_lanes(sums[t][i]);
    }
}

/* How many outputs a tile has: their sums and what a step needs beside them fit the 16 registers. */
INLINE int outputs_of(int64_t tokens) { return tokens == 4 ? 2 : 4; }

INLINE void tile_of(int format, const Weight *w, int64_t n, const float *x, float *y, int64_t rows, int64_t tokens) {
    if (tokens == 1)
        tile(format, w, n, x, y, rows, 1, outputs_of(1));
    else
        tile(format, w, n, x, y, rows, 4, outputs_of(4));
}

/* y [rows, N] of x [⌈rows / tokens⌉, K / 32, tokens, 32], both fp32; `tokens` is 1 or 4. */
void skinny_product(const Weight *w, const float *x, float *y, int64_t rows, int64_t tokens, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < w->n; n += outputs_of(tokens))
        for (int64_t t = 0; t < rows; t += tokens) {
            const float *from = x + t * w->k;
            float *to = y + t * w->n;
            switch (w->format) {
            case NF4: tile_of(NF4, w, n, from, to, rows - t, tokens); break;
            case INT4: tile_of(INT4, w, n, from, to, rows - t, tokens); break;
            case INT8: tile_of(INT8, w, n, from, to, rows - t, tokens); break;
            case FP8: tile_of(FP8, w, n, from, to, rows - t, tokens); break;
            case INT4_FROM_MINIMA: tile_of(INT4_FROM_MINIMA, w, n, from, to, rows - t, tokens); break;
            }
        }
}

INLINE void expand_row(int format, const Weight *w, int64_t n, float *out) {
    int64_t groups = (w->k + w->group - 1) / w->group, k = 0;
    const uint8_t *codes = w->codes + n * bytes_of(format, w->k);
    for (int64_t index = 0; index < groups; index++) {
        Group group = group_of(format, w, n * groups + index);
        for (int64_t end = smaller(k + w->group, w->k); k < end; k += STEP)
            UNROLLED(int half = 0; half < 2; half++) {
                __m128i bytes = bytes_of_half(format, codes + bytes_of(format, k), half);
                float *here = out + k + half * 2 * LANES;
                _mm256_storeu_ps(here, values_of(format, bytes, group));
                _mm256_storeu_ps(here + LANES, values_of(format, _mm_srli_si128(bytes, LANES), group));
            }
    }
}

/* The rows of W from `start` to `stop`, fp32 [stop - start, K]. */
void expand_rows(const Weight *w, int64_t start, int64_t stop, float *out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = start; n < stop; n++) {
        float *row = out + (n - start) * w->k;
        switch (w->format) {
        case NF4: expand_row(NF4, w, n, row); break;
        case INT4: expand_row(INT4, w, n, row); break;
        case INT8: expand_row(INT8, w, n, row); break;
        case FP8: expand_row(FP8, w, n, row); break;
        case INT4_FROM_MINIMA: expand_row(INT4_FROM_MINIMA, w, n, row); break;
        }
    }
}

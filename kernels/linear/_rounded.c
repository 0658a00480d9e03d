/* Products of rows that are rounded to 8 bits with integer weights, for x86 processors with AVX2, FMA and F16C; the form for
   those with VNNI (without it `_rounded_lanes.c` is faster).

   y[t, n] = sum over blocks of x's neighbours of s * (scale * (sum of q * code) + shift * (sum of q))

   x being s * q (kernels/linear/rounded.py), and W code * scale + shift (kernels/linear/quantization.py). Sums within a
   block are integers, and so exact; those of blocks are fp32, in an order that depends on K alone: a row of y has the same
   bits whatever rows are beside it and however many threads there are.

   A byte of four-bit codes holds an even and an odd neighbour, so of each span of x the even ones come first.

   Legend: T rows of x, N outputs, K inputs (a multiple of SPAN), G groups of a row of W.
*/

#include <stdlib.h>

#include "../common/floats.h"
#include "round.h"
#include "weights.h"

enum { BLOCK = 32, SPAN = 2 * BLOCK };
enum { TOKENS = 4, OUTPUTS = 2, MOST_OUTPUTS = 4, BLOCK_OUTPUTS = 16, BLOCK_ROWS = 64 };

/* SPAN neighbours of a row of x, for four-bit codes. Halves of registers belong to one block each. */
typedef struct {
    int8_t even[BLOCK], odd[BLOCK]; /* q */
    float scales[LANES];            /* s */
    float sums[LANES];              /* s * (sum of q), then zeros */
} Nibbles;

/* BLOCK neighbours of a row of x, for eight-bit codes. */
typedef struct {
    int16_t q[BLOCK];
    float scales[LANES];
} Bytes;

/* Which weights a product is compiled for. */
typedef struct {
    int format, is_half, has_small_groups; /* of BLOCK codes, else of SPANs */
} Kind;

typedef __m256 Sums[TOKENS][MOST_OUTPUTS];

INLINE int64_t bytes_of_row(int format, int64_t k) {
    return format == INT8 ? k / BLOCK * (int64_t)sizeof(Bytes) : k / SPAN * (int64_t)sizeof(Nibbles);
}

INLINE __m256 halves(float low, float high) { return _mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low)); }

/* Of the span of a row whose first group is `index`: what multiplies codes, a block in each half. */
INLINE __m256 scales_of(const Kind kind, const Weight *w, int64_t index) {
    float scale = number_at(kind.is_half, w->scales, index);
    return kind.has_small_groups ? halves(scale, number_at(kind.is_half, w->scales, index + 1)) : _mm256_set1_ps(scale);
}

INLINE float shift_of(const Kind kind, const Weight *w, int64_t index) {
    if (kind.format == INT4_FROM_MINIMA) return number_at(kind.is_half, w->minima, index);
    return -(kind.format == ASYMMETRIC ? w->zeros[index] : 8) * number_at(kind.is_half, w->scales, index);
}

/* And what is added to them. */
INLINE __m256 shifts_of(const Kind kind, const Weight *w, int64_t index) {
    if (kind.format == INT8) return _mm256_setzero_ps();
    float shift = shift_of(kind, w, index);
    return kind.has_small_groups ? halves(shift, shift_of(kind, w, index + 1)) : _mm256_set1_ps(shift);
}

INLINE __m256i bits(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

/* Sums of fours of neighbours. */
INLINE __m256i multiplied(__m256i even, __m256i odd, const Nibbles *span) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), even, bits(span->even));
    return _mm256_dpbusd_epi32(sums, odd, bits(span->odd));
#else
    /* Four products of less than 16 * 128 fit into 16 bits. */
    __m256i evens = _mm256_maddubs_epi16(even, bits(span->even)), odds = _mm256_maddubs_epi16(odd, bits(span->odd));
    return _mm256_madd_epi16(_mm256_add_epi16(evens, odds), _mm256_set1_epi16(1));
#endif
}

/* A span of row i of a tile of W, times spans of rows of x that lie `row` bytes apart. */
INLINE void multiply_nibbles(const uint8_t *codes, __m256 scales, __m256 shifts, const char *x, int64_t row, const int i,
                             const int tokens, Sums sums) {
    __m256i pairs = bits(codes), mask = _mm256_set1_epi8(15);
    __m256i even = _mm256_and_si256(pairs, mask), odd = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), mask);
    UNROLLED(int t = 0; t < tokens; t++) {
        const Nibbles *span = (const Nibbles *)(x + t * row);
        __m256 product = _mm256_cvtepi32_ps(multiplied(even, odd, span));
        sums[t][i] = _mm256_fmadd_ps(product, _mm256_mul_ps(scales, _mm256_loadu_ps(span->scales)), sums[t][i]);
        sums[t][i] = _mm256_fmadd_ps(shifts, _mm256_loadu_ps(span->sums), sums[t][i]);
    }
}

/* The same of a block, whose scale is in all lanes. */
INLINE void multiply_bytes(const uint8_t *codes, __m256 scale, const char *x, int64_t row, const int i,
                           const int tokens, Sums sums) {
    __m256i left = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
    __m256i right = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes + 1));
    UNROLLED(int t = 0; t < tokens; t++) {
        const Bytes *block = (const Bytes *)(x + t * row);
        __m256i product = _mm256_add_epi32(_mm256_madd_epi16(left, bits(block->q)),
                                           _mm256_madd_epi16(right, bits(block->q + BLOCK / 2)));
        __m256 factor = _mm256_mul_ps(scale, _mm256_loadu_ps(block->scales));
        sums[t][i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(product), factor, sums[t][i]);
    }
}

INLINE void multiply_span(const Kind kind, const uint8_t *codes, __m256 scales, __m256 shifts, const char *x,
                          int64_t row, const int i, const int tokens, Sums sums) {
    if (kind.format != INT8) {
        multiply_nibbles(codes, scales, shifts, x, row, i, tokens, sums);
        return;
    }
    __m256 low = _mm256_permute2f128_ps(scales, scales, 0x00), high = _mm256_permute2f128_ps(scales, scales, 0x11);
    multiply_bytes(codes, kind.has_small_groups ? low : scales, x, row, i, tokens, sums);
    multiply_bytes(codes + BLOCK, kind.has_small_groups ? high : scales, x + sizeof(Bytes), row, i, tokens, sums);
}

/* `tokens` rows of x times `outputs` rows of W, from n on. */
INLINE void multiply_tile(const Kind kind, const int outputs, const int tokens, const Weight *w, int64_t n,
                          const char *x, float *y) {
    int64_t group = kind.has_small_groups ? SPAN : w->group, groups = w->k / w->group, index = 0;
    int64_t bytes = bytes_of(w->format, w->k), step = kind.format == INT8 ? SPAN : SPAN / 2;
    int64_t row = bytes_of_row(kind.format, w->k);
    int64_t output[MOST_OUTPUTS];
    const uint8_t *codes[MOST_OUTPUTS];
    Sums sums;
    UNROLLED(int i = 0; i < outputs; i++) {
        output[i] = smaller(n + i, w->n - 1); /* beyond the end the last one again */
        codes[i] = w->codes + output[i] * bytes;
        UNROLLED(int t = 0; t < tokens; t++) sums[t][i] = _mm256_setzero_ps();
    }
    for (int64_t start = 0; start < w->k; start += group, index += kind.has_small_groups ? 2 : 1) {
        __m256 scales[MOST_OUTPUTS], shifts[MOST_OUTPUTS];
        UNROLLED(int i = 0; i < outputs; i++) {
            scales[i] = scales_of(kind, w, output[i] * groups + index);
            shifts[i] = shifts_of(kind, w, output[i] * groups + index);
        }
        for (int64_t k = 0; k < group; k += SPAN, x += bytes_of_row(kind.format, SPAN))
            UNROLLED(int i = 0; i < outputs; i++) {
                /* The same place of the next rows: the processor's own prefetch ends with a page. */
                if (tokens == 1) _mm_prefetch(codes[i] + outputs * bytes, _MM_HINT_T0);
                multiply_span(kind, codes[i], scales[i], shifts[i], x, row, i, tokens, sums);
                codes[i] += step;
            }
    }
    UNROLLED(int i = 0; i < outputs; i++)
        UNROLLED(int t = 0; t < tokens; t++) y[t * w->n + output[i]] = sum_of_lanes(sums[t][i]);
}

/* All rows of x times outputs of W, from `start` on. */
INLINE void multiply(const Kind kind, const Weight *w, const char *x, float *y, int64_t rows, int64_t start) {
    if (rows == 1) {
        multiply_tile(kind, MOST_OUTPUTS, 1, w, start, x, y);
        return;
    }
    int64_t stop = smaller(start + BLOCK_OUTPUTS, w->n), bytes = bytes_of_row(kind.format, w->k);
    for (int64_t t = 0; t < rows; t += TOKENS)
        for (int64_t n = start; n < stop; n += OUTPUTS)
            switch (smaller(TOKENS, rows - t)) {
            case 1: multiply_tile(kind, OUTPUTS, 1, w, n, x + t * bytes, y + t * w->n); break;
            case 2: multiply_tile(kind, OUTPUTS, 2, w, n, x + t * bytes, y + t * w->n); break;
            case 3: multiply_tile(kind, OUTPUTS, 3, w, n, x + t * bytes, y + t * w->n); break;
            case 4: multiply_tile(kind, OUTPUTS, 4, w, n, x + t * bytes, y + t * w->n); break;
            }
}

INLINE void multiply_format(int format, const Weight *w, const char *x, float *y, int64_t rows, int64_t start) {
    int is_small = w->group == BLOCK;
    if (is_small && w->is_half) multiply((Kind){format, 1, 1}, w, x, y, rows, start);
    if (is_small && !w->is_half) multiply((Kind){format, 0, 1}, w, x, y, rows, start);
    if (!is_small && w->is_half) multiply((Kind){format, 1, 0}, w, x, y, rows, start);
    if (!is_small && !w->is_half) multiply((Kind){format, 0, 0}, w, x, y, rows, start);
}

INLINE void store_nibbles(Nibbles *span, int half, const int32_t *q, int32_t sum, float scale) {
    for (int i = 0; i < BLOCK / 2; i++) {
        span->even[half * BLOCK / 2 + i] = (int8_t)q[2 * i];
        span->odd[half * BLOCK / 2 + i] = (int8_t)q[2 * i + 1];
    }
    for (int i = 0; i < LANES / 2; i++) {
        span->scales[half * LANES / 2 + i] = scale;
        span->sums[half * LANES / 2 + i] = i ? 0 : scale * (float)sum;
    }
}

INLINE void store_bytes(Bytes *block, const int32_t *q, float scale) {
    for (int i = 0; i < BLOCK; i++) block->q[i] = (int16_t)q[i];
    for (int i = 0; i < LANES; i++) block->scales[i] = scale;
}

/* A row of x, of which `group` neighbours share a scale. */
INLINE void round_row(const float *x, int64_t k, int64_t group, int nibbles, char *out) {
    float scale = 0;
    for (int64_t b = 0; b < k; b += BLOCK) {
        if (b % group == 0) scale = scale_of(FP32, x + b, group);
        int32_t q[BLOCK], sum = round_neighbours(x + b, scale, BLOCK, q);
        if (nibbles)
            store_nibbles((Nibbles *)out + b / SPAN, b % SPAN / BLOCK, q, sum, scale);
        else
            store_bytes((Bytes *)out + b / BLOCK, q, scale);
    }
}

/* `rows` rows of x, as they are rounded, times all of W. */
static void multiply_rows(int format, const Weight *w, const char *x, float *y, int64_t rows, int threads) {
    int64_t step = rows == 1 ? MOST_OUTPUTS : BLOCK_OUTPUTS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t start = 0; start < w->n; start += step)
        /* Here, since a parallel loop becomes a function of its own before formats are known. */
        switch (format) {
        case INT4: multiply_format(INT4, w, x, y, rows, start); break;
        case INT8: multiply_format(INT8, w, x, y, rows, start); break;
        case INT4_FROM_MINIMA: multiply_format(INT4_FROM_MINIMA, w, x, y, rows, start); break;
        case ASYMMETRIC: multiply_format(ASYMMETRIC, w, x, y, rows, start); break;
        }
}

/* y [rows, N] of x [rows, K], both fp32, of which `x_group` neighbours share a scale. Returns 0, or 1 without memory. */
int rounded_product(const Weight *w, const float *x, int64_t x_stride, int64_t x_group, float *y, int64_t rows,
                    int threads) {
    int format = w->format == INT4 && w->zeros ? ASYMMETRIC : w->format;
    int64_t bytes = bytes_of_row(format, w->k);
    char *block = malloc(smaller(rows, BLOCK_ROWS) * bytes); /* stays in the cache while all of W passes by */
    if (rows && !block) return 1;
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        int64_t count = smaller(BLOCK_ROWS, rows - first);
        for (int64_t t = 0; t < count; t++)
            round_row(x + (first + t) * x_stride, w->k, x_group, format != INT8, block + t * bytes);
        multiply_rows(format, w, block, y + first * w->n, count, threads);
    }
    free(block);
    return 0;
}

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
        __m256 q = _mm256_cvtepi32_ps(round_lanes(load(BF16, x + i), scale));
        store(BF16, out + i, rounded(BF16, _mm256_mul_ps(q, _mm256_set1_ps(scale))));
    }
#endif
}

/* s * q of rows of bf16, in bf16, of which `group` neighbours share a scale. */
void rounded_rows(const uint16_t *x, int64_t stride, int64_t k, int64_t group, uint16_t *out, int64_t rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > BLOCK_ROWS)
    for (int64_t t = 0; t < rows; t++)
        for (int64_t start = 0; start < k; start += group)
            round_group(x + t * stride + start, group, out + t * k + start);
}

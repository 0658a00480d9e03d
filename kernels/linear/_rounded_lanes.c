/* Products of rows that are rounded to 8 bits with integer weights, for x86 processors with AVX2, FMA and F16C but without
   VNNI (with it `_rounded.c` takes fewer instructions).

   y[t, n] = sum over blocks of x's neighbours of s * (scale * (sum of q * code) + shift * (sum of q))

   x being s * q (kernels/linear/rounded.py), and W code * scale + shift (kernels/linear/quantization.py). Sums within a
   block are integers, and so exact; those of blocks are fp32, one after another: a row of y has the same bits whatever rows
   are beside it and however many threads there are.

   A lane is an output: four neighbours of eight rows of W become a register, which multiplies the same four of a row of x
   in every lane. So products of four bits add up in 16 bits over a whole block, and no lanes are summed at the end.

   Legend: T rows of x, N outputs, K inputs (a multiple of BLOCK), G groups of a row of W.
*/

#include <stdlib.h>

#include "../common/floats.h"
#include "round.h"
#include "weights.h"

enum { BLOCK = 32, TOKENS = 8, BLOCK_ROWS = 64 };
enum { MORE_GROUPS = 7 }; /* since 16 bytes of scales are read at once */

/* BLOCK neighbours of TOKENS rows of x, for four-bit codes: even ones first, since a byte of codes holds one of each. */
typedef struct {
    int8_t q[TOKENS][BLOCK];
    float scales[TOKENS], sums[TOKENS]; /* s, and s * (sum of q) */
} Nibbles;

/* The same for eight-bit codes: of four neighbours the first, third, second and fourth. */
typedef struct {
    int16_t q[TOKENS][BLOCK];
    float scales[TOKENS]; /* s / 256 */
} Bytes;

/* LANES outputs of W. */
typedef struct {
    const uint8_t *codes;
    int64_t stride;               /* bytes from output to output */
    const float *scales, *shifts; /* [G, LANES]; INT8 has no shifts */
} Outputs;

INLINE int64_t bytes_of_block(int is_int8) { return is_int8 ? sizeof(Bytes) : sizeof(Nibbles); }

INLINE __m256i broadcast_bits(const void *four_bytes) {
    int32_t bits;
    memcpy(&bits, four_bytes, sizeof bits);
    return _mm256_set1_epi32(bits);
}

INLINE __m128i sixteen_bytes(const uint8_t *from) { return _mm_loadu_si128((const __m128i *)from); }

/* 16 bytes of each of LANES rows as 4 registers, which have 4 bytes of every row. */
INLINE void transpose(const uint8_t *from, int64_t stride, __m256i *out) {
    __m256i rows[4], pairs[4];
    UNROLLED(int i = 0; i < 4; i++)
        rows[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen_bytes(from + i * stride)),
                                          sixteen_bytes(from + (i + 4) * stride), 1);
    UNROLLED(int i = 0; i < 2; i++) {
        pairs[i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        pairs[i + 2] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    UNROLLED(int i = 0; i < 2; i++) {
        out[2 * i] = _mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]);
        out[2 * i + 1] = _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]);
    }
}

/* A block of LANES rows of four-bit codes times that of rows of x: integers in every lane. */
INLINE void multiply_nibbles(const uint8_t *codes, int64_t stride, const Nibbles *x, const int tokens, __m256i *sums) {
    __m256i fours[4], mask = _mm256_set1_epi8(15);
    transpose(codes, stride, fours);
    UNROLLED(int i = 0; i < 8; i++) {
        __m256i nibbles = _mm256_and_si256(i < 4 ? fours[i] : _mm256_srli_epi16(fours[i - 4], 4), mask);
        UNROLLED(int t = 0; t < tokens; t++) {
            /* Two products of at most 15 * 128 each: eight such sums fit into 16 bits. */
            __m256i products = _mm256_maddubs_epi16(nibbles, broadcast_bits(x->q[t] + 4 * i));
            sums[t] = i ? _mm256_add_epi16(sums[t], products) : products;
        }
    }
    UNROLLED(int t = 0; t < tokens; t++) sums[t] = _mm256_madd_epi16(sums[t], _mm256_set1_epi16(1));
}

/* The same of eight-bit codes, times 256: so their signs are where they belong. */
INLINE void multiply_bytes(const uint8_t *codes, int64_t stride, const Bytes *x, const int tokens, __m256i *sums) {
    UNROLLED(int t = 0; t < tokens; t++) sums[t] = _mm256_setzero_si256();
    for (int half = 0; half < 2; half++) { /* a loop, since registers are few */
        __m256i fours[4];
        transpose(codes + half * BLOCK / 2, stride, fours);
        UNROLLED(int i = 0; i < 8; i++) {
            __m256i odd = _mm256_and_si256(fours[i / 2], _mm256_set1_epi16((short)0xff00));
            __m256i pairs = i % 2 ? odd : _mm256_slli_epi16(fours[i / 2], 8);
            UNROLLED(int t = 0; t < tokens; t++) {
                __m256i products = _mm256_madd_epi16(pairs, broadcast_bits(x->q[t] + half * BLOCK / 2 + 2 * i));
                sums[t] = _mm256_add_epi32(sums[t], products);
            }
        }
    }
}

/* The next block of `tokens` rows of x times that of LANES outputs of a group, added to their sums. */
INLINE void multiply_block(const int is_int8, const Outputs *outputs, const uint8_t *codes, int64_t group, const char *x,
                           const int tokens, __m256 *sums) {
    __m256 scales = _mm256_loadu_ps(outputs->scales + group * LANES);
    __m256i products[TOKENS];
    if (is_int8) {
        const Bytes *block = (const Bytes *)x;
        multiply_bytes(codes, outputs->stride, block, tokens, products);
        UNROLLED(int t = 0; t < tokens; t++) {
            __m256 factor = _mm256_mul_ps(scales, _mm256_set1_ps(block->scales[t]));
            sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[t]), factor, sums[t]);
        }
        return;
    }
    const Nibbles *block = (const Nibbles *)x;
    __m256 shifts = _mm256_loadu_ps(outputs->shifts + group * LANES);
    multiply_nibbles(codes, outputs->stride, block, tokens, products);
    UNROLLED(int t = 0; t < tokens; t++) {
        __m256 factor = _mm256_mul_ps(scales, _mm256_set1_ps(block->scales[t]));
        sums[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(products[t]), factor, sums[t]);
        sums[t] = _mm256_fmadd_ps(shifts, _mm256_set1_ps(block->sums[t]), sums[t]);
    }
}

/* `tokens` rows of x times LANES outputs, of which `rows` and `count` are stored. */
INLINE void multiply_tile(const int is_int8, const int tokens, const Weight *w, const Outputs *outputs, const char *x,
                          float *y, int64_t rows, int64_t count) {
    const uint8_t *codes = outputs->codes;
    __m256 sums[TOKENS];
    UNROLLED(int t = 0; t < tokens; t++) sums[t] = _mm256_setzero_ps();
    for (int64_t start = 0, group = 0; start < w->k; start += w->group, group++)
        for (int64_t k = start; k < smaller(start + w->group, w->k); k += BLOCK, x += bytes_of_block(is_int8)) {
            /* The same place of the next rows: the processor's own prefetch ends with a page. */
            if (tokens == 1)
                UNROLLED(int i = 0; i < LANES; i++) _mm_prefetch(codes + (LANES + i) * outputs->stride, _MM_HINT_T0);
            multiply_block(is_int8, outputs, codes, group, x, tokens, sums);
            codes += is_int8 ? BLOCK : BLOCK / 2;
        }
    UNROLLED(int t = 0; t < tokens; t++)
        if (t < rows) store_some(FP32, y + t * w->n, sums[t], count);
}

/* All rows of x times LANES outputs, of which `count` are stored. */
INLINE void multiply(const int is_int8, const Weight *w, const Outputs *outputs, const char *x, float *y, int64_t rows,
                     int64_t count) {
    for (int64_t t = 0; t < rows; t += TOKENS, x += w->k / BLOCK * bytes_of_block(is_int8), y += TOKENS * w->n)
        switch (smaller(TOKENS, rows - t)) {
        case 1: multiply_tile(is_int8, 1, w, outputs, x, y, rows - t, count); break;
        case 2: multiply_tile(is_int8, 2, w, outputs, x, y, rows - t, count); break;
        case 3:
        case 4: multiply_tile(is_int8, 4, w, outputs, x, y, rows - t, count); break;
        default: multiply_tile(is_int8, 8, w, outputs, x, y, rows - t, count);
        }
}

/* 16 bytes of numbers of each of LANES rows as fp32, a group after another. */
INLINE void widen_by_lanes(const uint8_t *from, int64_t stride, int is_half, float *out) {
    __m256i fours[4];
    transpose(from, stride, fours);
    UNROLLED(int i = 0; i < 4; i++) {
        if (!is_half) {
            _mm256_storeu_si256((__m256i *)(out + i * LANES), fours[i]);
            continue;
        }
        __m256i first = _mm256_and_si256(fours[i], _mm256_set1_epi32(0xffff)), second = _mm256_srli_epi32(fours[i], 16);
        __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xd8);
        _mm256_storeu_ps(out + 2 * i * LANES, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
        _mm256_storeu_ps(out + (2 * i + 1) * LANES, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
    }
}

/* Numbers [N, G] of LANES rows from n on, as fp32 [G, LANES], and MORE_GROUPS of anything; beyond the end those of the
   last row again. */
INLINE void by_lanes(const Weight *w, const void *numbers, int64_t n, int64_t groups, float *out) {
    int64_t bytes = groups * (w->is_half ? 2 : 4), stride = bytes;
    const uint8_t *from = (const uint8_t *)place_of(w, numbers, n * groups);
    uint8_t copy[LANES * (bytes + 16)]; /* where 16 bytes more than a row has would be beyond the end */
    if ((w->n - n - LANES) * bytes < 16) {
        stride += 16;
        for (int64_t i = 0; i < LANES; i++)
            memcpy(copy + i * stride, place_of(w, numbers, smaller(n + i, w->n - 1) * groups), bytes);
        from = copy;
    }
    for (int64_t b = 0; b < bytes; b += 16)
        widen_by_lanes(from + b, stride, w->is_half, out + b / (w->is_half ? 2 : 4) * LANES);
}

/* What is added to code * scale, [G, LANES]. */
INLINE void shifts_by_lanes(const Weight *w, const float *scales, int64_t n, int64_t groups, float *out) {
    if (w->format == INT4_FROM_MINIMA) {
        by_lanes(w, w->minima, n, groups, out);
        return;
    }
    for (int64_t i = 0; i < groups * LANES; i++) out[i] = -8 * scales[i];
    for (int i = 0; i < LANES && w->zeros; i++) {
        const uint8_t *zeros = w->zeros + smaller(n + i, w->n - 1) * groups;
        for (int64_t g = 0; g < groups; g++) out[g * LANES + i] = -zeros[g] * scales[g * LANES + i];
    }
}

/* All rows of x times LANES outputs of W, from n on. */
INLINE void multiply_outputs(const int is_int8, const Weight *w, const char *x, float *y, int64_t rows, int64_t n) {
    int64_t groups = (w->k + w->group - 1) / w->group, bytes = bytes_of(w->format, w->k);
    int64_t count = smaller(LANES, w->n - n);
    float scales[(groups + MORE_GROUPS) * LANES], shifts[is_int8 ? 1 : (groups + MORE_GROUPS) * LANES];
    uint8_t copy[count < LANES ? LANES * bytes : 1]; /* of the last rows, since eight are read */
    by_lanes(w, w->scales, n, groups, scales);
    if (!is_int8) shifts_by_lanes(w, scales, n, groups, shifts);
    for (int64_t i = 0; i < LANES && count < LANES; i++)
        memcpy(copy + i * bytes, w->codes + smaller(n + i, w->n - 1) * bytes, bytes);
    Outputs outputs = {count < LANES ? copy : w->codes + n * bytes, bytes, scales, shifts};
    multiply(is_int8, w, &outputs, x, y + n, rows, count);
}

/* `rows` rows of x, as they are rounded, times all of W. */
static void multiply_rows(const Weight *w, const char *x, float *y, int64_t rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < w->n; n += LANES)
        /* Here, since a parallel loop becomes a function of its own before formats are known. */
        if (w->format == INT8)
            multiply_outputs(1, w, x, y, rows, n);
        else
            multiply_outputs(0, w, x, y, rows, n);
}

INLINE void store_nibbles(Nibbles *block, int64_t t, const int32_t *q, int32_t sum, float scale) {
    for (int i = 0; i < BLOCK; i++) block->q[t][i] = (int8_t)q[i % (BLOCK / 2) * 2 + i / (BLOCK / 2)];
    block->scales[t] = scale;
    block->sums[t] = scale * (float)sum;
}

INLINE void store_bytes(Bytes *block, int64_t t, const int32_t *q, float scale) {
    for (int i = 0; i < BLOCK; i += 4)
        for (int j = 0; j < 4; j++) block->q[t][i + j] = (int16_t)q[i + j % 2 * 2 + j / 2];
    block->scales[t] = scale / 256;
}

/* A row of x, of which `group` neighbours share a scale, as the t-th of a tile. */
INLINE void round_row(const float *x, int64_t k, int64_t group, int is_int8, int64_t t, char *out) {
    float scale = 0;
    for (int64_t b = 0; b < k; b += BLOCK, out += bytes_of_block(is_int8)) {
        if (b % group == 0) scale = scale_of(FP32, x + b, group);
        int32_t q[BLOCK], sum = round_neighbours(x + b, scale, BLOCK, q);
        if (is_int8)
            store_bytes((Bytes *)out, t, q, scale);
        else
            store_nibbles((Nibbles *)out, t, q, sum, scale);
    }
}

/* y [rows, N] of x [rows, K], both fp32, of which `x_group` neighbours share a scale. Returns 0, or 1 without memory. */
int rounded_product(const Weight *w, const float *x, int64_t x_stride, int64_t x_group, float *y, int64_t rows,
                    int threads) {
    int is_int8 = w->format == INT8;
    int64_t tile = w->k / BLOCK * bytes_of_block(is_int8), most = smaller(rows, BLOCK_ROWS);
    char *tiles = calloc((most + TOKENS - 1) / TOKENS, tile); /* stay in the cache while all of W passes by */
    if (rows && !tiles) return 1;
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        int64_t count = smaller(BLOCK_ROWS, rows - first);
        for (int64_t t = 0; t < count; t++)
            round_row(x + (first + t) * x_stride, w->k, x_group, is_int8, t % TOKENS, tiles + t / TOKENS * tile);
        multiply_rows(w, tiles, y + first * w->n, count, threads);
    }
    free(tiles);
    return 0;
}

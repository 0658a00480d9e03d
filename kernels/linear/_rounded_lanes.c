/* Products of rows that are rounded to 8 bits with integer weights (for x86 processors with AVX-512 VNNI `_rounded.c`, which
   takes fewer instructions).

   y[t, n] = sum over blocks of x's neighbours of s * (scale * (sum of q * code) + shift * (sum of q))

   x being s * q (kernels/linear/rounded.py), and W code * scale + shift (kernels/linear/quantization.py). Sums within a
   block are integers, and so exact; those of blocks are fp32, one after another: a row of y has the same bits whatever rows
   are beside it and however many threads there are.

   A lane is an output: four neighbours of eight rows of W become a register, which multiplies the same four of a row of x
   in every lane (dots_avx2.h, dots_neon.h), and no lanes are summed at the end.

   Legend: T rows of x, N outputs, K inputs (a multiple of BLOCK), G groups of a row of W.
*/

/* Or GCC puts off the sums of a block of rows until behind all their products, which it has no registers for. */
#pragma GCC optimize("no-tree-ter")

#include <stdlib.h>

#include "../common/floats.h"
#include "round.h"
#include "weights.h"

enum { BLOCK = 32, TOKENS = 8, BLOCK_ROWS = 64 };
enum { MORE_GROUPS = 7 }; /* since 16 bytes of scales are read at once */
enum { CACHE_LINE = 64 };

/* BLOCK neighbours of TOKENS rows of x, for four-bit codes: even ones first, since a byte of codes holds one of each. */
typedef struct {
    int8_t q[TOKENS][BLOCK];
    float scales[TOKENS], sums[TOKENS]; /* s, and s * (sum of q) */
} Nibbles;

INLINE int32_t four_bytes(const void *from) {
    int32_t bits;
    memcpy(&bits, from, sizeof bits);
    return bits;
}

/* Of both: `Products`, which `no_products` begins, `add_nibbles` adds those of a block's four-bit codes to, four
   neighbours at a time, and `sums_of` ends; and `Bytes`, as Nibbles for eight-bit codes, which `store_bytes` fills from q
   and s of one row, and `multiply_bytes` multiplies, giving sums that `scales` are to be multiplied with. */
#ifdef __aarch64__
#include "dots_neon.h"
#else
#include "dots_avx2.h"
#endif

/* LANES outputs of W. */
typedef struct {
    const uint8_t *codes;
    int64_t stride;               /* bytes from output to output */
    const float *scales, *shifts; /* [G, LANES]; INT8 has no shifts */
} Outputs;

INLINE int64_t bytes_of_block(int is_int8) { return is_int8 ? sizeof(Bytes) : sizeof(Nibbles); }

/* A block of LANES rows of four-bit codes times that of rows of x: integers in every lane. */
INLINE void multiply_nibbles(const uint8_t *codes, int64_t stride, const Nibbles *x, const int tokens, Ints *sums) {
    Products products[TOKENS];
    Ints fours[4];
    fours_of_rows(codes, stride, fours);
    UNROLLED(int t = 0; t < tokens; t++) products[t] = no_products();
    UNROLLED(int i = 0; i < 8; i++) {
        Ints nibbles = common_bits(i < 4 ? fours[i] : shifted_right(fours[i - 4], 4), every_int(0x0f0f0f0f));
        UNROLLED(int t = 0; t < tokens; t++) products[t] = add_nibbles(products[t], nibbles, x->q[t] + 4 * i);
    }
    UNROLLED(int t = 0; t < tokens; t++) sums[t] = sums_of(products[t]);
}

/* The next block of `tokens` rows of x times that of LANES outputs of a group, added to their sums. */
INLINE void multiply_block(const int is_int8, const Outputs *outputs, const uint8_t *codes, int64_t group, const char *x,
                           const int tokens, Floats *sums) {
    Floats scales = floats_at(outputs->scales + group * LANES);
    Ints products[TOKENS];
    if (is_int8) {
        const Bytes *block = (const Bytes *)x;
        multiply_bytes(codes, outputs->stride, block, tokens, products);
        UNROLLED(int t = 0; t < tokens; t++) {
            Floats factor = times(scales, every(block->scales[t]));
            sums[t] = times_plus(to_floats(products[t]), factor, sums[t]);
        }
        return;
    }
    const Nibbles *block = (const Nibbles *)x;
    Floats shifts = floats_at(outputs->shifts + group * LANES);
    multiply_nibbles(codes, outputs->stride, block, tokens, products);
    UNROLLED(int t = 0; t < tokens; t++) {
        Floats factor = times(scales, every(block->scales[t]));
        sums[t] = times_plus(to_floats(products[t]), factor, sums[t]);
        sums[t] = times_plus(shifts, every(block->sums[t]), sums[t]);
    }
}

/* `tokens` rows of x times LANES outputs, of which `rows` and `count` are stored. */
INLINE void multiply_tile(const int is_int8, const int tokens, const Weight *w, const Outputs *outputs, const char *x,
                          int dtype, char *y, int64_t rows, int64_t count) {
    const uint8_t *codes = outputs->codes;
    Floats sums[TOKENS];
    UNROLLED(int t = 0; t < tokens; t++) sums[t] = every(0);
    for (int64_t start = 0, group = 0; start < w->k; start += w->group, group++)
        for (int64_t k = start; k < smaller(start + w->group, w->k); k += BLOCK, x += bytes_of_block(is_int8)) {
            /* The same place of the next rows: the processor's own prefetch ends with a page. */
            UNROLLED(int i = 0; i < LANES; i++) __builtin_prefetch(codes + (LANES + i) * outputs->stride);
            multiply_block(is_int8, outputs, codes, group, x, tokens, sums);
            codes += is_int8 ? BLOCK : BLOCK / 2;
        }
    UNROLLED(int t = 0; t < tokens; t++)
        if (t < rows) store_some(dtype, y + t * w->n * size_of(dtype), rounded(dtype, sums[t]), count);
}

/* All rows of x times LANES outputs, of which `count` are stored. */
INLINE void multiply(const int is_int8, const Weight *w, const Outputs *outputs, const char *x, int dtype, char *y,
                     int64_t rows, int64_t count) {
    int64_t tile = w->k / BLOCK * bytes_of_block(is_int8), behind = TOKENS * w->n * size_of(dtype);
    for (int64_t t = 0; t < rows; t += TOKENS, x += tile, y += behind)
        switch (smaller(TOKENS, rows - t)) {
        case 1: multiply_tile(is_int8, 1, w, outputs, x, dtype, y, rows - t, count); break;
        case 2: multiply_tile(is_int8, 2, w, outputs, x, dtype, y, rows - t, count); break;
        case 3:
        case 4: multiply_tile(is_int8, 4, w, outputs, x, dtype, y, rows - t, count); break;
        default: multiply_tile(is_int8, 8, w, outputs, x, dtype, y, rows - t, count);
        }
}

/* 16 bytes of numbers of each of LANES rows as fp32, a group after another. */
INLINE void widen_by_lanes(const uint8_t *from, int64_t stride, int is_half, float *out) {
    Ints fours[4];
    fours_of_rows(from, stride, fours);
    UNROLLED(int i = 0; i < 4; i++) {
        if (!is_half) {
            put_floats(out + i * LANES, of_bits(fours[i]));
            continue;
        }
        Floats first, second;
        split_fp16(fours[i], &first, &second);
        put_floats(out + 2 * i * LANES, first);
        put_floats(out + (2 * i + 1) * LANES, second);
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

/* Of numbers [N, G] those of LANES rows from n on. */
INLINE void fetch_numbers(const Weight *w, const void *numbers, int64_t n, int64_t groups) {
    const char *from = (const char *)place_of(w, numbers, n * groups);
    for (int64_t i = 0; i < LANES * groups * (w->is_half ? 2 : 4); i += CACHE_LINE) __builtin_prefetch(from + i);
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
INLINE void multiply_outputs(const int is_int8, const Weight *w, const char *x, int dtype, char *y, int64_t rows,
                             int64_t n) {
    int64_t groups = groups_of(w), bytes = bytes_of(w->format, w->k);
    int64_t count = smaller(LANES, w->n - n);
    float scales[(groups + MORE_GROUPS) * LANES], shifts[is_int8 ? 1 : (groups + MORE_GROUPS) * LANES];
    uint8_t copy[count < LANES ? LANES * bytes : 1]; /* of the last rows, since eight are read */
    fetch_numbers(w, w->scales, n + LANES, groups);
    if (w->minima) fetch_numbers(w, w->minima, n + LANES, groups);
    by_lanes(w, w->scales, n, groups, scales);
    if (!is_int8) shifts_by_lanes(w, scales, n, groups, shifts);
    for (int64_t i = 0; i < LANES && count < LANES; i++)
        memcpy(copy + i * bytes, w->codes + smaller(n + i, w->n - 1) * bytes, bytes);
    Outputs outputs = {count < LANES ? copy : w->codes + n * bytes, bytes, scales, shifts};
    multiply(is_int8, w, &outputs, x, dtype, y + n * size_of(dtype), rows, count);
}

/* The same of any format. */
INLINE void multiply_any(const Weight *all, const char *x, int dtype, char *y, int64_t rows, int64_t n) {
    _Alignas(4) int8_t codes[rows_bytes(all, LANES)];
    Weight bytes;
    const Weight *w = in_rows(all, n, LANES, codes, &bytes);
    if (w->format == INT8)
        multiply_outputs(1, w, x, dtype, y, rows, n);
    else
        multiply_outputs(0, w, x, dtype, y, rows, n);
}

/* `rows` rows of x, as they are rounded, times all of W. */
static void multiply_rows(const Weight *w, const char *x, int dtype, char *y, int64_t rows, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < w->n; n += LANES)
        /* Formats are asked for in here, since a parallel loop becomes a function of its own before they are known. */
        multiply_any(w, x, dtype, y, rows, n);
}

INLINE void store_nibbles(Nibbles *block, int64_t t, const int32_t *q, int32_t sum, float scale) {
    for (int i = 0; i < BLOCK; i++) block->q[t][i] = (int8_t)q[i % (BLOCK / 2) * 2 + i / (BLOCK / 2)];
    block->scales[t] = scale;
    block->sums[t] = scale * (float)sum;
}

/* A row of x, of which `group` neighbours share a scale, as the t-th of a tile. */
INLINE void round_row(int dtype, const char *x, int64_t k, int64_t group, int is_int8, int64_t t, char *out) {
    float scale = 0;
    for (int64_t b = 0; b < k; b += BLOCK, out += bytes_of_block(is_int8)) {
        if (b % group == 0) scale = scale_of(dtype, at(dtype, x, b), group);
        int32_t q[BLOCK], sum = round_neighbours(dtype, at(dtype, x, b), scale, BLOCK, q);
        if (is_int8)
            store_bytes((Bytes *)out, t, q, scale);
        else
            store_nibbles((Nibbles *)out, t, q, sum, scale);
    }
}

/* y [rows, N] of x [rows, K], both of a dtype, of which `x_group` neighbours share a scale. Returns 0, or 1 without
   memory. */
int rounded_product(const Weight *w, int dtype, const char *x, int64_t x_stride, int64_t x_group, char *y, int64_t rows,
                    int threads) {
    int is_int8 = !has_four_bits(w->format);
    int64_t tile = w->k / BLOCK * bytes_of_block(is_int8), most = smaller(rows, BLOCK_ROWS);
    char *tiles = calloc((most + TOKENS - 1) / TOKENS, tile); /* stay in the cache while all of W passes by */
    if (rows && !tiles) return 1;
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        int64_t count = smaller(BLOCK_ROWS, rows - first);
        for (int64_t t = 0; t < count; t++) {
            const char *row = at(dtype, x, (first + t) * x_stride);
            round_row(dtype, row, w->k, x_group, is_int8, t % TOKENS, tiles + t / TOKENS * tile);
        }
        multiply_rows(w, tiles, dtype, y + first * w->n * size_of(dtype), count, threads);
    }
    free(tiles);
    return 0;
}

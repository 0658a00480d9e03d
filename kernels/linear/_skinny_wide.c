/* Products of fp32 rows with a weight, quantized or in bf16, and its rows expanded.

   y[t, n] = sum over k of x[t, k] * W[n, k], where W is `dequantize(torch.float32)` to the bit. Sums are fp32, in an order
   that depends on K alone: a row of y has the same bits whatever rows are beside it and however many threads there are.

   Weights are read as they are stored (kernels/linear/quantization.py), 16 neighbours of a row at a time: two registers
   of fp32, of four bits the even and the odd ones, since a byte holds one of each. So x is put into that order first. For
   up to DIRECT_TOKENS rows of x they stay in registers; for more, a block of rows of W is decoded once for all of them, into the
   cache.

   Legend: T rows of x, N outputs, K inputs (a multiple of 32), G groups of a row of W.
*/

#include <stdlib.h>

#include "../common/floats.h"
#include "weights.h"

enum { STEP = 2 * LANES, SPAN = 2 * STEP, OUTPUTS = 4, DIRECT_TOKENS = 8 };
enum { TOKENS = 4, BLOCK_OUTPUTS = 3, MOST_OUTPUTS = 12, BLOCK_FLOATS = 1 << 14 };

/* What the codes of a group stand for: code * scale + shift, (code - zero) * scale, or a value of a table times scale. */
typedef struct {
    Floats scale, shift;
    Ints zero;
} Group;

INLINE Group group_of(int format, const Weight *w, int64_t index) {
    if (format == BFLOAT16) return (Group){0};
    float scale = number_of(w, w->scales, index);
    if (format == FP8) scale *= 256; /* it is read as fp16 of 1/256 of its value */
    int zero = format == ASYMMETRIC ? w->zeros[index] : 8;
    /* 8 * scale is exact, so the shifted product is rounded once, as (code - 8) * scale is. */
    float shift = format == INT4_FROM_MINIMA ? number_of(w, w->minima, index) : -8 * scale;
    return (Group){every(scale), every(shift), every_int(zero)};
}

/* The numbers that 8 codes of four bits stand for. */
INLINE Floats values_of_4bit(int format, Ints codes, Group group) {
    if (format == NF4) return times(looked_up(NF4_VALUES, codes), group.scale);
    if (format == ASYMMETRIC) return times(to_floats(difference_of_ints(codes, group.zero)), group.scale);
    return times_plus(to_floats(codes), group.scale, group.shift);
}

/* The numbers that 8 codes of eight bits stand for. */
INLINE Floats values_of_8bit(int format, const uint8_t *codes, Group group) {
    return times(format == INT8 ? to_floats(ints_of_signed(codes)) : e4m3_by_256(codes), group.scale);
}

/* STEP neighbours of a row of W, from element k on. */
INLINE void decode(int format, const uint8_t *row, int64_t k, Group group, Floats *first, Floats *second) {
    if (format == BFLOAT16) {
        *first = load(BF16, row + 2 * k);
        *second = load(BF16, row + 2 * (k + LANES));
        return;
    }
    if (!has_four_bits(format)) {
        *first = values_of_8bit(format, row + k, group);
        *second = values_of_8bit(format, row + k + LANES, group);
        return;
    }
    Ints pairs = ints_of_bytes(row + (uint64_t)k / 2);
    Ints low = common_bits(pairs, every_int(15)), high = shifted_right(pairs, 4);
    *first = values_of_4bit(format, format == NF4 ? high : low, group);
    *second = values_of_4bit(format, format == NF4 ? low : high, group);
}

/* What a few rows of x and a few of W sum up to, lane by lane. */
typedef Floats Sums[DIRECT_TOKENS][OUTPUTS];

/* STEP neighbours of rows of x, from element k on, times those of rows of W. */
INLINE void multiply_step(int format, const int outputs, const int tokens, const uint8_t *const *row, int64_t row_k,
                          const Group *group, const float *x, int64_t k, Sums sums) {
    UNROLLED(int i = 0; i < outputs; i++) {
        Floats first, second;
        decode(format, row[i], k, group[i], &first, &second);
        UNROLLED(int t = 0; t < tokens; t++) {
            sums[t][i] = times_plus(floats_at(x + t * row_k + k), first, sums[t][i]);
            sums[t][i] = times_plus(floats_at(x + t * row_k + k + LANES), second, sums[t][i]);
        }
    }
}

/* `tokens` rows of x times `outputs` rows of W, from n on, which stay in registers. */
INLINE void multiply_direct(int format, const int outputs, const int tokens, const Weight *w, int64_t n, const float *x,
                            float *y) {
    int64_t groups = groups_of(w), bytes = bytes_of(w->format, w->k), k = 0, output[OUTPUTS];
    const uint8_t *row[OUTPUTS];
    Sums sums;
    UNROLLED(int i = 0; i < outputs; i++) {
        output[i] = smaller(n + i, w->n - 1); /* beyond the end the last one again */
        row[i] = w->codes + output[i] * bytes;
        UNROLLED(int t = 0; t < tokens; t++) sums[t][i] = every(0);
    }
    for (int64_t index = 0; index < groups; index++) {
        Group group[OUTPUTS];
        UNROLLED(int i = 0; i < outputs; i++) group[i] = group_of(format, w, output[i] * groups + index);
        int64_t end = smaller(k + w->group, w->k);
        for (; k + SPAN <= end; k += SPAN) {
            /* The same place of the next rows: the processor's own prefetch ends with a page. */
            UNROLLED(int i = 0; i < outputs; i++)
                __builtin_prefetch(row[i] + bytes_of(format, k) + outputs * bytes);
            UNROLLED(int s = 0; s < SPAN; s += STEP)
                multiply_step(format, outputs, tokens, row, w->k, group, x, k + s, sums);
        }
        for (; k < end; k += STEP) multiply_step(format, outputs, tokens, row, w->k, group, x, k, sums);
    }
    UNROLLED(int i = 0; i < outputs; i++)
        UNROLLED(int t = 0; t < tokens; t++) y[t * w->n + output[i]] = sum_of_lanes(sums[t][i]);
}

INLINE void decode_step(int format, const uint8_t *row, int64_t k, Group group, float *out) {
    Floats first, second;
    decode(format, row, k, group, &first, &second);
    put_floats(out + k, first);
    put_floats(out + k + LANES, second);
}

/* A row of W as x is ordered. */
INLINE void decode_row(int format, const Weight *w, int64_t n, float *out) {
    int64_t groups = groups_of(w), k = 0;
    const uint8_t *row = w->codes + n * bytes_of(w->format, w->k);
    for (int64_t index = 0; index < groups; index++) {
        Group group = group_of(format, w, n * groups + index);
        int64_t end = smaller(k + w->group, w->k);
        for (; k + SPAN <= end; k += SPAN)
            UNROLLED(int64_t s = 0; s < SPAN; s += STEP) decode_step(format, row, k + s, group, out);
        for (; k < end; k += STEP) decode_step(format, row, k, group, out);
    }
}

/* `tokens` rows of x times BLOCK_OUTPUTS decoded rows of W, of which `outputs` are stored. */
INLINE void multiply_tile(const float *x, const float *block, float *y, int64_t n, int64_t k, const int tokens,
                          int64_t outputs) {
    Floats sums[TOKENS][BLOCK_OUTPUTS];
    UNROLLED(int t = 0; t < tokens; t++)
        UNROLLED(int i = 0; i < BLOCK_OUTPUTS; i++) sums[t][i] = every(0);
    for (int64_t c = 0; c < k; c += LANES) {
        Floats weights[BLOCK_OUTPUTS];
        UNROLLED(int i = 0; i < BLOCK_OUTPUTS; i++) weights[i] = floats_at(block + i * k + c);
        UNROLLED(int t = 0; t < tokens; t++) {
            Floats inputs = floats_at(x + t * k + c);
            UNROLLED(int i = 0; i < BLOCK_OUTPUTS; i++) sums[t][i] = times_plus(inputs, weights[i], sums[t][i]);
        }
    }
    UNROLLED(int t = 0; t < tokens; t++)
        UNROLLED(int i = 0; i < BLOCK_OUTPUTS; i++)
            if (i < outputs) y[t * n + i] = sum_of_lanes(sums[t][i]);
}

/* All rows of x times `outputs` rows of W, from n on, which are decoded once. */
INLINE void multiply_block(int format, const Weight *w, int64_t n, int64_t outputs, const float *x, float *y,
                           int64_t rows) {
    int64_t k = w->k, whole = (outputs + BLOCK_OUTPUTS - 1) / BLOCK_OUTPUTS * BLOCK_OUTPUTS;
    float block[whole * k];
    for (int64_t i = 0; i < whole; i++) decode_row(format, w, smaller(n + i, w->n - 1), block + i * k);
    for (int64_t t = 0; t < rows; t += TOKENS)
        for (int64_t i = 0; i < outputs; i += BLOCK_OUTPUTS) {
            const float *from = x + t * k, *weights = block + i * k;
            float *to = y + t * w->n + n + i;
            switch (smaller(TOKENS, rows - t)) {
            case 1: multiply_tile(from, weights, to, w->n, k, 1, outputs - i); break;
            case 2: multiply_tile(from, weights, to, w->n, k, 2, outputs - i); break;
            case 3: multiply_tile(from, weights, to, w->n, k, 3, outputs - i); break;
            case 4: multiply_tile(from, weights, to, w->n, k, 4, outputs - i); break;
            }
        }
}

/* All rows of x times rows of W, from n on. */
INLINE void multiply_by(int format, const Weight *w, const float *x, float *y, int64_t rows, int64_t n, int64_t step) {
    switch (rows) {
    case 1: multiply_direct(format, 4, 1, w, n, x, y); break;
    case 2: multiply_direct(format, 2, 2, w, n, x, y); break;
    case 3: multiply_direct(format, 2, 3, w, n, x, y); break;
    case 4: multiply_direct(format, 2, 4, w, n, x, y); break;
    case 5: multiply_direct(format, 1, 5, w, n, x, y); break;
    case 6: multiply_direct(format, 1, 6, w, n, x, y); break;
    case 7: multiply_direct(format, 1, 7, w, n, x, y); break;
    case 8: multiply_direct(format, 1, 8, w, n, x, y); break;
    default: multiply_block(format, w, n, smaller(step, w->n - n), x, y, rows);
    }
}

INLINE int format_of(const Weight *w) { return w->format == INT4 && w->zeros ? ASYMMETRIC : w->format; }

/* The same of any format. */
INLINE void multiply(const Weight *all, const float *x, float *y, int64_t rows, int64_t n, int64_t step) {
    _Alignas(4) int8_t codes[rows_bytes(all, step)];
    Weight bytes;
    const Weight *w = in_rows(all, n, step, codes, &bytes);
    switch (format_of(w)) {
    case NF4: multiply_by(NF4, w, x, y, rows, n, step); break;
    case INT4: multiply_by(INT4, w, x, y, rows, n, step); break;
    case INT8: multiply_by(INT8, w, x, y, rows, n, step); break;
    case FP8: multiply_by(FP8, w, x, y, rows, n, step); break;
    case BFLOAT16: multiply_by(BFLOAT16, w, x, y, rows, n, step); break;
    case INT4_FROM_MINIMA: multiply_by(INT4_FROM_MINIMA, w, x, y, rows, n, step); break;
    case ASYMMETRIC: multiply_by(ASYMMETRIC, w, x, y, rows, n, step); break;
    }
}

/* How many outputs `multiply` takes at once: as many as their sums, with those of all rows, leave registers for. */
INLINE int64_t step_of(const Weight *w, int64_t rows) {
    int64_t most = smaller(MOST_OUTPUTS, BLOCK_FLOATS / w->k / BLOCK_OUTPUTS * BLOCK_OUTPUTS);
    return rows == 1 ? 4 : rows <= 4 ? 2 : rows <= DIRECT_TOKENS ? 1 : larger(BLOCK_OUTPUTS, most);
}

/* x [rows, K] in the order in which weights are decoded. */
INLINE void reorder(const float *x, int64_t x_stride, float *out, int64_t rows, int64_t k, int pairs) {
    for (int64_t t = 0; t < rows; t++)
        for (int64_t c = 0; c < k; c += STEP)
            for (int64_t i = 0; i < STEP; i++)
                out[t * k + c + i] = x[t * x_stride + c + (pairs ? i % LANES * 2 + i / LANES : i)];
}

/* y [rows, N] of x [rows, K], both fp32. Returns 0, or 1 without memory. */
int skinny_product(const Weight *w, const float *x, int64_t x_stride, float *y, int64_t rows, int threads) {
    float *ordered = malloc(rows * w->k * sizeof *ordered);
    if (rows && !ordered) return 1;
    reorder(x, x_stride, ordered, rows, w->k, has_four_bits(w->format));
    int64_t step = step_of(w, rows);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < w->n; n += step)
        /* Formats are asked for in here, since a parallel loop becomes a function of its own before they are known. */
        multiply(w, ordered, y, rows, n, step);
    free(ordered);
    return 0;
}

/* A row of W as it is. */
INLINE void expand_row_of(int format, const Weight *w, int64_t n, float *out) {
    decode_row(format, w, n, out);
    for (int64_t k = 0; k < w->k && has_four_bits(format); k += STEP) {
        Floats even = floats_at(out + k), odd = floats_at(out + k + LANES);
        put_in_turns(out + k, even, odd);
    }
}

typedef float Number;

INLINE void expand_row(const Weight *all, int64_t n, float *row) {
    _Alignas(4) int8_t codes[rows_bytes(all, 1)];
    Weight bytes;
    const Weight *w = in_rows(all, n, 1, codes, &bytes);
    switch (format_of(w)) {
    case NF4: expand_row_of(NF4, w, n, row); break;
    case INT4: expand_row_of(INT4, w, n, row); break;
    case INT8: expand_row_of(INT8, w, n, row); break;
    case FP8: expand_row_of(FP8, w, n, row); break;
    case BFLOAT16: expand_row_of(BFLOAT16, w, n, row); break;
    case INT4_FROM_MINIMA: expand_row_of(INT4_FROM_MINIMA, w, n, row); break;
    case ASYMMETRIC: expand_row_of(ASYMMETRIC, w, n, row); break;
    }
}

#include "expand.h"

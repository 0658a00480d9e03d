/* Products of fp32 rows with a weight, quantized or in bf16, for x86 processors with AVX-512 (F, BW, VL), which have twice
   the lanes of `_skinny_wide.c`.

   y[t, n] = sum over k of x[t, k] * W[n, k], where W is `dequantize(torch.float32)` to the bit. Sums are fp32, in an order
   that depends on K alone: a row of y has the same bits whatever rows are beside it and however many threads there are.

   A lane is an output: the same input of 16 rows of W is a register, which multiplies a number of x in every lane. A chunk
   of inputs is decoded into the cache, once for all rows of x.

   FP8 is not taken: its conversion takes so many steps here that a single row costs more.

   Legend: T rows of x, N outputs, K inputs (a multiple of 32), G groups of a row of W.
*/

#include <stdlib.h>

#include "outputs.h"

enum { CHUNK = 64, TOKENS = 8, BLOCK_ROWS = 64 };

static const float INTEGERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const float AROUND_ZERO[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

/* Inputs whose codes are so many bytes. */
INLINE int inputs_of(int format, const int bytes) {
    return format == BFLOAT16 ? bytes / 2 : has_four_bits(format) ? 2 * bytes : bytes;
}

/* INT8 in groups of 16 is as INT8 here: no piece of 16 bytes has two groups. */
INLINE int format_of(const Weight *w) { return w->format == INT4 && w->zeros ? ASYMMETRIC : w->format; }

/* Whether something is added to the codes of a group, or subtracted from them. */
INLINE int has_shifts(int format) { return format == INT4_FROM_MINIMA || format == ASYMMETRIC; }

/* The number that a code of four bits stands for, which is the lowest of each lane: a look-up reads no more of it. */
INLINE __m512 value_of_4bit(int format, __m512i codes, __m512 scale, __m512 shift) {
    const float *table = format == NF4 ? NF4_VALUES : format == INT4 ? AROUND_ZERO : INTEGERS;
    __m512 value = _mm512_permutexvar_ps(codes, _mm512_loadu_ps(table));
    if (format == INT4_FROM_MINIMA) return _mm512_fmadd_ps(value, scale, shift);
    if (format == ASYMMETRIC) value = _mm512_sub_ps(value, shift);
    return _mm512_mul_ps(value, scale);
}

/* The same of the i-th byte of each lane, which is 128 more than its code. */
INLINE __m512 value_of_8bit(__m512i codes, const int i, __m512 scale) {
    __m512i byte = _mm512_shuffle_epi8(codes, _mm512_set4_epi32(0x80808000 + 12 + i, 0x80808000 + 8 + i,
                                                                0x80808000 + 4 + i, 0x80808000 + i));
    /* 128 * scale is exact, so the shifted product is rounded once, as code * scale is. */
    __m512 shift = _mm512_mul_ps(scale, _mm512_set1_ps(-128));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(byte), scale, shift);
}

/* The i-th number of those whose codes are four bytes of each lane. */
INLINE __m512 value_at(int format, __m512i codes, const int i, __m512 scale, __m512 shift) {
    const __m512i high = _mm512_set1_epi32(0xffff0000);
    if (format == BFLOAT16) return _mm512_castsi512_ps(i ? _mm512_and_si512(codes, high) : _mm512_slli_epi32(codes, 16));
    if (format == INT8) return value_of_8bit(codes, i, scale);
    return value_of_4bit(format, _mm512_srli_epi32(codes, 4 * (format == NF4 ? i ^ 1 : i)), scale, shift);
}

/* OUTPUTS rows of W from n on. */
typedef struct {
    const Weight *weight;
    const uint8_t *codes;
    const float *scales, *shifts; /* [G, OUTPUTS]: what codes are multiplied by, and what is added or subtracted */
} Block;

/* Inputs `start` to `stop` of a block: to `weights` [., OUTPUTS], or, without that, times the numbers of x, added to sums of
   even and odd ones. */
INLINE void decode(int format, const Block *w, int64_t start, int64_t stop, float *weights, const float *x, __m512 *sums) {
    const int step = inputs_of(format, PIECE), each = inputs_of(format, 4);
    const int is_turned = w->weight->is_turned;
    int64_t at = bytes_of(format, start), stride = bytes_of(format, w->weight->k), group = w->weight->group;
    const uint8_t *next = w->codes + OUTPUTS * stride + (is_turned ? OUTPUTS * at : at);
    for (int64_t k = start; k < stop; k += step, at += PIECE) {
        __m512 scale = _mm512_setzero_ps(), shift = _mm512_setzero_ps();
        if (format != BFLOAT16) scale = _mm512_loadu_ps(w->scales + k / group * OUTPUTS);
        if (has_shifts(format)) shift = _mm512_loadu_ps(w->shifts + k / group * OUTPUTS);
        /* The same lines of the next outputs, a quarter of them now: the processor's own prefetch ends with a page. */
        if (is_turned)
            UNROLLED(int i = 0; i < OUTPUTS * PIECE; i += CACHE_LINE) _mm_prefetch(next + i, _MM_HINT_T1);
        else
            UNROLLED(int i = 0; i < OUTPUTS / 4; i++)
                _mm_prefetch(next + (i + k / step % 4 * OUTPUTS / 4) * stride, _MM_HINT_T1);
        next += is_turned ? OUTPUTS * PIECE : PIECE;
        __m512i fours[4];
        read_codes(w->weight, w->codes, at, fours);
        UNROLLED(int i = 0; i < 4; i++) {
            if (format == INT8) fours[i] = _mm512_xor_si512(fours[i], _mm512_set1_epi8(-128));
            UNROLLED(int j = 0; j < each; j++) {
                __m512 value = value_at(format, fours[i], j, scale, shift);
                if (weights)
                    _mm512_storeu_ps(weights + (k - start + i * each + j) * OUTPUTS, value);
                else
                    sums[j % 2] = _mm512_fmadd_ps(value, _mm512_set1_ps(x[k + i * each + j]), sums[j % 2]);
            }
        }
    }
}

/* `count` inputs of `tokens` rows of x times those of OUTPUTS, added to y [T, OUTPUTS]. */
INLINE void multiply_chunk(const int tokens, const float *x, int64_t row, const float *weights, int64_t count, float *y) {
    __m512 sums[TOKENS][2]; /* of even and odd inputs, since a product waits four cycles for the one before it */
    UNROLLED(int t = 0; t < tokens; t++)
        UNROLLED(int i = 0; i < 2; i++) sums[t][i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < count; k += 2)
        UNROLLED(int i = 0; i < 2; i++) {
            __m512 weight = _mm512_loadu_ps(weights + (k + i) * OUTPUTS);
            UNROLLED(int t = 0; t < tokens; t++)
                sums[t][i] = _mm512_fmadd_ps(weight, _mm512_set1_ps(x[t * row + k + i]), sums[t][i]);
        }
    UNROLLED(int t = 0; t < tokens; t++) {
        __m512 sum = _mm512_add_ps(sums[t][0], sums[t][1]);
        _mm512_storeu_ps(y + t * OUTPUTS, _mm512_add_ps(_mm512_loadu_ps(y + t * OUTPUTS), sum));
    }
}

/* The same of all rows of x. */
static void multiply_rows(const float *x, int64_t row, const float *weights, int64_t count, float *y, int64_t rows) {
    for (int64_t t = 0; t < rows; t += TOKENS, x += TOKENS * row, y += TOKENS * OUTPUTS)
        switch (smaller(TOKENS, rows - t)) {
        case 1: multiply_chunk(1, x, row, weights, count, y); break;
        case 2: multiply_chunk(2, x, row, weights, count, y); break;
        case 3: multiply_chunk(3, x, row, weights, count, y); break;
        case 4: multiply_chunk(4, x, row, weights, count, y); break;
        case 5: multiply_chunk(5, x, row, weights, count, y); break;
        case 6: multiply_chunk(6, x, row, weights, count, y); break;
        case 7: multiply_chunk(7, x, row, weights, count, y); break;
        case 8: multiply_chunk(8, x, row, weights, count, y); break;
        }
}

/* Both of a block, [G, OUTPUTS]. */
INLINE void constants_by_lanes(int format, const Weight *w, int64_t n, float *scales, float *shifts) {
    if (format == BFLOAT16) return;
    numbers_by_lanes(w, w->scales, n, scales);
    if (format == INT4_FROM_MINIMA) numbers_by_lanes(w, w->minima, n, shifts);
    if (format == ASYMMETRIC) zeros_by_lanes(w, n, shifts);
}

/* A row of x times a block: in the order of `multiply_chunk`, but no weight is written. */
INLINE __m512 multiply_row(int format, const Block *w, const float *x, int64_t size) {
    __m512 y = _mm512_setzero_ps();
    for (int64_t k = 0; k < size; k += CHUNK) {
        __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        decode(format, w, k, smaller(k + CHUNK, size), NULL, x, sums);
        y = _mm512_add_ps(y, _mm512_add_ps(sums[0], sums[1]));
    }
    return y;
}

/* At most BLOCK_ROWS rows of x times a block, y [T, OUTPUTS]. */
INLINE void multiply_block(int format, const Block *w, const float *x, int64_t x_stride, int64_t size, float *y,
                           int64_t rows) {
    ALIGNED float weights[CHUNK * OUTPUTS];
    memset(y, 0, rows * OUTPUTS * sizeof *y);
    for (int64_t k = 0; k < size; k += CHUNK) {
        int64_t stop = smaller(k + CHUNK, size);
        decode(format, w, k, stop, weights, NULL, NULL);
        multiply_rows(x + k, x_stride, weights, stop - k, y, rows);
    }
}

/* `rows` rows of x times OUTPUTS of W, from n on; the first `count` go to y [T, .], whose rows are `y_stride` apart. */
INLINE void multiply_outputs(int format, const Weight *w, int64_t n, const float *x, int64_t x_stride, float *y,
                             int64_t y_stride, int64_t rows, int64_t count) {
    int64_t constants = format == BFLOAT16 ? 1 : groups_of(w) * OUTPUTS, stride = bytes_of(w->format, w->k);
    ALIGNED float scales[constants], shifts[has_shifts(format) ? constants : 1], sums[BLOCK_ROWS * OUTPUTS];
    Block block = {w, w->codes + n * stride, scales, shifts};
    constants_by_lanes(format, w, n, scales, shifts);
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        int64_t most = smaller(BLOCK_ROWS, rows - first);
        for (int64_t t = first; t < first + most; t++) __builtin_prefetch(y + t * y_stride, 1);
        if (rows == 1)
            _mm512_storeu_ps(sums, multiply_row(format, &block, x, w->k));
        else
            multiply_block(format, &block, x + first * x_stride, x_stride, w->k, sums, most);
        for (int64_t t = 0; t < most; t++)
            _mm512_mask_storeu_ps(y + (first + t) * y_stride, (1 << count) - 1, _mm512_loadu_ps(sums + t * OUTPUTS));
    }
}

/* The same of any format. */
INLINE void multiply_any(const Weight *all, int64_t n, const float *x, int64_t x_stride, float *y, int64_t y_stride,
                         int64_t rows, int64_t count) {
    ALIGNED int8_t codes[widened_bytes(all, OUTPUTS)];
    Weight bytes;
    const Weight *w = outputs_in_bytes(all, n, codes, &bytes);
    switch (format_of(w)) {
    case NF4: multiply_outputs(NF4, w, n, x, x_stride, y, y_stride, rows, count); break;
    case INT4: multiply_outputs(INT4, w, n, x, x_stride, y, y_stride, rows, count); break;
    case INT8: multiply_outputs(INT8, w, n, x, x_stride, y, y_stride, rows, count); break;
    case BFLOAT16: multiply_outputs(BFLOAT16, w, n, x, x_stride, y, y_stride, rows, count); break;
    case INT4_FROM_MINIMA: multiply_outputs(INT4_FROM_MINIMA, w, n, x, x_stride, y, y_stride, rows, count); break;
    case ASYMMETRIC: multiply_outputs(ASYMMETRIC, w, n, x, x_stride, y, y_stride, rows, count); break;
    }
}

/* y [rows, N] of x [rows, K], both fp32. Returns 0, or 1 without memory. */
int skinny_product(const Weight *w, const float *x, int64_t x_stride, float *y, int64_t rows, int threads) {
    char *memory = calloc(1, last_bytes(w));
    if (!memory) return 1;
    Weight last = last_outputs(w, memory);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < w->n; n += OUTPUTS) {
        int64_t count = smaller(OUTPUTS, w->n - n), place = count < OUTPUTS ? 0 : n;
        const Weight *from = count < OUTPUTS ? &last : w;
        /* Formats are asked for in here, since a parallel loop becomes a function of its own before they are known. */
        multiply_any(from, place, x, x_stride, y + n, w->n, rows, count);
    }
    free(memory);
    return 0;
}

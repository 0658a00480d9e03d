/* Products of rows that are rounded to 8 bits with integer weights, for x86 processors with AVX-512 VNNI (for others
   `_rounded_lanes.c`).

   y[t, n] = sum over spans of x's neighbours of s * (scale * (sum of q * code) + shift * (sum of q))

   x being s * q (kernels/linear/rounded.py), and W code * scale + shift (kernels/linear/quantization.py). Sums within a
   span are integers, and so exact; those of spans are fp32, one after another: a row of y has the same bits whatever rows
   are beside it and however many threads there are.

   A lane is an output: four neighbours of 16 rows of W become a register, which multiplies the same four of a row of x in
   every lane, so no lanes are summed at the end. A span of 16 rows of W is 16 such registers. They are decoded once and
   stay while all rows of x pass by; sums of those wait in the cache for the next span.

   Legend: T rows of x, N outputs, K inputs (a multiple of MOST_SPAN), G groups of a row of W.
*/

#include "../common/amx.h"
#include "../common/reserve.h"
#include "outputs.h"
#include "round.h"

enum { MOST_SPAN = 64, TOKENS = 8, BLOCK_ROWS = 128 };
enum { AHEAD = 2 * OUTPUTS }; /* so many rows of W on is fetched: the processor's own prefetch ends with a page */

/* What a product is compiled for. From symmetric codes an integer is subtracted, 8, 32 or 128; the others have shifts.
   Turned codes of six bits are read as they lie, others have been widened to eight. */
typedef struct {
    int bits, has_shifts, span; /* of 32 or MOST_SPAN neighbours, within a group of W and of x */
} Kind;

/* Rows of x, rounded: one span of all of them after another. */
typedef struct {
    int64_t rows;
    int8_t *q;            /* [K / span, T, span]; for four bits of each eight the even ones first, as a byte has them */
    float *scales, *sums; /* [K / span, T]: s, and s * (sum of q) */
    int32_t *offsets;     /* [K / span, T]: what symmetric sums begin with */
} Rows;

INLINE int piece_of(const Kind kind) { return kind.bits == 6 ? SIXES_BYTES : PIECE; }

/* A piece of OUTPUTS rows of W, from byte `at` of each on, as unsigned bytes, four of every row in a register. */
INLINE void decode(const Kind kind, const Weight *w, const uint8_t *block, int64_t at, __m512i *out) {
    const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
    __m512i fours[4];
    if (kind.bits == 6) {
        read_sixes(block + OUTPUTS * at, out);
        return;
    }
    read_codes(w, block, at, fours);
    UNROLLED(int i = 0; i < 4; i++) {
        if (kind.bits == 8) {
            out[i] = _mm512_xor_si512(fours[i], sign);
            continue;
        }
        out[2 * i] = _mm512_and_si512(fours[i], low);
        out[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(fours[i], 4), low);
    }
}

INLINE __m512i four_bytes(const int8_t *from) {
    int32_t bits;
    memcpy(&bits, from, sizeof bits);
    return _mm512_set1_epi32(bits);
}

/* A span of `tokens` rows of x, from `at` on, times that of OUTPUTS rows of W, from byte `byte` of each on, added to y. */
INLINE void multiply_span(const Kind kind, const int tokens, const Weight *w, const uint8_t *codes, int64_t byte,
                          __m512 scales, __m512 shifts, const Rows *x, int64_t at, __m512 *y) {
    const int chains = tokens < 4 ? 4 : 1; /* since a product waits five cycles for the one before it */
    const int decoded = kind.bits == 8 ? 4 : 8;
    const int8_t *q = x->q + at * kind.span;
    __m512i sums[TOKENS], weights[8];
    UNROLLED(int i = 0; i < chains * tokens; i++) {
        int begins = !kind.has_shifts && i < tokens;
        sums[i] = begins ? _mm512_set1_epi32(x->offsets[at + i]) : _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (int first = 0; first < kind.span / 4; first += decoded, byte += piece_of(kind)) {
        decode(kind, w, codes, byte, weights);
        UNROLLED(int i = 0; i < decoded; i++)
            UNROLLED(int t = 0; t < tokens; t++) {
                __m512i *sum = sums + i % chains * tokens + t;
                *sum = _mm512_dpbusd_epi32(*sum, weights[i], four_bytes(q + t * kind.span + 4 * (first + i)));
            }
    }
    UNROLLED(int i = tokens; i < chains * tokens; i++) sums[i % tokens] = _mm512_add_epi32(sums[i % tokens], sums[i]);
    UNROLLED(int t = 0; t < tokens; t++) {
        __m512 factor = _mm512_mul_ps(scales, _mm512_set1_ps(x->scales[at + t]));
        y[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[t]), factor, y[t]);
        if (kind.has_shifts) y[t] = _mm512_fmadd_ps(shifts, _mm512_set1_ps(x->sums[at + t]), y[t]);
    }
}

/* To the second cache, which waits for more lines at once than the first. */
INLINE void fetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) _mm_prefetch((const char *)from + i, _MM_HINT_T1);
}

/* Scales, or minima, of OUTPUTS rows. */
INLINE void fetch_numbers(const Weight *w, const void *numbers, int64_t n) {
    fetch(place_of(w, numbers, n * groups_of(w)), OUTPUTS * groups_of(w) * (w->is_half ? 2 : 4));
}

/* The first `count` of OUTPUTS sums, as y holds them. */
INLINE void store_outputs(int dtype, void *y, __m512 sums, int64_t count) {
    __mmask16 stored = (1 << count) - 1;
    if (dtype == FP32) {
        _mm512_mask_storeu_ps(y, stored, sums);
        return;
    }
    __m256 low = rounded(BF16, _mm512_castps512_ps256(sums));
    __m256 high = rounded(BF16, _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(sums), 1)));
    __m512i bits = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_castps_si256(low)), _mm256_castps_si256(high), 1);
    _mm256_mask_storeu_epi16(y, stored, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}

/* OUTPUTS of W, what is wanted after them, or null, and where products go. */
typedef struct {
    const uint8_t *codes, *next;
    const float *scales, *shifts; /* [G, OUTPUTS] */
    int dtype;
    char *y; /* the first `count` of a row; rows are `row` bytes apart */
    int64_t row, count;
} Outputs;

/* `tokens` rows of x, from the t-th on, times OUTPUTS of W. */
INLINE void multiply(const Kind kind, const int tokens, const Weight *w, const Outputs *outputs, const Rows *x, int64_t t) {
    int64_t step = bytes_of(w->format, kind.span), byte = 0;
    const uint8_t *next = t ? NULL : outputs->next;
    char *to = outputs->y + t * outputs->row;
    __m512 y[TOKENS];
    UNROLLED(int i = 0; i < tokens; i++) y[i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < w->k; k += kind.span, t += x->rows, byte += step) {
        int64_t group = k / w->group * OUTPUTS;
        __m512 scale = _mm512_loadu_ps(outputs->scales + group);
        __m512 shift = kind.has_shifts ? _mm512_loadu_ps(outputs->shifts + group) : _mm512_setzero_ps();
        if (next) fetch(next + OUTPUTS * byte, OUTPUTS * step);
        multiply_span(kind, tokens, w, outputs->codes, byte, scale, shift, x, t, y);
    }
    UNROLLED(int i = 0; i < tokens; i++) store_outputs(outputs->dtype, to + i * outputs->row, y[i], outputs->count);
}

/* What is added to code * scale, [G, OUTPUTS]. */
INLINE void shifts_by_lanes(const Weight *w, const float *scales, int64_t n, float *out) {
    if (w->minima) {
        numbers_by_lanes(w, w->minima, n, out);
        return;
    }
    zeros_by_lanes(w, n, out);
    for (int64_t i = 0; i < groups_of(w) * OUTPUTS; i++) out[i] *= -scales[i];
}

/* The codes of OUTPUTS rows, turned. */
INLINE void turn(const Weight *w, const uint8_t *codes, uint8_t *out) {
    for (int64_t at = 0; at < bytes_of(w->format, w->k); at += PIECE, out += OUTPUTS * PIECE) {
        __m512i fours[4];
        read_codes(w, codes, at, fours);
        UNROLLED(int i = 0; i < 4; i++) _mm512_store_si512(out + i * CACHE_LINE, fours[i]);
    }
}

/* All rows of x times OUTPUTS of W, from n on; the first `count` go to y [T, .], whose rows are `stride` apart. */
INLINE void multiply_outputs(const Kind kind, const Weight *w, const Rows *x, int64_t n, int dtype, char *y,
                             int64_t stride, int64_t count) {
    int64_t groups = groups_of(w), bytes = bytes_of(w->format, w->k), t = 0, row = stride * size_of(dtype);
    int turns = !w->is_turned && x->rows > TOKENS; /* since codes are read again for other rows of x */
    ALIGNED float scales[groups * OUTPUTS], shifts[kind.has_shifts ? groups * OUTPUTS : 1];
    ALIGNED uint8_t turned_codes[turns ? OUTPUTS * bytes : 1];
    const uint8_t *codes = w->codes + n * bytes;
    int is_seen = w->is_turned && x->rows == 1 && !HAS_AMX; /* that codes go on; processors with AMX do not see it */
    const uint8_t *next = is_seen ? NULL : codes + AHEAD * bytes;
    Outputs outputs = {codes, next, scales, shifts, dtype, y, row, count};
    Weight turned = *w;
    for (int64_t i = 0; i < x->rows; i++) __builtin_prefetch(y + i * row, 1);
    fetch_numbers(w, w->scales, n + AHEAD);
    if (w->minima) fetch_numbers(w, w->minima, n + AHEAD);
    numbers_by_lanes(w, w->scales, n, scales);
    if (kind.has_shifts) shifts_by_lanes(w, scales, n, shifts);
    if (turns) {
        turn(w, codes, turned_codes);
        outputs.codes = turned_codes;
        turned.is_turned = 1;
    }
    for (; t + TOKENS <= x->rows; t += TOKENS) multiply(kind, TOKENS, &turned, &outputs, x, t);
    for (; t + 4 <= x->rows; t += 4) multiply(kind, 4, &turned, &outputs, x, t);
    for (; t < x->rows; t++) multiply(kind, 1, &turned, &outputs, x, t);
}

/* The same, compiled for each kind. */
static void multiply_kind(Kind kind, const Weight *all, const Rows *x, int64_t n, int dtype, char *y, int64_t stride,
                          int64_t count) {
    ALIGNED int8_t codes[kind.bits == 8 ? widened_bytes(all, OUTPUTS) : 1];
    Weight bytes;
    const Weight *w = kind.bits == 8 ? outputs_in_bytes(all, n, codes, &bytes) : all;
#define MULTIPLY(BITS, HAS_SHIFTS) \
    if (kind.bits == BITS && kind.has_shifts == HAS_SHIFTS && kind.span == MOST_SPAN) \
        multiply_outputs((Kind){BITS, HAS_SHIFTS, MOST_SPAN}, w, x, n, dtype, y, stride, count); \
    if (kind.bits == BITS && kind.has_shifts == HAS_SHIFTS && kind.span == 32) \
        multiply_outputs((Kind){BITS, HAS_SHIFTS, 32}, w, x, n, dtype, y, stride, count);
    MULTIPLY(4, 0)
    MULTIPLY(4, 1)
    MULTIPLY(6, 0)
    MULTIPLY(6, 1)
    MULTIPLY(8, 0)
#undef MULTIPLY
}

INLINE __m512 load_piece(int dtype, const void *from) {
    if (dtype == FP32) return _mm512_loadu_ps(from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from)), 16));
}

/* A row of x, of which `group` neighbours share a scale, as the t-th. */
static void round_row(Kind kind, int dtype, const char *x, int64_t k, int64_t group, int64_t t, const Rows *out) {
    const __m128i even_first = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m512 lowest = _mm512_set1_ps(-128), highest = _mm512_set1_ps(127);
    float scale = 0;
    for (int64_t start = 0, span = t; start < k; start += kind.span, span += out->rows) {
        if (start % group == 0) scale = scale_of(dtype, at(dtype, x, start), group);
        __m512i sums = _mm512_setzero_si512();
        for (int i = 0; i < kind.span; i += PIECE) {
            __m512 scaled = _mm512_div_ps(load_piece(dtype, at(dtype, x, start + i)), _mm512_set1_ps(scale));
            __m512i q = _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(scaled, lowest), highest));
            __m128i bytes = _mm512_cvtepi32_epi8(q);
            sums = _mm512_add_epi32(sums, q);
            if (kind.bits == 4) bytes = _mm_shuffle_epi8(bytes, even_first);
            _mm_storeu_si128((__m128i *)(out->q + span * kind.span + i), bytes);
        }
        int32_t sum = _mm512_reduce_add_epi32(sums);
        out->scales[span] = scale;
        out->sums[span] = scale * (float)sum;
        out->offsets[span] = -(1 << (kind.bits - 1)) * sum;
    }
}

/* Rows of x times all of W, whose last outputs, if they are fewer than OUTPUTS, are in `last`. */
static void multiply_rows(Kind kind, const Weight *w, const Weight *last, int dtype, const char *x, int64_t x_stride,
                          int64_t x_group, const Rows *rounded, char *y, int threads) {
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < rounded->rows; t++) round_row(kind, dtype, at(dtype, x, t * x_stride), w->k, x_group, t, rounded);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < w->n; n += OUTPUTS) {
            int64_t count = smaller(OUTPUTS, w->n - n);
            int is_whole = count == OUTPUTS;
            char *outputs = y + n * size_of(dtype);
            multiply_kind(kind, is_whole ? w : last, rounded, is_whole ? n : 0, dtype, outputs, w->n, count);
        }
    }
}

/* `rows` rows of x, and where they lie once they are rounded. */
static Rows rows_in(char *memory, int64_t rows, int64_t k, int64_t span) {
    int64_t scales = rows * k / span;
    float *first = (float *)(memory + rows * k);
    return (Rows){rows, (int8_t *)memory, first, first + scales, (int32_t *)(first + 2 * scales)};
}

/* y [rows, N] of x [rows, K], both of a dtype, of which `x_group` neighbours share a scale. Returns 0, or 1 without
   memory. */
int rounded_product(const Weight *w, int dtype, const char *x, int64_t x_stride, int64_t x_group, char *y, int64_t rows,
                    int threads) {
    int64_t span = w->group % MOST_SPAN || x_group % MOST_SPAN ? 32 : MOST_SPAN, most = smaller(rows, BLOCK_ROWS);
    int64_t block = most * (w->k + w->k / span * 3 * (int64_t)sizeof(float)); /* stays in the cache while W passes by */
    int bits = has_four_bits(w->format) ? 4 : w->format == INT6 && w->is_turned ? 6 : 8;
    Kind kind = {bits, bits < 8 && (w->minima || w->zeros), span};
    char *memory = reserve(block + last_bytes(w));
    if (!memory) return 1;
    Weight last = last_outputs(w, memset(memory + block, 0, last_bytes(w)));
    for (int64_t first = 0; first < rows; first += BLOCK_ROWS) {
        Rows rounded = rows_in(memory, smaller(BLOCK_ROWS, rows - first), w->k, span);
        multiply_rows(kind, w, &last, dtype, at(dtype, x, first * x_stride), x_stride, x_group, &rounded,
                      y + first * w->n * size_of(dtype), threads);
    }
    return 0;
}

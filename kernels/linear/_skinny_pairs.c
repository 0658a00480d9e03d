/* Products of bf16 rows with a weight of integers that lies turned (weights.h), for x86 processors with AVX-512 BF16, by
   AMX where they have it.

   y[t, n] = sum over k of x[t, k] * W[n, k], in fp32 and rounded once, or kept, in an order that depends on K alone: a row
   of y has the same bits whatever rows are beside it, up to DIRECT_ROWS, and however many threads there are. By tiles that is so
   from two rows to MOST_TILED_ROWS; in groups of 16, which are no whole step, from FEWEST_SIXTEENS on.

   A lane is an output. Registers of words of codes become pairs of inputs in bf16, and no weight is rounded:

       4 and 6 bits    behind the exponent of a number they are 128 more than their code
       8 bits          in the highest bits of an integer they become a float of 2^24 times their code, whose lower half is
                       zero; so x is multiplied with 2^-24 first (below 2e-31 it becomes 0)

   A span of inputs sums up to x * (offset + code), and  scale * (that - (offset + zero) * sum of x)  is added to y. By tiles
   the pairs of a span lie in the cache before they are multiplied. For more rows a panel of W becomes
   `dequantize(torch.bfloat16)` in the cache, of eight bits times 2^24.

   Legend: T rows of x, N outputs, K inputs (a multiple of 32), G groups of a row of W.
*/

#include <omp.h>
#include <stddef.h>

#include "../common/pairs.h"
#include "../common/reserve.h"
#include "outputs.h"
#include "panel_tiles.h"

enum { SPAN = 128, STEP = 32, MOST_PARTS = 6, DIRECT_ROWS = 32, MOST_TILED_ROWS = 128, FEWEST_SIXTEENS = 5 };

/* What a product is compiled for. */
typedef struct {
    int bits, has_minima;
} Kind;

static const Kind FOUR = {4, 0}, FOUR_FROM_MINIMA = {4, 1}, SIX = {6, 0}, EIGHT = {8, 0};

/* Pairs of inputs in the fewest whole words of codes, and the bytes of those. */
INLINE int pairs_of(const Kind kind) { return kind.bits == 8 ? 2 : kind.bits == 6 ? 16 : 4; }
INLINE int bytes_of_pairs(const Kind kind) { return pairs_of(kind) * kind.bits / 4; }

/* What the exponent adds to codes. */
INLINE float offset_of(const Kind kind) { return kind.bits == 8 ? 0 : 128; }

INLINE int64_t span_of(const Weight *w, int64_t k) {
    return smaller(smaller(SPAN, w->group - k % w->group), w->k - k);
}

INLINE __m512i words_at(const uint8_t *codes, const int word) {
    return _mm512_loadu_si512(codes + word * OUTPUTS * sizeof(uint32_t));
}

/* A pair of every output of those that begin at `codes`: 128 more than their codes, of eight bits 2^24 times as large. */
INLINE __m512i codes_at(const Kind kind, const uint8_t *codes, const int pair) {
    const __m512i fours = _mm512_set1_epi32(0x000f000f), twos = _mm512_set1_epi32(0x00300030);
    const __m512i exponent = _mm512_set1_epi32(0x43004300), high = _mm512_set1_epi32(0xff000000);
    const int and_then_or = 0xea;
    if (kind.bits == 4)
        return _mm512_ternarylogic_epi32(_mm512_srli_epi32(words_at(codes, 0), 4 * pair), fours, exponent, and_then_or);
    if (kind.bits == 6) {
        const int four = pair / 2, byte = pair % 2 * 8, two = byte + four / 2 * 2 - 4; /* where the bits are wanted */
        __m512i low = _mm512_srli_epi32(words_at(codes, four % 4), byte + four / 4 * 4);
        __m512i upper = words_at(codes, 4 + four % 2);
        upper = two < 0 ? _mm512_slli_epi32(upper, -two) : _mm512_srli_epi32(upper, two);
        low = _mm512_ternarylogic_epi32(low, fours, exponent, and_then_or);
        return _mm512_ternarylogic_epi32(upper, twos, low, and_then_or);
    }
    __m512i words = words_at(codes, 0), first = _mm512_slli_epi32(words, pair ? 16 : 24);
    __m512i second = pair ? words : _mm512_slli_epi32(words, 8);
    if (pair) first = _mm512_and_si512(first, high);
    first = (__m512i)_mm512_cvtepi32_ps(first);
    second = (__m512i)_mm512_cvtepi32_ps(_mm512_and_si512(second, high));
    return _mm512_or_si512(_mm512_srli_epi32(first, 16), second);
}

/* STEP numbers of x as words that are the pairs of a weight's words: inputs 0 and 4, 1 and 5, … of each eight, or of six
   and eight bits 0 and 2, 1 and 3 of each four. */
INLINE __m512i paired_inputs(const int bits, __m512i x) {
    if (bits == 4) return _mm512_unpacklo_epi16(x, _mm512_shuffle_epi32(x, _MM_PERM_DCDC));
    if (bits == 8) {
        __m512 unit = _mm512_set1_ps(0x1p-24f), low = _mm512_mul_ps(widen(_mm512_castsi512_si256(x)), unit);
        x = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(widen(_mm512_extracti64x4_epi64(x, 1)), unit), low);
    }
    return _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(x, _MM_SHUFFLE(3, 1, 2, 0)), _MM_SHUFFLE(3, 1, 2, 0));
}

/* Row t of x into its tile [K / 2, tokens], or `by_tiles` [S, SIDE, WORDS]. */
INLINE void pack_row(const int bits, const uint16_t *x, int64_t k, uint32_t *tile, int64_t tokens, const int by_tiles) {
    for (int64_t i = 0; i < k; i += STEP, tile += STEP / 2 * tokens) {
        __m512i pairs = paired_inputs(bits, _mm512_loadu_si512(x + i));
        if (tokens == 1 || by_tiles) {
            _mm512_storeu_si512(tile, pairs);
            continue;
        }
        uint32_t words[STEP / 2];
        _mm512_storeu_si512(words, pairs);
        for (int j = 0; j < STEP / 2; j++) tile[j * tokens] = words[j];
    }
}

/* The sums of a row of x over spans, `tokens` apart. */
INLINE void sum_spans(const Weight *w, const uint16_t *x, float *totals, int64_t tokens) {
    for (int64_t k = 0, end; k < w->k; k = end, totals += tokens) {
        end = k + span_of(w, k);
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = k; i < end; i += WORDS)
            sum = _mm512_add_ps(sum, widen(_mm256_loadu_si256((const __m256i *)(x + i))));
        *totals = _mm512_reduce_add_ps(sum);
    }
}

static int64_t spans_of(const Weight *w) {
    int64_t spans = 0;
    for (int64_t k = 0; k < w->k; k += span_of(w, k)) spans++;
    return spans;
}

/* Rows of x as tiles, and their sums [spans, tokens]. */
typedef struct {
    uint32_t *words;
    float *totals;
    int64_t rows, spans, by_tiles;
} Rows;

INLINE int64_t together(const Rows *rows) { return rows->by_tiles ? SIDE : TILE_ROWS; }

INLINE void pack_tile(const Weight *w, const uint16_t *x, int64_t stride, const Rows *rows, int64_t first,
                      const int by_tiles) {
    int64_t tokens = smaller(together(rows), rows->rows - first), distance = by_tiles ? SIDE : tokens;
    for (int64_t t = 0; t < tokens; t++) {
        const uint16_t *row = x + (first + t) * stride;
        uint32_t *tile = rows->words + first * w->k / 2 + (by_tiles ? t * WORDS : t);
        switch (w->format) {
        case INT8: pack_row(8, row, w->k, tile, distance, by_tiles); break;
        case INT6: pack_row(6, row, w->k, tile, distance, by_tiles); break;
        default: pack_row(4, row, w->k, tile, distance, by_tiles);
        }
        if (rows->spans) sum_spans(w, row, rows->totals + first * rows->spans + t, tokens);
    }
}

static void pack_rows(const Weight *w, const uint16_t *inputs, int64_t stride, const Rows *x, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (x->rows > TILE_ROWS)
    for (int64_t t = 0; t < x->rows; t += together(x))
        if (x->by_tiles) pack_tile(w, inputs, stride, x, t, 1);
        else pack_tile(w, inputs, stride, x, t, 0);
}

/* A weight, and its last outputs where they are fewer than OUTPUTS. */
typedef struct {
    Weight all, last;
} Whole;

/* Several panels of OUTPUTS. */
typedef struct {
    const uint8_t *codes[MOST_PARTS];
    const float *scales[MOST_PARTS], *shifts[MOST_PARTS]; /* [G, OUTPUTS]; minima, or zeros of less than eight bits */
} Parts;

/* `count` panels from output n on, beyond the end the last one again, whose scales and shifts lie in `memory` then. */
INLINE Parts parts_from(const Kind kind, const Whole *w, int64_t n, int count, float *memory) {
    int64_t end = w->all.n / OUTPUTS * OUTPUTS, groups = groups_of(&w->all);
    Parts parts;
    for (int i = 0; i < count; i++, memory += 2 * groups * OUTPUTS) {
        int64_t first = smaller(n + i * OUTPUTS, (w->all.n - 1) / OUTPUTS * OUTPUTS), place = first < end ? first : 0;
        const Weight *from = first < end ? &w->all : &w->last;
        float *shifts = memory + groups * OUTPUTS;
        numbers_by_lanes(from, from->scales, place, memory);
        if (kind.has_minima) numbers_by_lanes(from, from->minima, place, shifts);
        else if (from->zeros) zeros_by_lanes(from, place, shifts);
        else for (int64_t j = 0; j < groups * OUTPUTS; j++) shifts[j] = 1 << (kind.bits - 1);
        parts.codes[i] = from->codes + place * bytes_of(from->format, from->k);
        parts.scales[i] = memory;
        parts.shifts[i] = shifts;
    }
    return parts;
}

/* Codes are wanted soon. Panels are too short for processors with AMX to see that they go on: of one row, on one thread,
   this saves a tenth of the time. */
INLINE void fetch(const Kind kind, const Parts *w, int64_t at, const int parts) {
    UNROLLED(int i = 0; i < parts; i++)
        UNROLLED(int byte = 0; byte < bytes_of_pairs(kind) * OUTPUTS; byte += CACHE_LINE)
            _mm_prefetch(w->codes[i] + at + byte, _MM_HINT_T0);
}

/* Some inputs of every output times those of `tokens` rows of x [pairs, tokens]. */
INLINE void multiply_pairs(const Kind kind, const Parts *w, int64_t at, const uint32_t *x,
                           __m512 sums[TILE_ROWS][MOST_PARTS], const int tokens, const int parts) {
#pragma GCC unroll 16
    for (int pair = 0; pair < pairs_of(kind); pair++, x += tokens) {
        __m512bh weights[MOST_PARTS];
        UNROLLED(int i = 0; i < parts; i++) weights[i] = (__m512bh)codes_at(kind, w->codes[i] + at, pair);
        UNROLLED(int t = 0; t < tokens; t++) {
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(x[t]);
            UNROLLED(int i = 0; i < parts; i++) sums[t][i] = _mm512_dpbf16_ps(sums[t][i], inputs, weights[i]);
        }
    }
}

/* What a span of `tokens` rows has summed up to, added to y [tokens, parts, OUTPUTS]. */
INLINE void add_span(const Kind kind, const Parts *w, int64_t group, const float *totals,
                     __m512 sums[TILE_ROWS][MOST_PARTS], float *y, const int tokens, const int parts) {
    UNROLLED(int i = 0; i < parts; i++) {
        __m512 scale = _mm512_loadu_ps(w->scales[i] + group * OUTPUTS), offset = _mm512_set1_ps(offset_of(kind));
        __m512 shift = _mm512_loadu_ps(w->shifts[i] + group * OUTPUTS);
        if (!kind.has_minima) offset = _mm512_add_ps(offset, shift);
        UNROLLED(int t = 0; t < tokens; t++) {
            float *to = y + (t * parts + i) * OUTPUTS;
            __m512 total = _mm512_set1_ps(totals[t]), sum = _mm512_loadu_ps(to), span = sums[t][i];
            if (kind.has_minima) sum = _mm512_fmadd_ps(shift, total, sum);
            if (kind.bits < 8) span = _mm512_fnmadd_ps(offset, total, span);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(span, scale, sum));
        }
    }
}

/* `tokens` rows of x, a tile, times `count` panels. */
INLINE void tile(const Kind kind, const Weight *w, const Parts *parts, const uint32_t *x, const float *totals, Columns to,
                 const int tokens, const int count) {
    ALIGNED float y[tokens * count * OUTPUTS];
    memset(y, 0, sizeof y);
    int64_t at = 0, step = bytes_of_pairs(kind) * OUTPUTS, next = count * OUTPUTS * bytes_of(w->format, w->k);
    next *= omp_get_num_threads(); /* which take panels in turns */
    for (int64_t k = 0, end; k < w->k; k = end, totals += tokens) {
        __m512 sums[TILE_ROWS][MOST_PARTS];
        UNROLLED(int t = 0; t < tokens; t++)
            UNROLLED(int i = 0; i < count; i++) sums[t][i] = _mm512_setzero_ps();
        end = k + span_of(w, k);
        for (int64_t c = k; c < end; c += 2 * pairs_of(kind), at += step, x += pairs_of(kind) * tokens) {
            if (HAS_AMX && tokens == 1) fetch(kind, parts, at + next, count);
            multiply_pairs(kind, parts, at, x, sums, tokens, count);
        }
        add_span(kind, parts, k / w->group, totals, sums, y, tokens, count);
    }
    UNROLLED(int t = 0; t < tokens; t++)
        UNROLLED(int i = 0; i < count; i++)
            store_lanes(to.y, to.at + t * to.stride + i * OUTPUTS, lanes_until(to.count, i * OUTPUTS),
                        _mm512_loadu_ps(y + (t * count + i) * OUTPUTS), to.keeps_sums);
}

/* The same of any number of rows: of few with all panels at once, of more with one half and then the other. */
INLINE void tile_of(const Kind kind, const Weight *w, const Parts *parts, const uint32_t *x, const float *totals, Columns to,
                    int64_t tokens) {
    switch (tokens) {
    case 1: tile(kind, w, parts, x, totals, to, 1, MOST_PARTS); return;
    case 2: tile(kind, w, parts, x, totals, to, 2, MOST_PARTS); return;
    case 3: tile(kind, w, parts, x, totals, to, 3, MOST_PARTS); return;
    case 4: tile(kind, w, parts, x, totals, to, 4, MOST_PARTS); return;
    }
    Parts half = *parts;
    for (int part = 0; part < MOST_PARTS; part += PANEL_WORDS, to.at += PANEL_OUTPUTS, to.count -= PANEL_OUTPUTS) {
        for (int i = 0; i < PANEL_WORDS; i++) {
            half.codes[i] = parts->codes[part + i];
            half.scales[i] = parts->scales[part + i];
            half.shifts[i] = parts->shifts[part + i];
        }
        switch (tokens) {
        case 5: tile(kind, w, &half, x, totals, to, 5, PANEL_WORDS); break;
        case 6: tile(kind, w, &half, x, totals, to, 6, PANEL_WORDS); break;
        case 7: tile(kind, w, &half, x, totals, to, 7, PANEL_WORDS); break;
        case 8: tile(kind, w, &half, x, totals, to, 8, PANEL_WORDS); break;
        }
    }
}

/* All rows of x times MOST_PARTS panels from output n on. */
INLINE void multiply_direct(const Kind kind, const Whole *whole, int64_t n, const Rows *x, void *y) {
    const Weight *w = &whole->all;
    ALIGNED float constants[2 * MOST_PARTS * groups_of(w) * OUTPUTS];
    Parts parts = parts_from(kind, whole, n, MOST_PARTS, constants);
    for (int64_t t = 0; t < x->rows; t += TILE_ROWS) {
        Columns to = {y, t * w->n + n, w->n, w->n - n, NULL, w->keeps_sums};
        tile_of(kind, w, &parts, x->words + t * w->k / 2, x->totals + t * x->spans, to,
                smaller(TILE_ROWS, x->rows - t));
    }
}

/* A step of PANEL_WORDS panels from `part` on, [16 pairs, PANEL_OUTPUTS]. */
INLINE void spread_step(const Kind kind, const Parts *w, const int part, int64_t at, uint32_t *out) {
    UNROLLED(int i = 0; i < PANEL_WORDS; i++) {
        const uint8_t *codes = w->codes[part + i] + at;
        uint32_t *to = out + i * OUTPUTS;
        for (int first = 0; first < WORDS; first += pairs_of(kind), codes += bytes_of_pairs(kind) * OUTPUTS)
#pragma GCC unroll 16
            for (int pair = 0; pair < pairs_of(kind); pair++, to += PANEL_OUTPUTS)
                _mm512_storeu_si512(to, codes_at(kind, codes, pair));
    }
}

/* What a span of `tokens` rows has summed up to, [PANEL_WORDS, SIDE, OUTPUTS], added to y [tokens, PANEL_OUTPUTS]. */
INLINE void add_sums(const Kind kind, const Parts *w, const int part, int64_t group, const float *totals,
                     const float *sums, float *y, int64_t tokens) {
    UNROLLED(int i = 0; i < PANEL_WORDS; i++, y += OUTPUTS, sums += SIDE * OUTPUTS) {
        __m512 scale = _mm512_loadu_ps(w->scales[part + i] + group * OUTPUTS), offset = _mm512_set1_ps(offset_of(kind));
        __m512 shift = _mm512_loadu_ps(w->shifts[part + i] + group * OUTPUTS);
        if (!kind.has_minima) offset = _mm512_add_ps(offset, shift);
        for (int64_t t = 0; t < tokens; t++) {
            float *to = y + t * PANEL_OUTPUTS;
            __m512 total = _mm512_set1_ps(totals[t]), sum = _mm512_loadu_ps(to), span = _mm512_load_ps(sums + t * OUTPUTS);
            if (kind.has_minima) sum = _mm512_fmadd_ps(shift, total, sum);
            if (kind.bits < 8) span = _mm512_fnmadd_ps(offset, total, span);
            _mm512_storeu_ps(to, _mm512_fmadd_ps(span, scale, sum));
        }
    }
}

/* All rows of x, as tiles, times MOST_PARTS panels from output n on. */
INLINE void multiply_by_tiles(const Kind kind, const Whole *whole, int64_t n, const Rows *x, void *y) {
    const Weight *w = &whole->all;
    ALIGNED float constants[2 * MOST_PARTS * groups_of(w) * OUTPUTS], sums[PANEL_OUTPUTS * SIDE];
    ALIGNED float all[MOST_TILED_ROWS * PANEL_OUTPUTS];
    ALIGNED uint32_t panel[SPAN / 2 * PANEL_OUTPUTS];
    Parts parts = parts_from(kind, whole, n, MOST_PARTS, constants);
    for (int part = 0; part < MOST_PARTS && n + part * OUTPUTS < w->n; part += PANEL_WORDS) {
        int64_t at = 0, span = 0;
        memset(all, 0, x->rows * PANEL_OUTPUTS * sizeof *all);
        for (int64_t k = 0, end; k < w->k; k = end, span++) {
            end = k + span_of(w, k);
            for (int64_t c = k; c < end; c += STEP, at += bytes_of(w->format, STEP) * OUTPUTS)
                spread_step(kind, &parts, part, at, panel + (c - k) / 2 * PANEL_OUTPUTS);
            for (int64_t t = 0; t < x->rows; t += SIDE) {
                int64_t tokens = smaller(SIDE, x->rows - t);
                sum_parts(panel, (end - k) / 2, x->words + t * w->k / 2 + k / 2 * SIDE, sums, 0);
                add_sums(kind, &parts, part, k / w->group, x->totals + t * x->spans + span * tokens, sums,
                         all + t * PANEL_OUTPUTS, tokens);
            }
        }
        for (int64_t t = 0; t < x->rows; t++)
            UNROLLED(int i = 0; i < PANEL_WORDS; i++) {
                int64_t first = n + (part + i) * OUTPUTS;
                store_lanes(y, t * w->n + first, lanes_until(w->n - first, 0),
                            _mm512_load_ps(all + t * PANEL_OUTPUTS + i * OUTPUTS), w->keeps_sums);
            }
    }
}

/* A pair of every output as it is: two codes times their scales, in bf16. */
INLINE __m512i weights_at(const Kind kind, const uint8_t *codes, const int pair, __m512 scale, __m512 shift) {
    __m512i numbers = codes_at(kind, codes, pair), high = _mm512_set1_epi32(0xffff0000);
    __m512 values[2] = {(__m512)_mm512_slli_epi32(numbers, 16), (__m512)_mm512_and_si512(numbers, high)};
    UNROLLED(int i = 0; i < 2; i++) {
        if (kind.bits < 8) values[i] = _mm512_sub_ps(values[i], _mm512_set1_ps(offset_of(kind)));
        if (kind.bits < 8 && !kind.has_minima) values[i] = _mm512_sub_ps(values[i], shift);
        values[i] = kind.has_minima ? _mm512_fmadd_ps(values[i], scale, shift) : _mm512_mul_ps(values[i], scale);
    }
    return (__m512i)paired((Wide)values[0], (Wide)values[1]);
}

/* PANEL_WORDS panels of OUTPUTS from n on as one of bf16, [K / 2, PANEL_OUTPUTS]. */
INLINE void decode_panel(const Kind kind, const Whole *whole, int64_t n, uint32_t *out) {
    const Weight *w = &whole->all;
    ALIGNED float constants[2 * PANEL_WORDS * groups_of(w) * OUTPUTS];
    Parts parts = parts_from(kind, whole, n, PANEL_WORDS, constants);
    for (int i = 0; i < PANEL_WORDS; i++) {
        const uint8_t *codes = parts.codes[i];
        uint32_t *to = out + i * OUTPUTS;
        for (int64_t k = 0; k < w->k; k += 2 * pairs_of(kind), codes += bytes_of_pairs(kind) * OUTPUTS) {
            int64_t group = k / w->group * OUTPUTS;
            __m512 scale = _mm512_loadu_ps(parts.scales[i] + group), shift = _mm512_loadu_ps(parts.shifts[i] + group);
#pragma GCC unroll 16
            for (int pair = 0; pair < pairs_of(kind); pair++, to += PANEL_OUTPUTS)
                _mm512_storeu_si512(to, weights_at(kind, codes, pair, scale, shift));
        }
    }
}

/* Kinds are asked for inside of loops, since a parallel loop becomes a function of its own before they are known. */
INLINE void multiply_few(const Whole *w, int64_t n, const Rows *x, void *y) {
    if (x->by_tiles) {
        switch (w->all.format) {
        case INT4: multiply_by_tiles(FOUR, w, n, x, y); break;
        case INT4_FROM_MINIMA: multiply_by_tiles(FOUR_FROM_MINIMA, w, n, x, y); break;
        case INT6: multiply_by_tiles(SIX, w, n, x, y); break;
        case INT8: multiply_by_tiles(EIGHT, w, n, x, y); break;
        }
        return;
    }
    switch (w->all.format) {
    case INT4: multiply_direct(FOUR, w, n, x, y); break;
    case INT4_FROM_MINIMA: multiply_direct(FOUR_FROM_MINIMA, w, n, x, y); break;
    case INT6: multiply_direct(SIX, w, n, x, y); break;
    case INT8: multiply_direct(EIGHT, w, n, x, y); break;
    }
}

/* So many rows from `first` on times PANEL_OUTPUTS outputs, which lie in `panel` then. */
INLINE void multiply_many(
    const Whole *whole, int64_t n, const Rows *x, int64_t first, int64_t rows, uint32_t *panel, void *y
) {
    const Weight *w = &whole->all;
    switch (w->format) {
    case INT4: decode_panel(FOUR, whole, n, panel); break;
    case INT4_FROM_MINIMA: decode_panel(FOUR_FROM_MINIMA, whole, n, panel); break;
    case INT6: decode_panel(SIX, whole, n, panel); break;
    case INT8: decode_panel(EIGHT, whole, n, panel); break;
    }
    Columns to = {y, first * w->n + n, w->n, w->n - n, NULL, w->keeps_sums};
    int64_t pairs = w->k / 2;
    if (x->by_tiles) product_by_tiles(panel, pairs, x->words + first * pairs, to, rows);
    else panel_product(panel, pairs, x->words + first * pairs, to, rows);
}

/* Words of a panel, and of what is fetched behind it. */
INLINE int64_t panel_size(const Weight *w) { return (w->k / 2 + PANELS_AHEAD) * PANEL_OUTPUTS; }

static void product_of_few(const Whole *w, const Rows *x, void *y, int threads) {
#pragma omp parallel num_threads(threads)
    {
        if (x->by_tiles) begin_tiles(x->rows);
#pragma omp for schedule(dynamic)
        for (int64_t n = 0; n < w->all.n; n += MOST_PARTS * OUTPUTS) multiply_few(w, n, x, y);
        if (x->by_tiles) end_tiles();
    }
}

/* Packed rows times panels that are decoded once for all of them or, where threads had too few panels then, for some.
   `panels`: memory for one of each thread. */
static void product_of_many(const Whole *w, const Rows *x, uint32_t *panels, void *y, int threads) {
    int64_t at_once = w->all.n >= 4 * threads * PANEL_OUTPUTS ? x->rows : AT_ONCE;
#pragma omp parallel num_threads(threads)
    {
        uint32_t *panel = panels + omp_get_thread_num() * panel_size(&w->all);
        if (x->by_tiles) begin_tiles(x->rows);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t t = 0; t < x->rows; t += at_once)
            for (int64_t n = 0; n < w->all.n; n += PANEL_OUTPUTS)
                multiply_many(w, n, x, t, smaller(at_once, x->rows - t), panel, y);
        if (x->by_tiles) end_tiles();
    }
}

/* y [rows, N] of x [rows, K] in bf16. Returns 0, or 1 without memory. */
int skinny_product(const Weight *w, const uint16_t *inputs, int64_t stride, void *y, int64_t rows, int threads) {
    if (!rows) return 0;
    int64_t has_steps = w->group % STEP == 0, most = DIRECT_ROWS;
    if (has_tiles()) most = has_steps ? MOST_TILED_ROWS : FEWEST_SIXTEENS - 1;
    Rows x = {.rows = rows, .by_tiles = has_tiles() && rows >= (has_steps ? 2 : FEWEST_SIXTEENS)};
    x.spans = rows > most ? 0 : spans_of(w);
    int64_t packed = (smaller(rows, PACKED_ROWS) + SIDE - 1) / SIDE * SIDE * w->k / 2;
    x.words = reserve((packed + (x.spans ? rows * x.spans : threads * panel_size(w))) * sizeof *x.words);
    if (!x.words) return 1;
    x.totals = (float *)(x.words + packed);
    Whole whole = {*w, last_outputs(w, NULL)};
    for (int64_t first = 0; first < rows; first += PACKED_ROWS) {
        x.rows = smaller(rows - first, PACKED_ROWS);
        pack_rows(w, inputs + first * stride, stride, &x, threads);
        if (x.spans) product_of_few(&whole, &x, y, threads);
        else product_of_many(&whole, &x, x.words + packed, row_of_y(w, y, first), threads);
    }
    return 0;
}

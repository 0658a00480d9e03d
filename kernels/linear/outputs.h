/* What the C sources share in which a lane is an output, for x86 processors with AVX-512 (F, BW, VL): OUTPUTS rows of a
   weight at a time, whose bytes are turned until a register has the same neighbours of each. */

#ifndef OUTPUTS_H
#define OUTPUTS_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "weights.h"

enum { OUTPUTS = TURNED, PIECE = 16, CACHE_LINE = 64 };
#define ALIGNED __attribute__((aligned(CACHE_LINE)))

/* The first `count` bytes of PIECE, then zeros. */
INLINE __m128i some_bytes(const uint8_t *from, int64_t count) {
    return _mm_maskz_loadu_epi8(count < PIECE ? (1 << count) - 1 : 0xffff, from);
}

/* So many bytes of each of OUTPUTS rows as 4 registers, which have 4 bytes of every row. */
INLINE void transpose(const uint8_t *from, int64_t stride, int64_t count, __m512i *out) {
    __m512i rows[4], pairs[4];
    UNROLLED(int i = 0; i < 4; i++) {
        rows[i] = _mm512_castsi128_si512(some_bytes(from + i * stride, count));
        rows[i] = _mm512_inserti32x4(rows[i], some_bytes(from + (i + 4) * stride, count), 1);
        rows[i] = _mm512_inserti32x4(rows[i], some_bytes(from + (i + 8) * stride, count), 2);
        rows[i] = _mm512_inserti32x4(rows[i], some_bytes(from + (i + 12) * stride, count), 3);
    }
    UNROLLED(int i = 0; i < 4; i++)
        pairs[i] = i % 2 ? _mm512_unpackhi_epi32(rows[i - 1], rows[i]) : _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    UNROLLED(int i = 0; i < 4; i++) {
        __m512i low = pairs[i / 2], high = pairs[i / 2 + 2]; /* of rows */
        out[i] = i % 2 ? _mm512_unpackhi_epi64(low, high) : _mm512_unpacklo_epi64(low, high);
    }
}

/* PIECE bytes of each of OUTPUTS rows of codes, from byte `at` of a row on; their codes begin at `block`. */
INLINE void read_codes(const Weight *w, const uint8_t *block, int64_t at, __m512i *out) {
    if (!w->is_turned) {
        transpose(block + at, bytes_of(w->format, w->k), PIECE, out);
        return;
    }
    UNROLLED(int i = 0; i < 4; i++) out[i] = _mm512_loadu_si512(block + OUTPUTS * (at + 4 * i));
}

/* Numbers [OUTPUTS, G] of fp32, fp16 or bytes, which have so many bytes, as fp32 [G, OUTPUTS]. */
INLINE void by_lanes(const uint8_t *from, int64_t groups, const int size, float *out) {
    for (int64_t first = 0; first < groups; first += PIECE / size) {
        int64_t count = smaller(groups - first, PIECE / size);
        __m512i fours[4];
        transpose(from + first * size, groups * size, count * size, fours);
        for (int64_t i = 0; i < count; i++, out += OUTPUTS) {
            __m512i bits = _mm512_srli_epi32(fours[i * size / 4], i * size % 4 * 8);
            __m512 numbers = _mm512_castsi512_ps(bits);
            if (size == 2) numbers = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
            if (size == 1) numbers = _mm512_cvtepi32_ps(_mm512_and_si512(bits, _mm512_set1_epi32(255)));
            _mm512_storeu_ps(out, numbers);
        }
    }
}

/* Scales, or minima, of OUTPUTS rows from n on, [G, OUTPUTS]; OUTPUTS divides n. */
INLINE void numbers_by_lanes(const Weight *w, const void *numbers, int64_t n, float *out) {
    int64_t groups = groups_of(w);
    const char *from = place_of(w, numbers, n * groups);
    if (w->is_turned && !w->is_half) memcpy(out, from, groups * OUTPUTS * sizeof *out);
    else if (w->is_turned)
        for (int64_t i = 0; i < groups * OUTPUTS; i += OUTPUTS)
            _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from + i / OUTPUTS)));
    else if (w->is_half) by_lanes((const uint8_t *)from, groups, 2, out);
    else by_lanes((const uint8_t *)from, groups, 4, out);
}

/* The same of zeros. */
INLINE void zeros_by_lanes(const Weight *w, int64_t n, float *out) {
    int64_t groups = groups_of(w);
    const uint8_t *from = w->zeros + n * groups;
    if (!w->is_turned) by_lanes(from, groups, 1, out);
    else
        for (int64_t i = 0; i < groups * OUTPUTS; i += OUTPUTS)
            _mm512_storeu_ps(out + i, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + i)))));
}

/* The zeros of OUTPUTS rows from n on in a group of six bits, each in all bytes of its lane, of a turned weight. */
INLINE __m512i zeros_of_sixes(const Weight *w, int64_t n, int64_t group) {
    if (!w->zeros) return _mm512_set1_epi8(SIXES);
    __m512i zeros = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w->zeros + index_of(w, n, group))));
    return _mm512_mullo_epi32(zeros, _mm512_set1_epi32(0x01010101));
}

/* SIXES codes of OUTPUTS rows: of turned words in six bits, those in eight. */
INLINE void read_sixes(const uint8_t *from, __m512i *out) {
    const __m512i fours = _mm512_set1_epi32(0x0f0f0f0f), twos = _mm512_set1_epi32(0x30303030);
    const int either_and = 0xca; /* a ? b : c */
    UNROLLED(int i = 0; i < 8; i++) {
        __m512i low = _mm512_srli_epi32(_mm512_loadu_si512(from + i % 4 * CACHE_LINE), i / 4 * 4);
        __m512i high = _mm512_loadu_si512(from + (4 + i % 2) * CACHE_LINE);
        high = i < 4 ? _mm512_slli_epi32(high, 4 - i / 2 * 2) : _mm512_srli_epi32(high, i / 2 * 2 - 4);
        out[i] = _mm512_ternarylogic_epi32(fours, low, _mm512_and_si512(high, twos), either_and);
    }
}

/* The same, less their zeros. */
INLINE void widen_words(const uint8_t *from, __m512i zeros, uint8_t *out) {
    __m512i codes[8];
    read_sixes(from, codes);
    UNROLLED(int i = 0; i < 8; i++) _mm512_storeu_si512(out + i * CACHE_LINE, _mm512_sub_epi8(codes[i], zeros));
}

/* `in_bytes` of OUTPUTS rows; of a turned weight, turned. */
INLINE const Weight *outputs_in_bytes(const Weight *w, int64_t n, int8_t *codes, Weight *out) {
    if (w->format != INT6 || !w->is_turned) return in_bytes(w, n, OUTPUTS, codes, out);
    const uint8_t *from = w->codes + n * bytes_of(INT6, w->k);
    for (int64_t k = 0; k < w->k; k += SIXES, from += SIXES_BYTES * OUTPUTS)
        widen_words(from, zeros_of_sixes(w, n, k / w->group), (uint8_t *)codes + k * OUTPUTS);
    place_rows(w, n, INT8, codes, out);
    out->is_turned = 1;
    out->zeros = NULL;
    return out;
}

/* `count` rows of `bytes` each of a tensor from row n on, copied to where `to` is, which moves on to the next place. */
static const void *copied(const void *tensor, int64_t n, int64_t count, int64_t bytes, char **to) {
    char *begin = *to;
    *to += OUTPUTS * bytes;
    return tensor ? memcpy(begin, (const char *)tensor + n * bytes, count * bytes) : NULL;
}

/* The rows of W beyond the last OUTPUTS, as a weight of so many in memory of `last_bytes` that is zero. */
static Weight last_outputs(const Weight *w, char *memory) {
    int64_t count = w->n % OUTPUTS, n = w->n - count, numbers = groups_of(w) * (w->is_half ? 2 : 4);
    Weight last = *w;
    if (w->is_turned) { /* whole, and zero beyond the end */
        last.codes += n * bytes_of(w->format, w->k);
        last.scales = (const char *)w->scales + n * numbers;
        if (w->minima) last.minima = (const char *)w->minima + n * numbers;
        if (w->zeros) last.zeros += n * groups_of(w);
        return last;
    }
    last.scales = copied(w->scales, n, count, numbers, &memory);
    last.minima = copied(w->minima, n, count, numbers, &memory);
    last.codes = copied(w->codes, n, count, bytes_of(w->format, w->k), &memory);
    last.zeros = copied(w->zeros, n, count, groups_of(w), &memory);
    return last;
}

/* At most; turned ones lie there already. */
INLINE int64_t last_bytes(const Weight *w) {
    int64_t row = bytes_of(w->format, w->k) + groups_of(w) * (2 * (int64_t)sizeof(float) + 1);
    return w->is_turned ? 1 : OUTPUTS * row;
}

#endif

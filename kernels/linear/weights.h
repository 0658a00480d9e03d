/* What the C sources of quantized products share: how a weight lies in memory. */

#ifndef WEIGHTS_H
#define WEIGHTS_H

#include <stdint.h>
#include <string.h>

#include "../common/eight_lanes.h"

/* In the order of _FORMATS in kernels/linear/_skinny_cpu.py, then INT4 with minima, and INT4 whose zero is not always 8,
   which is INT4 in a `Weight`. */
enum { NF4, INT4, INT6, INT8, FP8, BFLOAT16, INT4_FROM_MINIMA, ASYMMETRIC };
enum { TURNED = 16 }; /* outputs whose words are neighbours in a turned weight */
enum { ALONE = 16 };  /* rows below which a second thread costs more than it saves */

typedef struct {
    int64_t format, n, k;
    int64_t group;        /* codes that share a scale: 64 in NF4, K in FP8 and bf16, 16 or 32s in integers */
    int64_t is_half;      /* whether scales and minima are fp16, else fp32 */
    int64_t is_turned;    /* whether words of codes, 32 bits each, lie as [⌈N / TURNED⌉, words of a row, TURNED] */
    const uint8_t *codes; /* [N, K], or [N, K / 2] in four bits, [N, 3 K / 4] in six; of bf16 the numbers themselves */
    const void *scales;   /* [N, G]; null in bf16 */
    const uint8_t *zeros; /* [N, G] of asymmetric INT4 and INT6, else null */
    const void *minima;   /* [N, G] of INT4_FROM_MINIMA, else null */
} Weight;

static const float NF4_VALUES[16] = {
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
};

INLINE int has_four_bits(int format) {
    return format == NF4 || format == INT4 || format == INT4_FROM_MINIMA || format == ASYMMETRIC;
}

/* Where a scale or minimum of the weight lies, and its value. */
INLINE const char *place_of(const Weight *w, const void *numbers, int64_t index) {
    return (const char *)numbers + index * (w->is_half ? 2 : 4);
}

INLINE float number_at(int is_half, const void *numbers, int64_t index) {
    return is_half ? fp16_at((const uint16_t *)numbers + index) : ((const float *)numbers)[index];
}

INLINE float number_of(const Weight *w, const void *numbers, int64_t index) {
    return number_at(w->is_half, numbers, index);
}

INLINE int64_t bytes_of(int format, int64_t codes) {
    return format == BFLOAT16 ? 2 * codes : has_four_bits(format) ? codes / 2 : format == INT6 ? codes / 4 * 3 : codes;
}

/* Codes of six bits lie 32 in 24 bytes: their low four bits, of the first 16 in the low halves of 16 bytes and of the others
   in the high ones; then two bits of each eighth in 8 bytes. They are multiplied as INT8: a few rows at a time become
   code - zero in bytes, in the cache, where any form reads them as a weight of its own. */
enum { SIXES = 32, SIXES_BYTES = 24 };
typedef uint64_t Quarters __attribute__((vector_size(SIXES)));
typedef int8_t Signed __attribute__((vector_size(SIXES)));

/* SIXES codes less their zero. */
INLINE void widen_sixes(const uint8_t *from, Signed zero, int8_t *out) {
    const uint64_t fours = 0x0f0f0f0f0f0f0f0f, twos = 0x0303030303030303;
    uint64_t part[3];
    memcpy(part, from, sizeof part);
    Quarters low = (Quarters){part[0], part[1], part[0], part[1]} >> (Quarters){0, 0, 4, 4} & fours;
    Quarters high = (Quarters){part[2], part[2], part[2], part[2]} >> (Quarters){0, 2, 4, 6} & twos;
    Signed codes = (Signed)(low | high << 4) - zero;
    memcpy(out, &codes, sizeof codes);
}

/* The codes of row n: where they lie, or of a turned weight in `memory`. */
INLINE const uint8_t *row_of(const Weight *w, int64_t n, void *memory) {
    int64_t bytes = bytes_of(w->format, w->k), words = bytes / 4;
    if (!w->is_turned) return w->codes + n * bytes;
    const int32_t *from = (const int32_t *)w->codes + n / TURNED * TURNED * words + n % TURNED;
    for (int64_t word = 0; word < words; word++) ((int32_t *)memory)[word] = from[word * TURNED];
    return memory;
}

/* Row n of W in bytes; `next` rows on another is wanted soon. */
INLINE void widen_row(const Weight *w, int64_t n, int64_t next, int8_t *out) {
    int64_t groups = (w->k + w->group - 1) / w->group, bytes = bytes_of(INT6, w->k), k = 0;
    int32_t row[w->is_turned ? bytes / 4 : 1];
    const uint8_t *from = row_of(w, n, row), *zeros = w->zeros ? w->zeros + n * groups : NULL;
    for (int64_t group = 0; group < groups; group++) {
        Signed zero = (Signed){0} + (int8_t)(zeros ? zeros[group] : SIXES);
        for (int64_t end = smaller(k + w->group, w->k); k < end; k += SIXES, from += SIXES_BYTES) {
            __builtin_prefetch(from + next * bytes);
            widen_sixes(from, zero, out + k);
        }
    }
}

/* What `in_bytes` needs for `count` rows, and `in_rows`. */
INLINE int64_t widened_bytes(const Weight *w, int64_t count) { return w->format == INT6 ? count * w->k : 1; }
INLINE int64_t rows_bytes(const Weight *w, int64_t count) { return w->is_turned ? count * w->k : widened_bytes(w, count); }

/* W as it is, but its rows from n on at `codes`, at their numbers. */
INLINE void place_rows(const Weight *w, int64_t n, int format, const int8_t *codes, Weight *out) {
    *out = *w;
    out->format = format;
    out->is_turned = 0;
    out->codes = (const uint8_t *)((uintptr_t)codes - n * bytes_of(format, w->k)); /* where row 0 would be */
}

/* W itself; or of six bits its `count` rows from n on in INT8. */
INLINE const Weight *in_bytes(const Weight *w, int64_t n, int64_t count, int8_t *codes, Weight *out) {
    if (w->format != INT6) return w;
    for (int64_t i = 0; i < smaller(count, w->n - n); i++) widen_row(w, n + i, count, codes + i * w->k);
    place_rows(w, n, INT8, codes, out);
    out->zeros = NULL;
    return out;
}

/* The same, but also of a turned weight only these rows, as they were before. */
INLINE const Weight *in_rows(const Weight *w, int64_t n, int64_t count, int8_t *codes, Weight *out) {
    if (w->format == INT6 || !w->is_turned) return in_bytes(w, n, count, codes, out);
    int64_t bytes = bytes_of(w->format, w->k);
    for (int64_t i = 0; i < smaller(count, w->n - n); i++) row_of(w, n + i, codes + i * bytes);
    place_rows(w, n, w->format, codes, out);
    return out;
}

#endif

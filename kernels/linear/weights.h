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
    int64_t is_turned;    /* whether words of codes, 32 bits each, lie as [⌈N / TURNED⌉, words of a row, TURNED], and
                             what groups have as [⌈N / TURNED⌉, G, TURNED] */
    int64_t keeps_sums;   /* whether y is fp32 beside rows in bf16 */
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

/* Where row t of y lies, of rows in bf16. */
INLINE void *row_of_y(const Weight *w, void *y, int64_t t) {
    return (char *)y + t * w->n * (w->keeps_sums ? sizeof(float) : sizeof(uint16_t));
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

INLINE int64_t groups_of(const Weight *w) { return (w->k + w->group - 1) / w->group; }

/* Where a row's group is among scales, minima or zeros. */
INLINE int64_t index_of(const Weight *w, int64_t n, int64_t group) {
    int64_t groups = groups_of(w);
    return w->is_turned ? (n / TURNED * groups + group) * TURNED + n % TURNED : n * groups + group;
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
    int64_t bytes = bytes_of(INT6, w->k), k = 0;
    int32_t row[w->is_turned ? bytes / 4 : 1];
    const uint8_t *from = row_of(w, n, row);
    for (int64_t group = 0; group < groups_of(w); group++) {
        Signed zero = (Signed){0} + (int8_t)(w->zeros ? w->zeros[index_of(w, n, group)] : SIXES);
        for (int64_t end = smaller(k + w->group, w->k); k < end; k += SIXES, from += SIXES_BYTES) {
            __builtin_prefetch(from + next * bytes);
            widen_sixes(from, zero, out + k);
        }
    }
}

/* What `in_bytes` needs for `count` rows. */
INLINE int64_t widened_bytes(const Weight *w, int64_t count) { return w->format == INT6 ? count * w->k : 1; }

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

enum { READ_BEYOND = 16 }; /* so many bytes behind a row's numbers may be read */

/* What `in_rows` needs for `count` rows. */
INLINE int64_t rows_bytes(const Weight *w, int64_t count) {
    if (!w->is_turned) return widened_bytes(w, count);
    return count * (w->k + groups_of(w) * (2 * (int64_t)sizeof(float) + 1)) + READ_BEYOND;
}

/* What groups of `count` rows from n on have, so many bytes each, of a turned weight, as [N, G] at `to`, which moves on. */
INLINE const void *in_rows_at(const Weight *w, const void *turned, int64_t n, int64_t count, int64_t size, int8_t **to) {
    int64_t groups = groups_of(w);
    const int8_t *begin = *to;
    if (!turned) return NULL;
    for (int64_t i = 0; i < count; i++)
        for (int64_t group = 0; group < groups; group++, *to += size)
            memcpy(*to, (const int8_t *)turned + index_of(w, n + i, group) * size, size);
    return (const void *)((uintptr_t)begin - n * groups * size); /* where row 0 would be */
}

/* The same as `in_bytes`, but of a turned weight only these rows, as they were before. */
INLINE const Weight *in_rows(const Weight *w, int64_t n, int64_t count, int8_t *memory, Weight *out) {
    if (!w->is_turned) return in_bytes(w, n, count, memory, out);
    int format = w->format == INT6 ? INT8 : w->format;
    int64_t bytes = bytes_of(format, w->k), size = w->is_half ? 2 : sizeof(float);
    count = smaller(count, w->n - n);
    for (int64_t i = 0; i < count; i++)
        if (w->format == INT6) widen_row(w, n + i, count, memory + i * bytes);
        else row_of(w, n + i, memory + i * bytes);
    place_rows(w, n, format, memory, out);
    memory += count * bytes;
    out->scales = in_rows_at(w, w->scales, n, count, size, &memory);
    out->minima = in_rows_at(w, w->minima, n, count, size, &memory);
    out->zeros = w->format == INT6 ? NULL : in_rows_at(w, w->zeros, n, count, 1, &memory);
    return out;
}

#endif

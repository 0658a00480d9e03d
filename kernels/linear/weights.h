/* What the C sources of quantized products share: how a weight lies in memory. */

#ifndef WEIGHTS_H
#define WEIGHTS_H

#include <stdint.h>

#include "../common/eight_lanes.h"

/* In the order of _FORMATS in kernels/linear/_skinny_cpu.py, then INT4 with minima, and INT4 whose zero is not always 8,
   which is INT4 in a `Weight`. */
enum { NF4, INT4, INT8, FP8, BFLOAT16, INT4_FROM_MINIMA, ASYMMETRIC };

typedef struct {
    int64_t format, n, k;
    int64_t group;        /* codes that share a scale: 64 in NF4, K in FP8 and bf16, 16 or 32s in integers */
    int64_t is_half;      /* whether scales and minima are fp16, else fp32 */
    const uint8_t *codes; /* [N, K], or [N, K / 2] in four bits; of bf16 the numbers themselves */
    const void *scales;   /* [N, G]; null in bf16 */
    const uint8_t *zeros; /* [N, G] of asymmetric INT4, else null */
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
    return format == BFLOAT16 ? 2 * codes : has_four_bits(format) ? codes / 2 : codes;
}

#endif

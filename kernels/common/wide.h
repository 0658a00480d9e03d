/* The widest registers of fp32 numbers that the processor has, as vectors of the compiler: 16 lanes, 8, or 4.

   Arithmetic is written with operators, so that one source serves all; WIDTH may be given to try another.
*/

#ifndef WIDE_H
#define WIDE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "inline.h"

#ifndef WIDTH
#ifdef __AVX512F__
#define WIDTH 16
#elif defined(__aarch64__)
#define WIDTH 4
#else
#define WIDTH 8
#endif
#endif

typedef float Wide __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Lanes __attribute__((vector_size(4 * WIDTH)));

INLINE Wide all(float x) { return (Wide){0} + x; }

/* Of each lane `yes` where the mask is -1, `no` where it is 0. */
INLINE Wide chosen(Lanes mask, Wide yes, Wide no) { return (Wide)((mask & (Lanes)yes) | (~mask & (Lanes)no)); }

/* Whether the mask is -1 anywhere. */
INLINE bool any_lane(Lanes mask) {
    int32_t found = 0;
    UNROLLED(int i = 0; i < WIDTH; i++) found |= mask[i];
    return found;
}

/* Of each lane a if it is more than b, else b; so b where one is NaN. */
#if defined(__AVX512F__) && WIDTH == 16
INLINE Wide highest_of(Wide a, Wide b) { return (Wide)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__) && WIDTH == 8
INLINE Wide highest_of(Wide a, Wide b) { return (Wide)_mm256_max_ps((__m256)a, (__m256)b); }
#else
INLINE Wide highest_of(Wide a, Wide b) { return chosen(a > b, a, b); }
#endif

/* 2^x = power · (1 + slope · rest), where power is the nearest power of two; |x| <= 127, of which -127 gives 0. */
typedef struct {
    Wide power, slope, rest;
} Exp2;

INLINE Exp2 exp2_parts(Wide x) {
    Wide shifted = x + 0x1.8p23f; /* the last bits now hold x, rounded */
    Wide f = x - (shifted - 0x1.8p23f), y = all(1.5403530e-4f);
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    return (Exp2){(Wide)(((Lanes)shifted << 23) + 0x3f800000), y, f};
}

/* 2^x for x <= 0, to 2e-7; 0 from 2^-127 on, and NaN of NaN. */
INLINE Wide exp2_wide(Wide x) {
    Exp2 e = exp2_parts(highest_of(all(-127), x));
    return (e.slope * e.rest + 1.0f) * e.power;
}

/* tanh x, to 4e-7 of itself, and NaN of NaN: (2^y - 1) / (2^y + 1), from a 2^y - 1 that loses no digits near 0. */
INLINE Wide tanh_wide(Wide x) {
    Wide y = x * 2.8853900817779268f;
    y = chosen(y > all(30), all(30), y);
    Exp2 e = exp2_parts(chosen(y < all(-30), all(-30), y));
    Wide less_one = (e.power - 1.0f) + e.power * (e.slope * e.rest);
    return less_one / (less_one + 2.0f);
}

/* limit · tanh(x / limit) */
INLINE Wide soft_capped(Wide x, float limit) { return tanh_wide(x * (1 / limit)) * limit; }

#endif

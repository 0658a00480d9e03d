/* Rows of fp32 or bf16 numbers as 8 fp32 lanes at a time. */

#ifndef FLOATS_H
#define FLOATS_H

#include <stdint.h>
#include <string.h>

#include "eight_lanes.h"

/* In the order of DTYPES in kernels/common/floats_cpu.py. */
enum { FP32, BF16 };

INLINE int64_t size_of(int dtype) { return dtype == FP32 ? 4 : 2; }

/* Element `i` of a row. */
INLINE const void *at(int dtype, const void *row, int64_t i) { return (const char *)row + i * size_of(dtype); }

INLINE Floats load(int dtype, const void *from) {
    if (dtype == FP32) return floats_at(from);
    return of_bits(shifted_left(ints_of_halves(from), 16));
}

/* As the dtype holds it: bf16 to the nearest, ties to even. */
INLINE Floats rounded(int dtype, Floats x) {
    if (dtype == FP32) return x;
    Ints bits = bits_of(x), odd = common_bits(shifted_right(bits, 16), every_int(1));
    bits = sum_of_ints(bits, sum_of_ints(odd, every_int(0x7fff)));
    Floats nearest = of_bits(common_bits(bits, every_int((int32_t)0xffff0000)));
    return either(is_nan(x), of_bits(every_int(0x7fc00000)), nearest);
}

/* Of numbers that are `rounded`. */
INLINE void store(int dtype, void *to, Floats x) {
    if (dtype == FP32)
        put_floats(to, x);
    else
        put_halves(to, shifted_right(bits_of(x), 16));
}

/* The same of the first `count` lanes; the others are zero. */
INLINE Floats load_some(int dtype, const void *from, int64_t count) {
    if (count >= LANES) return load(dtype, from);
    char whole[LANES * 4] = {0};
    memcpy(whole, from, count * size_of(dtype));
    return load(dtype, whole);
}

INLINE void store_some(int dtype, void *to, Floats x, int64_t count) {
    char whole[LANES * 4];
    store(dtype, count >= LANES ? to : whole, x);
    if (count < LANES) memcpy(to, whole, count * size_of(dtype));
}

/* 2^x, to 2e-7; 0 below 2^-126, no more than 2^126, and NaN of NaN. */
INLINE Floats exp2_lanes(Floats x) {
    Ints tiny = below(x, every(-126));
    x = lesser(every(126), x); /* of a NaN the second operand */
    Floats whole = to_whole(x), f = minus(x, whole), y = every(1.5403530e-4f);
    y = times_plus(y, f, every(1.3333558e-3f));
    y = times_plus(y, f, every(9.6181291e-3f));
    y = times_plus(y, f, every(5.5504109e-2f));
    y = times_plus(y, f, every(2.4022651e-1f));
    y = times_plus(y, f, every(6.9314718e-1f));
    y = times_plus(y, f, every(1));
    Ints power = shifted_left(sum_of_ints(to_ints(whole), every_int(127)), 23);
    return zero_where(tiny, times(y, of_bits(power)));
}

/* 1 / rms of a row, which holds `size` numbers. */
INLINE float inverse_rms(int dtype, const void *row, int64_t size, float eps) {
    Floats sums[4];
    UNROLLED(int i = 0; i < 4; i++) sums[i] = every(0);
    for (int64_t c = 0; c < size; c += 4 * LANES)
        UNROLLED(int i = 0; i < 4; i++) {
            int64_t left = size - c - i * LANES;
            if (left <= 0) break;
            Floats x = load_some(dtype, at(dtype, row, c + i * LANES), left);
            sums[i] = times_plus(x, x, sums[i]);
        }
    Floats sum = plus(plus(sums[0], sums[1]), plus(sums[2], sums[3]));
    return 1 / __builtin_sqrtf(sum_of_lanes(sum) / size + eps);
}

/* x · factor, rounded, times weight, rounded. */
INLINE Floats normalized(int dtype, Floats x, float factor, Floats weight) {
    return rounded(dtype, times(rounded(dtype, times(x, every(factor))), weight));
}

#endif

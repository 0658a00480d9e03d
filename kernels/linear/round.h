/* How numbers are rounded to 8 bits, as `round_activations` of kernels/linear/rounded.py has it. */

#ifndef ROUND_H
#define ROUND_H

#include "../common/floats.h"

/* The largest magnitude; NaN beside a NaN, which a maximum would forget. */
INLINE float largest(int dtype, const void *x, int64_t count) {
    Floats most = every(0);
    Ints broken = every_int(0);
    for (int64_t i = 0; i < count; i += LANES) {
        Floats lanes = load(dtype, at(dtype, x, i));
        broken = either_mask(broken, is_nan(lanes));
        most = greater(most, magnitudes(lanes));
    }
    if (any(broken)) return __builtin_nanf("");
    float lanes[LANES], found = 0;
    put_floats(lanes, most);
    UNROLLED(int i = 0; i < LANES; i++) found = lanes[i] > found ? lanes[i] : found;
    return found;
}

/* s of neighbours, and below q. */
INLINE float scale_of(int dtype, const void *x, int64_t count) {
    float scale = largest(dtype, x, count) / 127.5f;
    return scale < 1e-30f ? 1e-30f : scale; /* NaN stays */
}

INLINE Ints round_lanes(Floats x, float scale) {
    Floats scaled = over(x, every(scale));
    return to_ints(lesser(greater(scaled, every(-128)), every(127)));
}

/* q of neighbours, and its sum. */
INLINE int32_t round_neighbours(int dtype, const void *x, float scale, const int count, int32_t *q) {
    int32_t sum = 0;
    for (int i = 0; i < count; i += LANES) put_ints(q + i, round_lanes(load(dtype, at(dtype, x, i)), scale));
    for (int i = 0; i < count; i++) sum += q[i];
    return sum;
}

#endif

/* Cosine and sine of positions as rotations read them, on any processor: see rotary.py. */

#include <stdint.h>

/* Below this many positions a second thread costs more than it saves. */
enum { ALONE = 64 };

/* Of angles [T, half] both halves of a row [T, 2 half] each; sine is negative in the first. */
void rotary_tables(const float *cos, const float *sin, int64_t tokens, int64_t half, float *cosines, float *sines,
                   int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens >= ALONE)
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < half; i++) {
            int64_t from = t * half + i, to = 2 * t * half + i;
            cosines[to] = cosines[to + half] = cos[from];
            sines[to] = -sin[from];
            sines[to + half] = sin[from];
        }
}

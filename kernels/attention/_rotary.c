/* Cosine and sine of the angles that positions are rotated by, on any processor: see rotary.py. */

#include <math.h>
#include <stdint.h>

/* Below this many positions a second thread costs more than it saves. */
enum { ALONE = 64 };

/* cos and sin [T, 2 half], of positions [T] and frequencies [half]. */
void rotary_tables(const int64_t *positions, int64_t tokens, const float *frequencies, int64_t half, float *cos,
                   float *sin, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens >= ALONE)
    for (int64_t t = 0; t < tokens; t++) {
        float *c = cos + 2 * half * t, *s = sin + 2 * half * t, position = (float)positions[t];
        for (int64_t i = 0; i < half; i++) {
            float angle = position * frequencies[i];
            c[i] = c[half + i] = cosf(angle);
            s[half + i] = sinf(angle);
            s[i] = -s[half + i];
        }
    }
}

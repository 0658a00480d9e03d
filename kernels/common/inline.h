/* What every C source needs. */

#ifndef INLINE_H
#define INLINE_H

#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
/* Sums stay in registers only if every loop over them is unrolled. */
#define UNROLLED _Pragma("GCC unroll 8") for

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

#endif

/* Registers of eight lanes of 32 bits, and what is done with them, by AVX2 or by NEON.

   Floats are fp32, Ints are integers, masks, or the bits of Floats. Lane for lane, unless said otherwise:

     every(x)                       x in every lane
     floats_at, put_floats          eight numbers in memory, anywhere
     plus, minus, times, over       a + b, a - b, a * b, a / b
     times_plus(a, b, c)            a * b + c, rounded once
     lesser, greater(a, b)          the smaller or larger one; b where one of them is NaN
     to_whole, to_ints              rounded to the nearest, ties to even
     bits_of, of_bits               the same bits
     sum_of_lanes(x)                ((x0 + x4) + (x2 + x6)) + ((x1 + x5) + (x3 + x7))
     below(a, b), is_nan(x)         a mask: all bits where it is so, else none
     either(mask, yes, no), zero_where(mask, x), either_mask, any(mask)
     every_int, put_ints, sum_of_ints, difference_of_ints, common_bits
     shifted_left, shifted_right    by bits that the compiler knows; zeros come in
     ints_of_halves, put_halves     eight numbers of 16 bits, unsigned
     ints_of_bytes, ints_of_signed  eight numbers of 8 bits
     e4m3_by_256(from)              eight numbers of FP8 (e4m3), 1/256 of each
     fp16_at(from)                  one number of fp16
     split_fp16(pairs, low, high)   two numbers of fp16 that a lane holds
     looked_up(table, codes)        of 16 numbers, by the lowest four bits of each lane
     put_in_turns(to, even, odd)    16 numbers, one of each after another
     fours_of_rows(from, stride, out)   16 bytes of each of eight rows as 4 registers with 4 bytes of every row
*/

#ifndef EIGHT_LANES_H
#define EIGHT_LANES_H

#include <stdint.h>

#include "inline.h"

#define LANES 8

#ifdef __aarch64__
#include "neon.h"
#else
#include "avx2.h"
#endif

#endif

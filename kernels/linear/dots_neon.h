/* Products of four neighbours in every lane by NEON, at once where the processor has its dot products. What is said of
   each function in _rounded_lanes.c is not said again. */

typedef struct {
    int32x4_t low, high;
} Products;

INLINE Products no_products(void) { return (Products){vdupq_n_s32(0), vdupq_n_s32(0)}; }

/* To each of four lanes the products of its four bytes of both. */
INLINE int32x4_t add_dots(int32x4_t sums, int8x16_t one, int8x16_t other) {
#ifdef __ARM_FEATURE_DOTPROD
    return vdotq_s32(sums, one, other);
#else
    int16x8_t first = vmull_s8(vget_low_s8(one), vget_low_s8(other)), second = vmull_high_s8(one, other);
    return vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(first), vpaddlq_s16(second)));
#endif
}

/* Of nibbles, or of signed bytes. */
INLINE Products add_nibbles(Products sums, Ints codes, const int8_t *q) {
    int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(q)));
    sums.low = add_dots(sums.low, vreinterpretq_s8_u32(codes.low), four);
    sums.high = add_dots(sums.high, vreinterpretq_s8_u32(codes.high), four);
    return sums;
}

INLINE Ints sums_of(Products products) {
    return (Ints){vreinterpretq_u32_s32(products.low), vreinterpretq_u32_s32(products.high)};
}

/* For eight-bit codes. */
typedef struct {
    int8_t q[TOKENS][BLOCK];
    float scales[TOKENS]; /* s */
} Bytes;

INLINE void store_bytes(Bytes *block, int64_t t, const int32_t *q, float scale) {
    for (int i = 0; i < BLOCK; i++) block->q[t][i] = (int8_t)q[i];
    block->scales[t] = scale;
}

INLINE void multiply_bytes(const uint8_t *codes, int64_t stride, const Bytes *x, const int tokens, Ints *sums) {
    Products products[TOKENS];
    UNROLLED(int t = 0; t < tokens; t++) products[t] = no_products();
    for (int half = 0; half < 2; half++) { /* a loop, since registers are few */
        Ints fours[4];
        fours_of_rows(codes + half * BLOCK / 2, stride, fours);
        UNROLLED(int i = 0; i < 4; i++)
            UNROLLED(int t = 0; t < tokens; t++)
                products[t] = add_nibbles(products[t], fours[i], x->q[t] + half * BLOCK / 2 + 4 * i);
    }
    UNROLLED(int t = 0; t < tokens; t++) sums[t] = sums_of(products[t]);
}

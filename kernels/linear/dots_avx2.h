/* Products of four neighbours in every lane by AVX2, which adds up two of them in 16 bits. What is said of each function in
   _rounded_lanes.c is not said again. */

typedef __m256i Products; /* 16 sums of 16 bits */

INLINE Products no_products(void) { return _mm256_setzero_si256(); }

/* Two products of at most 15 * 128 each: eight such sums fit into 16 bits. */
INLINE Products add_nibbles(Products sums, Ints nibbles, const int8_t *q) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(nibbles, _mm256_set1_epi32(four_bytes(q))));
}

INLINE Ints sums_of(Products products) { return _mm256_madd_epi16(products, _mm256_set1_epi16(1)); }

/* For eight-bit codes: of four neighbours the first, third, second and fourth. */
typedef struct {
    int16_t q[TOKENS][BLOCK];
    float scales[TOKENS]; /* s / 256 */
} Bytes;

INLINE void store_bytes(Bytes *block, int64_t t, const int32_t *q, float scale) {
    for (int i = 0; i < BLOCK; i += 4)
        for (int j = 0; j < 4; j++) block->q[t][i + j] = (int16_t)q[i + j % 2 * 2 + j / 2];
    block->scales[t] = scale / 256;
}

/* Times 256: so their signs are where they belong. */
INLINE void multiply_bytes(const uint8_t *codes, int64_t stride, const Bytes *x, const int tokens, Ints *sums) {
    UNROLLED(int t = 0; t < tokens; t++) sums[t] = every_int(0);
    for (int half = 0; half < 2; half++) { /* a loop, since registers are few */
        Ints fours[4];
        fours_of_rows(codes + half * BLOCK / 2, stride, fours);
        UNROLLED(int i = 0; i < 8; i++) {
            Ints odd = common_bits(fours[i / 2], _mm256_set1_epi16((short)0xff00));
            Ints pairs = i % 2 ? odd : _mm256_slli_epi16(fours[i / 2], 8);
            UNROLLED(int t = 0; t < tokens; t++) {
                int32_t two = four_bytes(x->q[t] + half * BLOCK / 2 + 2 * i);
                sums[t] = sum_of_ints(sums[t], _mm256_madd_epi16(pairs, every_int(two)));
            }
        }
    }
}

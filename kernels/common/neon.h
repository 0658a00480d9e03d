/* Eight lanes of 32 bits as two registers, for arm64 processors. What each function does is said in eight_lanes.h. */

#include <arm_neon.h>
#include <string.h>

typedef struct {
    float32x4_t low, high;
} Floats;

typedef struct {
    uint32x4_t low, high;
} Ints;

/* A function of the halves of so many operands. */
#define OF_ONE(type, f, a) ((type){f(a.low), f(a.high)})
#define OF_TWO(type, f, a, b) ((type){f(a.low, b.low), f(a.high, b.high)})
#define OF_THREE(type, f, a, b, c) ((type){f(a.low, b.low, c.low), f(a.high, b.high, c.high)})

INLINE Floats every(float x) { return (Floats){vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE Floats floats_at(const float *from) { return (Floats){vld1q_f32(from), vld1q_f32(from + 4)}; }
INLINE void put_floats(float *to, Floats x) {
    vst1q_f32(to, x.low);
    vst1q_f32(to + 4, x.high);
}

INLINE Floats plus(Floats a, Floats b) { return OF_TWO(Floats, vaddq_f32, a, b); }
INLINE Floats minus(Floats a, Floats b) { return OF_TWO(Floats, vsubq_f32, a, b); }
INLINE Floats times(Floats a, Floats b) { return OF_TWO(Floats, vmulq_f32, a, b); }
INLINE Floats over(Floats a, Floats b) { return OF_TWO(Floats, vdivq_f32, a, b); }
INLINE Floats times_plus(Floats a, Floats b, Floats c) { return OF_THREE(Floats, vfmaq_f32, c, a, b); }
INLINE Floats magnitudes(Floats x) { return OF_ONE(Floats, vabsq_f32, x); }

INLINE Floats to_whole(Floats x) { return OF_ONE(Floats, vrndnq_f32, x); }
INLINE Ints bits_of(Floats x) { return OF_ONE(Ints, vreinterpretq_u32_f32, x); }
INLINE Floats of_bits(Ints x) { return OF_ONE(Floats, vreinterpretq_f32_u32, x); }
INLINE Ints to_ints(Floats x) {
    return (Ints){vreinterpretq_u32_s32(vcvtnq_s32_f32(x.low)), vreinterpretq_u32_s32(vcvtnq_s32_f32(x.high))};
}
INLINE Floats to_floats(Ints x) {
    return (Floats){vcvtq_f32_s32(vreinterpretq_s32_u32(x.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(x.high))};
}

INLINE float sum_of_lanes(Floats wide) {
    float32x4_t four = vaddq_f32(wide.low, wide.high);
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE Ints below(Floats a, Floats b) { return OF_TWO(Ints, vcltq_f32, a, b); }
INLINE Ints is_nan(Floats x) {
    Ints equal = OF_TWO(Ints, vceqq_f32, x, x);
    return OF_ONE(Ints, vmvnq_u32, equal);
}
INLINE Floats either(Ints mask, Floats yes, Floats no) { return OF_THREE(Floats, vbslq_f32, mask, yes, no); }
INLINE Floats zero_where(Ints mask, Floats x) {
    Ints bits = bits_of(x);
    return of_bits(OF_TWO(Ints, vbicq_u32, bits, mask));
}
INLINE Ints either_mask(Ints a, Ints b) { return OF_TWO(Ints, vorrq_u32, a, b); }
INLINE int any(Ints mask) { return vmaxvq_u32(vorrq_u32(mask.low, mask.high)) != 0; }
INLINE Floats lesser(Floats a, Floats b) { return either(below(a, b), a, b); }
INLINE Floats greater(Floats a, Floats b) { return either(below(b, a), a, b); }

INLINE Ints every_int(int32_t x) { return (Ints){vdupq_n_u32((uint32_t)x), vdupq_n_u32((uint32_t)x)}; }
INLINE void put_ints(int32_t *to, Ints x) {
    vst1q_s32(to, vreinterpretq_s32_u32(x.low));
    vst1q_s32(to + 4, vreinterpretq_s32_u32(x.high));
}
INLINE Ints sum_of_ints(Ints a, Ints b) { return OF_TWO(Ints, vaddq_u32, a, b); }
INLINE Ints difference_of_ints(Ints a, Ints b) { return OF_TWO(Ints, vsubq_u32, a, b); }
INLINE Ints common_bits(Ints a, Ints b) { return OF_TWO(Ints, vandq_u32, a, b); }
INLINE Ints shifted_left(Ints x, const int bits) { return (Ints){x.low << bits, x.high << bits}; }
INLINE Ints shifted_right(Ints x, const int bits) { return (Ints){x.low >> bits, x.high >> bits}; }

INLINE Ints ints_of_halves(const uint16_t *from) {
    uint16x8_t halves = vld1q_u16(from);
    return (Ints){vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves)};
}
INLINE void put_halves(uint16_t *to, Ints x) { vst1q_u16(to, vcombine_u16(vmovn_u32(x.low), vmovn_u32(x.high))); }

INLINE Ints ints_of_bytes(const uint8_t *from) {
    uint16x8_t halves = vmovl_u8(vld1_u8(from));
    return (Ints){vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves)};
}
INLINE Ints ints_of_signed(const uint8_t *from) {
    int16x8_t halves = vmovl_s8(vreinterpret_s8_u8(vld1_u8(from)));
    int32x4_t low = vmovl_s16(vget_low_s16(halves)), high = vmovl_high_s16(halves);
    return (Ints){vreinterpretq_u32_s32(low), vreinterpretq_u32_s32(high)};
}

INLINE float32x4_t floats_of_fp16(uint16x4_t bits) { return vcvt_f32_f16(vreinterpret_f16_u16(bits)); }

/* Sign, exponent and mantissa at their places in fp16, subnormal numbers too. */
INLINE Floats e4m3_by_256(const uint8_t *from) {
    int16x8_t shifted = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(from))), 7);
    uint16x8_t bits = vandq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0xbf80));
    return (Floats){floats_of_fp16(vget_low_u16(bits)), floats_of_fp16(vget_high_u16(bits))};
}

INLINE float fp16_at(const void *from) { return *(const __fp16 *)from; }

INLINE void split_fp16(Ints pairs, Floats *first, Floats *second) {
    *first = (Floats){floats_of_fp16(vmovn_u32(pairs.low)), floats_of_fp16(vmovn_u32(pairs.high))};
    *second = (Floats){floats_of_fp16(vshrn_n_u32(pairs.low, 16)), floats_of_fp16(vshrn_n_u32(pairs.high, 16))};
}

/* Four numbers of a table by where their bytes lie in it. */
INLINE float32x4_t four_looked_up(uint8x16x4_t table, uint32x4_t codes) {
    uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100), codes, vdupq_n_u32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes)));
}
INLINE Floats looked_up(const float *table, Ints codes) {
    const uint8_t *from = (const uint8_t *)table;
    uint8x16x4_t bytes = {{vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
    Ints four_bits = common_bits(codes, every_int(15));
    return (Floats){four_looked_up(bytes, four_bits.low), four_looked_up(bytes, four_bits.high)};
}

INLINE void put_in_turns(float *to, Floats even, Floats odd) {
    put_floats(to, (Floats){vzip1q_f32(even.low, odd.low), vzip2q_f32(even.low, odd.low)});
    put_floats(to + 8, (Floats){vzip1q_f32(even.high, odd.high), vzip2q_f32(even.high, odd.high)});
}

/* 16 bytes of each of four rows, turned. */
INLINE void turned(const uint8_t *from, int64_t stride, uint32x4_t *out) {
    uint64x2_t pairs[4];
    UNROLLED(int i = 0; i < 4; i += 2) {
        uint32x4_t one = vreinterpretq_u32_u8(vld1q_u8(from + i * stride));
        uint32x4_t next = vreinterpretq_u32_u8(vld1q_u8(from + (i + 1) * stride));
        pairs[i] = vreinterpretq_u64_u32(vtrn1q_u32(one, next));
        pairs[i + 1] = vreinterpretq_u64_u32(vtrn2q_u32(one, next));
    }
    UNROLLED(int i = 0; i < 2; i++) {
        out[i] = vreinterpretq_u32_u64(vtrn1q_u64(pairs[i], pairs[i + 2]));
        out[i + 2] = vreinterpretq_u32_u64(vtrn2q_u64(pairs[i], pairs[i + 2]));
    }
}
INLINE void fours_of_rows(const uint8_t *from, int64_t stride, Ints *out) {
    uint32x4_t low[4], high[4];
    turned(from, stride, low);
    turned(from + 4 * stride, stride, high);
    UNROLLED(int i = 0; i < 4; i++) out[i] = (Ints){low[i], high[i]};
}

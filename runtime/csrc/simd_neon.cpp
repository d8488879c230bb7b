// NEON, part of every aarch64 processor.
#include "simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

namespace edgevlm {
namespace {

struct V {
    static constexpr std::int64_t W = 4;
    float32x4_t v;

    static V zero() { return {vdupq_n_f32(0)}; }
    static V set(float x) { return {vdupq_n_f32(x)}; }
    static V load(const float* from) { return {vld1q_f32(from)}; }
    static V load(const Half* from) {
        return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(from))))};
    }
    static V load(const Int8* from) {
        std::int32_t four;
        std::memcpy(&four, from, sizeof four);
        return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))))))};
    }
    void store(float* to) const { vst1q_f32(to, v); }
    void store(Half* to) const { vst1_u16(reinterpret_cast<std::uint16_t*>(to), vreinterpret_u16_f16(vcvt_f16_f32(v))); }
    void store(Int8* to) const {  // integers saturate on their way down
        const int16x4_t words = vqmovn_s32(vcvtnq_s32_f32(v));
        const std::int32_t four = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(words, words))), 0);
        std::memcpy(to, &four, sizeof four);
    }
};

inline V operator+(V a, V b) { return {vaddq_f32(a.v, b.v)}; }
inline V operator-(V a, V b) { return {vsubq_f32(a.v, b.v)}; }
inline V operator*(V a, V b) { return {vmulq_f32(a.v, b.v)}; }
inline V operator/(V a, V b) { return {vdivq_f32(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline V fnma(V a, V b, V c) { return {vfmsq_f32(c.v, a.v, b.v)}; }
inline V most(V a, V b) { return {vmaxq_f32(a.v, b.v)}; }
inline float sum(V a) { return vaddvq_f32(a.v); }
inline Dots sums(V a, V b) { return {sum(a), sum(b)}; }
inline float largest(V a) { return vmaxvq_f32(a.v); }
inline V round(V a) { return {vrndnq_f32(a.v)}; }
inline V scaled(V a, V n) {
    return {vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(a.v), vshlq_n_u32(vreinterpretq_u32_f32(n.v), 23)))};
}
inline V keep_from(V a, V x, V least) {
    return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.v), vcgeq_f32(x.v, least.v)))};
}

inline void transpose(V (&rows)[4]) {
    const float32x4x2_t top = vtrnq_f32(rows[0].v, rows[1].v), bottom = vtrnq_f32(rows[2].v, rows[3].v);
    rows[0].v = vcombine_f32(vget_low_f32(top.val[0]), vget_low_f32(bottom.val[0]));
    rows[1].v = vcombine_f32(vget_low_f32(top.val[1]), vget_low_f32(bottom.val[1]));
    rows[2].v = vcombine_f32(vget_high_f32(top.val[0]), vget_high_f32(bottom.val[0]));
    rows[3].v = vcombine_f32(vget_high_f32(top.val[1]), vget_high_f32(bottom.val[1]));
}
constexpr int kRegisters = 32;

#include "kernels.inc"

void copy(const void* from, void* to, std::int64_t bytes) { std::memcpy(to, from, bytes); }
void drain() {}

}  // namespace
}  // namespace edgevlm

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif

namespace edgevlm {
namespace {

struct C {
    static constexpr std::int32_t kOffset = 0;
    int32x4_t v;

    using Codes = int8x16_t;

    static C set(std::int32_t x) { return {vdupq_n_s32(x)}; }
    static C load(const std::int32_t* from) { return {vld1q_s32(from)}; }
    void store(std::int32_t* to) const { vst1q_s32(to, v); }
    void dot(int8x16_t rows, const std::int8_t* key) {
        std::int32_t four;
        std::memcpy(&four, key, sizeof four);
        v = vdotq_s32(v, rows, vreinterpretq_s8_s32(vdupq_n_s32(four)));
    }
    void dot(int8x16_t rows, int8x16_t keys) { v = vdotq_s32(v, rows, keys); }
    void dot(const std::uint8_t* rows, const std::int8_t* key) { dot(vreinterpretq_s8_u8(vld1q_u8(rows)), key); }
    // Four rows of codes, so that those of a column are side by side.
    static void turn(const std::int8_t* from, std::int64_t stride, int8x16_t (&turned)[4]) {
        int8x16_t rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = vld1q_s8(from + i * stride);
        const int8x16x2_t first = vzipq_s8(rows[0], rows[1]), second = vzipq_s8(rows[2], rows[3]);
        for (int half = 0; half < 2; ++half) {
            const int16x8x2_t fours = vzipq_s16(vreinterpretq_s16_s8(first.val[half]), vreinterpretq_s16_s8(second.val[half]));
            for (int i = 0; i < 2; ++i) turned[2 * half + i] = vreinterpretq_s8_s16(fours.val[i]);
        }
    }
    static Codes bytes(const void* from) { return vld1q_s8(static_cast<const std::int8_t*>(from)); }
    static Codes low(Codes both) { return vandq_s8(both, vdupq_n_s8(15)); }
    static Codes high(Codes both) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(both), 4)); }
    static V fours(const float* from) { return {vld1q_dup_f32(from)}; }
    V floats() const { return {vcvtq_f32_s32(v)}; }
};
inline std::uint32_t at_least(V a, V b) {
    constexpr std::uint32_t kBits[] = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(vcgeq_f32(a.v, b.v), vld1q_u32(kBits)));
}

#include "codes.inc"

}  // namespace

const Simd& simd_neon() {
    static const CodeKernels codes = getauxval(AT_HWCAP) & HWCAP_ASIMDDP ? CodeKernels{V::W, 0, encode, likely, multiply, encode_blocks, multiply_blocks} : CodeKernels{0, 0, encode};
    static const Simd table{"neon", kRowKernels<float>, kRowKernels<Half>, kRowKernels<Int8>, kAttentionOf<2>, kAttentionOf<1>, kTiles, kLevels, codes, gate, box<double>,
                            box<std::int32_t>, at_least, hamming, turn, copy, drain, saturated, outside, read};
    return table;
}

}  // namespace edgevlm

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

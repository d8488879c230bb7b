// AVX2 with FMA and F16C.
#include "simd.h"

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace edgevlm {
namespace {

struct V {
    static constexpr std::int64_t W = 8;
    __m256 v;

    static V zero() { return {_mm256_setzero_ps()}; }
    static V set(float x) { return {_mm256_set1_ps(x)}; }
    static V load(const float* from) { return {_mm256_loadu_ps(from)}; }
    static V load(const Half* from) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))}; }
    static V load(const Int8* from) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))))};
    }
    void store(float* to) const { _mm256_storeu_ps(to, v); }
    void store(Half* to) const {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    void store(Int8* to) const {
        const __m256 near = _mm256_min_ps(_mm256_max_ps(v, _mm256_set1_ps(kInt8Min)), _mm256_set1_ps(kInt8Max));
        const __m256i whole = _mm256_cvtps_epi32(near);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
    }
};

inline V operator+(V a, V b) { return {_mm256_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm256_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline V fnma(V a, V b, V c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v)}; }
inline V most(V a, V b) { return {_mm256_max_ps(a.v, b.v)}; }
inline float sum(V a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Dots sums(V a, V b) {
    const __m256 four = _mm256_add_ps(_mm256_unpacklo_ps(a.v, b.v), _mm256_unpackhi_ps(a.v, b.v));  // a, b, a, b in each half
    const __m128 two = _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
    const __m128 one = _mm_add_ps(two, _mm_movehl_ps(two, two));
    return {_mm_cvtss_f32(one), _mm_cvtss_f32(_mm_movehdup_ps(one))};
}
inline float largest(V a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline V round(V a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline V scaled(V a, V n) {
    return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), _mm256_slli_epi32(_mm256_castps_si256(n.v), 23)))};
}
inline V keep_from(V a, V x, V least) { return {_mm256_and_ps(a.v, _mm256_cmp_ps(x.v, least.v, _CMP_GE_OQ))}; }

inline void transpose(V (&rows)[8]) {  // 8 x 8: pairs, fours, then halves
    __m256 pairs[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 8; i += 4) {
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0x44);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0xee);
        }
    }
    for (int i = 0; i < 4; ++i) {
        rows[i].v = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x20);
        rows[4 + i].v = _mm256_permute2f128_ps(fours[i], fours[4 + i], 0x31);
    }
}
constexpr int kRegisters = 16;

#include "kernels.inc"
#include "streaming.inc"

}  // namespace

const Simd& simd_avx2() {
    static constexpr Simd table{"avx2", kRowKernels<float>, kRowKernels<Half>, kRowKernels<Int8>, kAttentionOf<2>, kAttentionOf<1>, kTiles, kLevels, CodeKernels{0, 0, encode}, gate,
                                box<double>, box<std::int32_t>, at_least, hamming, turn, copy, drain, saturated, outside, read};
    return table;
}

}  // namespace edgevlm

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

// AVX-512F.
#include "simd.h"

#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)  // GCC 12's own header, not this file (bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx2,fma,f16c")
#endif

namespace edgevlm {
namespace {

struct V {
    static constexpr std::int64_t W = 16;
    __m512 v;

    static V zero() { return {_mm512_setzero_ps()}; }
    static V set(float x) { return {_mm512_set1_ps(x)}; }
    static V load(const float* from) { return {_mm512_loadu_ps(from)}; }
    static V load(const Half* from) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
    }
    static V load(const Int8* from) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
    }
    void store(float* to) const { _mm512_storeu_ps(to, v); }
    void store(Half* to) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
    void store(Int8* to) const {
        const __m512 near = _mm512_min_ps(_mm512_max_ps(v, _mm512_set1_ps(kInt8Min)), _mm512_set1_ps(kInt8Max));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(near)));
    }
};

inline V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V fnma(V a, V b, V c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
inline V most(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline float sum(V a) { return _mm512_reduce_add_ps(a.v); }
inline Dots sums(V a, V b) {
    const __m512 four = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));  // a, b, a, b in each 128 bits
    const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(four), 1));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four), upper);
    const __m128 two = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 one = _mm_add_ps(two, _mm_movehl_ps(two, two));
    return {_mm_cvtss_f32(one), _mm_cvtss_f32(_mm_movehdup_ps(one))};
}
inline float largest(V a) { return _mm512_reduce_max_ps(a.v); }
inline V round(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline V scaled(V a, V n) {
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(_mm512_castps_si512(n.v), 23)))};
}
inline V keep_from(V a, V x, V least) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, least.v, _CMP_GE_OQ), a.v)};
}

inline void transpose(V (&rows)[16]) {  // 16 x 16: pairs, fours, then quarters
    __m512 pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < 16; i += 4) {
        for (int j = 0; j < 2; ++j) {
            const __m512d low = _mm512_castps_pd(pairs[i + j]), high = _mm512_castps_pd(pairs[i + 2 + j]);
            fours[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            fours[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    for (int i = 0; i < 4; ++i) {  // fours[4 j + i]: column i of each quarter, of rows 4 j to 4 j + 3
        const __m512 even_low = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0x88);
        const __m512 odd_low = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0xdd);
        const __m512 even_high = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0x88);
        const __m512 odd_high = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0xdd);
        rows[i].v = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
        rows[8 + i].v = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        rows[4 + i].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        rows[12 + i].v = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
}
constexpr int kRegisters = 32;

#include "kernels.inc"
#include "streaming.inc"

}  // namespace
}  // namespace edgevlm

#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vnni,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vnni,avx2,fma,f16c")
#endif

namespace edgevlm {
namespace {

struct C {
    static constexpr std::int32_t kOffset = 128;
    __m512i v;

    using Codes = __m512i;

    static C set(std::int32_t x) { return {_mm512_set1_epi32(x)}; }
    static C load(const std::int32_t* from) { return {_mm512_loadu_si512(from)}; }
    void store(std::int32_t* to) const { _mm512_storeu_si512(to, v); }
    void dot(__m512i rows, const std::int8_t* key) {
        std::int32_t four;
        std::memcpy(&four, key, sizeof four);
        v = _mm512_dpbusd_epi32(v, rows, _mm512_set1_epi32(four));
    }
    void dot(__m512i rows, __m512i keys) { v = _mm512_dpbusd_epi32(v, rows, keys); }
    void dot(const std::uint8_t* rows, const std::int8_t* key) { dot(_mm512_loadu_si512(rows), key); }
    // Four rows of codes, each plus kOffset, so that the codes of a column are side by side.
    static void turn(const std::int8_t* from, std::int64_t stride, __m512i (&turned)[4]) {
        __m512i rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = _mm512_xor_si512(_mm512_loadu_si512(from + i * stride), _mm512_set1_epi32(static_cast<int>(0x80808080u)));
        const __m512i low_two = _mm512_unpacklo_epi8(rows[0], rows[1]), high_two = _mm512_unpackhi_epi8(rows[0], rows[1]);
        const __m512i low = _mm512_unpacklo_epi8(rows[2], rows[3]), high = _mm512_unpackhi_epi8(rows[2], rows[3]);
        turned[0] = _mm512_unpacklo_epi16(low_two, low), turned[1] = _mm512_unpackhi_epi16(low_two, low);
        turned[2] = _mm512_unpacklo_epi16(high_two, high), turned[3] = _mm512_unpackhi_epi16(high_two, high);
    }
    static Codes bytes(const void* from) { return _mm512_loadu_si512(from); }
    static Codes low(Codes both) { return _mm512_and_si512(both, _mm512_set1_epi8(15)); }
    static Codes high(Codes both) { return low(_mm512_srli_epi16(both, 4)); }
    static V fours(const float* from) {  // each of W / 4 numbers four times
        const __m512i place = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        return {_mm512_permutexvar_ps(place, _mm512_castps128_ps512(_mm_loadu_ps(from)))};
    }
    V floats() const { return {_mm512_cvtepi32_ps(v)}; }
};
inline std::uint32_t at_least(V a, V b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

#include "codes.inc"

}  // namespace

const Simd& simd_avx512() {
    static const CodeKernels codes = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") ? CodeKernels{V::W, 0x80808080u, encode, likely, multiply, encode_blocks, multiply_blocks} : CodeKernels{0, 0, encode};
    static const Simd table{"avx512", kRowKernels<float>, kRowKernels<Half>, kRowKernels<Int8>, kAttentionOf<2>, kAttentionOf<1>, kTiles, kLevels, codes, gate, box<double>,
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

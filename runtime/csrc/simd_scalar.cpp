// Plain C++, four numbers at a time, on any processor.
#include "simd.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace edgevlm {
namespace {

struct V {
    static constexpr std::int64_t W = 4;
    float v[W];

    template <typename F>
    static V from(F&& lane) { return {{lane(0), lane(1), lane(2), lane(3)}}; }

    static V zero() { return set(0); }
    static V set(float x) { return {{x, x, x, x}}; }
    static V load(const float* at) { return from([&](int i) { return at[i]; }); }
    static V load(const Half* at) { return from([&](int i) { return to_float(at[i]); }); }
    static V load(const Int8* at) { return from([&](int i) { return static_cast<float>(at[i].value); }); }
    void store(float* to) const { std::copy_n(v, W, to); }
    void store(Half* to) const { std::transform(v, v + W, to, to_half); }
    void store(Int8* to) const {
        for (int i = 0; i < W; ++i) {
            const float least = v[i] > kInt8Min ? v[i] : kInt8Min;
            to[i].value = static_cast<std::int8_t>(std::nearbyint(least < kInt8Max ? least : kInt8Max));
        }
    }
};

inline V operator+(V a, V b) { return V::from([&](int i) { return a.v[i] + b.v[i]; }); }
inline V operator-(V a, V b) { return V::from([&](int i) { return a.v[i] - b.v[i]; }); }
inline V operator*(V a, V b) { return V::from([&](int i) { return a.v[i] * b.v[i]; }); }
inline V operator/(V a, V b) { return V::from([&](int i) { return a.v[i] / b.v[i]; }); }
inline V fma(V a, V b, V c) { return a * b + c; }
inline V fnma(V a, V b, V c) { return c - a * b; }
inline V most(V a, V b) { return V::from([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline float sum(V a) { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }
inline Dots sums(V a, V b) { return {sum(a), sum(b)}; }
inline float largest(V a) { return std::max({a.v[0], a.v[1], a.v[2], a.v[3]}); }
inline V round(V a) { return V::from([&](int i) { return std::nearbyint(a.v[i]); }); }
inline V scaled(V a, V n) {
    std::uint32_t from[V::W], by[V::W];
    std::memcpy(from, a.v, sizeof from);
    std::memcpy(by, n.v, sizeof by);
    for (int i = 0; i < V::W; ++i) from[i] += by[i] << 23;
    std::memcpy(a.v, from, sizeof from);
    return a;
}
inline V keep_from(V a, V x, V least) { return V::from([&](int i) { return x.v[i] >= least.v[i] ? a.v[i] : 0.0f; }); }

inline void transpose(V (&rows)[V::W]) {
    for (int i = 0; i < V::W; ++i) {
        for (int j = 0; j < i; ++j) std::swap(rows[i].v[j], rows[j].v[i]);
    }
}
constexpr int kRegisters = 16;

#include "kernels.inc"

void copy(const void* from, void* to, std::int64_t bytes) { std::memcpy(to, from, bytes); }
void drain() {}

}  // namespace

const Simd& simd_scalar() {
    static constexpr Simd table{"scalar", kRowKernels<float>, kRowKernels<Half>, kRowKernels<Int8>, kAttentionOf<2>, kAttentionOf<1>, kTiles, kLevels, CodeKernels{0, 0, encode}, gate,
                                box<double>, box<std::int32_t>, at_least, hamming, turn, copy, drain, saturated, outside, read};
    return table;
}

}  // namespace edgevlm

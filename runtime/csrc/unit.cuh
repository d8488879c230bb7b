// Lengths of rows, whatever the size of their numbers.
#pragma once

#include "device.cuh"

namespace edgevlm {

// |row|^2 over a group's lanes, in X. The whole warp takes part; groups that are not live add nothing.
template <typename X, typename T, bool kWide>
__device__ X square_of(const T* row, bool live, int pairs, const Group& group) {
    X square = 0;
    if (live) {
        each_pair<T, kWide>(row, pairs, group, [&](const auto& first, const auto& second, int) {
            for (const float x : first) square += X{x} * x;
            for (const float x : second) square += X{x} * x;
        });
    }
    return group.sum(square);
}

// 1 / |row|, in double only where float32 cannot hold the square; 0 for a row of zeros.
struct Inverse {
    float quick;
    double exact;
    bool is_exact;

    __device__ float of(float x) const { return is_exact ? static_cast<float>(x * exact) : x * quick; }
};

template <typename T, bool kWide>
__device__ Inverse inverse_length(const T* row, bool live, int pairs, const Group& group) {
    const float square = square_of<float, T, kWide>(row, live, pairs, group);
    Inverse inverse{1 / sqrtf(square), 0, !trusted(square)};
    if (__any_sync(kAll, live && inverse.is_exact)) {
        const double exact = square_of<double, T, kWide>(row, live, pairs, group);
        inverse.exact = exact > 0 ? 1 / sqrt(exact) : exact;
    }
    return inverse;
}

}  // namespace edgevlm

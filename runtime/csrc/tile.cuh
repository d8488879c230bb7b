// Products of 64 rows with 64 others by one block, in float32: each thread has 4 x 4 of them.
#pragma once

#include "device.cuh"

namespace edgevlm {

constexpr int kTile = 64, kAcross = 16, kEachWay = kTile / kAcross, kDepth = 16;
static_assert(kAcross * kAcross == kThreads, "a thread has kEachWay x kEachWay products");

// Which products are this thread's. Neighbours have neighbouring columns.
struct Corner {
    int across = static_cast<int>(threadIdx.x) % kAcross, down = static_cast<int>(threadIdx.x) / kAcross;

    __device__ Corner() {}
    __device__ int row(int t) const { return down + t * kAcross; }
    __device__ int column(int k) const { return across + k * kAcross; }
};

// rows [count, width], dense, of which a tile's kDepth numbers from `d` on go to shared memory; zero where there is none.
template <typename T>
__device__ inline void stage(const T* rows, std::int64_t count, int width, int d, float (&to)[kDepth][kTile + 1]) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += kThreads) {
        const int row = i / kDepth, depth = i % kDepth;
        to[depth][row] = row < count && d + depth < width ? number(rows[std::int64_t{row} * width + d + depth]) : 0.0f;
    }
}

struct Products {
    float of[kEachWay][kEachWay] = {};

    __device__ Products() {}

    // Adds rows [row_count, width] x columns [column_count, width]; what lies beyond a count is zero. The whole block takes part.
    template <typename T>
    __device__ void add(const float* rows, std::int64_t row_count, const T* columns, std::int64_t column_count, int width) {
        __shared__ float left[kDepth][kTile + 1], right[kDepth][kTile + 1];
        const Corner corner;
        for (int d = 0; d < width; d += kDepth) {
            __syncthreads();
            stage(rows, row_count, width, d, left);
            stage(columns, column_count, width, d, right);
            __syncthreads();
#pragma unroll
            for (int depth = 0; depth < kDepth; ++depth) {
                float row[kEachWay], column[kEachWay];
                for (int t = 0; t < kEachWay; ++t) row[t] = left[depth][corner.row(t)];
                for (int k = 0; k < kEachWay; ++k) column[k] = right[depth][corner.column(k)];
                for (int t = 0; t < kEachWay; ++t) {
                    for (int k = 0; k < kEachWay; ++k) of[t][k] += row[t] * column[k];
                }
            }
        }
    }
};

}  // namespace edgevlm

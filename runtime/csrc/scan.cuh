// What a whole block works out together: places in a list, counts, the k-th highest key.
#pragma once

#include "device.cuh"

namespace edgevlm {

constexpr int kWarps = kThreads / 32;

// How many of the threads before this one say yes; `all` becomes how many do at all. Every thread of the block takes part.
__device__ inline std::int32_t count_before(bool yes, std::int32_t& all) {
    __shared__ std::int32_t warps[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned votes = __ballot_sync(kAll, yes);
    __syncthreads();  // the last call's numbers have been read
    if (lane == 0) warps[warp] = __popc(votes);
    __syncthreads();
    std::int32_t before = __popc(votes & ((1u << lane) - 1));
    all = 0;
    for (int other = 0; other < kWarps; ++other) {
        if (other < warp) before += warps[other];
        all += warps[other];
    }
    return before;
}

// Writes the i of [first, last) where(i) to `list` in rising order; returns how many.
template <typename Where>
__device__ std::int32_t list_where(std::int32_t first, std::int32_t last, std::int32_t* list, Where&& where) {
    std::int32_t count = 0;
    for (std::int32_t from = first; from < last; from += kThreads) {
        const std::int32_t i = from + static_cast<std::int32_t>(threadIdx.x);
        const bool yes = i < last && where(i);
        std::int32_t all;
        const std::int32_t before = count_before(yes, all);
        if (yes) list[count + before] = i;
        count += all;
    }
    return count;
}

// How many i of [0, n) there are where(i).
template <typename Where>
__device__ std::int32_t count_where(std::int32_t n, Where&& where) {
    __shared__ std::int32_t count;
    __syncthreads();
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    std::int32_t own = 0;
    for (std::int32_t i = threadIdx.x; i < n; i += kThreads) own += where(i);
    if (own) atomicAdd(&count, own);
    __syncthreads();
    return count;
}

// One of all the threads' numbers, joined in a fixed order.
template <typename X, typename Both>
__device__ X block_fold(X x, Both&& both) {
    __shared__ X part[kThreads];
    __syncthreads();
    part[threadIdx.x] = x;
    for (int step = kThreads / 2; step; step /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < step) part[threadIdx.x] = both(part[threadIdx.x], part[threadIdx.x + step]);
    }
    __syncthreads();
    return part[0];
}

// The k-th highest of the keys (of kBits bits) that key(i, out) gives of the i it returns true for: a digit of eight bits at a
// time, by a histogram. There are at least k. Afterwards k counts how many of those equal to it belong to the k highest.
template <typename Key, typename KeyOf>
__device__ Key kth_highest(std::int32_t n, std::int32_t& k, KeyOf&& key_of) {
    __shared__ std::int32_t histogram[256], digit_found, k_left;
    Key found = 0, known = 0;
    for (int shift = 8 * sizeof(Key) - 8; shift >= 0; shift -= 8) {
        __syncthreads();
        for (int digit = threadIdx.x; digit < 256; digit += kThreads) histogram[digit] = 0;
        __syncthreads();
        for (std::int32_t i = threadIdx.x; i < n; i += kThreads) {
            Key key;
            if (key_of(i, key) && (key & known) == found) atomicAdd(histogram + static_cast<int>(key >> shift & 255), 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            std::int32_t left = k;
            int digit = 255;
            while (left > histogram[digit]) left -= histogram[digit--];
            digit_found = digit;
            k_left = left;
        }
        __syncthreads();
        k = k_left;
        found |= static_cast<Key>(digit_found) << shift;
        known |= Key{255} << shift;
    }
    return found;
}

}  // namespace edgevlm

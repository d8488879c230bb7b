// Exact selection with the tie rule of every policy: the newer token wins, then the lower row.
#pragma once

#include "scan.cuh"

namespace edgevlm {

// The score as a whole number of the same order; NaN is the lowest, and 0 none.
__device__ inline std::uint32_t rank_of(float score) {
    score += 0.0f;  // -0 becomes +0: they are a tie
    if (score != score) return 1;
    const std::uint32_t bits = __float_as_uint(score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// out [n]: the k candidates of the highest score, all of them if there are fewer, by one block. score(i), candidate(i).
template <typename Score, typename Candidate>
__device__ void top_k(std::int32_t n, std::int32_t k, const std::int64_t* seq, Score&& score, Candidate&& candidate,
                      std::uint8_t* out) {
    if (k <= 0 || k >= count_where(n, candidate)) {
        for (std::int32_t i = threadIdx.x; i < n; i += kThreads) out[i] = k > 0 && candidate(i);
        __syncthreads();
        return;
    }
    const std::uint32_t rank = kth_highest<std::uint32_t>(n, k, [&](std::int32_t i, std::uint32_t& key) {
        key = rank_of(score(i));
        return candidate(i);
    });
    const auto equal = [&](std::int32_t i) { return candidate(i) && rank_of(score(i)) == rank; };
    constexpr std::uint64_t kSign = 1ull << 63;  // so that signed numbers rise as unsigned ones do
    std::int32_t left = k;
    const std::uint64_t age = kth_highest<std::uint64_t>(n, left, [&](std::int32_t i, std::uint64_t& key) {
        key = static_cast<std::uint64_t>(seq[i]) ^ kSign;
        return equal(i);
    });
    for (std::int32_t from = 0; from < n; from += kThreads) {
        const std::int32_t i = from + static_cast<std::int32_t>(threadIdx.x);
        const bool tied = i < n && equal(i);
        const std::uint64_t own = tied ? static_cast<std::uint64_t>(seq[i]) ^ kSign : 0;
        std::int32_t all;
        const std::int32_t before = count_before(tied && own == age, all);
        if (i < n) out[i] = (candidate(i) && rank_of(score(i)) > rank) || (tied && (own > age || (own == age && before < left)));
        left -= all;
    }
    __syncthreads();
}

}  // namespace edgevlm

// top_k of each head, one block each.
#include "select.cuh"

namespace edgevlm {

struct TopCall {
    const float* score;             // [H, n]
    const std::int64_t* seq;        // [H, n]
    const std::uint8_t* candidate;  // [H, n]
    std::uint8_t* out;              // [H, n]
    std::int32_t rows, k;
};

__device__ inline void top_k_of_head(const TopCall& at) {
    const std::int64_t base = std::int64_t{blockIdx.y} * at.rows;
    const float* const score = at.score + base;
    const std::uint8_t* const candidate = at.candidate + base;
    top_k(at.rows, at.k, at.seq + base, [=](std::int32_t i) { return score[i]; },
          [=](std::int32_t i) { return candidate[i] != 0; }, at.out + base);
}

EDGEVLM_KERNEL(top_k, TopCall, edgevlm::top_k_of_head(at))

}  // namespace edgevlm

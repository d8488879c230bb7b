// InfiniPot-V, Alg. 1: what stays of each layer and head, of scores that lie on the device.
#include "select.cuh"

namespace edgevlm {

struct ChooseCall {
    Rows rows;                       // their norms
    const float *similarity, *pooled;  // [H, n] of each layer
    const std::int64_t* seq;         // [H, n]
    const std::uint8_t *prefix, *vision, *recent;  // [H, n]
    std::uint8_t *keep, *open, *chosen;  // [H, n]
    const double* thresholds;        // [3], of the coefficient of variation
    std::int32_t* window;            // [layers]
    std::int32_t distinctive, target, keep_recent;
};

// One block a layer: VaN's window by sigma / mu of the norms of its vision rows, all heads together (Alg. 2, lines 16 to 21).
__device__ inline void choose_window(const ChooseCall& at) {
    const LayerRows& layer = at.rows.layers[blockIdx.z];
    const std::int64_t all = std::int64_t{at.rows.heads} * layer.rows;
    const auto over = [&](auto&& of) {
        double sum = 0;
        for (std::int64_t i = threadIdx.x; i < all; i += kThreads) {
            if (at.vision[layer.first + i]) sum += of(double{layer.norm[i / layer.rows * layer.norm_stride + i % layer.rows]});
        }
        return block_fold(sum, [](double a, double b) { return a + b; });
    };
    const double count = fmax(over([](double) { return 1.0; }), 1.0), mean = over([](double norm) { return norm; }) / count;
    const double squares = over([mean](double norm) { return (norm - mean) * (norm - mean); });
    const double spread = sqrt(squares / count) / fmax(mean, 1e-30);
    int window = 7;
    for (int step = 0; step < 3; ++step) window -= spread >= at.thresholds[step] ? 2 : 0;
    if (threadIdx.x == 0) at.window[blockIdx.z] = window;
}

EDGEVLM_KERNEL(choose_window, ChooseCall, choose_window(at))

// One block a layer and head: first the best of TaR, then the recent ones, then those of the best pooled norm.
__device__ inline void choose_rows(const ChooseCall& at) {
    const LayerRows& layer = at.rows.layers[blockIdx.z];
    const std::int64_t base = layer.first + std::int64_t{blockIdx.y} * layer.rows;
    const std::int64_t* const seq = at.seq + base;
    const float *const similarity = at.similarity + base, *const pooled = at.pooled + base;
    const std::uint8_t *const vision = at.vision + base, *const recent = at.recent + base, *const prefix = at.prefix + base;
    std::uint8_t *const keep = at.keep + base, *const open = at.open + base, *const chosen = at.chosen + base;
    const std::int32_t n = layer.rows;
    const auto is_open = [=](std::int32_t i) { return open[i] != 0; };
    top_k(n, at.distinctive, seq, [=](std::int32_t i) { return -similarity[i]; },
          [=](std::int32_t i) { return vision[i] && !recent[i]; }, keep);
    for (std::int32_t i = threadIdx.x; i < n; i += kThreads) keep[i] |= recent[i] && at.keep_recent;
    __syncthreads();
    const std::int32_t count = count_where(n, [=](std::int32_t i) { return keep[i] != 0; });
    const bool fits = count <= at.target;  // else frames of more tokens than was said: the newest of what was chosen
    for (std::int32_t i = threadIdx.x; i < n; i += kThreads) open[i] = fits ? vision[i] && !keep[i] : keep[i];
    __syncthreads();
    top_k(n, fits ? at.target - count : at.target, seq, [=](std::int32_t i) { return fits ? pooled[i] : 0.0f; }, is_open, chosen);
    for (std::int32_t i = threadIdx.x; i < n; i += kThreads) keep[i] = (fits && keep[i]) || chosen[i] || prefix[i];
}

EDGEVLM_KERNEL(choose_rows, ChooseCall, choose_rows(at))

}  // namespace edgevlm

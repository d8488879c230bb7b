// How much attention each cached token gets from rows of queries: what the attention-scored policies rank by. Up to 64 query rows
// at a time: their scores with all keys, the highest and the sum of each row, then each key's share. Bound by arithmetic.
#include <cfloat>
#include <cmath>

#include "scan.cuh"
#include "tile.cuh"

namespace edgevlm {

struct AttentionCall {
    Rows rows;                      // one layer's keys [H, n, D], or [H, m, D] of keys outside the cache
    const float* query;             // [H, group * queries, D]
    const std::int64_t* query_seq;  // [queries]
    const std::int64_t* seq;        // [H, n], or [m] for all heads
    float* scores;                  // [H, 64, columns]
    float *highest, *weight;        // [H, 64]
    float* mass;                    // [H, n]
    std::int64_t seq_stride, columns;
    std::int32_t column, all, first, queries;  // the first column of these keys; query rows of a head; the first of this batch
};

// A block a tile of keys: scores, scaled by 1 / sqrt(D); minus infinity where the row does not see the key.
template <typename T>
__device__ void attention_scores(const AttentionCall& at) {
    const LayerRows& layer = at.rows.layers[0];
    const std::int64_t head = blockIdx.y, first = std::int64_t{blockIdx.x} * kTile;
    const int width = 2 * at.rows.pairs, count = min(kTile, at.all - at.first);
    const float scale = 1 / sqrtf(static_cast<float>(width));
    const T* const keys = static_cast<const T*>(layer.key) + (head * layer.capacity + first) * width;
    const Corner corner;
    Products products;
    products.add(at.query + (head * at.all + at.first) * width, count, keys, layer.rows - first, width);
    for (int t = 0; t < kEachWay; ++t) {
        const int row = corner.row(t);
        if (row >= count) continue;
        const std::int64_t seen = at.query_seq[(at.first + row) % at.queries];
        float* const scores = at.scores + (head * kTile + row) * at.columns + at.column;
        for (int k = 0; k < kEachWay; ++k) {
            const std::int64_t i = first + corner.column(k);
            if (i < layer.rows) scores[i] = at.seq[head * at.seq_stride + i] > seen ? -INFINITY : products.of[t][k] * scale;
        }
    }
}

EDGEVLM_KERNEL(attention_scores_fp32, AttentionCall, attention_scores<float>(at))
EDGEVLM_KERNEL(attention_scores_fp16, AttentionCall, attention_scores<__half>(at))

// A block a query row: its highest score, and 1 / the sum of the exponents; 0 where it sees nothing.
__device__ inline void attention_weights(const AttentionCall& at) {
    const std::int64_t row = std::int64_t{blockIdx.y} * kTile + blockIdx.x;
    const float* const scores = at.scores + row * at.columns;
    float most = -FLT_MAX, sum = 0;  // not infinite: a row may see nothing
    for (std::int64_t i = threadIdx.x; i < at.columns; i += kThreads) most = fmaxf(most, scores[i]);
    most = block_fold(most, [](float a, float b) { return fmaxf(a, b); });
    for (std::int64_t i = threadIdx.x; i < at.columns; i += kThreads) sum += expf(scores[i] - most);
    sum = block_fold(sum, [](float a, float b) { return a + b; });
    if (threadIdx.x == 0) at.highest[row] = most, at.weight[row] = sum > 0 ? 1 / sum : 0;
}

EDGEVLM_KERNEL(attention_weights, AttentionCall, attention_weights(at))

// A thread a key: its share of each row of the batch, in the order of the rows, on top of what earlier batches gave it.
__device__ inline void attention_mass(const AttentionCall& at) {
    const std::int64_t head = blockIdx.y, i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const std::int32_t rows = at.rows.layers[0].rows;
    if (i >= rows) return;
    float mass = at.first ? at.mass[head * rows + i] : 0;
    for (int row = 0; row < min(kTile, at.all - at.first); ++row) {
        const std::int64_t place = head * kTile + row;
        mass += expf(at.scores[place * at.columns + i] - at.highest[place]) * at.weight[place];
    }
    at.mass[head * rows + i] = mass;
}

EDGEVLM_KERNEL(attention_mass, AttentionCall, attention_mass(at))

}  // namespace edgevlm

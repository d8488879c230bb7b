// How alike each token is to the newest of its kind: what last-seen ranks by. Bound by arithmetic: n m D products.
#include "tile.cuh"
#include "unit.cuh"

namespace edgevlm {

struct NewerCall {
    Rows rows;                     // of one layer
    Turns how;
    const std::int32_t* position;  // [H, n, axes]
    const std::int32_t* order;     // [H, n]: valid rows, the oldest first
    const std::int32_t* held;      // [H]: how many there are
    const std::int32_t* news;      // [H]: the first of `order` that others are compared with
    float* unit;                   // [H, n, D]: their unit keys, in that order
    float* out;                    // [H, n], zero at the start
};

// A group a token: its unit key, turned to where the oldest stands.
template <typename T, bool kWide>
__device__ void unit_keys(const NewerCall& at) {
    const Group group(at.rows.lanes);
    const LayerRows& layer = at.rows.layers[0];
    const std::int64_t head = blockIdx.y, place = std::int64_t{blockIdx.x} * group.count + group.index;
    const std::int32_t* const order = at.order + head * layer.rows;
    const int pairs = at.rows.pairs;
    const bool live = place < at.held[head];
    const std::int64_t i = live ? order[place] : 0;
    const T* const key = static_cast<const T*>(layer.key) + (head * layer.capacity + i) * 2 * pairs;
    const Inverse inverse = inverse_length<T, kWide>(key, live, pairs, group);
    if (!live) return;
    const std::int32_t* const position = at.position + head * layer.rows * at.how.axes;
    float* const unit = at.unit + (head * layer.rows + place) * 2 * pairs;
    each_pair<T, kWide>(key, pairs, group, [&](const auto& first, const auto& second, int d) {
        for (int j = 0; j < kEach<T, kWide>; ++j) {
            float u = inverse.of(first[j]), v = inverse.of(second[j]);
            if (at.how.on) turn_back(at.how, position + i * at.how.axes, position + order[0] * at.how.axes, d + j, u, v);
            unit[d + j] = u;
            unit[pairs + d + j] = v;
        }
    });
}

EDGEVLM_ROW_KERNEL(unit_keys, NewerCall, unit_keys)

// A block a tile of tokens, which meets one tile of newer ones after another.
__device__ inline void nearest_newer(const NewerCall& at) {
    const LayerRows& layer = at.rows.layers[0];
    const std::int64_t head = blockIdx.y;
    const std::int32_t held = at.held[head], first = static_cast<std::int32_t>(blockIdx.x) * kTile;
    if (first >= held) return;
    const int width = 2 * at.rows.pairs;
    const float* const unit = at.unit + head * layer.rows * width;
    const Corner corner;
    float highest[kEachWay] = {-1, -1, -1, -1};
    for (std::int32_t from = max(first, at.news[head]) / kTile * kTile; from < held; from += kTile) {
        Products products;
        products.add<float>(unit + std::int64_t{first} * width, held - first, unit + std::int64_t{from} * width, held - from, width);
        for (int t = 0; t < kEachWay; ++t) {
            for (int k = 0; k < kEachWay; ++k) {
                const std::int32_t token = first + corner.row(t), key = from + corner.column(k);
                if (key > token && key >= at.news[head] && key < held) highest[t] = fmaxf(highest[t], products.of[t][k]);
            }
        }
    }
    for (int t = 0; t < kEachWay; ++t) {
        for (int step = kAcross / 2; step; step /= 2) highest[t] = fmaxf(highest[t], __shfl_xor_sync(kAll, highest[t], step));
        const std::int32_t token = first + corner.row(t);
        if (corner.across == 0 && token < held) at.out[head * layer.rows + at.order[head * layer.rows + token]] = highest[t];
    }
}

EDGEVLM_KERNEL(nearest_newer, NewerCall, nearest_newer(at))

}  // namespace edgevlm

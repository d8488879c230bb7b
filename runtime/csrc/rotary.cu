// Keys turned to new positions, in place: rotate-half pairs, in float32, then rounded to what they are stored as.
#include "device.cuh"

namespace edgevlm {

struct TurnCall {
    Rows rows;
    Turns how;
    const std::int32_t* by;  // [H, n, axes] of each layer: new less old
};

template <typename T, bool kWide>
__device__ void turn_keys(const TurnCall& at) {
    constexpr int N = kEach<T, kWide>;
    const Group group(at.rows.lanes);
    const LayerRows& layer = at.rows.layers[blockIdx.z];
    const std::int64_t head = blockIdx.y, row = std::int64_t{blockIdx.x} * group.count + group.index;
    if (row >= layer.rows) return;
    const int axes = at.how.axes, pairs = at.rows.pairs;
    const std::int32_t* const by = at.by + (layer.first + head * layer.rows + row) * axes;
    bool moves = false;
    for (int axis = 0; axis < axes; ++axis) moves |= by[axis] != 0;
    if (!moves) return;
    T* const key = static_cast<T*>(layer.key) + (head * layer.capacity + row) * 2 * pairs;
    each_pair<T, kWide>(key, pairs, group, [&](const auto& first, const auto& second, int d) {
        float u[N], v[N];
        for (int i = 0; i < N; ++i) {
            float cosine, sine;
            angle_of(by[axes == 1 ? 0 : at.how.axis[d + i]], at.how.turns[d + i], cosine, sine);
            u[i] = first[i] * cosine - second[i] * sine;
            v[i] = second[i] * cosine + first[i] * sine;
        }
        save(u, key + d);
        save(v, key + pairs + d);
    });
}

EDGEVLM_ROW_KERNEL(turn_keys, TurnCall, turn_keys)

}  // namespace edgevlm

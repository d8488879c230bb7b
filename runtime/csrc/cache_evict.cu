// Eviction: holes are filled from the tail. First a list of moves for each layer and head, then as many rows move as there are.
#include "device.cuh"
#include "scan.cuh"

namespace edgevlm {

struct MovesCall {
    Rows rows;
    const std::uint8_t* keep;  // [H, n] of each layer
    const std::int32_t* kept;  // [layers]
    std::int32_t* from;        // [H, n] of each layer: the k-th survivor behind `kept`
    std::int32_t* to;          // the same: the k-th hole before it
    std::int32_t* count;       // [layers, H]
};

// One block a layer and head: both lists in rising order, so that the k-th hole takes the k-th survivor.
__device__ inline void list_moves(const MovesCall& at) {
    const LayerRows& layer = at.rows.layers[blockIdx.z];
    const std::int64_t base = layer.first + std::int64_t{blockIdx.y} * layer.rows;
    const std::int32_t kept = at.kept[blockIdx.z];
    const std::uint8_t* const keep = at.keep + base;
    const std::int32_t holes = list_where(0, kept, at.to + base, [=](std::int32_t i) { return !keep[i]; });
    list_where(kept, layer.rows, at.from + base, [=](std::int32_t i) { return keep[i] != 0; });
    if (threadIdx.x == 0) at.count[blockIdx.z * at.rows.heads + blockIdx.y] = holes;
}

EDGEVLM_KERNEL(list_moves, MovesCall, list_moves(at))

template <typename T, bool kWide>
__device__ void move_rows(const MovesCall& at) {
    const Group group(at.rows.lanes);
    const LayerRows& layer = at.rows.layers[blockIdx.z];
    const std::int64_t head = blockIdx.y, move = std::int64_t{blockIdx.x} * group.count + group.index;
    if (move >= at.count[blockIdx.z * at.rows.heads + head]) return;
    const std::int64_t place = layer.first + head * layer.rows + move, from = at.from[place], to = at.to[place];
    const int pairs = at.rows.pairs;
    for (void* const part : {layer.key, layer.value}) {
        T* const rows = static_cast<T*>(part) + head * layer.capacity * 2 * pairs;
        T* const target = rows + to * 2 * pairs;
        each_pair<T, kWide>(rows + from * 2 * pairs, pairs, group, [=](const auto& first, const auto& second, int d) {
            save(first, target + d);
            save(second, target + pairs + d);
        });
    }
    float* const norm = layer.norm + head * layer.norm_stride;
    if (group.lane == 0) norm[to] = norm[from];
}

EDGEVLM_ROW_KERNEL(move_rows, MovesCall, move_rows)

}  // namespace edgevlm

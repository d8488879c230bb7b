// ReSV's kernels as Python sees them: a layer at a time, its KV heads shared out over the threads.

#include <pybind11/numpy.h>

#include <vector>

#include "arena.h"
#include "arrays.h"
#include "errors.h"
#include "hash_clusters.h"
#include "kernels_api.h"
#include "threads.h"
#include "wicsum.h"

namespace py = pybind11;

namespace edgevlm {

namespace {

using Unlocked = py::gil_scoped_release;

// The caller's own dense array, to be changed in place.
template <typename T>
T* in_place(py::handle object, const char* name, const std::vector<std::int64_t>& shape) {
    py::array array = checked<T>(object, name, shape);
    if (!(array.flags() & py::array::c_style)) refuse(name, " must be dense");
    if (!array.writeable()) refuse(name, " must be writeable");
    return static_cast<T*>(array.mutable_data());
}

// The clusters of a layer: [heads, slots] of everything.
struct Layer {
    std::int64_t heads, slots, width, axes;
    float *key, *place;
    std::uint32_t* bits;
    std::int32_t* count;
    bool* open;
    py::array_t<float, py::array::c_style> planes;  // [heads, width, kPlanes]

    Layer(py::handle key_, py::handle bits_, py::handle count_, py::handle open_, py::handle place_, py::handle planes_) {
        const py::array all = checked<float>(key_, "key", {any, any, any}), where = checked<float>(place_, "place", {any, any, any});
        heads = all.shape(0), slots = all.shape(1), width = all.shape(2), axes = where.shape(2);
        if (slots < 4 || slots >= 1 << 24) refuse("there must be 4 to 2^24 slots, not ", slots);
        key = in_place<float>(key_, "key", {heads, slots, width});
        bits = in_place<std::uint32_t>(bits_, "bits", {heads, slots});
        count = in_place<std::int32_t>(count_, "count", {heads, slots});
        open = in_place<bool>(open_, "open", {heads, slots});
        place = in_place<float>(place_, "place", {heads, slots, axes});
        planes = dense<float>(planes_, "planes", {heads, width, kPlanes});
    }

    ClusterTable of(std::int64_t head) const {
        const std::int64_t at = head * slots;
        return {slots, width, axes, key + at * width, bits + at, count + at, open + at, place + at * axes};
    }

    // Calls work(head, clusters) for every head; adds up what was counted.
    template <typename Work>
    Counted each(std::int32_t* home, Work&& work) const {
        const float* const first = planes.data();
        const Unlocked unlocked;
        std::vector<Counted> counted(heads);
        const Lease memory(nullptr, cluster_scratch(of(0)), heads);
        parallel_for(heads, memory.workers(), [&](std::int64_t head, int worker) {
            Clusters clusters(of(head), first + head * width * kPlanes, home + head * 2 * slots, memory.of(worker));
            work(head, clusters);
            counted[head] = clusters.counted;
        });
        Counted all;
        for (const Counted& one : counted) all.merged += one.merged, all.forced += one.forced;
        return all;
    }
};

py::array_t<std::uint32_t> call_hash_bits(py::handle key, py::handle planes) {
    const auto keys = dense<float>(key, "key", {any, any, any});
    const std::int64_t heads = keys.shape(0), rows = keys.shape(1), width = keys.shape(2);
    const auto normals = dense<float>(planes, "planes", {heads, width, kPlanes});
    py::array_t<std::uint32_t> out({heads, rows});
    std::uint32_t* const first = out.mutable_data();
    const Unlocked unlocked;
    for (std::int64_t i = 0; i < heads * rows; ++i)
        first[i] = hash_bits(keys.data() + i * width, normals.data() + i / rows * width * kPlanes, width);
    return out;
}

py::tuple call_hash_join(py::handle rows_key, py::handle rows_place, std::int64_t distance, py::handle key, py::handle bits,
                         py::handle count, py::handle open, py::handle place, py::handle planes) {
    const Layer layer(key, bits, count, open, place, planes);
    const auto keys = dense<float>(rows_key, "keys", {layer.heads, any, layer.width});
    const std::int64_t rows = keys.shape(1);
    const auto places = dense<float>(rows_place, "positions", {layer.heads, rows, layer.axes});
    if (distance < 0) refuse("distance must not be negative, and is ", distance);
    py::array_t<std::int32_t> slot({layer.heads, rows}), home({layer.heads, 2 * layer.slots});
    std::int32_t* const out = slot.mutable_data();
    const Counted counted = layer.each(home.mutable_data(), [&](std::int64_t head, Clusters& clusters) {
        for (std::int64_t i = head * rows; i < (head + 1) * rows; ++i)
            out[i] = clusters.join(keys.data() + i * layer.width, places.data() + i * layer.axes, distance);
    });
    return py::make_tuple(slot, home, counted.merged, counted.forced);
}

py::tuple call_hash_seal(py::handle rows_key, py::handle rows_place, py::handle rows_slot, py::handle leaving, py::handle key,
                         py::handle bits, py::handle count, py::handle open, py::handle place, py::handle planes) {
    const Layer layer(key, bits, count, open, place, planes);
    const auto keys = dense<float>(rows_key, "keys", {layer.heads, any, layer.width});
    const std::int64_t rows = keys.shape(1);
    const auto places = dense<float>(rows_place, "positions", {layer.heads, rows, layer.axes});
    const auto slot = dense<std::int32_t>(rows_slot, "slot", {layer.heads, rows});
    for (std::int64_t i = 0; i < layer.heads * rows; ++i) {
        if (slot.data()[i] >= layer.slots) refuse("there is no slot ", slot.data()[i], " of ", layer.slots);
    }
    const Held<bool> goes = as_mask(leaving, "leaving", layer.heads, rows);
    py::array_t<std::int32_t> home({layer.heads, 2 * layer.slots});
    const Counted counted = layer.each(home.mutable_data(), [&](std::int64_t head, Clusters& clusters) {
        const std::int64_t at = head * rows;
        clusters.seal(keys.data() + at * layer.width, places.data() + at * layer.axes, slot.data() + at, goes.of(head), rows);
    });
    return py::make_tuple(home, counted.merged);
}

py::array_t<float> call_wicsum(py::handle query, py::handle key, py::handle count, double threshold) {
    const auto keys = dense<float>(key, "key", {any, any, any});
    const std::int64_t heads = keys.shape(0), slots = keys.shape(1), width = keys.shape(2);
    const auto counts = dense<std::int32_t>(count, "count", {heads, slots});
    const auto queries = dense<float>(query, "query", {any, any, width});
    if (heads < 1 || queries.shape(0) % heads)
        refuse("query heads must be a multiple of the ", heads, " KV heads, not ", queries.shape(0));
    const std::int64_t rows = queries.shape(0) / heads * queries.shape(1);
    py::array_t<float> best({heads, slots});
    float* const out = best.mutable_data();
    const Unlocked unlocked;
    const Lease memory(nullptr, wicsum_scratch(slots, width), heads);
    parallel_for(heads, memory.workers(), [&](std::int64_t head, int worker) {
        const Scored clusters{keys.data() + head * slots * width, counts.data() + head * slots,
                              queries.data() + head * rows * width, slots, width, rows};
        wicsum(clusters, threshold, out + head * slots, memory.of(worker));
    });
    return best;
}

}  // namespace

void bind_resv(py::module_& module) {
    module.def("hash_bits", &call_hash_bits);
    module.def("hash_join", &call_hash_join);
    module.def("hash_seal", &call_hash_seal);
    module.def("wicsum", &call_wicsum);
}

}  // namespace edgevlm

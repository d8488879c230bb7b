// ReSV's kernels as Python sees them: a layer at a time, its KV heads shared out over the threads.

#include <pybind11/numpy.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "arena.h"
#include "arrays.h"
#include "errors.h"
#include "hash_clusters.h"
#include "kernels_api.h"
#include "threads.h"
#include "wicsum.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {

namespace {

using Unlocked = py::gil_scoped_release;

// The clusters of a layer: [heads, slots] of everything.
struct Layer {
    std::int64_t heads, slots, width, axes;
    float *key, *place;
    std::uint32_t* bits;
    std::int32_t* count;
    std::uint8_t* open;
    py::array_t<float, py::array::c_style> planes;  // [heads, width, kPlanes]

    Layer(Call& call, py::handle key_, py::handle bits_, py::handle count_, py::handle open_, py::handle place_, py::handle planes_) {
        py::array all = call.array<float>(key_, "key", {any, any, any}, true);
        heads = all.shape(0), slots = all.shape(1), width = all.shape(2);
        if (slots < 4 || slots >= 1 << 24) refuse("slots must be 4 to 2^24 - 1, not ", slots);
        py::array where = call.array<float>(place_, "place", {heads, slots, any}, true);
        axes = where.shape(2);
        key = static_cast<float*>(all.mutable_data()), place = static_cast<float*>(where.mutable_data());
        bits = call.in_place<std::uint32_t>(bits_, "bits", {heads, slots});
        count = call.in_place<std::int32_t>(count_, "count", {heads, slots});
        open = call.in_place<bool>(open_, "open", {heads, slots});
        planes = call.dense<float>(planes_, "planes", {heads, width, kPlanes});
    }

    ClusterTable of(std::int64_t head) const {
        const std::int64_t at = head * slots;
        return {slots, width, axes, key + at * width, bits + at, count + at, open + at, place + at * axes};
    }

    // Refuses a table that is not at rest, and one to which `rows` tokens a head are more than it can count.
    void check(std::int64_t rows) const {
        for (std::int64_t head = 0; head < heads; ++head) {
            std::int64_t used = 0, opened = 0, tokens = rows;
            for (std::int64_t s = head * slots; s < (head + 1) * slots; ++s) {
                if (count[s] < 0) refuse("a cluster cannot have ", count[s], " tokens");
                used += count[s] > 0, opened += count[s] > 0 && open[s], tokens += count[s];
            }
            if (used == slots) refuse("head ", head, " has no free slot among ", slots);
            if (opened > slots / 2) refuse("head ", head, " has ", opened, " open clusters, more than half of its ", slots, " slots");
            if (tokens > std::numeric_limits<std::int32_t>::max()) refuse("head ", head, " has too many tokens: ", tokens);
        }
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

py::array_t<std::uint32_t> call_hash_bits(Floats key, Floats planes) {
    Call call;
    const auto keys = call.dense<float>(key, "key", {any, any, any});
    const std::int64_t heads = keys.shape(0), rows = keys.shape(1), width = keys.shape(2);
    const auto normals = call.dense<float>(planes, "planes", {heads, width, kPlanes});
    py::array_t<std::uint32_t> out({heads, rows});
    std::uint32_t* const first = out.mutable_data();
    const Unlocked unlocked;
    for (std::int64_t i = 0; i < heads * rows; ++i)
        first[i] = hash_bits(keys.data() + i * width, normals.data() + i / rows * width * kPlanes, width);
    return out;
}

py::typing::Tuple<Array<std::int32_t>, Array<std::int32_t>, py::int_, py::int_> call_hash_join(Floats rows_key, Floats rows_place, std::int64_t distance, Floats key, Words bits, Ints count,
                         Bools open, Floats place, Floats planes) {
    Call call;
    const Layer layer(call, key, bits, count, open, place, planes);
    const auto keys = call.dense<float>(rows_key, "keys", {layer.heads, any, layer.width});
    const std::int64_t rows = keys.shape(1);
    const auto places = call.dense<float>(rows_place, "positions", {layer.heads, rows, layer.axes});
    if (distance < -1) refuse("distance must be -1 (no cluster is near) or more, not ", distance);
    layer.check(rows);
    py::array_t<std::int32_t> slot({layer.heads, rows}), home({layer.heads, 2 * layer.slots});
    std::int32_t* const out = slot.mutable_data();
    const Counted counted = layer.each(home.mutable_data(), [&](std::int64_t head, Clusters& clusters) {
        for (std::int64_t i = head * rows; i < (head + 1) * rows; ++i)
            out[i] = clusters.join(keys.data() + i * layer.width, places.data() + i * layer.axes, distance);
    });
    return py::make_tuple(slot, home, counted.merged, counted.forced);
}

py::typing::Tuple<Array<std::int32_t>, py::int_> call_hash_seal(Floats rows_key, Floats rows_place, Ints rows_slot, Bools leaving, Floats key, Words bits,
                         Ints count, Bools open, Floats place, Floats planes) {
    Call call;
    const Layer layer(call, key, bits, count, open, place, planes);
    const auto keys = call.dense<float>(rows_key, "keys", {layer.heads, any, layer.width});
    const std::int64_t rows = keys.shape(1);
    const auto places = call.dense<float>(rows_place, "positions", {layer.heads, rows, layer.axes});
    const auto slot = call.dense<std::int32_t>(rows_slot, "slot", {layer.heads, rows});
    const Mask goes = call.mask(leaving, "leaving", layer.heads, rows);
    layer.check(0);
    std::vector<std::int32_t> left(layer.count, layer.count + layer.heads * layer.slots);
    for (std::int64_t i = 0; i < layer.heads * rows; ++i) {
        const std::int64_t head = i / rows, own = slot.data()[i], at = head * layer.slots + own;
        if (own >= layer.slots) refuse("slot must be below ", layer.slots, ", not ", own);
        if (own < 0 || !goes.at(head, i % rows)) continue;
        if (!layer.open[at] || left[at]-- == 0) refuse("more tokens leave slot ", own, " of head ", head, " than its open cluster has");
    }
    py::array_t<std::int32_t> home({layer.heads, 2 * layer.slots});
    const Counted counted = layer.each(home.mutable_data(), [&](std::int64_t head, Clusters& clusters) {
        const std::int64_t at = head * rows;
        clusters.seal(keys.data() + at * layer.width, places.data() + at * layer.axes, slot.data() + at, goes.of(head), rows);
    });
    return py::make_tuple(home, counted.merged);
}

py::array_t<float> call_wicsum(Floats query, Floats key, Ints count, double threshold) {
    Call call;
    const auto keys = call.dense<float>(key, "key", {any, any, any});
    const std::int64_t heads = keys.shape(0), slots = keys.shape(1), width = keys.shape(2);
    const auto counts = call.dense<std::int32_t>(count, "count", {heads, slots});
    const auto queries = call.dense<float>(query, "query", {any, any, width});
    if (heads < 1 || queries.shape(0) % heads)
        refuse("query heads must be a multiple of the ", heads, " KV heads, not ", queries.shape(0));
    if (!std::isfinite(threshold)) refuse("the threshold must be finite, not ", threshold);
    for (py::ssize_t i = 0; i < counts.size(); ++i) {
        if (counts.data()[i] < 0) refuse("a cluster cannot have ", counts.data()[i], " tokens");
    }
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
    module.def("hash_bits", &call_hash_bits, "key"_a, "planes"_a, "Return each key's hash bits, uint32 [H, n]: bit p is set if the dot product with plane p is above 0.");
    module.def("hash_join", &call_hash_join, "keys"_a, "places"_a, "distance"_a, "key"_a, "bits"_a, "count"_a, "open"_a, "place"_a,
               "planes"_a, "See edgevlm.runtime.policies.resv.HashClusters.join.");
    module.def("hash_seal", &call_hash_seal, "keys"_a, "places"_a, "slot"_a, "leaving"_a, "key"_a, "bits"_a, "count"_a, "open"_a,
               "place"_a, "planes"_a, "See edgevlm.runtime.policies.resv.HashClusters.seal.");
    module.def("wicsum", &call_wicsum, "query"_a, "key"_a, "count"_a, "share"_a, "See edgevlm.runtime.policies.resv.HashClusters.choose.");
}

}  // namespace edgevlm

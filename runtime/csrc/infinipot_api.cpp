// InfiniPot-V as Python sees it: all layers of a cache in one call, shared out over the threads.

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "arrays.h"
#include "cache.h"
#include "cache_rows.h"
#include "errors.h"
#include "infinipot.h"
#include "kernels_api.h"
#include "norms.h"
#include "threads.h"
#include "temporal_similarity.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {

namespace {

using Unlocked = py::gil_scoped_release;

template <typename T>
py::list infinipot_scores(Cache& cache, const py::list& recent, const py::list& valid, bool rotated) {
    struct Scores {
        PatchedKeys<T> keys;
        Volume<T> value;
        Norms known;
        float *similarity, *norm;
    };
    const std::int64_t layers = cache.layers(), heads = cache.kv_heads();
    rotary_of(cache, rotated, 0);  // refuses before any work
    Call call;
    call.reads(cache);
    std::vector<Scores> work(layers);
    py::list out;
    for (std::int64_t l = 0; l < layers; ++l) {
        const LayerRows<T> rows = rows_of<T>(cache, cache.layer(l));
        const std::int64_t n = rows.key.rows;
        const Mask is_recent = call.mask(recent[l], "recent", heads, n), is_valid = call.mask(valid[l], "valid", heads, n);
        py::array_t<float> similarity({heads, n}), norm({heads, n});
        work[l] = {{rows.key, rows.position, rows.row, rows.col, is_recent, is_valid}, rows.value, rows.norm,
                   similarity.mutable_data(), norm.mutable_data()};
        out.append(py::make_tuple(std::move(similarity), std::move(norm)));
    }
    const Unlocked unlocked;
    const Lease memory(&cache.scratch(), similarity_scratch(longest_of(cache), cache.head_dim()), layers * heads);
    parallel_for(layers * heads, memory.workers(), [&](std::int64_t task, int worker) {
        const Scores& scores = work[task / heads];
        const std::int64_t head = task % heads, at = head * scores.keys.key.rows;
        temporal_similarity(scores.keys, head, rotary_of(cache, rotated, task / heads), scores.similarity + at, memory.of(worker));
        complete_norms(scores.value, head, scores.known.of(head));
        std::copy_n(scores.known.of(head), scores.value.rows, scores.norm + at);
    });
    return out;
}

using Masks = Sequence<Array<bool>>;
using Scores = py::typing::List<py::typing::Tuple<Array<float>, Array<float>>>;

Scores call_infinipot_scores(Cache& cache, const Masks& recent, const Masks& valid, bool rotated) {
    const auto layers = static_cast<std::size_t>(cache.layers());
    if (recent.size() != layers || valid.size() != layers)
        refuse("recent and valid need one mask for each of the ", layers, " layers, not ", recent.size(), " and ", valid.size());
    return by_dtype(cache.dtype(), [&](auto* type) {
        return infinipot_scores<std::remove_pointer_t<decltype(type)>>(cache, recent, valid, rotated);
    });
}

template <typename T>
py::list infinipot_select(Cache& cache, const Selection& how, const std::vector<int>& windows) {
    const std::int64_t layers = cache.layers(), heads = cache.kv_heads();
    Call call;
    call.reads(cache);
    std::vector<bool*> keep(layers);
    py::list out;
    for (std::int64_t l = 0; l < layers; ++l) {
        py::array_t<bool> mask({heads, cache.layer(l).length});
        keep[l] = mask.mutable_data();
        out.append(std::move(mask));
    }
    const Unlocked unlocked;
    const Lease memory(&cache.scratch(), infinipot_scratch(heads, longest_of(cache), cache.head_dim()), layers);
    parallel_for(layers, memory.workers(), [&](std::int64_t l, int worker) {
        Selection of_layer = how;
        if (!how.thresholds) of_layer.window = windows[l];
        if (how.rotary) of_layer.rotary = cache.rotary(l);
        infinipot_select(rows_of<T>(cache, cache.layer(l)), of_layer, keep[l], memory.of(worker));
    });
    return out;
}

py::typing::List<Array<bool>> call_infinipot_select(Cache& cache, std::int64_t recent_frames, std::int64_t distinctive, std::int64_t target,
                               const std::vector<int>& windows, const std::vector<double>& thresholds, bool keep_recent,
                               bool rotated) {
    if (std::min({recent_frames, distinctive, target}) < 0) refuse("cannot choose a negative number of rows or frames");
    if (!thresholds.empty() && thresholds.size() != 3) refuse("thresholds must be 3 numbers, not ", thresholds.size());
    if (thresholds.empty() && static_cast<std::int64_t>(windows.size()) != cache.layers())
        refuse("windows need one number for each of the ", cache.layers(), " layers, not ", windows.size());
    for (const int window : windows) check_window(window);
    const Selection how{recent_frames, distinctive, target, keep_recent, 1, thresholds.empty() ? nullptr : thresholds.data(),
                        rotary_of(cache, rotated, 0)};
    return by_dtype(cache.dtype(), [&](auto* type) {
        return infinipot_select<std::remove_pointer_t<decltype(type)>>(cache, how, windows);
    });
}

}  // namespace

void bind_infinipot(py::module_& module) {
    module.def("infinipot_scores", &call_infinipot_scores, "cache"_a, "recent"_a, "valid"_a, py::kw_only(), "rotated"_a = false,
               R"(Return TaR's similarity and the value norm of each row, as one pair (similarity, norms) of float32 [H, n_l] per layer.

recent, valid: masks of the recent frames' rows and of the rows to score, one bool [H, n_l] per layer.)");
    module.def("infinipot_select", &call_infinipot_select, "cache"_a, "recent_frames"_a, "distinctive"_a, "target"_a, "windows"_a,
               "thresholds"_a = py::list(), py::kw_only(), "keep_recent"_a = true, "rotated"_a = false,
               R"(Return masks of the rows that InfiniPot-V (Alg. 1) keeps in each KV head, one bool [H, n_l] per layer.

The prefix and `target` vision rows stay: the `recent_frames` newest frames (if `keep_recent`), then the `distinctive` past rows
that are least similar by TaR, then the rows with the highest VaN (pool_norms). windows: VaN's window in each layer. thresholds: if
given, three rising numbers that select the window 7, 5, 3 or 1 by the coefficient of variation of the layer's value norms
(Alg. 2, lines 16 to 21). The masks are the same as by infinipot_scores, pool_norms and top_k called one after another.)");
}

}  // namespace edgevlm

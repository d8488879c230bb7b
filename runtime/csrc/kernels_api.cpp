// The kernels as Python sees them: arrays checked, memory lent, heads and layers shared out, the GIL released.

#include "kernels_api.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "attend.h"
#include "attention.h"
#include "cache.h"
#include "errors.h"
#include "index_of.h"
#include "norms.h"
#include "threads.h"
#include "select.h"
#include "simd.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {

std::vector<Run> runs_of(Call& call, py::handle pair_axis, std::int64_t axes, std::int64_t pairs) {
    if (pair_axis.is_none()) {
        if (axes != 1) return {};
        return {{0, 0, static_cast<std::int32_t>(pairs)}};
    }
    const auto axis_of = call.dense<std::uint8_t>(pair_axis, "pair_axis", {pairs});
    std::vector<Run> runs;
    for (std::int32_t d = 0; d < pairs; ++d) {
        const std::int32_t axis = axis_of.at(d);
        if (axis >= axes) refuse("pair_axis must be below the position's number of axes, ", axes, ", not ", axis);
        if (runs.empty() || runs.back().axis != axis) runs.push_back({axis, d, d});
        ++runs.back().end;
    }
    return runs;
}

void check_window(int window) {
    if (window != 1 && window != 3 && window != 5 && window != 7) refuse("window must be 1, 3, 5 or 7, not ", window);
}

namespace {

using Unlocked = py::gil_scoped_release;

// The cache that an array is a view of, or null.
Cache* cache_of(py::handle array) {
    while (array && py::isinstance<py::array>(array)) array = py::detail::array_proxy(array.ptr())->base;
    return array && py::isinstance<Cache>(array) ? &array.cast<Cache&>() : nullptr;
}

Scratch* scratch_of(py::handle array) {
    Cache* const cache = cache_of(array);
    return cache ? &cache->scratch() : nullptr;
}

// Calls f with a null float*, Half* or Int8*, by the dtype of an array.
template <typename F>
auto by_dtype(py::handle array, const char* name, F&& f) {
    if (is_array_of<Half>(array)) return f(static_cast<Half*>(nullptr));
    if (is_array_of<Int8>(array)) return f(static_cast<Int8*>(nullptr));
    if (py::isinstance<py::array>(array) && !py::isinstance<py::array_t<float, 0>>(array))
        refuse(name, " must be float32, float16 or int8, not ", std::string(py::str(array.attr("dtype"))));
    return f(static_cast<float*>(nullptr));
}

py::array_t<float> call_value_norms(Numbers value, MaybeFloats scale) {
    Call call;
    return by_dtype(value, "value", [&](auto* type) {
        const auto values = call.stored<std::remove_pointer_t<decltype(type)>>(value, scale, "value");
        py::array_t<float> out({values.heads, values.rows});
        float* const first = out.mutable_data();
        {
            Unlocked unlocked;
            parallel_for(values.heads, threads(), [&](std::int64_t head, int) { value_norms(values, head, first + head * values.rows); });
        }
        return out;
    });
}

py::array_t<float> call_pool_norms(Floats norms, Ints frame, Shorts row, Shorts col, Bools valid, int window) {
    check_window(window);
    Call call;
    const auto norm = call.plane<float>(norms, "norms", any, any);
    const std::int64_t heads = norm.heads, rows = norm.rows;
    const auto time = call.plane<std::int32_t>(frame, "frame", heads, rows);
    const auto down = call.plane<std::int16_t>(row, "row", heads, rows), across = call.plane<std::int16_t>(col, "col", heads, rows);
    const auto held = call.mask(valid, "valid", heads, rows);
    const PatchedNorms tokens{norm, time, down, across, held};
    Scratch* const scratch = scratch_of(frame);
    py::array_t<float> out({heads, rows});
    float* const first = out.mutable_data();
    {
        Unlocked unlocked;
        const Lease memory(scratch, pool_scratch(rows), heads);
        parallel_for(heads, memory.workers(), [&](std::int64_t head, int worker) {
            pool_norms(tokens, head, window, first + head * rows, memory.of(worker));
        });
    }
    return out;
}

py::array_t<bool> call_top_k(Floats scores, Longs seq, Bools candidates, std::int64_t k) {
    if (k < 0) refuse("cannot choose ", k, " rows");
    Call call;
    const auto score = call.plane<float>(scores, "scores", any, any);
    const auto age = call.plane<std::int64_t>(seq, "seq", score.heads, score.rows);
    const auto mask = call.mask(candidates, "candidates", score.heads, score.rows);
    Scratch* const scratch = scratch_of(seq);
    py::array_t<bool> out({score.heads, score.rows});
    bool* const first = out.mutable_data();
    {
        Unlocked unlocked;
        const Lease memory(scratch, top_k_scratch(score.rows), score.heads);
        parallel_for(score.heads, memory.workers(), [&](std::int64_t head, int worker) {
            top_k(score.of(head), age.of(head), mask.of(head), score.rows, k, first + head * score.rows, memory.of(worker));
        });
    }
    return out;
}

py::array_t<std::int32_t> call_places(Longs seq, Longs known) {
    Call call;
    const auto wanted = call.plane<std::int64_t>(seq, "seq", any, any);
    const auto there = call.plane<std::int64_t>(known, "known", wanted.heads, any);
    Scratch* const scratch = scratch_of(seq);
    py::array_t<std::int32_t> out({wanted.heads, wanted.rows});
    std::int32_t* const first = out.mutable_data();
    {
        Unlocked unlocked;
        const Lease memory(scratch, index_of_scratch(there.rows), wanted.heads);
        parallel_for(wanted.heads, memory.workers(), [&](std::int64_t head, int worker) {
            index_of(wanted.of(head), wanted.rows, there.of(head), there.rows, first + head * wanted.rows, memory.of(worker));
        });
    }
    return out;
}

void call_join(Longs seq, Longs known, Floats score, Floats into) {
    Call call;
    const auto wanted = call.plane<std::int64_t>(seq, "seq", any, any);
    const auto there = call.plane<std::int64_t>(known, "known", wanted.heads, any);
    const auto given = call.plane<float>(score, "score", wanted.heads, there.rows);
    float* const first = call.in_place<float>(into, "into", {wanted.heads, wanted.rows});
    Scratch* const scratch = scratch_of(seq);
    const Unlocked unlocked;
    const Lease memory(scratch, join_scratch(wanted.rows, there.rows), wanted.heads);
    parallel_for(wanted.heads, memory.workers(), [&](std::int64_t head, int worker) {
        join(wanted.of(head), wanted.rows, there.of(head), there.rows, given.of(head), first + head * wanted.rows, memory.of(worker));
    });
}

py::array_t<bool> call_newest_frames(Ints frame, Bools among, std::int64_t count) {
    if (count < 0) refuse("cannot choose ", count, " frames");
    Call call;
    const auto frames = call.plane<std::int32_t>(frame, "frame", any, any);
    const auto mask = call.mask(among, "among", frames.heads, frames.rows);
    Scratch* const scratch = scratch_of(frame);
    py::array_t<bool> out({frames.heads, frames.rows});
    bool* const first = out.mutable_data();
    {
        Unlocked unlocked;
        count = std::min(count, frames.heads * frames.rows);
        const Lease memory(scratch, newest_scratch(count), 1);
        newest_frames(frames, mask, count, first, memory.of(0));
    }
    return out;
}

py::array_t<float> call_attention_mass(Floats query, Longs query_seq, Numbers key, Longs seq, MaybeFloats own_key,
                                       MaybeLongs own_seq, MaybeFloats scale) {
    Call call;
    return by_dtype(key, "key", [&](auto* type) {
        Attended<std::remove_pointer_t<decltype(type)>> tokens;
        tokens.key = call.stored<std::remove_pointer_t<decltype(type)>>(key, scale, "key");
        const std::int64_t heads = tokens.key.heads, rows = tokens.key.rows, width = tokens.key.width;
        tokens.seq = call.plane<std::int64_t>(seq, "seq", heads, rows);
        const auto queries = call.dense<float>(query, "query", {any, any, width});
        const auto places = call.dense<std::int64_t>(query_seq, "query_seq", {queries.shape(1)});
        if (heads < 1 || queries.shape(0) % heads)
            refuse("query heads must be a multiple of the ", heads, " KV heads, not ", queries.shape(0));
        tokens.query = queries.data();
        tokens.query_seq = places.data();
        tokens.group = queries.shape(0) / heads;
        tokens.queries = queries.shape(1);
        py::array_t<std::int64_t, py::array::c_style> own_places;
        if (!own_key.is_none()) {
            tokens.own = call.volume<float>(own_key, "own_key", heads, any, width);
            own_places = call.dense<std::int64_t>(own_seq, "own_seq", {tokens.own.rows});
            tokens.own_seq = own_places.data();
        }
        Scratch* const scratch = scratch_of(key);
        py::array_t<float> out({heads, rows});
        float* const first = out.mutable_data();
        {
            Unlocked unlocked;
            const Lease memory(scratch, attention_scratch(rows + tokens.own.rows, width), heads);
            parallel_for(heads, memory.workers(), [&](std::int64_t head, int worker) {
                attention_mass(tokens, head, first + head * rows, memory.of(worker));
            });
        }
        return out;
    });
}

py::array_t<float> call_attend(Floats query, Floats key, Floats value, Numbers keys, Numbers values, Ints held, MaybeFloats key_scale,
                               MaybeFloats value_scale, const py::object& rows, MaybeFloats bias, std::int64_t shared, MaybeLongs previous,
                               MaybeInts until, std::int64_t window, MaybeInts place, MaybeInts position, int workers) {
    Call call;
    if (workers < 0 || workers > kMaxThreads) refuse("threads must be 0 to ", kMaxThreads, ", not ", workers);
    return by_dtype(keys, "keys", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        AttendCall<T> at{};
        at.threads = workers ? workers : threads();
        const auto memory = [&](py::handle object, py::handle scale, const char* name, const std::vector<std::int64_t>& shape) {
            const py::array found = call.array<T>(object, name, shape, true);
            Volume<T> all{static_cast<const std::byte*>(found.data()), found.strides(0), found.strides(1),
                          found.shape(0), found.shape(1), found.shape(2)};
            if (std::is_same_v<T, Int8> == scale.is_none()) refuse("int8 requires a scale, and other dtypes do not support one");
            if (!scale.is_none()) {
                const auto dense = call.dense<float>(scale, "scale", {all.heads, all.width});
                call.keep(dense);
                all.scale = dense.data();
            }
            return all;
        };
        at.key = memory(keys, key_scale, "keys", {any, any, any});
        const std::int64_t heads = at.key.heads, capacity = at.key.rows, width = at.key.width;
        at.value = memory(values, value_scale, "values", {heads, capacity, width});
        const auto new_key = call.dense<float>(key, "key", {any, heads * width});
        const auto new_value = call.dense<float>(value, "value", {new_key.shape(0), heads * width});
        const auto queries = call.dense<float>(query, "query", {new_key.shape(0), any});
        const auto lengths = call.dense<std::int32_t>(held, "held", {heads});
        at.rows = new_key.shape(0);
        if (heads < 1 || width < 1 || queries.shape(1) < heads * width || queries.shape(1) % (heads * width))
            refuse("query must be [S, Hq D] with Hq a multiple of ", heads, " and D ", width, ", not [S, ", queries.shape(1), "]");
        at.group = queries.shape(1) / (heads * width);
        at.query = queries.data(), at.new_key = new_key.data(), at.new_value = new_value.data(), at.held = lengths.data();
        for (std::int64_t head = 0; head < heads; ++head) {
            if (at.held[head] < 0 || at.held[head] + at.rows > capacity)
                refuse(at.rows, " rows do not fit after ", at.held[head], " of ", capacity, " rows");
        }
        std::vector<Plane<std::int32_t>> listed;
        if (!rows.is_none() && !py::isinstance<py::sequence>(rows)) refuse("rows must have a list for each of the ", heads, " KV heads");
        if (!rows.is_none()) {
            for (const py::handle each : py::reinterpret_borrow<py::sequence>(rows)) {
                const auto dense = call.dense<std::int32_t>(each, "rows", {any});
                call.keep(dense);
                const std::int32_t most = listed.size() < static_cast<std::size_t>(heads) ? at.held[listed.size()] : 0;
                for (py::ssize_t i = 0; i < dense.size(); ++i) {
                    if (dense.data()[i] < 0 || dense.data()[i] >= most) refuse("rows must be below held, not ", dense.data()[i]);
                }
                listed.push_back({reinterpret_cast<const std::byte*>(dense.data()), 0, 1, dense.size()});
            }
            if (listed.size() != static_cast<std::size_t>(heads)) refuse("rows must have a list for each of the ", heads, " KV heads");
            at.listed = listed.data();
        }
        if (!bias.is_none()) at.bias = call.plane<float>(bias, "bias", heads, capacity);
        py::array_t<std::int64_t, py::array::c_style> places;
        if (!previous.is_none()) {
            places = call.dense<std::int64_t>(previous, "previous", {heads, any});
            at.frame = places.shape(1), at.shared = shared, at.previous = places.data();
            if (at.frame < 1 || at.rows % at.frame || at.listed) refuse("a pattern requires whole frames, without rows");
            const std::int32_t least = *std::min_element(at.held, at.held + heads);
            if (shared < 0 || shared > least) refuse("shared must be 0 to ", least, ", not ", shared);
            for (std::int64_t i = 0; i < places.size(); ++i) {
                if (places.data()[i] < -1 || places.data()[i] >= at.held[i / at.frame]) refuse("previous must be held rows, or -1");
            }
        }
        const auto row_numbers = [&](py::handle object, const char* name) {
            const auto dense = call.dense<std::int32_t>(object, name, {at.rows});
            call.keep(dense);
            for (std::int64_t s = 1; s < at.rows; ++s) {
                if (dense.data()[s] < dense.data()[s - 1]) refuse(name, " must not decrease");
            }
            return dense.data();
        };
        if (!until.is_none()) {
            at.until = row_numbers(until, "until");
            for (std::int64_t s = 0; s < at.rows; ++s) {
                if (at.until[s] <= s || at.until[s] > at.rows || at.frame) refuse("until must be above its row, within the call, and not with a pattern");
            }
        }
        if (window < 0 || window > INT32_MAX || (window && at.frame)) refuse("window must be 0 to 2^31 - 1, and 0 with a pattern");
        if ((at.window = window) > 0) {
            at.place = row_numbers(place, "place");
            at.position = call.plane<std::int32_t>(position, "position", heads, any);
            if (at.position.rows < *std::max_element(at.held, at.held + heads)) refuse("position must cover all held rows");
        }
        py::array_t<float> out({at.rows, queries.shape(1)});
        at.out = out.mutable_data();
        {
            Unlocked unlocked;
            attend(at);
        }
        return out;
    });
}

py::array_t<float> call_dequantize(Numbers stored, MaybeFloats scale) {
    Call call;
    return by_dtype(stored, "stored", [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Volume<T> rows = call.stored<T>(stored, scale, "stored");
        py::array_t<float> out({rows.heads, rows.rows, rows.width});
        float* to = out.mutable_data();
        const Unlocked unlocked;
        for (std::int64_t head = 0; head < rows.heads; ++head) {
            for (std::int64_t i = 0; i < rows.rows; ++i, to += rows.width) simd().rows<T>().load(rows.row(head, i), rows.width, to);
        }
        return out;
    });
}

void call_use_simd(const std::string& name) {
    const Simd* const table = simd_named(name.c_str());
    if (!table) refuse("this processor does not support ", name, "; set EDGEVLM_SIMD to scalar, avx2, avx512 or neon");
    use_simd(*table);
}

bool call_read(const Cache& cache) {
    Call call;
    call.reads(cache);
    const Unlocked unlocked;
    const std::int64_t heads = cache.kv_heads();
    const auto row = static_cast<std::int64_t>(cache.head_dim() * element_size(cache.dtype()));
    std::atomic<bool> found{false};
    parallel_for(cache.layers() * heads, threads(), [&](std::int64_t task, int) {
        const Layer& layer = cache.layer(task / heads);
        const std::int64_t at = task % heads * layer.capacity * row, bytes = layer.length * row;
        if (simd().read(layer.key + at, bytes) | simd().read(layer.value + at, bytes)) found = true;
    });
    return found;
}

}  // namespace

void bind_kernels(py::module_& module) {
    module.def("value_norms", &call_value_norms, "value"_a, "scale"_a = py::none(),
               "Return the L2 norms [H, n] of values [H, n, D]. scale: [H, D], for int8 values.");
    module.def("pool_norms", &call_pool_norms, "norms"_a, "frame"_a, "row"_a, "col"_a, "valid"_a, "window"_a,
               R"(Pool value norms as InfiniPot-V's VaN: return the mean norm of the window x window patches around each token in its frame.

All arrays are [H, n], and heads are pooled separately. The mean skips missing patches. window: 1, 3, 5 or 7. The result is
float32, 0 for rows that are not valid. Takes O(n window) time on frames of up to about 60 x 60 patches.)");
    module.def("top_k", &call_top_k, "scores"_a, "seq"_a, "candidates"_a, "k"_a,
               R"(Return a mask of the k candidates with the highest scores in each head, bool [H, n]; of all if there are fewer than k.

The newer seq wins ties, then the lower row. NaN is lower than every number. Takes O(n) time.)");
    module.def("index_of", &call_places, "seq"_a, "known"_a,
               R"(Return the index in `known` [H, m] of each token of `seq` [H, n], per head, int32 [H, n]; -1 for a missing token.

Tokens may be in any order. If `known` has duplicates, the first one counts. Takes O(n + m) time.)");
    module.def("join", &call_join, "seq"_a, "known"_a, "score"_a, "into"_a,
               "Set into[h, i] = score[h, j] wherever seq[h, i] == known[h, j]. seq, into: [H, n]. known, score: [H, m].");
    module.def("newest_frames", &call_newest_frames, "frame"_a, "among"_a, "count"_a,
               "Return a mask of the rows of `among` [H, n] in the `count` newest frames over all heads, bool [H, n].");
    module.def("attention_mass", &call_attention_mass, "query"_a, "query_seq"_a, "key"_a, "seq"_a, "own_key"_a = py::none(),
               "own_seq"_a = py::none(), "scale"_a = py::none(),
               R"(Return the attention that each cached token receives from w query rows, float32 [H, n].

The attention softmax(q K^T / sqrt(D)) is summed over the query rows and over the query heads of a KV head. A query row attends
to the tokens whose seq is at most its query_seq; if there are none, the row adds nothing. query: rotated, [heads, w, D].
query_seq: [w]. key: rotated, [H, n, D]. seq: [H, n]. scale: [H, D], for int8 keys. own_key, own_seq: keys outside the cache,
[H, m, D] and [m], which the query rows also attend to; the attention that these keys receive is not returned.)");
    module.def("attend", &call_attend, "query"_a, "key"_a, "value"_a, "keys"_a, "values"_a, "held"_a, "key_scale"_a = py::none(),
               "value_scale"_a = py::none(), py::kw_only(), "rows"_a = py::none(), "bias"_a = py::none(), "shared"_a = 0, "previous"_a = py::none(),
               "until"_a = py::none(), "window"_a = 0, "place"_a = py::none(), "position"_a = py::none(), "threads"_a = 0,
               R"(Append S rows to a layer's memory, and return their attention output, float32 [S, Hq D].

The output is softmax(q K^T / sqrt(D) + bias) V over the held rows and, causally, the new rows, all as rounded in memory.
query, key: rotated, [S, Hq D] and [S, Hkv D]. value: [S, Hkv D]. keys, values: the memory, [Hkv, C, D]. held: each head's number
of rows in memory before the call, int32 [Hkv]; rows [held, held + S) are written. key_scale, value_scale: [Hkv, D], for int8.
rows: the held rows that each KV head attends to, int32; None for all. bias: [Hkv, C], added to the scores of held rows.
previous: int64 [Hkv, p], for PureKV's ST-SpAttn (sec. 3.2) on whole frames of p rows. A new row then attends to the held rows
[0, shared), to its own frame up to itself, and to the row in the same place of the frame before; for the call's first frame, that
row is given by `previous`, -1 for none. until: how many of the call's rows each new row attends to, at least up to itself, int32
[S]. window: if above 0, a new row attends to a row outside its frame only if that row's position is above `place` - `window`.
place: the new rows' positions, int32 [S]. position: the held rows' positions, int32 [Hkv, n]. threads: the number of threads for
this call; 0 for as many as set_threads allows. Raises CacheError before a byte is changed.)");
    module.def("dequantize", &call_dequantize, "stored"_a, "scale"_a, "Return a float32 copy of keys or values [H, n, D]. scale: [H, D], for int8 codes.");
    module.def("read", &call_read, "cache"_a, "Read every byte of the keys and values once, for comparison with the kernels' speed.");
    module.def("simd", [] { return simd().name; }, "Return the instruction set in use: avx512, avx2, neon or scalar.");
    module.def("use_simd", &call_use_simd, "name"_a,
               "Select the instruction set, for tests. Raises CacheError if this processor does not have it.");
    module.def("threads", &threads, "Return the largest number of threads that a kernel may use.");
    module.def("set_threads", &set_threads, "count"_a,
               R"(Let kernels use up to `count` threads (1..256), including the calling thread.

Call this before you make a cache, because a cache gets its working memory for the number of threads set when it is made. The
threads sleep between calls and live as long as the process; a forked child starts its own threads.)");
}

}  // namespace edgevlm

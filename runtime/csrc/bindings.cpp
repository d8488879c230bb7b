// What Python sees. Arrays are checked here, down to dtype and shape, before anything below runs; long work releases the GIL.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "cache.h"
#include "cache_rows.h"
#include "errors.h"
#include "kernels_api.h"
#include "threads.h"
#include "simd.h"

namespace py = pybind11;

namespace edgevlm {
namespace {

using Unlocked = py::gil_scoped_release;

// ---- the cache ----

DType dtype_named(const std::string& name) {
    if (name == "fp32") return DType::fp32;
    if (name == "fp16") return DType::fp16;
    if (name == "int8") return DType::int8;
    refuse("dtype must be fp32, fp16 or int8, not ", name);
}

std::vector<float> scale_of(py::handle scale, const char* name, const Shape& shape) {
    const auto layers = static_cast<std::int64_t>(shape.capacities.size());
    const auto numbers = dense<float>(scale, name, {layers, shape.kv_heads, shape.head_dim});
    return {numbers.data(), numbers.data() + numbers.size()};
}

// pair_axis [head_dim / 2]: the position axis that each pair turns by; None with one axis, or where keys are never turned.
Shape make_shape(std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim, py::handle inv_freq,
                 std::int64_t axes, const std::string& dtype, py::handle pair_axis) {
    const DType stored = dtype_named(dtype);
    const auto frequencies = dense<double>(inv_freq, "inv_freq", {-1});
    const double* first = frequencies.data();
    std::vector<double> values(first, first + frequencies.size());
    auto runs = runs_of(pair_axis, axes, frequencies.size());
    return {kv_heads, head_dim, axes, std::move(capacities), std::move(values), std::move(runs), stored, threads(), {}, {}};
}

void make_read_only(const py::array& array) {
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
}

// Part of a layer's memory, `width` numbers a row (0: one, and no axis for it), read-only; it keeps the cache alive.
py::array view(const py::object& self, const Layer& layer, const py::dtype& dtype, const void* start, std::int64_t width) {
    const auto item = static_cast<py::ssize_t>(dtype.itemsize());
    const auto row = item * std::max<std::int64_t>(width, 1);
    std::vector<py::ssize_t> shape{self.cast<const Cache&>().kv_heads(), layer.length}, strides{row * layer.capacity, row};
    if (width) {
        shape.push_back(width);
        strides.push_back(item);
    }
    py::array array(dtype, shape, strides, start, self);
    make_read_only(array);
    return array;
}

template <typename T>
py::array view(const py::object& self, std::int64_t index, T* Layer::* field, std::int64_t width = 0) {
    const Layer& layer = self.cast<const Cache&>().layer(index);
    return view(self, layer, py::dtype::of<T>(), layer.*field, width);
}

py::array rows_view(const py::object& self, std::int64_t index, std::byte* Layer::* field) {
    const auto& cache = self.cast<const Cache&>();
    const Layer& layer = cache.layer(index);
    const py::dtype dtype = by_dtype(cache.dtype(), [](auto* type) { return dtype_of<std::remove_pointer_t<decltype(type)>>(); });
    return view(self, layer, dtype, layer.*field, cache.head_dim());
}

// float32 [H, D], read-only, or None where numbers are not kept as codes.
py::object scale_view(const py::object& self, std::int64_t index, float* Layer::* field) {
    const auto& cache = self.cast<const Cache&>();
    const float* const scale = cache.layer(index).*field;
    if (!scale) return py::none();
    py::array array(py::dtype::of<float>(), {cache.kv_heads(), cache.head_dim()}, scale, self);
    make_read_only(array);
    return array;
}

struct PyRows {
    py::array_t<std::uint8_t> kind;
    py::array_t<std::int64_t> seq;
    py::array_t<std::int32_t> frame;
    py::array_t<std::int16_t> row, col;
    py::array_t<std::int32_t> position;

    PyRows(const Cache& cache, py::handle kind_, py::handle seq_, py::handle frame_, py::handle row_, py::handle col_,
           py::handle position_)
        : kind(dense<std::uint8_t>(kind_, "kind", {-1})),
          seq(dense<std::int64_t>(seq_, "seq", {kind.size()})),
          frame(dense<std::int32_t>(frame_, "frame", {kind.size()})),
          row(dense<std::int16_t>(row_, "row", {kind.size()})),
          col(dense<std::int16_t>(col_, "col", {kind.size()})),
          position(dense<std::int32_t>(position_, "position", {kind.size(), cache.axes()})) {}

    Rows rows() const {
        return {kind.size(), kind.data(), seq.data(), frame.data(), row.data(), col.data(), position.data()};
    }
};

// A dense array of keys or values, copied if it was not dense.
py::array dense_rows(const Cache& cache, py::handle object, const char* name, std::int64_t rows) {
    const std::vector<std::int64_t> shape{cache.kv_heads(), rows, cache.head_dim()};
    const auto check = [&](auto* type) { return checked<std::remove_pointer_t<decltype(type)>>(object, name, shape); };
    return py::array::ensure(by_dtype(cache.dtype(), check), py::array::c_style);
}

// [H, n] of everything that a layer holds.
void load(Cache& self, std::int64_t layer, py::handle key_, py::handle value_, py::handle kind_, py::handle seq_,
          py::handle frame_, py::handle row_, py::handle col_, py::handle position_, py::handle confirmed_) {
    const std::int64_t heads = self.kv_heads();
    const auto kind = dense<std::uint8_t>(kind_, "kind", {heads, any});
    const std::int64_t rows = kind.shape(1);
    const py::array key = dense_rows(self, key_, "key", rows), value = dense_rows(self, value_, "value", rows);
    const auto seq = dense<std::int64_t>(seq_, "seq", {heads, rows});
    const auto frame = dense<std::int32_t>(frame_, "frame", {heads, rows});
    const auto row = dense<std::int16_t>(row_, "row", {heads, rows}), col = dense<std::int16_t>(col_, "col", {heads, rows});
    const auto position = dense<std::int32_t>(position_, "position", {heads, rows, self.axes()});
    const auto confirmed = dense<std::int32_t>(confirmed_, "confirmed", {heads, rows});
    const StoredRows stored{rows,
                            static_cast<const std::byte*>(key.data()),
                            static_cast<const std::byte*>(value.data()),
                            kind.data(),
                            seq.data(),
                            frame.data(),
                            row.data(),
                            col.data(),
                            position.data(),
                            confirmed.data()};
    Unlocked unlocked;
    self.load(layer, stored);
}

template <typename Field>
py::array_t<std::int32_t> per_layer(const Cache& cache, Field field) {
    py::array_t<std::int32_t> out(cache.layers());
    for (std::int64_t l = 0; l < cache.layers(); ++l) out.mutable_at(l) = static_cast<std::int32_t>(field(cache.layer(l)));
    return out;
}

void bind_cache(py::module_& module) {
    py::class_<Mark>(module, "Mark");

    py::class_<Cache> cache(module, "Cache");
    cache.def(py::init([](std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim,
                          const py::object& inv_freq, std::int64_t axes, const std::string& dtype, const py::object& pair_axis,
                          const py::object& key_scale, const py::object& value_scale) {
        Shape shape = make_shape(std::move(capacities), kv_heads, head_dim, inv_freq, axes, dtype, pair_axis);
        if (!key_scale.is_none()) shape.key_scale = scale_of(key_scale, "key scale", shape);
        if (!value_scale.is_none()) shape.value_scale = scale_of(value_scale, "value scale", shape);
        const py::gil_scoped_release release;  // zeroing gigabytes takes seconds
        return std::make_unique<Cache>(shape);
    }));
    cache.def_static("bytes_for", [](std::vector<std::int64_t> capacities, std::int64_t kv_heads, std::int64_t head_dim,
                                     const py::object& inv_freq, std::int64_t axes, const std::string& dtype,
                          const py::object& pair_axis) {
        return Cache::bytes_for(make_shape(std::move(capacities), kv_heads, head_dim, inv_freq, axes, dtype, pair_axis));
    });
    cache.def_property_readonly("nbytes", &Cache::nbytes);
    cache.def_property_readonly("allocations", &Cache::allocations);
    cache.def_property_readonly("rows_moved", &Cache::rows_moved);
    cache.def_property_readonly("saturated", &Cache::saturated);
    cache.def_property_readonly("lengths",
                                [](const Cache& self) { return per_layer(self, [](const Layer& l) { return l.length; }); });
    cache.def_property_readonly("capacities",
                                [](const Cache& self) { return per_layer(self, [](const Layer& l) { return l.capacity; }); });

    cache.def("key_address",
              [](const Cache& self, std::int64_t l) { return reinterpret_cast<std::uintptr_t>(self.layer(l).key); });
    cache.def("value_address",
              [](const Cache& self, std::int64_t l) { return reinterpret_cast<std::uintptr_t>(self.layer(l).value); });
    cache.def("key", [](const py::object& self, std::int64_t l) { return rows_view(self, l, &Layer::key); });
    cache.def("value", [](const py::object& self, std::int64_t l) { return rows_view(self, l, &Layer::value); });
    cache.def("key_scale", [](const py::object& self, std::int64_t l) { return scale_view(self, l, &Layer::key_scale); });
    cache.def("value_scale", [](const py::object& self, std::int64_t l) { return scale_view(self, l, &Layer::value_scale); });
    cache.def("kind", [](const py::object& self, std::int64_t l) { return view(self, l, &Layer::kind); });
    cache.def("seq", [](const py::object& self, std::int64_t l) { return view(self, l, &Layer::seq); });
    cache.def("frame", [](const py::object& self, std::int64_t l) { return view(self, l, &Layer::frame); });
    cache.def("row", [](const py::object& self, std::int64_t l) { return view(self, l, &Layer::row); });
    cache.def("col", [](const py::object& self, std::int64_t l) { return view(self, l, &Layer::col); });
    cache.def("position", [](const py::object& self, std::int64_t l) {
        return view(self, l, &Layer::position, self.cast<const Cache&>().axes());
    });
    cache.def("confirmed", [](const py::object& self, std::int64_t l) { return view(self, l, &Layer::confirmed); });
    cache.def_property_readonly("memory", [](const py::object& self) {
        const auto& block = self.cast<const Cache&>();
        py::array bytes(py::dtype::of<std::uint8_t>(), {static_cast<py::ssize_t>(block.nbytes())}, {1}, block.data(), self);
        make_read_only(bytes);
        return bytes;
    });

    cache.def("reserve", &Cache::reserve);
    cache.def("commit", [](Cache& self, py::handle kind, py::handle seq, py::handle frame, py::handle row, py::handle col,
                           py::handle position) {
        const PyRows rows(self, kind, seq, frame, row, col, position);
        self.commit(rows.rows());
    });
    cache.def("abort", &Cache::abort);
    cache.def("mark", &Cache::mark);
    cache.def("rollback", &Cache::rollback);
    cache.def("evict", [](Cache& self, const py::list& keep) {
        std::vector<std::optional<Mask>> masks;
        std::vector<py::array> held;
        for (const py::handle mask : keep) {
            if (mask.is_none()) {
                masks.emplace_back();
                continue;
            }
            const Held<bool> rows = as_mask(mask, "keep", any, any);
            held.push_back(rows.array);
            masks.emplace_back(rows);
        }
        Unlocked unlocked;
        return self.evict(masks);
    });
    cache.def("append", [](Cache& self, std::int64_t layer, py::handle key, py::handle value, py::handle kind, py::handle seq,
                           py::handle frame, py::handle row, py::handle col, py::handle position) {
        const PyRows rows(self, kind, seq, frame, row, col, position);
        const auto keys = as_volume<float>(key, "key", self.kv_heads(), rows.kind.size(), self.head_dim());
        const auto values = as_volume<float>(value, "value", self.kv_heads(), rows.kind.size(), self.head_dim());
        self.append(layer, keys, values, rows.rows());
    });
    cache.def("shift", [](Cache& self, std::int64_t layer, py::handle position) {
        const auto positions = as_volume<std::int32_t>(position, "position", any, any, any);
        Unlocked unlocked;
        self.shift(layer, positions);
    });
    cache.def("confirm", [](Cache& self, py::handle seq, std::int32_t frame) {
        const Held<std::int64_t> tokens = as_plane<std::int64_t>(seq, "seq", any, any);
        Unlocked unlocked;
        self.confirm(tokens, frame);
    });
    cache.def("load", &load);
    cache.def("reindex", [](Cache& self, std::int64_t prefix) {
        Unlocked unlocked;
        return self.reindex(prefix);
    });
}

// Errors become edgevlm.errors.CacheError and CacheFull.
void raise(const char* name, const Misuse& error) {
    py::set_error(py::module_::import("edgevlm.errors").attr(name), error.what());
}

}  // namespace
}  // namespace edgevlm

PYBIND11_MODULE(_native, module) {
    using namespace edgevlm;
    module.doc() = "The ring cache and its kernels; use edgevlm.runtime.cache and edgevlm.runtime.kernels.";
    py::register_local_exception_translator([](std::exception_ptr pending) {
        try {
            if (pending) std::rethrow_exception(pending);
        } catch (const Full& error) {
            raise("CacheFull", error);
        } catch (const Misuse& error) {
            raise("CacheError", error);
        }
    });
    bind_cache(module);
    bind_kernels(module);
    bind_infinipot(module);
    bind_newer_similarity(module);
    bind_mosaic(module);
    bind_patch_levels(module);
    bind_resv(module);
    module.def("loose_allocations", [] { return loose_heap().allocations(); });
}

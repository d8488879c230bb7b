// What a call from Python is given: numpy arrays, checked, as the strided types of the kernels, and caches. What is wrong is
// refused by name.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/typing.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "access.h"
#include "cache.h"
#include "errors.h"
#include "simd.h"
#include "strided.h"

namespace edgevlm {

struct Number {};  // float32, float16 or int8

// Anything, until a Call has checked it.
class Unchecked : public pybind11::object {
    static bool any_object(PyObject*) { return true; }

public:
    PYBIND11_OBJECT_DEFAULT(Unchecked, object, any_object)
};

// As signatures show them: a numpy array of T, one or None, and a sequence of such.
template <typename T>
struct Array : Unchecked {
    using Unchecked::Unchecked;
};
template <typename T>
struct MaybeArray : Array<T> {
    using Array<T>::Array;
};
template <typename T>
struct Sequence : pybind11::sequence {
    using pybind11::sequence::sequence;
};

}  // namespace edgevlm

namespace pybind11::detail {

template <typename T>
constexpr auto element_name() {
    if constexpr (std::is_same_v<T, edgevlm::Number>) return const_name("numpy.number");
    else return npy_format_descriptor<T>::name;
}
template <typename T>
struct handle_type_name<edgevlm::Array<T>> {
    static constexpr auto name = const_name("numpy.typing.NDArray[") + element_name<T>() + const_name("]");
};
template <typename T>
struct handle_type_name<edgevlm::MaybeArray<T>> {
    static constexpr auto name = handle_type_name<edgevlm::Array<T>>::name + const_name(" | None");
};
template <typename T>
struct handle_type_name<edgevlm::Sequence<T>> {
    static constexpr auto name = const_name("collections.abc.Sequence[") + handle_type_name<T>::name + const_name("]");
};

// pybind11 would lend memory of no content to an instance whose __init__ never ran (Cache.__new__(Cache)): that is no cache.
template <typename T>
struct made_by_init : type_caster_base<T> {
    bool load(handle source, bool convert) {
        if (!isinstance<T>(source)) return false;
        const auto* const made = reinterpret_cast<instance*>(source.ptr());
        return const_cast<instance*>(made)->get_value_and_holder().holder_constructed() && type_caster_base<T>::load(source, convert);
    }
};
template <>
struct type_caster<edgevlm::Cache> : made_by_init<edgevlm::Cache> {};
template <>
struct type_caster<edgevlm::Mark> : made_by_init<edgevlm::Mark> {};

}  // namespace pybind11::detail

namespace edgevlm {

using Floats = const Array<float>&;
using Doubles = const Array<double>&;
using Numbers = const Array<Number>&;
using Bytes = const Array<std::uint8_t>&;
using Shorts = const Array<std::int16_t>&;
using Ints = const Array<std::int32_t>&;
using Longs = const Array<std::int64_t>&;
using Words = const Array<std::uint32_t>&;
using Bools = const Array<bool>&;
using MaybeFloats = const MaybeArray<float>&;
using MaybeInts = const MaybeArray<std::int32_t>&;
using MaybeLongs = const MaybeArray<std::int64_t>&;
using MaybeBytes = const MaybeArray<std::uint8_t>&;

constexpr std::int64_t any = -1;  // a dimension of any size

inline std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::string text = "[";
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        text += (axis ? ", " : "") + (shape[axis] == any ? std::string("any") : std::to_string(shape[axis]));
    }
    return text + "]";
}

template <typename T>
pybind11::dtype dtype_of() {
    if constexpr (std::is_same_v<T, Half>) return pybind11::dtype("float16");
    else if constexpr (std::is_same_v<T, Int8>) return pybind11::dtype("int8");
    else return pybind11::dtype::of<T>();
}

template <typename T>
bool is_array_of(pybind11::handle object) {
    namespace py = pybind11;
    return py::isinstance<py::array>(object) && py::reinterpret_borrow<py::array>(object).dtype().equal(dtype_of<T>());
}

// The element of a Plane or a pointer: a byte for numpy's bool, of which any but 0 is true.
template <typename T>
using Element = std::conditional_t<std::is_same_v<T, bool>, std::uint8_t, T>;

// One call from Python. Arrays are checked as they are asked for, and held until it returns; so is what it reads and changes.
class Call {
public:
    void reads(const Cache& cache) { access_.reads(cache.data(), cache.nbytes(), "the cache"); }
    void changes(const Cache& cache) { access_.changes(cache.data(), cache.nbytes(), "the cache"); }

    // Any strides; dense and writeable where the call is to change it.
    template <typename T>
    pybind11::array array(pybind11::handle object, const char* name, const std::vector<std::int64_t>& shape, bool changed = false) {
        namespace py = pybind11;
        const py::dtype dtype = dtype_of<T>();
        const auto text = [](const py::dtype& of) { return std::string(py::str(of)); };  // slow: for errors alone
        if (!py::isinstance<py::array>(object)) refuse(name, " must be a numpy array of ", text(dtype), " ", shape_text(shape));
        auto array = py::reinterpret_borrow<py::array>(object);
        if (!array.dtype().equal(dtype)) refuse(name, " must be ", text(dtype), ", not ", text(array.dtype()));
        std::vector<std::int64_t> found(array.shape(), array.shape() + array.ndim());
        bool fits = found.size() == shape.size();
        for (std::size_t axis = 0; fits && axis < shape.size(); ++axis) fits = shape[axis] == any || shape[axis] == found[axis];
        if (!fits) refuse(name, " must be ", shape_text(shape), ", not ", shape_text(found));
        if (changed && !array.writeable()) refuse(name, " must be writeable");
        if (array.size() == 0) return array;
        constexpr auto alignment = static_cast<py::ssize_t>(alignof(T));
        bool straight = reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0;
        py::ssize_t before = 0, behind = array.itemsize();  // how far it reaches from its first element
        for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
            const py::ssize_t stride = array.strides(axis), reach = stride * (array.shape(axis) - 1);
            straight = straight && stride % alignment == 0;
            (reach < 0 ? before : behind) += reach;
        }
        if (!straight) refuse(name, " must be aligned to its dtype");
        if (changed && !(array.flags() & py::array::c_style)) refuse(name, " must be C-contiguous");
        const auto* const first = static_cast<const std::byte*>(array.data()) + before;
        const auto bytes = static_cast<std::size_t>(behind - before);
        if (changed) access_.changes(first, bytes, name);
        else access_.reads(first, bytes, name);
        held_.push_back(array);
        return array;
    }

    // Dense, copied if it was not.
    template <typename T>
    pybind11::array_t<T, pybind11::array::c_style> dense(pybind11::handle object, const char* name,
                                                         const std::vector<std::int64_t>& shape) {
        return pybind11::array_t<T, pybind11::array::c_style>(array<T>(object, name, shape));
    }

    // The caller's own dense array, to be changed.
    template <typename T>
    Element<T>* in_place(pybind11::handle object, const char* name, const std::vector<std::int64_t>& shape) {
        return static_cast<Element<T>*>(array<T>(object, name, shape, true).mutable_data());
    }

    // [heads, rows]; copied where rows were not dense.
    template <typename T>
    Plane<Element<T>> plane(pybind11::handle object, const char* name, std::int64_t heads, std::int64_t rows) {
        pybind11::array found = array<T>(object, name, {heads, rows});
        if (found.shape(1) > 1 && found.strides(1) != static_cast<pybind11::ssize_t>(sizeof(T)))
            held_.push_back(found = pybind11::array_t<T, pybind11::array::c_style>(found));
        return {static_cast<const std::byte*>(found.data()), found.strides(0), found.shape(0), found.shape(1)};
    }

    void keep(const pybind11::array& array) { held_.push_back(array); }

    Mask mask(pybind11::handle object, const char* name, std::int64_t heads, std::int64_t rows) {
        return plane<bool>(object, name, heads, rows);
    }

    // [heads, rows, width], the last axis dense.
    template <typename T>
    Volume<T> volume(pybind11::handle object, const char* name, std::int64_t heads, std::int64_t rows, std::int64_t width) {
        const pybind11::array found = array<T>(object, name, {heads, rows, width});
        if (found.shape(2) > 1 && found.strides(2) != static_cast<pybind11::ssize_t>(sizeof(T)) && found.size() > 0)
            refuse(name, " must be contiguous in its last axis");
        return {static_cast<const std::byte*>(found.data()), found.strides(0), found.strides(1),
                found.shape(0), found.shape(1), found.shape(2)};
    }

    // Rows as they are stored: with a scale, float32 [heads, width], if they are codes, else with None.
    template <typename T>
    Volume<T> stored(pybind11::handle object, pybind11::handle scale, const char* name) {
        Volume<T> rows = volume<T>(object, name, any, any, any);
        if constexpr (std::is_same_v<T, Int8>) {
            if (scale.is_none()) refuse(name, " of int8 needs its scale, float32 [heads, head_dim]");
            held_.push_back(dense<float>(scale, "scale", {rows.heads, rows.width}));
            rows.scale = static_cast<const float*>(held_.back().data());
        } else if (!scale.is_none()) {
            refuse("a scale requires int8, but ", name, " is ", std::string(pybind11::str(dtype_of<T>())));
        }
        return rows;
    }

private:
    Access access_;
    std::vector<pybind11::array> held_;
};

}  // namespace edgevlm

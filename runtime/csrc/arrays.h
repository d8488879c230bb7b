// numpy arrays, checked, as the strided types of the kernels. A wrong array is refused by name.
#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "errors.h"
#include "simd.h"
#include "strided.h"

namespace edgevlm {

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

template <typename T>
pybind11::array checked(pybind11::handle object, const char* name, const std::vector<std::int64_t>& shape) {
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
    constexpr auto alignment = static_cast<py::ssize_t>(alignof(T));
    bool straight = reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T) == 0;
    for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) straight = straight && array.strides(axis) % alignment == 0;
    if (!straight && array.size() > 0) refuse(name, " must be aligned to its dtype");
    return array;
}

// A dense array, copied if it was not dense.
template <typename T>
pybind11::array_t<T, pybind11::array::c_style> dense(pybind11::handle object, const char* name,
                                                     const std::vector<std::int64_t>& shape) {
    return pybind11::array_t<T, pybind11::array::c_style>(checked<T>(object, name, shape));
}

// A plane and the array that it lies in: the caller's, or a copy of one whose rows were not dense.
template <typename T>
struct Held : Plane<std::conditional_t<std::is_same_v<T, bool>, std::uint8_t, T>> {
    pybind11::array array;
};

template <typename T>
Held<T> as_plane(pybind11::handle object, const char* name, std::int64_t heads, std::int64_t rows) {
    pybind11::array array = checked<T>(object, name, {heads, rows});
    if (array.shape(1) > 1 && array.strides(1) != static_cast<pybind11::ssize_t>(sizeof(T)))
        array = pybind11::array_t<T, pybind11::array::c_style>(array);
    return {{static_cast<const std::byte*>(array.data()), array.strides(0), array.shape(0), array.shape(1)}, array};
}

inline Held<bool> as_mask(pybind11::handle object, const char* name, std::int64_t heads, std::int64_t rows) {
    return as_plane<bool>(object, name, heads, rows);
}

template <typename T>
Volume<T> as_volume(pybind11::handle object, const char* name, std::int64_t heads, std::int64_t rows, std::int64_t width) {
    const pybind11::array array = checked<T>(object, name, {heads, rows, width});
    if (array.shape(2) > 1 && array.strides(2) != static_cast<pybind11::ssize_t>(sizeof(T)) && array.size() > 0)
        refuse(name, " must be dense in its last axis");
    return {static_cast<const std::byte*>(array.data()), array.strides(0), array.strides(1),
            array.shape(0), array.shape(1), array.shape(2)};
}

// Rows as they are stored, and the array that their scale lies in: float32 [heads, width] with codes, None with other dtypes.
template <typename T>
struct Stored : Volume<T> {
    pybind11::array own;
};

template <typename T>
Stored<T> as_stored(pybind11::handle object, pybind11::handle scale, const char* name) {
    Stored<T> rows{as_volume<T>(object, name, any, any, any), {}};
    if constexpr (std::is_same_v<T, Int8>) {
        if (scale.is_none()) refuse(name, " of int8 needs its scale, float32 [heads, head_dim]");
        rows.own = dense<float>(scale, "scale", {rows.heads, rows.width});
        rows.scale = static_cast<const float*>(rows.own.data());
    } else if (!scale.is_none()) {
        refuse("a scale goes with int8, and ", name, " is ", std::string(pybind11::str(dtype_of<T>())));
    }
    return rows;
}

}  // namespace edgevlm

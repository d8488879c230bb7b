#include "simd.h"

#include <atomic>
#include <initializer_list>

namespace edgevlm {

namespace {

std::atomic<const Simd*>& in_use() {
    static std::atomic<const Simd*> table{nullptr};
    return table;
}

}  // namespace

const Simd* simd_named(const char* name) {
    const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
    if (is("scalar")) return &simd_scalar();
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (is("avx2") && avx2) return &simd_avx2();
    if (is("avx512") && avx2 && __builtin_cpu_supports("avx512f")) return &simd_avx512();
#elif defined(__aarch64__)
    if (is("neon")) return &simd_neon();
#endif
    return nullptr;
}

const Simd& simd() {
    const Simd* table = in_use().load(std::memory_order_relaxed);
    if (!table) {
        for (const char* name : {"avx512", "avx2", "neon", "scalar"}) {
            if ((table = simd_named(name))) break;
        }
        in_use().store(table, std::memory_order_relaxed);
    }
    return *table;
}

void use_simd(const Simd& table) { in_use().store(&table, std::memory_order_relaxed); }

}  // namespace edgevlm

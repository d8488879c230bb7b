// What a row is, as runtime/cache.py numbers it; the kinds that kernels tell apart.
#pragma once

#include <cstdint>

namespace edgevlm {

constexpr std::uint8_t kPrefix = 0, kVision = 1, kLast = 3;

}  // namespace edgevlm

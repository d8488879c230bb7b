// What the caller did wrong. Thrown before a byte is changed; bindings.cpp turns these into edgevlm.errors.
#pragma once

#include <sstream>
#include <stdexcept>

namespace edgevlm {

struct Misuse : std::runtime_error {  // CacheError
    using std::runtime_error::runtime_error;
};

struct Full : Misuse {  // CacheFull
    using Misuse::Misuse;
};

template <typename Error = Misuse, typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    throw Error(text.str());
}

}  // namespace edgevlm

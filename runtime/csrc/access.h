// Who is at work on which memory. What one call changes no other may touch meanwhile: the second is refused, it never waits.
#pragma once

#include <cstddef>
#include <vector>

namespace edgevlm {

// The memory that one call from Python reads and changes, from when it says so until it returns.
class Access {
public:
    Access() = default;
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
    ~Access();

    // Refused, by `name`, where another call changes some of it, or where this one does.
    void reads(const void* first, std::size_t bytes, const char* name) { add({bytes_at(first), bytes_at(first) + bytes, false}, name); }

    // Refused where any call is at work on some of it.
    void changes(const void* first, std::size_t bytes, const char* name) { add({bytes_at(first), bytes_at(first) + bytes, true}, name); }

private:
    struct Range {
        const std::byte *first, *end;
        bool changed;
    };

    static const std::byte* bytes_at(const void* first) { return static_cast<const std::byte*>(first); }
    bool meets(const Range& range) const;
    void add(const Range& range, const char* name);

    std::vector<Range> ranges_;
};

}  // namespace edgevlm

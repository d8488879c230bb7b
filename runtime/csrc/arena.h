// Memory: the one place where this module allocates, and the carving of a block into aligned arrays.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

namespace edgevlm {

constexpr std::size_t kAlignment = 64;  // a cache line, and the widest vector load

struct Release {
    void operator()(std::byte* memory) const noexcept;
};
using Block = std::unique_ptr<std::byte[], Release>;

// The allocation hook: every block of the module comes from a Heap, zeroed and aligned, and is counted.
class Heap {
public:
    Block allocate(std::size_t bytes);
    std::int64_t allocations() const { return allocations_; }

private:
    std::atomic<std::int64_t> allocations_{0};
};

// For kernels that are given arrays of no cache.
Heap& loose_heap();

std::size_t aligned(std::size_t bytes);

// Cuts arrays out of a block, each aligned. Without a block it only adds up what they would take, so that the byte count
// known before is, by construction, the byte count allocated.
class BumpAllocator {
public:
    explicit BumpAllocator(std::byte* base = nullptr) : base_(base) {}

    template <typename T>
    T* take(std::size_t count) {
        const std::size_t offset = advance(count, sizeof(T));
        return base_ ? reinterpret_cast<T*>(base_ + offset) : nullptr;
    }

    std::byte* take_rows(std::size_t count, std::size_t row_bytes) {
        const std::size_t offset = advance(count, row_bytes);
        return base_ ? base_ + offset : nullptr;
    }

    std::size_t bytes() const { return used_; }

private:
    std::size_t advance(std::size_t count, std::size_t size);  // returns the offset before; throws when bytes overflow

    std::byte* base_;
    std::size_t used_ = 0;
};

// Working memory that a cache lends to one kernel call at a time: a slot for each thread that may take part.
struct Scratch {
    std::byte* memory = nullptr;
    std::size_t bytes = 0;  // of one slot
    int slots = 0;
    std::mutex busy;
};

// One kernel call's working memory, for up to `tasks` threads: the scratch if there is one and it is large enough, else a
// block of its own.
class Lease {
public:
    Lease(Scratch* scratch, std::size_t bytes, std::int64_t tasks);

    int workers() const { return workers_; }
    BumpAllocator of(int worker) const { return BumpAllocator(memory_ + worker * bytes_); }

private:
    std::unique_lock<std::mutex> lock_;
    Block own_;
    std::byte* memory_;
    std::size_t bytes_;  // from one worker's to the next's
    int workers_;
};

}  // namespace edgevlm

#include "arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "errors.h"
#include "threads.h"

namespace edgevlm {

namespace {

constexpr std::size_t kMost = std::numeric_limits<std::ptrdiff_t>::max() / 2;  // half of what an address can tell apart

constexpr std::size_t kHugePage = std::size_t{2} << 20, kManyPages = 8;

}  // namespace

std::size_t aligned(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

void Release::operator()(std::byte* memory) const noexcept { std::free(memory); }

Block Heap::allocate(std::size_t bytes) {
    const std::size_t unit = bytes < kManyPages * kHugePage ? kAlignment : kHugePage;
    bytes = (std::max<std::size_t>(bytes, 1) + unit - 1) / unit * unit;
#if defined(__linux__)
    if (static const auto all = static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); bytes > all)
        refuse("cannot allocate ", bytes, " bytes for the cache: this machine has ", all, "; give a smaller budget");
#endif
    Block block(static_cast<std::byte*>(std::aligned_alloc(unit, bytes)));
    if (!block) throw std::bad_alloc();
    ++allocations_;
#if defined(__linux__)
    if (unit == kHugePage) madvise(block.get(), bytes, MADV_HUGEPAGE);  // fewer pages to look up; no matter if refused
#endif
    std::memset(block.get(), 0, bytes);  // touches every page: resident from the start, and no larger later
    return block;
}

Heap& loose_heap() {
    static Heap heap;
    return heap;
}

std::size_t BumpAllocator::advance(std::size_t count, std::size_t size) {
    const std::size_t offset = used_;
    if (count > (kMost - used_) / size) refuse("the cache would exceed the address space; give a smaller budget");
    used_ = aligned(used_ + count * size);
    return offset;
}

Lease::Lease(Scratch* scratch, std::size_t bytes, std::int64_t tasks) {
    workers_ = static_cast<int>(std::clamp<std::int64_t>(tasks, 1, threads()));
    if (scratch && scratch->bytes >= bytes) {
        lock_ = std::unique_lock<std::mutex>(scratch->busy);
        memory_ = scratch->memory;
        bytes_ = scratch->bytes;
        workers_ = std::min(workers_, scratch->slots);
    } else {
        bytes_ = aligned(bytes);
        own_ = loose_heap().allocate(workers_ * bytes_);
        memory_ = own_.get();
    }
}

}  // namespace edgevlm

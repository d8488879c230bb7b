#include "access.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "errors.h"

namespace edgevlm {

namespace {

struct AtWork {
    std::mutex mutex;
    std::vector<const Access*> calls;
};

// Never destroyed: a thread may call while the process ends. A forked child, where nobody is at work, begins anew.
AtWork& at_work() {
    static std::atomic<AtWork*> current{new AtWork};
    static const int watched = pthread_atfork(nullptr, nullptr, [] { current = new AtWork; });
    static_cast<void>(watched);
    return *current;
}

}  // namespace

bool Access::meets(const Range& range) const {
    return std::any_of(ranges_.begin(), ranges_.end(), [&](const Range& other) {
        return (range.changed || other.changed) && range.first < other.end && other.first < range.end;
    });
}

void Access::add(const Range& range, const char* name) {
    if (range.first == range.end) return;
    AtWork& all = at_work();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (meets(range)) refuse(name, " overlaps memory that the call changes; pass a copy");
    for (const Access* other : all.calls) {
        if (other != this && other->meets(range)) refuse(name, " is in use by another thread");
    }
    ranges_.push_back(range);  // before the list has it: by its ranges the destructor knows to take it out
    if (ranges_.size() == 1) all.calls.push_back(this);
}

Access::~Access() {
    if (ranges_.empty()) return;
    AtWork& all = at_work();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.calls.erase(std::remove(all.calls.begin(), all.calls.end(), this), all.calls.end());
}

}  // namespace edgevlm

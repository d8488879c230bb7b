#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "errors.h"

namespace edgevlm {

namespace {

std::atomic<int> wanted{1};

// Waits in turns of some nanoseconds, for as long as it takes a thread to wake up. A token makes a hundred calls, some 50 us apart.
template <typename Done>
void spin(Done&& done) {
    constexpr std::chrono::microseconds kLongest{100};
    for (const auto end = std::chrono::steady_clock::now() + kLongest; !done() && std::chrono::steady_clock::now() < end;) {
        for (int turn = 0; turn < 16 && !done(); ++turn) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
    }
}

// Never destroyed: its threads sleep in it until the process is gone. A forked child, which has none of them, makes its own.
class Pool {
public:
    void start(int helpers) {
        const std::lock_guard<std::mutex> lock(busy_);
        start_missing(helpers);
    }

    void parallel_for(std::int64_t tasks, int workers, void (*call)(void*, std::int64_t, int), void* context) {
        const std::unique_lock<std::mutex> ours(busy_, std::try_to_lock);
        if (!ours) {
            for (std::int64_t task = 0; task < tasks; ++task) call(context, task, 0);
            return;
        }
        start_missing(workers - 1);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            call_ = call;
            context_ = context;
            tasks_ = tasks;
            next_ = 0;
            helpers_ = workers - 1;
            ++job_;
        }
        wake_.notify_all();
        take_tasks(0);
        spin([this] { return working_ == 0; });
        std::unique_lock<std::mutex> lock(mutex_);
        helpers_ = 0;  // those that have not woken yet are not waited for
        done_.wait(lock, [this] { return working_ == 0; });
    }

private:
    // Fewer where the system allows no more threads.
    void start_missing(int helpers) {
        try {
            for (; started_ < helpers; ++started_) std::thread(&Pool::help, this, started_ + 1, job_.load()).detach();
        } catch (const std::system_error&) {
        }
    }

    void take_tasks(int worker) {
        for (std::int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) call_(context_, task, worker);
    }

    void help(int worker, std::uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return job_ != seen; });
            seen = job_;
            if (worker > helpers_) continue;
            ++working_;
            lock.unlock();
            take_tasks(worker);
            lock.lock();
            if (--working_ == 0) done_.notify_one();
            lock.unlock();
            spin([&] { return job_ != seen; });
            lock.lock();
        }
    }

    std::mutex busy_;  // held by the thread whose call is shared out
    int started_ = 0;

    std::mutex mutex_;  // of what follows
    std::condition_variable wake_, done_;
    std::atomic<std::uint64_t> job_{0};  // changed with the mutex held, as working_
    std::atomic<int> working_{0};
    int helpers_ = 0;
    void (*call_)(void*, std::int64_t, int) = nullptr;
    void* context_ = nullptr;
    std::int64_t tasks_ = 0;
    std::atomic<std::int64_t> next_{0};
};

std::atomic<Pool*> current{nullptr};

Pool& pool() {
    Pool* found = current;
    if (found) return *found;
    static const int watched = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });
    static_cast<void>(watched);
    Pool* const fresh = new Pool;
    if (current.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
    return *found;
}

}  // namespace

int threads() { return wanted; }

void set_threads(int count) {
    if (count < 1 || count > kMaxThreads) refuse("threads must lie in 1..", kMaxThreads, ", not ", count);
    if (count > 1) pool().start(count - 1);
    wanted = count;
}

void detail::parallel_for(std::int64_t tasks, int workers, void (*call)(void*, std::int64_t, int), void* context) {
    const auto most = static_cast<int>(std::min<std::int64_t>(tasks, workers));
    if (most > 1) {
        pool().parallel_for(tasks, most, call, context);
    } else {
        for (std::int64_t task = 0; task < tasks; ++task) call(context, task, 0);
    }
}

}  // namespace edgevlm

// A few threads that live as long as the process and share out the tasks of one kernel call at a time.
#pragma once

#include <cstdint>
#include <type_traits>

namespace edgevlm {

constexpr int kMaxThreads = 256;
int threads();            // that kernels may use, this one included; 1 unless set
void set_threads(int count);  // 1..kMaxThreads; starts what is missing, so that no kernel call allocates

namespace detail {
void parallel_for(std::int64_t tasks, int workers, void (*call)(void*, std::int64_t, int), void* context);
}

// Calls work(task, worker) once for every task of [0, tasks), on at most `workers` threads, and waits. No two tasks run at
// once with the same worker number, which lies in [0, workers). Tasks must not throw, nor depend on each other: which thread
// takes which is not fixed, so what they compute must not depend on it. A call made while the threads are busy with another
// runs by itself.
template <typename Work>
void parallel_for(std::int64_t tasks, int workers, Work&& work) {
    detail::parallel_for(tasks, workers, [](void* context, std::int64_t task, int worker) {
        (*static_cast<std::remove_reference_t<Work>*>(context))(task, worker);
    }, &work);
}

}  // namespace edgevlm

// A block's threads as fibers. Each runs until it waits; a wait ends when all who are to come have come.
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>

#include <memory>
#include <vector>

#include "cuda_fp16.h"

namespace shim {

namespace {

constexpr std::size_t kStack = std::size_t{64} << 10;

struct Barrier {
    unsigned there = 0, come = 0, round = 0;

    void arrive() {
        if (++come == there) open();
    }
    void leave() {
        if (--there && come == there) open();
    }
    void open() {
        come = 0;
        ++round;
    }
};

struct Warp {
    Barrier barrier;
    std::uint64_t given[2][kWarp] = {};  // of this round and the last
};

struct Fiber {
    ucontext_t first;
    jmp_buf here;
    std::unique_ptr<char[]> stack{new char[kStack]};
    bool born = false, done = false;
};

std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Warp> warps;
Barrier block;
const std::function<void()>* body;
jmp_buf scheduler;
unsigned running;
bool moved;  // whether any thread came further

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "cuda_shim: %s\n", what);
    std::abort();
}

void pause() {
    if (!_setjmp(fibers[running]->here)) _longjmp(scheduler, 1);
}

void live() {
    for (;;) {
        (*body)();
        Warp& warp = warps[running / kWarp];
        if (warp.barrier.come) fail("a thread ended while others of its warp waited for it");
        fibers[running]->done = moved = true;
        warp.barrier.leave();
        block.leave();
        pause();
    }
}

void resume(unsigned thread) {
    running = threadIdx.x = thread;
    Fiber& fiber = *fibers[thread];
    if (_setjmp(scheduler)) return;
    if (fiber.born) _longjmp(fiber.here, 1);
    fiber.born = true;
    getcontext(&fiber.first);
    fiber.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.first.uc_stack.ss_size = kStack;
    makecontext(&fiber.first, live, 0);
    setcontext(&fiber.first);
}

void wait(Barrier& barrier) {
    const unsigned round = barrier.round;
    barrier.arrive();
    while (barrier.round == round) pause();
    moved = true;
}

void run_block(unsigned threads) {
    block = {threads};
    warps.assign((threads + kWarp - 1) / kWarp, {});
    for (unsigned thread = 0; thread < threads; ++thread) {
        ++warps[thread / kWarp].barrier.there;
        fibers[thread]->done = false;
    }
    for (unsigned left = threads; left;) {
        left = 0;
        moved = false;
        for (unsigned thread = 0; thread < threads; ++thread) {
            if (fibers[thread]->done) continue;
            resume(thread);
            left += !fibers[thread]->done;
        }
        if (left && !moved) fail("all threads of a block wait for others that never come");
    }
}

}  // namespace

void wait_for_block() { wait(block); }

const std::uint64_t* exchange(std::uint64_t own) {
    Warp& warp = warps[running / kWarp];
    if (warp.barrier.there != kWarp) fail("a warp's threads exchange numbers after some of them ended");
    std::uint64_t* const given = warp.given[warp.barrier.round & 1];
    given[running % kWarp] = own;
    wait(warp.barrier);
    return given;
}

void run(dim3 grid, unsigned threads, const std::function<void()>& kernel) {
    while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
    body = &kernel;
    gridDim = grid;
    blockDim = {threads};
    for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z) {
        for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
            for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) run_block(threads);
        }
    }
}

}  // namespace shim

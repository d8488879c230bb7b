#include "row_part.h"

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kBlock = CodeKernels::kBlock;

// Kept by its thread, so that a token allocates nothing.
struct Memory {
    std::vector<std::int8_t> codes;
    std::vector<std::int32_t> sums;
    std::vector<float> delta, normed, packed;
};

Memory& memory() {
    thread_local Memory kept;
    return kept;
}

// Columns are shared out: their sums are the same integers whatever the number of threads.
void multiply(const CodedMatrix& matrix, const float* row, Memory& at, float* out, int workers) {
    at.codes.resize(std::max<std::size_t>(at.codes.size(), matrix.in));
    at.sums.resize(std::max<std::size_t>(at.sums.size(), matrix.out));
    const Coded about = simd().codes.encode(row, matrix.in, at.codes.data());
    const std::int64_t blocks = matrix.out / kBlock, tasks = std::min<std::int64_t>(workers, blocks);
    parallel_for(tasks, workers, [&](std::int64_t task, int) {
        const std::int64_t from = task * blocks / tasks * kBlock, to = (task + 1) * blocks / tasks * kBlock;
        simd().codes.multiply(at.codes.data(), about, matrix.codes + from, matrix.out, matrix.in, to - from, matrix.scales + from,
                              matrix.bias ? matrix.bias + from : nullptr, at.sums.data() + from, out + from);
    });
}

// out [size] = x over its root mean square, times the gain unless that is null; out may be x.
void norm(const float* x, std::int64_t size, const float* gain, float epsilon, float* out) {
    float square;
    simd().fp32.squares({x, nullptr}, size, 1, size, &square);
    const float factor = 1 / std::sqrt(square / static_cast<float>(size) + epsilon);
    for (std::int64_t d = 0; d < size; ++d) out[d] = gain ? x[d] * factor * gain[d] : x[d] * factor;
}

void hadamard(float* x, std::int64_t size, std::int64_t block) {
    const float factor = 1 / std::sqrt(static_cast<float>(block));
    for (float* at = x; at < x + size; at += block) {
        for (std::int64_t half = 1; half < block; half *= 2) {
            for (std::int64_t start = 0; start < block; start += 2 * half) {
                for (std::int64_t d = start; d < start + half; ++d) {
                    const float a = at[d], b = at[d + half];
                    at[d] = a + b, at[d + half] = a - b;
                }
            }
        }
        for (std::int64_t d = 0; d < block; ++d) at[d] *= factor;
    }
}

}  // namespace

bool multiplies_codes() { return simd().codes.multiply; }

bool multiplies_codes(std::int64_t in, std::int64_t out) {
    return multiplies_codes() && in > 0 && out > 0 && in % CodeKernels::kDepth == 0 && out % kBlock == 0;
}

void RowPart::run(const float* attention, const float* residual, const float* cosine, const float* sine, float* query, float* key,
                  float* value, float* next, int workers) const {
    Memory& at = memory();
    const std::int64_t hidden = output.out, inner = down.in;
    at.delta.resize(std::max<std::size_t>(at.delta.size(), hidden));
    at.normed.resize(std::max<std::size_t>(at.normed.size(), hidden));
    at.packed.resize(std::max<std::size_t>(at.packed.size(), std::max(gate_up.out, qkv.out)));
    float *const delta = at.delta.data(), *const normed = at.normed.data(), *const packed = at.packed.data();

    multiply(output, attention, at, delta, workers);
    for (std::int64_t d = 0; d < hidden; ++d) next[d] = residual[d] + delta[d];
    norm(next, hidden, mlp_gain, epsilon, normed);
    multiply(gate_up, normed, at, packed, workers);
    simd().gate(packed, packed + inner, inner);
    hadamard(packed, inner, block);
    multiply(down, packed, at, delta, workers);
    for (std::int64_t d = 0; d < hidden; ++d) next[d] += delta[d];

    norm(next, hidden, input_gain, epsilon, normed);
    multiply(qkv, normed, at, packed, workers);
    const auto turned = [&](const float* from, std::int64_t count, const float* gain, float* to) {
        std::copy_n(from, count * width, to);
        for (; count-- > 0; to += width) {
            if (gain) norm(to, width, gain, epsilon, to);
            simd().fp32.rotate(to, cosine, sine, width / 2);
        }
    };
    turned(packed, heads, query_gain, query);
    turned(packed + heads * width, kv_heads, key_gain, key);
    std::copy_n(packed + (heads + kv_heads) * width, kv_heads * width, value);
}

}  // namespace edgevlm

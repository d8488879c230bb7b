#include "row_part.h"

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "threads.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kBlock = CodeKernels::kBlock;

constexpr std::int64_t kRows = 256;  // at a time, so that working memory does not grow with a call

// Kept by its thread, so that a token allocates nothing.
struct Memory {
    std::vector<std::int8_t> codes;
    std::vector<std::int32_t> sums;
    std::vector<float> scales, delta, normed, packed;
};

Memory& memory() {
    thread_local Memory kept;
    return kept;
}

template <typename T>
T* sized(std::vector<T>& kept, std::int64_t size) {
    kept.resize(std::max<std::size_t>(kept.size(), size));
    return kept.data();
}

// Calls work(row) for each.
template <typename Work>
void each_row(std::int64_t rows, int workers, Work&& work) {
    parallel_for(rows, rows > 1 ? workers : 1, [&](std::int64_t row, int) { work(row); });
}

// Columns are shared out: their sums are the same whatever the number of threads.
void multiply(const CodedMatrix& m, const float* in, std::int64_t rows, Memory& at, float* out, int workers) {
    const CodeKernels& kernels = simd().codes;
    const std::int64_t width = m.codes ? kBlock : CodeKernels::kColumns, tiles = m.out / width, blocks = m.in / 32;
    const std::int64_t tasks = std::min<std::int64_t>(rows > 1 ? 4 * workers : workers, tiles);
    std::int8_t* const codes = sized(at.codes, rows * m.in);
    std::int32_t* const sums = sized(at.sums, m.codes ? m.out : rows * blocks * 4);
    const auto shared = [&](auto&& work) {
        parallel_for(tasks, workers, [&](std::int64_t task, int) {
            const std::int64_t from = task * tiles / tasks * width, to = (task + 1) * tiles / tasks * width;
            work(from, to - from, m.bias ? m.bias + from : nullptr);
        });
    };
    if (m.pairs) {
        float* const scales = sized(at.scales, rows * blocks);
        each_row(rows, workers, [&](std::int64_t r) {
            kernels.encode_blocks(in + r * m.in, m.in, codes + r * m.in, scales + r * blocks, sums + r * blocks * 4);
        });
        shared([&](std::int64_t from, std::int64_t count, const float* bias) {
            thread_local std::vector<std::uint8_t> turned;
            kernels.multiply_blocks({codes, scales, sums, rows}, m.pairs + from * m.in / 2, m.scales + from * blocks, m.in, count, bias,
                                    sized(turned, CodeKernels::kColumns * (m.in + m.in / 8)), out + from, m.out);
        });
        return;
    }
    for (std::int64_t r = 0; r < rows; ++r) {
        const Coded about = kernels.encode(in + r * m.in, m.in, codes);
        shared([&](std::int64_t from, std::int64_t count, const float* bias) {
            kernels.multiply(codes, about, m.codes + from, m.out, m.in, count, m.scales + from, bias, sums + from, out + r * m.out + from);
        });
    }
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

bool multiplies_codes(const CodedMatrix& m) {
    if (!multiplies_codes() || m.in <= 0 || m.out <= 0) return false;
    if (m.codes) return m.in % CodeKernels::kDepth == 0 && m.out % kBlock == 0;
    return m.in % 32 == 0 && m.in >= CodeKernels::kLeastDepth && m.out % CodeKernels::kColumns == 0;
}

void RowPart::run(std::int64_t rows, const float* attention, const float* residual, const float* cosine, const float* sine, float* query,
                  float* key, float* value, float* next, int workers) const {
    Memory& at = memory();
    const std::int64_t hidden = output.out, inner = down.in, queries = output.in, kv = kv_heads * width;
    for (std::int64_t first = 0; first < rows; first += kRows) {
        const std::int64_t count = std::min(kRows, rows - first);
        float *const delta = sized(at.delta, count * hidden), *const normed = sized(at.normed, count * std::max(hidden, inner));
        float* const packed = sized(at.packed, count * std::max(gate_up.out, qkv.out));
        float* const to = next + first * hidden;

        multiply(output, attention + first * queries, count, at, delta, workers);
        each_row(count, workers, [&](std::int64_t r) {
            float* const own = to + r * hidden;
            for (std::int64_t d = 0; d < hidden; ++d) own[d] = residual[(first + r) * hidden + d] + delta[r * hidden + d];
            norm(own, hidden, mlp_gain, epsilon, normed + r * hidden);
        });
        multiply(gate_up, normed, count, at, packed, workers);
        each_row(count, workers, [&](std::int64_t r) {
            float* const own = normed + r * inner;
            std::copy_n(packed + r * 2 * inner, inner, own);
            simd().gate(own, packed + (2 * r + 1) * inner, inner);
            if (block > 1) hadamard(own, inner, block);
        });
        multiply(down, normed, count, at, delta, workers);
        each_row(count, workers, [&](std::int64_t r) {
            float* const own = to + r * hidden;
            for (std::int64_t d = 0; d < hidden; ++d) own[d] += delta[r * hidden + d];
            norm(own, hidden, input_gain, epsilon, normed + r * hidden);
        });
        multiply(qkv, normed, count, at, packed, workers);
        each_row(count, workers, [&](std::int64_t r) {
            const float *const own = packed + r * qkv.out, *const c = cosine + (first + r) * width / 2, *const s = sine + (first + r) * width / 2;
            const auto turned = [&](const float* from, std::int64_t heads, const float* gain, float* out) {
                std::copy_n(from, heads * width, out);
                for (; heads-- > 0; out += width) {
                    if (gain) norm(out, width, gain, epsilon, out);
                    simd().fp32.rotate(out, c, s, width / 2);
                }
            };
            turned(own, heads, query_gain, query + (first + r) * queries);
            turned(own + queries, kv_heads, key_gain, key + (first + r) * kv);
            std::copy_n(own + queries + kv, kv, value + (first + r) * kv);
        });
    }
}

}  // namespace edgevlm

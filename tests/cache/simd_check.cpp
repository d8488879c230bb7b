// Each inner loop of one instruction set against plain C++, on rows of every length up to a few vectors. For processors that
// the tests do not run on: test_builds.py compiles it for aarch64 and runs it in an emulator. Prints what differs; exit code 1.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "simd.h"

using namespace edgevlm;

namespace {

std::mt19937 engine(0);
int failures = 0;

std::vector<float> noise(std::int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> out(count);
    for (float& x : out) x = normal(engine);
    return out;
}

// Of each channel, the same in both halves of a pair: some codes saturate.
std::vector<float> scales(std::int64_t pairs) {
    std::vector<float> out(2 * pairs);
    for (std::int64_t d = 0; d < pairs; ++d) out[d] = out[d + pairs] = 0.01f + 0.001f * static_cast<float>(d % 7);
    return out;
}

template <typename T>
std::vector<T> stored(const std::vector<float>& numbers, const std::vector<float>& scale) {
    std::vector<T> out(numbers.size());
    simd_scalar().rows<T>().store(numbers.data(), scale.data(), static_cast<std::int64_t>(numbers.size()), out.data());
    return out;
}

void compare(const char* what, std::int64_t size, const std::vector<float>& found, const std::vector<float>& expected,
             float error = 1e-4f) {
    for (std::size_t i = 0; i < found.size(); ++i) {
        if (std::abs(found[i] - expected[i]) <= error * (1 + std::abs(expected[i]))) continue;
        std::printf("%s, size %d: [%d] is %g and not %g\n", what, static_cast<int>(size), static_cast<int>(i), found[i], expected[i]);
        ++failures;
        return;
    }
}

// What each row kernel makes of the same numbers, one after another.
template <typename T>
std::vector<float> rows(const Simd& table, std::int64_t pairs, const std::vector<float>& a, const std::vector<float>& b) {
    const RowKernels<T>& kernels = table.rows<T>();
    const std::int64_t size = 2 * pairs;
    const std::vector<float> scale = scales(pairs);
    std::vector<T> row = stored<T>(a, scale), copy(row.size());
    const Row<T> one{row.data(), scale.data()};
    std::vector<float> out(size), sums(b), loaded(size);
    kernels.load(one, size, loaded.data());
    kernels.store(b.data(), scale.data(), size, copy.data());
    kernels.squares(one, size, 1, size, out.data());
    const Compared<T> at{one, b.data(), a.data()};
    Dots dots[2];
    kernels.dots(&at, 1, size, dots);
    kernels.turned_dots(&at, 1, size, dots + 1);
    kernels.add(one, 0.5f, size, sums.data());
    kernels.add_turned(one, 0.5f, b.data(), a.data(), pairs, sums.data());
    kernels.rotate(row.data(), b.data(), b.data() + pairs, pairs);
    out.resize(1);
    for (const Dots& d : dots) out.insert(out.end(), {d.dot, d.square});
    for (const auto* part : {&sums, &loaded}) out.insert(out.end(), part->begin(), part->end());
    for (const auto* part : {&row, &copy}) {
        simd_scalar().rows<T>().load({part->data(), scale.data()}, size, loaded.data());
        out.insert(out.end(), loaded.begin(), loaded.end());
    }
    return out;
}

// What is counted of a row of codes.
std::vector<float> counted(const Simd& table, std::int64_t pairs, const std::vector<float>& a) {
    const std::vector<Int8> row = stored<Int8>(a, scales(pairs));
    return {static_cast<float>(table.saturated(row.data(), 2 * pairs)), static_cast<float>(table.outside(row.data(), pairs))};
}

// Softmax weights of `keys` keys for `rows` query rows; rows are summed up, so that lanes do not matter.
std::vector<float> attention(const AttentionKernels& kernels, std::int64_t rows, std::int64_t keys, std::int64_t size,
                             const std::vector<float>& key, const std::vector<float>& query) {
    const std::int64_t lanes = kernels.rows;
    std::vector<float> turned(size * lanes, 0.0f), scores(keys * lanes), most(lanes, -1e30f), sum(lanes, 0.0f), mass(keys, 0.0f);
    for (std::int64_t d = 0; d < size; ++d) {
        for (std::int64_t r = 0; r < rows; ++r) turned[d * lanes + r] = query[r * size + d];
    }
    kernels.scores(key.data(), size, keys, turned.data(), size, scores.data());
    kernels.peak(scores.data(), keys, most.data());
    kernels.exponents(scores.data(), keys, most.data(), sum.data());
    for (std::int64_t r = 0; r < lanes; ++r) sum[r] = r < rows ? 1 / sum[r] : 0;
    kernels.weigh(scores.data(), keys, sum.data(), mass.data());
    return mass;
}

std::vector<float> encoded(const Simd& table, const std::vector<float>& a) {
    std::vector<std::int8_t> code(a.size());
    const Coded found = table.codes.encode(a.data(), static_cast<std::int64_t>(a.size()), code.data());
    std::vector<float> out(code.begin(), code.end());
    out.insert(out.end(), {found.scale, found.error, static_cast<float>(found.sum)});
    return out;
}

// Of products of codes: rows whose largest product was not among those that may be, rows said to have more than they have, and
// pairs said to be possible that are far from it.
std::vector<float> missed(const Simd& table, std::int64_t size) {
    const CodeKernels& kernels = table.codes;
    constexpr std::int64_t kKeys = 37;
    std::vector<float> out(3, 0.0f);
    if (!kernels.lanes) return out;
    const std::int64_t width = (size + 3) / 4 * 4, lanes = kernels.lanes, all = kKeys + lanes;
    std::vector<float> vectors = noise(all * size), scale(lanes), error(lanes), least(lanes, -1.0f), best(lanes, -1.0f);
    std::vector<std::int8_t> code(all * width);
    std::vector<std::uint8_t> rows(lanes * width);
    std::vector<Coded> coded(all);
    for (std::int64_t i = 0; i < all; ++i) {
        float* const vector = vectors.data() + i * size;
        double square = 0;
        for (std::int64_t d = 0; d < size; ++d) square += double{vector[d]} * vector[d];
        for (std::int64_t d = 0; d < size; ++d) vector[d] = static_cast<float>(vector[d] / std::sqrt(square));
        coded[i] = kernels.encode(vector, size, code.data() + i * width);
        coded[i].error += 0.5f * coded[i].error * coded[i].error + 1e-5f;
    }
    for (std::int64_t r = 0; r < lanes; ++r) {
        scale[r] = coded[kKeys + r].scale, error[r] = coded[kKeys + r].error;
        for (std::int64_t d = 0; d < width; ++d) {
            const auto flip = static_cast<std::uint8_t>(kernels.flip >> 24);
            rows[d / 4 * 4 * lanes + r * 4 + d % 4] = static_cast<std::uint8_t>(code[(kKeys + r) * width + d]) ^ flip;
        }
    }
    std::uint32_t hit[kKeys];
    const std::uint64_t any = kernels.likely(code.data(), coded.data(), kKeys, width, rows.data(), scale.data(), error.data(), least.data(), hit);
    for (std::int64_t r = 0; r < lanes; ++r) {
        std::vector<double> product(kKeys, 0.0);
        for (std::int64_t k = 0; k < kKeys; ++k) {
            for (std::int64_t d = 0; d < size; ++d) product[k] += double{vectors[k * size + d]} * vectors[(kKeys + r) * size + d];
        }
        const double highest = *std::max_element(product.begin(), product.end());
        out[1] += least[r] > highest;
        for (std::int64_t k = 0; k < kKeys; ++k) {
            const bool likely = hit[k] >> r & 1 && any >> k & 1;
            out[0] += product[k] == highest && !likely;
            out[2] += likely && product[k] + 4 * (coded[k].error + error[r]) < highest;
        }
    }
    return out;
}

// A row by a matrix of codes, and a gate; in plain code where a table has no such products.
std::vector<float> multiplied(const Simd& table, const std::vector<float>& a, const std::vector<float>& up) {
    constexpr std::int64_t kDepth = 3 * CodeKernels::kDepth, kColumns = 2 * CodeKernels::kBlock, kStride = kColumns + 64;
    std::vector<std::int8_t> row(kDepth), codes(kDepth * kStride);
    for (std::size_t i = 0; i < row.size(); ++i) row[i] = static_cast<std::int8_t>(i * 37 % 255 - 127);
    for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::int8_t>(i * 101 % 256 - 128);
    Coded about{0.01f, 0, 0};
    for (const std::int8_t code : row) about.sum += code;
    std::vector<float> scale(kColumns, 0.02f), bias(kColumns, 0.5f), out(kColumns);
    std::vector<std::int32_t> sums(kColumns);
    if (table.codes.multiply) {
        table.codes.multiply(row.data(), about, codes.data(), kStride, kDepth, kColumns, scale.data(), bias.data(), sums.data(), out.data());
    } else {
        for (std::int64_t n = 0; n < kColumns; ++n) {
            for (std::int64_t k = 0; k < kDepth; ++k) sums[n] += row[k] * codes[k * kStride + n];
            out[n] = static_cast<float>(sums[n]) * about.scale * scale[n] + bias[n];
        }
    }
    std::vector<float> gated(a);
    table.gate(gated.data(), up.data(), static_cast<std::int64_t>(gated.size()));
    out.insert(out.end(), gated.begin(), gated.end());
    return out;
}

// Rows by a matrix of 4 bits in blocks; in plain code where a table has no such products.
std::vector<float> in_blocks(const Simd& table, std::int64_t count, const std::vector<float>& in) {
    constexpr std::int64_t kDepth = CodeKernels::kLeastDepth + 32, kBlocks = kDepth / 32, kColumns = 2 * CodeKernels::kColumns;
    const CodeKernels& kernels = table.codes;
    const std::vector<float> scale(in.end() - kColumns * kBlocks, in.end()), bias(in.begin(), in.begin() + kColumns);
    std::vector<std::uint8_t> pairs(kColumns * kDepth / 2), memory(CodeKernels::kColumns * (kDepth + kDepth / 8));
    for (std::size_t i = 0; i < pairs.size(); ++i) pairs[i] = static_cast<std::uint8_t>(i * 101 % 256);
    std::vector<float> out(count * kColumns), scales(count * kBlocks);
    if (kernels.multiply_blocks) {
        std::vector<std::int8_t> codes(count * kDepth);
        std::vector<std::int32_t> start(count * kBlocks * 4);
        for (std::int64_t r = 0; r < count; ++r)
            kernels.encode_blocks(&in[r * kDepth], kDepth, &codes[r * kDepth], &scales[r * kBlocks], &start[r * kBlocks * 4]);
        kernels.multiply_blocks({codes.data(), scales.data(), start.data(), count}, pairs.data(), scale.data(), kDepth, kColumns, bias.data(),
                                memory.data(), out.data(), kColumns);
        return out;
    }
    for (std::int64_t r = 0; r < count; ++r) {
        for (std::int64_t n = 0; n < kColumns; ++n) {
            float& sum = out[r * kColumns + n] = bias[n];
            for (std::int64_t b = 0; b < kBlocks; ++b) {
                const float* const row = &in[r * kDepth + b * 32];
                float peak = 0;
                for (int i = 0; i < 32; ++i) peak = std::max(peak, std::fabs(row[i]));
                for (int i = 0; i < 32; ++i) {
                    const int code = pairs[(n * kBlocks + b) * 16 + i / 2] >> (i % 2 * 4) & 15;
                    sum += std::nearbyint(row[i] * (1 / (peak / 127))) * (peak / 127) * (code - 8) * scale[n * kBlocks + b];
                }
            }
        }
    }
    return out;
}

// Of pooling and of selection.
std::vector<float> boxes(const Simd& table, int window, const std::vector<float>& numbers) {
    const auto count = static_cast<std::int64_t>(numbers.size()) - 3 * (window - 1);
    const std::vector<double> in(numbers.begin(), numbers.end());
    const std::vector<std::int32_t> whole(in.size(), 3);
    std::vector<double> sums(count);
    std::vector<std::int32_t> counts(count);
    table.box_sums(in.data(), count, 3, window, sums.data());
    table.box_counts(whole.data(), count, 3, window, counts.data());
    std::vector<float> out(sums.begin(), sums.end());
    out.insert(out.end(), counts.begin(), counts.end());
    std::vector<std::int32_t> bits(numbers.size());
    std::memcpy(bits.data(), numbers.data(), bits.size() * sizeof bits[0]);
    for (std::size_t size = 0; size < bits.size(); ++size)
        out.push_back(static_cast<float>(table.at_least(bits.data(), static_cast<std::int64_t>(size), bits[size])));
    return out;
}

// Bits in which words differ from the first.
std::vector<float> hamming(const Simd& table, const std::vector<float>& numbers) {
    std::vector<std::uint32_t> words(numbers.size()), distance(numbers.size());
    std::memcpy(words.data(), numbers.data(), words.size() * sizeof words[0]);
    table.hamming(words.data(), static_cast<std::int64_t>(words.size()), words[0], distance.data());
    return {distance.begin(), distance.end()};
}

}  // namespace

int main(int, char** argv) {
    const Simd* const table = simd_named(argv[1]);
    if (!table) return std::printf("this processor does not run %s\n", argv[1]), 2;
    const Simd& plain = simd_scalar();
    for (std::int64_t pairs = 1; pairs <= 70; ++pairs) {
        const std::vector<float> a = noise(2 * pairs), b = noise(2 * pairs);
        compare("rows of float", 2 * pairs, rows<float>(*table, pairs, a, b), rows<float>(plain, pairs, a, b));
        compare("rows of half", 2 * pairs, rows<Half>(*table, pairs, a, b), rows<Half>(plain, pairs, a, b), 2e-3f);
        compare("rows of codes", 2 * pairs, rows<Int8>(*table, pairs, a, b), rows<Int8>(plain, pairs, a, b), 2e-2f);
        compare("codes counted", 2 * pairs, counted(*table, pairs, a), counted(plain, pairs, a), 0);
        const std::vector<float> key = noise(pairs * 12), query = noise(8 * 12);
        compare("hamming", 2 * pairs, hamming(*table, a), hamming(plain, a), 0);
        compare("attention", pairs, attention(table->attention, 8, pairs, 12, key, query),
                attention(plain.attention, 8, pairs, 12, key, query));  // every table takes 8, and 4
        compare("attention of few", pairs, attention(table->few, 4, pairs, 12, key, query),
                attention(plain.few, 4, pairs, 12, key, query));
        compare("encoded", 2 * pairs, encoded(*table, a), encoded(plain, a));
        compare("a row by codes", 2 * pairs, multiplied(*table, a, b), multiplied(plain, a, b));
        compare("products of codes", 2 * pairs, missed(*table, 2 * pairs), {0, 0, 0});
    }
    for (const std::int64_t count : {1, 2, 5, 11, 12, 15, 20}) {
        const std::vector<float> in = noise(2 * 160 + count * 160);
        compare("rows in blocks", count, in_blocks(*table, count, in), in_blocks(plain, count, in));
    }
    for (const int window : {1, 3, 5, 7}) {
        const std::vector<float> numbers = noise(90);
        compare("boxes", window, boxes(*table, window, numbers), boxes(plain, window, numbers));
    }
    if (!failures) std::printf("%s agrees with scalar\n", table->name);
    return failures != 0;
}

#include "newer_similarity.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "norms.h"
#include "simd.h"

namespace edgevlm {

namespace {

constexpr std::int64_t kLanes = 32;    // at most: two vectors of the widest instruction set
constexpr std::int64_t kKeys = 64;     // compared at a time, while they and their cosines are in the first-level cache
constexpr std::int64_t kBatch = 1024;  // tokens that meet a key each time it is turned back, at most

std::int64_t batch_size(std::int64_t rows, std::int64_t width) {  // as many numbers as 32 for each row
    const std::int64_t fits = rows * kLanes / std::max<std::int64_t>(width, 1);
    return std::clamp<std::int64_t>(fits / kLanes * kLanes, kLanes, kBatch);
}

// Unit keys, turned to where the first that is asked for stands: what position adds to a likeness is then gone.
template <typename T>
class UnitKeys {
public:
    UnitKeys(const DatedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, BumpAllocator& memory)
        : tokens_(tokens), head_(head), rotary_(rotary), width_(tokens.key.width) {
        float* const angles = memory.take<float>(Turner::floats(width_ / 2));
        loaded_ = memory.take<float>(width_);
        if (rotary) turner_.emplace(*rotary, angles);
    }

    void load(std::int64_t row, float* out) {
        const Row<T> key = tokens_.key.row(head_, row);
        std::fill_n(out, width_, 0.0f);
        float square;
        simd().rows<T>().squares(key, width_, 1, width_, &square);
        if (trusted(square)) return add(simd().rows<T>(), key, 1 / std::sqrt(square), row, out);
        simd().rows<T>().load(key, width_, loaded_);
        double exact = 0;
        for (std::int64_t d = 0; d < width_; ++d) exact += double{loaded_[d]} * loaded_[d];
        if (exact == 0) return;
        for (std::int64_t d = 0; d < width_; ++d) loaded_[d] = static_cast<float>(loaded_[d] / std::sqrt(exact));
        add(simd().fp32, Row<float>{loaded_, nullptr}, 1, row, out);
    }

private:
    template <typename U>
    void add(const RowKernels<U>& kernels, Row<U> key, float factor, std::int64_t row, float* out) {
        if (!rotary_) return kernels.add(key, factor, width_, out);
        const std::int32_t* const at = tokens_.position.at(head_, row);
        if (!here_) here_ = at;
        const float* const angle = turner_->of(here_, at);
        kernels.add_turned(key, factor, angle, angle + width_ / 2, width_ / 2, out);
        turner_->next_block();
    }

    const DatedKeys<T>& tokens_;
    std::int64_t head_;
    const Rotary* rotary_;
    std::int64_t width_;
    std::optional<Turner> turner_;
    const std::int32_t* here_ = nullptr;
    float* loaded_;
};

// What tokens from one place in the stream on have met so far, lanes of them side by side.
struct Batch {
    float *token, *highest;  // [batch / lanes, width, lanes], [batch]
    float *keys, *cosines;   // [kKeys, width], [kKeys, lanes]

    Batch(BumpAllocator& memory, std::int64_t batch, std::int64_t width) {
        token = memory.take<float>(batch * width);
        highest = memory.take<float>(batch);
        keys = memory.take<float>(kKeys * width);
        cosines = memory.take<float>(kKeys * kLanes);
    }
};

// Tokens order[first .. first + count), turned on their side; lanes past the last are zero.
template <typename T>
void lay_out(UnitKeys<T>& unit, const std::int32_t* order, std::int64_t first, std::int64_t count, std::int64_t width, Batch& at) {
    const std::int64_t lanes = simd().attention.rows;
    std::fill_n(at.token, (count + lanes - 1) / lanes * lanes * width, 0.0f);
    std::fill_n(at.highest, (count + lanes - 1) / lanes * lanes, -1.0f);
    for (std::int64_t i = 0; i < count; ++i) {
        unit.load(order[first + i], at.keys);
        float* const lane = at.token + i / lanes * lanes * width + i % lanes;
        for (std::int64_t d = 0; d < width; ++d) lane[d * lanes] = at.keys[d];
    }
}

// Tokens [first, first + count) of the stream's order meet the keys [from, to) in at.keys, each those behind it.
void meet(Batch& at, std::int64_t first, std::int64_t count, std::int64_t from, std::int64_t to, std::int64_t width) {
    const AttentionKernels& kernels = simd().attention;
    const std::int64_t lanes = kernels.rows;
    for (std::int64_t group = 0; group < count && first + group < to - 1; group += lanes) {
        kernels.scores(at.keys, width, to - from, at.token + group * width, width, at.cosines);
        for (std::int64_t key = from; key < std::min(to, first + group + lanes); ++key) {
            for (std::int64_t lane = std::max<std::int64_t>(0, key - first - group); lane < lanes; ++lane)
                at.cosines[(key - from) * lanes + lane] = -1;
        }
        kernels.peak(at.cosines, to - from, at.highest + group);
    }
}

}  // namespace

std::size_t newer_similarity_scratch(std::int64_t rows, std::int64_t width) {
    BumpAllocator sizes;
    sizes.take<std::int32_t>(rows);
    sizes.take<float>(Turner::floats(width / 2));
    sizes.take<float>(width);
    Batch(sizes, batch_size(rows, width), width);
    return sizes.bytes();
}

template <typename T>
void newer_similarity(const DatedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, float* out, BumpAllocator memory) {
    const std::int64_t rows = tokens.key.rows, width = tokens.key.width, batch = batch_size(rows, width);
    const std::int64_t* const seq = tokens.seq.of(head);
    const std::uint8_t* const valid = tokens.valid.of(head);
    std::int32_t* const order = memory.take<std::int32_t>(rows);
    UnitKeys<T> unit(tokens, head, rotary, memory);
    Batch at(memory, batch, width);
    std::int64_t held = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
        if (valid[i]) order[held++] = static_cast<std::int32_t>(i);
    }
    std::sort(order, order + held, [seq](std::int32_t a, std::int32_t b) { return seq[a] < seq[b]; });
    const auto older = [&](std::int32_t i) { return seq[i] < tokens.since; };
    const std::int64_t news = std::partition_point(order, order + held, older) - order;
    std::fill_n(out, rows, 0.0f);
    for (std::int64_t first = 0; first < held; first += batch) {
        const std::int64_t count = std::min(batch, held - first);
        lay_out(unit, order, first, count, width, at);
        for (std::int64_t from = std::max(first, news); from < held; from += kKeys) {
            const std::int64_t to = std::min(held, from + kKeys);
            for (std::int64_t k = from; k < to; ++k) unit.load(order[k], at.keys + (k - from) * width);
            meet(at, first, count, from, to, width);
        }
        for (std::int64_t i = 0; i < count; ++i) out[order[first + i]] = at.highest[i];
    }
}

template void newer_similarity(const DatedKeys<float>&, std::int64_t, const Rotary*, float*, BumpAllocator);
template void newer_similarity(const DatedKeys<Half>&, std::int64_t, const Rotary*, float*, BumpAllocator);
template void newer_similarity(const DatedKeys<Int8>&, std::int64_t, const Rotary*, float*, BumpAllocator);

}  // namespace edgevlm

#include "newer_similarity.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
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

// The same by products of codes: of a token's pairs those that may be its most alike are compared as they are.
class CodedBatch {
public:
    CodedBatch(BumpAllocator& memory, std::int64_t batch, std::int64_t width) : width_(width), coded_((width + 3) / 4 * 4) {
        token_ = memory.take<float>(batch * width);
        keys_ = memory.take<float>(kKeys * width);
        codes_ = memory.take<std::uint8_t>(batch * coded_);
        key_codes_ = memory.take<std::int8_t>(kKeys * coded_);
        for (float** list : {&highest_, &least_, &scale_, &error_}) *list = memory.take<float>(batch);
    }

    template <typename T>
    void lay_out(UnitKeys<T>& unit, const std::int32_t* order, std::int64_t first, std::int64_t count) {
        const std::int64_t lanes = simd().codes.lanes;
        const std::uint32_t flip = simd().codes.flip;
        first_ = first, count_ = count;
        std::fill_n(key_codes_, coded_, std::int8_t{0});  // numbers behind the width stay 0
        for (std::int64_t i = 0; i < (count + lanes - 1) / lanes * lanes; ++i) {
            highest_[i] = least_[i] = -1;
            if (i >= count) {  // a lane without a token
                scale_[i] = 0, error_[i] = 0, least_[i] = std::numeric_limits<float>::infinity();
                continue;
            }
            unit.load(order[first + i], token_ + i * width_);
            const Coded found = encode(token_ + i * width_, key_codes_);
            scale_[i] = found.scale, error_[i] = found.error;
            std::uint8_t* const lane = codes_ + i / lanes * lanes * coded_ + i % lanes * 4;
            for (std::int64_t d = 0; d < coded_; d += 4) {
                std::uint32_t four;
                std::memcpy(&four, key_codes_ + d, sizeof four);
                four ^= flip;
                std::memcpy(lane + d * lanes, &four, sizeof four);
            }
        }
    }

    // The keys [from, to) of the stream's order meet the tokens before them.
    template <typename T>
    void meet(UnitKeys<T>& unit, const std::int32_t* order, std::int64_t from, std::int64_t to) {
        const CodeKernels& kernels = simd().codes;
        const std::int64_t lanes = kernels.lanes;
        Coded key[kKeys];
        std::fill_n(key_codes_, kKeys * coded_, std::int8_t{0});
        for (std::int64_t k = from; k < to; ++k) {
            unit.load(order[k], keys_ + (k - from) * width_);
            key[k - from] = encode(keys_ + (k - from) * width_, key_codes_ + (k - from) * coded_);
        }
        for (std::int64_t group = 0; group < count_ && first_ + group < to - 1; group += lanes) {
            const std::int64_t oldest = first_ + group, newer = std::clamp(oldest + lanes, from, to);
            for (std::int64_t k = std::max(from, oldest + 1); k < newer; ++k) {  // of tokens some of which are not before them
                for (std::int64_t i = group; first_ + i < std::min(k, first_ + count_) && i < group + lanes; ++i) compare(k - from, i);
            }
            std::uint32_t hit[kKeys];
            const std::int64_t start = newer - from;
            std::uint64_t keys = kernels.likely(key_codes_ + start * coded_, key + start, to - newer, coded_, codes_ + group * coded_,
                                                scale_ + group, error_ + group, least_ + group, hit);
            for (; keys; keys &= keys - 1) {
                const int k = __builtin_ctzll(keys);
                for (std::uint32_t left = hit[k]; left; left &= left - 1) compare(start + k, group + __builtin_ctz(left));
            }
        }
        finish();
    }

    float highest(std::int64_t i) const { return highest_[i]; }

private:
    static constexpr int kBlock = 32;
    static_assert(kKeys <= CodeKernels::kKeys);

    // Its error so that a product of two rows of length 1 lies within the sum of both errors.
    Coded encode(const float* row, std::int8_t* code) const {
        Coded found = simd().codes.encode(row, width_, code);
        found.error += 0.5f * found.error * found.error + 1e-5f;
        return found;
    }

    void compare(std::int64_t key, std::int64_t token) {
        pairs_[listed_] = {{keys_ + key * width_, nullptr}, token_ + token * width_, nullptr};
        of_[listed_++] = token;
        if (listed_ == kBlock) finish();
    }

    void finish() {
        Dots found[kBlock];
        simd().fp32.dots(pairs_, listed_, width_, found);
        for (int k = 0; k < listed_; ++k) highest_[of_[k]] = std::max(highest_[of_[k]], found[k].dot);
        listed_ = 0;
    }

    std::int64_t width_, coded_, first_ = 0, count_ = 0;
    float *token_, *keys_;  // [batch, width], [kKeys, width]
    std::uint8_t* codes_;   // [batch / lanes, coded / 4, lanes, 4]
    std::int8_t* key_codes_;  // [kKeys, coded]
    float *highest_, *least_, *scale_, *error_;  // [batch]
    Compared<float> pairs_[kBlock];
    std::int64_t of_[kBlock];
    int listed_ = 0;
};

}  // namespace

std::size_t newer_similarity_scratch(std::int64_t rows, std::int64_t width) {
    BumpAllocator sizes, coded;
    sizes.take<std::int32_t>(rows);
    sizes.take<float>(Turner::floats(width / 2));
    sizes.take<float>(width);
    CodedBatch(coded, batch_size(rows, width), width);
    BumpAllocator floats;
    Batch(floats, batch_size(rows, width), width);
    return sizes.bytes() + std::max(coded.bytes(), floats.bytes());
}

template <typename T>
void newer_similarity(const DatedKeys<T>& tokens, std::int64_t head, const Rotary* rotary, float* out, BumpAllocator memory) {
    const std::int64_t rows = tokens.key.rows, width = tokens.key.width, batch = batch_size(rows, width);
    const std::int64_t* const seq = tokens.seq.of(head);
    const std::uint8_t* const valid = tokens.valid.of(head);
    std::int32_t* const order = memory.take<std::int32_t>(rows);
    UnitKeys<T> unit(tokens, head, rotary, memory);
    std::int64_t held = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
        if (valid[i]) order[held++] = static_cast<std::int32_t>(i);
    }
    std::sort(order, order + held, [seq](std::int32_t a, std::int32_t b) { return seq[a] < seq[b]; });
    const auto older = [&](std::int32_t i) { return seq[i] < tokens.since; };
    const std::int64_t news = std::partition_point(order, order + held, older) - order;
    std::fill_n(out, rows, 0.0f);
    if (simd().codes.lanes) {
        CodedBatch at(memory, batch, width);
        for (std::int64_t first = 0; first < held; first += batch) {
            const std::int64_t count = std::min(batch, held - first);
            at.lay_out(unit, order, first, count);
            for (std::int64_t from = std::max(first, news); from < held; from += kKeys) at.meet(unit, order, from, std::min(held, from + kKeys));
            for (std::int64_t i = 0; i < count; ++i) out[order[first + i]] = at.highest(i);
        }
        return;
    }
    Batch at(memory, batch, width);
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

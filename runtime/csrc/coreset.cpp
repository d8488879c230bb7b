// A coreset of rows, chosen greedily: what the `coreset` policy keeps.

#include <pybind11/numpy.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "arena.h"
#include "arrays.h"
#include "errors.h"
#include "kernels_api.h"
#include "simd.h"

namespace py = pybind11;
using namespace py::literals;

namespace edgevlm {

namespace {

constexpr float kFloor = 0.01f;         // added to what is orthogonal, so that its logarithm is finite
constexpr float kShortest = 1e-3f;      // a direction's length, below which rounding made it
constexpr std::int64_t kRows = 64;      // candidates that meet a batch of choices at a time
constexpr std::int64_t kListed = 256;   // candidates among which a batch is chosen
constexpr int kPairs = 32;

// Choices are made in batches, one lane each. Inside a batch only the `listed` candidates, those of the highest scores, are up to date.
// Scores never rise, so a choice among them is right as long as it scores no less than any other did when the batch began.
class Coreset {
public:
    Coreset(const float* rows, std::int64_t count, std::int64_t width, float diversity, std::int64_t directions, std::byte* memory)
        : rows_(rows), width_(width), lanes_(simd().attention.rows), left_(std::min(directions, width)), diversity_(diversity), live_(count) {
        lay_out(BumpAllocator(memory), count);
        for (std::int64_t i = 0; i < count; ++i) live_[i] = static_cast<std::int32_t>(i), cover_[i] = i ? -1 : -INFINITY;
        simd().fp32.squares({rows_, nullptr}, width_, count, width_, rest_);
    }

    static std::size_t bytes(std::int64_t count, std::int64_t width, std::int64_t directions) {
        Coreset sizes(width, std::min(directions, width));
        return sizes.lay_out(BumpAllocator(), count);
    }

    void choose(std::int64_t wanted, std::int64_t steps, std::int32_t* out) {
        std::int64_t done = 0;
        const std::int64_t greedy = std::min(wanted, steps);
        while (done < greedy) {
            const float bound = list();
            chosen_ = turned_ = 0;
            std::fill_n(choices_, 2 * lanes_ * width_, 0.0f);
            while (chosen_ < lanes_ && done < greedy && !listed_.empty()) {
                const auto best = std::min_element(listed_.begin(), listed_.end(), [&](auto a, auto b) { return before(a, b); });
                if (chosen_ && score_[*best] <= bound) break;
                out[done++] = *best;
                take(*best);
            }
            meet();
        }
        if (done == wanted) return;
        for (const std::int32_t i : live_) score(i);
        std::partial_sort_copy(live_.begin(), live_.end(), out + done, out + wanted, [&](auto a, auto b) { return before(a, b); });
    }

private:
    Coreset(std::int64_t width, std::int64_t directions) : width_(width), lanes_(simd().attention.rows), left_(directions) {}

    std::size_t lay_out(BumpAllocator memory, std::int64_t count) {
        for (float** list : {&cover_, &rest_, &score_}) *list = memory.take<float>(count);
        choices_ = memory.take<float>(2 * lanes_ * width_);
        basis_ = memory.take<float>(left_ * width_);
        products_ = memory.take<float>(left_);
        met_ = memory.take<float>(kRows * (width_ + lanes_));
        return memory.bytes();
    }

    bool before(std::int32_t a, std::int32_t b) const { return score_[a] != score_[b] ? score_[a] > score_[b] : a < b; }

    void score(std::int32_t i) {
        const float spread = diversity_ > 0 ? diversity_ * std::log(kFloor + std::max(rest_[i], 0.0f)) : 0, score = 1 - cover_[i] + spread;
        score_[i] = std::isnan(score) ? -INFINITY : score;  // else they would be in no order
    }

    // Lists the best of the live candidates; returns the highest score of the others.
    float list() {
        for (const std::int32_t i : live_) score(i);
        const auto middle = live_.begin() + std::min<std::ptrdiff_t>(kListed, static_cast<std::ptrdiff_t>(live_.size()));
        std::nth_element(live_.begin(), middle, live_.end(), [&](auto a, auto b) { return before(a, b); });
        listed_.assign(live_.begin(), middle);
        live_.erase(live_.begin(), middle);
        float bound = -INFINITY;
        for (const std::int32_t i : live_) bound = std::max(bound, score_[i]);
        return bound;
    }

    void take(std::int32_t i) {
        listed_.erase(std::find(listed_.begin(), listed_.end(), i));
        const float* const row = rows_ + i * width_;
        for (std::int64_t d = 0; d < width_; ++d) choices_[d * lanes_ + chosen_] = row[d];
        ++chosen_;
        dots(row, [&](std::int32_t j, float dot) { cover_[j] = std::max(cover_[j], dot); });
        if (diversity_ > 0 && left_) {
            if (const float* const direction = orthogonal(row)) {
                for (std::int64_t d = 0; d < width_; ++d) choices_[(width_ + d) * lanes_ + turned_] = direction[d];
                ++turned_;
                dots(direction, [&](std::int32_t j, float dot) { rest_[j] -= dot * dot; });
            }
        }
        for (const std::int32_t j : listed_) score(j);
    }

    // What is new in a row, of length 1, which joins the basis; null where nothing is.
    const float* orthogonal(const float* row) {
        float* const out = basis_ + held_ * width_;
        std::copy_n(row, width_, out);
        for (int twice = 0; twice < 2; ++twice) {
            for (std::int64_t b = 0; b < held_; ++b) products_[b] = dot(basis_ + b * width_, out);
            for (std::int64_t b = 0; b < held_; ++b) simd().fp32.add({basis_ + b * width_, nullptr}, -products_[b], width_, out);
        }
        const float length = std::sqrt(dot(out, out));
        if (length <= kShortest) return nullptr;
        for (std::int64_t d = 0; d < width_; ++d) out[d] /= length;
        ++held_, --left_;
        return out;
    }

    static constexpr auto plain = [](const float* row) { return Row<float>{row, nullptr}; };

    float dot(const float* a, const float* b) const {
        const Compared<float> pair{plain(a), b, nullptr};
        Dots found;
        simd().fp32.dots(&pair, 1, width_, &found);
        return found.dot;
    }

    template <typename F>
    void dots(const float* row, F&& f) const {
        Compared<float> pairs[kPairs];
        Dots found[kPairs];
        for (std::size_t first = 0; first < listed_.size(); first += kPairs) {
            const std::int64_t count = std::min<std::size_t>(kPairs, listed_.size() - first);
            for (std::int64_t k = 0; k < count; ++k) pairs[k] = {plain(rows_ + listed_[first + k] * width_), row, nullptr};
            simd().fp32.dots(pairs, count, width_, found);
            for (std::int64_t k = 0; k < count; ++k) f(listed_[first + k], found[k].dot);
        }
    }

    // The candidates that were not listed meet the batch; those listed are candidates again.
    void meet() {
        float* const found = met_ + kRows * width_;
        for (std::size_t first = 0; first < live_.size(); first += kRows) {
            const std::int64_t count = std::min<std::size_t>(kRows, live_.size() - first);
            for (std::int64_t k = 0; k < count; ++k) std::copy_n(rows_ + live_[first + k] * width_, width_, met_ + k * width_);
            simd().attention.scores(met_, width_, count, choices_, width_, found);
            for (std::int64_t k = 0; k < count; ++k) {
                float& cover = cover_[live_[first + k]];
                for (std::int64_t lane = 0; lane < chosen_; ++lane) cover = std::max(cover, found[k * lanes_ + lane]);
            }
            if (!turned_) continue;
            simd().attention.scores(met_, width_, count, choices_ + width_ * lanes_, width_, found);
            for (std::int64_t k = 0; k < count; ++k) {
                for (std::int64_t lane = 0; lane < turned_; ++lane) rest_[live_[first + k]] -= found[k * lanes_ + lane] * found[k * lanes_ + lane];
            }
        }
        live_.insert(live_.end(), listed_.begin(), listed_.end());
    }

    const float* rows_ = nullptr;  // [count, width]
    std::int64_t width_, lanes_, left_, held_ = 0, chosen_ = 0, turned_ = 0;  // left_: directions that may join the held_
    float diversity_ = 0;
    std::vector<std::int32_t> live_, listed_;  // candidates
    float *cover_, *rest_, *score_;            // [count]
    float *choices_, *basis_, *products_, *met_;  // [2, width, lanes], [directions, width], [directions], [kRows, width + lanes]
};

py::array_t<std::int32_t> call_coreset(Floats rows, std::int64_t count, float diversity, std::int64_t directions, std::int64_t steps) {
    Call call;
    const auto from = call.dense<float>(rows, "rows", {any, any});
    const std::int64_t held = from.shape(0), width = from.shape(1);
    if (count < 0 || count > held) refuse("count must be 0 to ", held, ", not ", count);
    if (!(diversity >= 0) || directions < 0 || steps < 1) refuse("diversity and directions must be 0 or more, steps 1 or more");
    py::array_t<std::int32_t> out(count);
    std::int32_t* const first = out.mutable_data();
    {
        const py::gil_scoped_release unlocked;
        const Block memory = loose_heap().allocate(Coreset::bytes(held, width, directions));
        Coreset(from.data(), held, width, diversity, directions, memory.get()).choose(count, steps, first);
    }
    return out;
}

}  // namespace

void bind_coreset(py::module_& module) {
    module.def("coreset", &call_coreset, "rows"_a, "count"_a, py::kw_only(), "diversity"_a, "directions"_a, "steps"_a,
               R"(Return the rows of a greedy coreset in the order in which they are taken, int32 [count].

rows: float32 [n, width], finite, of length 1 or less. Row 0 is taken first, then repeatedly the row with the highest score
1 - c + diversity log(0.01 + r); the lowest row wins ties. c is the row's highest dot product with a taken row, and r is the
squared length of its part orthogonal to the first `directions` (at most width) independent taken rows. After `steps` rows,
scores stay as they are and the other rows are taken at once. Takes O(n steps width) time. Raises CacheError if count > n.)");
}

}  // namespace edgevlm

// The target, side a, where it is the mean of a head group, or the largest of the means of its runs.
#pragma once

#include "passes/pass.h"

#include <memory>
#include <numeric>
#include <utility>
#include <vector>

namespace streamkl::cpu {

// The head group that a distribution is compared with: its rows, taken once per block, and its mean p[keys, rows]. A
// group of several runs of as many heads has the largest of their means, key by key.
class Target {
 public:
  Target(std::unique_ptr<DenseSide> a, int64_t group, int64_t runs, bool fast)
      : a_(std::move(a)), group_(group), heads_(group / runs), factor_(static_cast<float>(a_->scale)), stats_(group), run_(runs == 1 ? 0 : kBlockK * kBlockQ) {
    add_ = dispatch(fast, false, a_->relu, [](auto precision, auto, auto relu) { return &add<precision(), relu()>; });
  }

  void take_rows(const Block& block, int64_t r, const Rows& m, const Rows& ln_l) {
    rows_ = block.rows();
    // Where a block has few rows, heads of a key head lie side by side in a strip, since products want to be wide.
    together_ = rows_ % kLanes == 0 ? heads_that_fit(rows_, kStrip, std::gcd(group_, a_->heads / a_->kv_heads)) : 1;
    for (int64_t n = 0; n < group_; n++) {
      const int64_t head = r * group_ + n;
      if (n % together_ == 0) a_->take_rows(n / together_, block.seq.batch, head, block.first_row(), rows_, false, together_);
      stats_[n].take(block, head, m, ln_l);
    }
  }

  // All parts of a tile at once, p[part][keys, rows]: the keys of a key head are taken once for all its heads. x[keys,
  // rows] is scratch for a product.
  void compute(const Block& block, const KeyTile& tile, const Window& window, int64_t r, float* x, float* p) {
    for (int64_t first = 0; first < group_; first += together_) {
      const int64_t kv = a_->kv_head(r * group_ + first);
      if (first == 0 || kv != a_->kv_head(r * group_ + first - 1)) a_->take_keys(block.seq.batch, kv, tile.key(block), tile.keys(), false);
      each_part(block, tile, window, false, [&](const Part& part) {
        a_->product(first / together_, together_ == 1 ? part : Part{0, together_ * rows_, part.j0, part.j1}, x);
        each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
          const int64_t at = i - part.i0, to = part.i0 * kBlockK + at;
          for (int64_t n = first; n < first + together_; n++) {
            const bool ends = (n + 1) % heads_ == 0;
            add_(x + (n - first) * rows_ + at, (n < heads_ ? p : run_.data()) + to, span, factor_, stats_[n], i, n % heads_ == 0, ends ? heads_ : 1);
            if (ends && n >= heads_) keep_larger(p + to, run_.data() + to, span);
          }
        });
      });
    }
  }

 private:
  template <Precision precision, bool relu>
  static void add(const float* x, float* p, const Span& span, float factor, const BlockStats& stats, int64_t i, bool first, int64_t heads) {
    const Lanes scale = splat(factor), m = stats.m[i], ln_l = stats.ln_l[i];
    // The last head divides, so that the mean of ones is 1.
    const Lanes count = splat(static_cast<float>(heads)), inverse = 1.0f / count;
    Span all = span;  // p has a value wherever some row of the sixteen sees a key
    all.full_begin = span.begin;
    all.full_end = span.end;
    each_key(all, [&](int64_t j, auto, int) {
      Lanes value = exponential<precision>((logit<relu>(load(x + j * kStrip), scale) - m) - ln_l);
      if (!first) value += load(p + j * kStrip);
      store(p + j * kStrip, heads == 1 ? value : divided(value, count, inverse));
    });
  }

  static void keep_larger(float* p, const float* run, const Span& span) {
    for (int64_t j = span.begin; j < span.end; j++) store(p + j * kStrip, max(load(p + j * kStrip), load(run + j * kStrip)));
  }

  std::unique_ptr<DenseSide> a_;
  const int64_t group_, heads_;
  const float factor_;
  int64_t rows_ = 0, together_ = 1;
  std::vector<BlockStats> stats_;
  Buffer<float> run_;
  void (*add_)(const float*, float*, const Span&, float, const BlockStats&, int64_t, bool, int64_t);
};

}  // namespace streamkl::cpu

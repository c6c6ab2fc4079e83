// The compared distribution, side b: one head, or head-summed.
#pragma once

#include "passes/side_gradient.h"

#include <memory>
#include <optional>
#include <vector>

namespace streamkl::cpu {

// What the relu of scale x does to x: nothing, if there is none, or it cuts off one side.
enum class Cut { kNone, kNegative, kPositive };

template <Cut cut>
STREAMKL_INLINE Lanes cut_off(Lanes x) {
  if constexpr (cut == Cut::kNegative) return max(Lanes{}, x);
  if constexpr (cut == Cut::kPositive) return min(Lanes{}, x);
  return x;
}

// x[keys, rows] (+)= the sum of weight relu(scale x of a head) over heads that lie `apart` rows apart. The weights
// include the scale, here and below.
template <Cut cut>
void add_heads(const float* heads, float* x, const Part& part, const Row* weights, int64_t count, int64_t apart, bool first) {
  for (int64_t j = part.j0; j < part.j1; j++)
    for (int64_t i = 0; i < part.i1 - part.i0; i += kLanes) {
      Lanes sum = first ? Lanes{} : load(x + j * kStrip + i);
      for (int64_t n = 0; n < count; n++) sum = fma(cut_off<cut>(load(heads + j * kStrip + n * apart + i)), weights[n][part.i0 + i], sum);
      store(x + j * kStrip + i, sum);
    }
}

// The same sum for sixteen rows from i on, those of the weights from `row` on, and sixteen keys from j on: sums[l] is that
// of key j + l. x, the sum of the heads before, is null for the first ones.
template <Cut cut>
STREAMKL_INLINE void sum_heads(const float* heads, const float* x, int64_t i, int64_t j, const Row* weights, int64_t row, int64_t count, int64_t apart, Lanes* sums) {
  Lanes sum[kLanes];
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; l++) sum[l] = x == nullptr ? Lanes{} : load(x + (j + l) * kStrip + i);
  for (int64_t n = 0; n < count; n++) {
    const Lanes weight = weights[n][row];
    const float* from = heads + j * kStrip + n * apart + i;
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; l++) sum[l] = fma(cut_off<cut>(load(from + l * kStrip)), weight, sum[l]);
  }
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; l++) sums[l] = sum[l];
}

// dx of a head from db, the gradient of the sum; it overwrites the head's x. Where db is 0, dx is 0, even if x is nan.
template <Cut cut>
void head_gradient(float* head, const float* db, const Part& part, float scale, const Row& weight, Row& d_weight) {
  for (int64_t i = 0; i < part.i1 - part.i0; i += kLanes) {
    const Lanes by = weight[part.i0 + i];
    Lanes sum[4] = {};  // in four parts, to be more exact
    for (int64_t j = part.j0; j < part.j1; j++) {
      const Lanes x = load(head + j * kStrip + i), d = load(db + j * kStrip + i);
      sum[j % 4] = select(d == 0.0f, sum[j % 4], fma(d, cut_off<cut>(x), sum[j % 4]));
      Lanes dx = select(d == 0.0f, Lanes{}, d * by);
      if constexpr (cut == Cut::kNegative) dx = select(x <= 0.0f, Lanes{}, dx);
      if constexpr (cut == Cut::kPositive) dx = select(x >= 0.0f, Lanes{}, dx);
      store(head + j * kStrip + i, dx);
    }
    store(d_weight.data + part.i0 + i, d_weight[part.i0 + i] + ((sum[0] + sum[1]) + (sum[2] + sum[3])) * scale);
  }
}

class Student {
 public:
  // With weights [B, J, Nq] the side is head-summed; without them each head is a distribution.
  Student(const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, double scale, bool relu)
      : side_(dense_side_of(q, k, scale, relu)), weights_(weights), head_summed_(weights.has_value()) {
    if (!head_summed_) return;
    weight_.resize(side_->heads);
    d_weight_.resize(side_->heads);
  }

  static int64_t distributions(const Tensor& q, const std::optional<Tensor>& weights) { return weights ? 1 : q.size(1); }
  // The factor and the relu that turn the result of product() into logits: head sums are logits already.
  double scale() const { return head_summed_ ? 1.0 : side_->scale; }
  bool relu() const { return !head_summed_ && side_->relu; }
  int64_t bytes_of_row(bool for_gradient) const {
    const int64_t heads = head_summed_ ? side_->heads : 1;
    return side_->bytes_of_row() * heads + (for_gradient ? (side_->bytes_of_row() + 4 * side_->padded_dim) * heads : 0);
  }

  void take_rows(const Block& block, int64_t r, bool for_gradient) {
    rows_ = block.rows();
    const bool wide = head_summed_ && rows_ % kLanes == 0 && rows_ <= kStrip;  // a strip has whole heads
    strip_heads_ = wide ? heads_that_fit(rows_, kStrip, side_->heads) : 1;
    together_ = wide ? heads_that_fit(rows_, side_->widest(), side_->heads, strip_heads_) : 1;
    for (int64_t slot = 0; slot < slots(); slot++)
      side_->take_rows(slot, block.seq.batch, head_summed_ ? slot * together_ : r, block.first_row(), rows_, for_gradient, together_);
    for (size_t n = 0; n < weight_.size(); n++) weight_[n].take(Rows(*weights_).at(block, n), rows_, scale_of_head());
    if (!head_summed_) return;
    // Where heads lie side by side, a block has one part, so what a tile's gradient needs of them is still there.
    kept_ = for_gradient && together_ > 1 && strips() <= kKeptStrips;
    head_.reserve((kept_ ? strips() : 1) * kBlockK * kStrip);
    if (for_gradient && slots() > 1) dk_.reserve(kBlockK * side_->padded_dim);
  }
  void take_keys(const Block& block, const KeyTile& tile, int64_t r, bool for_gradient) {
    side_->take_keys(block.seq.batch, side_->kv_head(r), tile.key(block), tile.keys(), for_gradient);
  }

  // x[j, i - i0] for the part's keys and rows, kStrip rows apart.
  void product(const Part& part, float* x) {
    if (!head_summed_) return side_->product(0, part, x);
    add_strips(part, strips(), x);
  }

  // The same, and visit(i, j, x) with what it is for sixteen rows and the sixteen keys j ... j + 15: x[l] is key j + l,
  // and i counts from the part's first row. The sum of several heads is not kept.
  template <typename Visit>
  void product(const Part& part, float* x, const Visit& visit) {
    const auto each = [&](const auto& sixteen) {
      for (int64_t i = 0; i < part.i1 - part.i0; i += kLanes)
        for (int64_t j = part.j0; j < part.j1; j += kLanes) {
          Lanes found[kLanes];
          sixteen(i, j, found);
          visit(i, j, found);
        }
    };
    if (!head_summed_) {
      side_->product(0, part, x);
      return each([&](int64_t i, int64_t j, Lanes* found) {
        for (int l = 0; l < kLanes; l++) found[l] = load(x + (j + l) * kStrip + i);
      });
    }
    const int64_t last = strips() - 1;
    add_strips(part, last, x);
    multiply(last, part);
    with_cut([&](auto cut) {
      each([&](int64_t i, int64_t j, Lanes* found) {
        sum_heads<cut()>(
            heads_of(last), last == 0 ? nullptr : x, i, j, &weight_[last * strip_heads_], part.i0 + i, strip_heads_, rows_,
            found);
      });
    });
  }

  // As in DenseSide; dx is the gradient of the result of product(), the last one of the part.
  void begin_gradient() {
    for (int64_t slot = 0; slot < slots(); slot++) side_->begin_gradient(slot);
    for (auto& row : d_weight_) std::fill_n(row.data, kBlockQ, 0.0f);
    if (head_summed_) db_.reserve(kBlockK * kBlockQ);
  }
  void set_gradient(const Part& part, const float* dx) {
    if (!head_summed_) return side_->set_gradient(part, dx);
    parts_.push_back(part);
    std::copy_n(dx + part.j0 * kStrip, (part.j1 - part.j0) * kStrip, db_.data() + part.i0 * kBlockK + part.j0 * kStrip);
  }
  // Adds to dQ, and to the dK of this thread's own tile if there are several slots: all that other threads need not wait
  // for.
  void compute_gradient() {
    for (int64_t slot = 0; slot < slots(); slot++) {
      for (const auto& part : parts_)
        for (int64_t strip = slot * strips_of_slot(); strip < (slot + 1) * strips_of_slot(); strip++) set_heads(strip, part);
      side_->add_query_gradient(slot);
      if (slots() > 1) side_->key_gradient(slot, slot > 0, dk_.data());
    }
    parts_.clear();
  }
  void add_key_gradient(const KeyTile& tile, float* dk) {
    if (slots() == 1) return side_->add_key_gradient(0, dk);
    for (int64_t c = 0; c < tile.keys() * side_->padded_dim; c += kLanes) store(dk + c, load(dk + c) + load(dk_.data() + c));
  }
  void end_gradient(const Block& block, int64_t r, const SideGradient& gradient, const Tensor& d_weights, bool as_floats) {
    for (int64_t slot = 0; slot < slots(); slot++)
      side_->end_gradient(slot, gradient.rows(block, head_summed_ ? slot * together_ : r), as_floats, gradient.q.size(2) * gradient.q.size(3));
    for (size_t n = 0; n < d_weight_.size(); n++) std::copy_n(d_weight_[n].data, block.rows(), Rows(d_weights).at(block, n));
  }

  int64_t kv_head(int64_t r) const { return side_->kv_head(r); }

 private:
  // Strips of 256 keys whose heads' products are kept: 1 MB. More is computed again sooner than read again.
  static constexpr int64_t kKeptStrips = 8;
  static constexpr int64_t kFewKeys = 32;

  // With many heads a block has few rows, and products want to be wide: heads lie side by side, as many of them in a
  // strip as fill its rows, and several strips in a slot, over whose rows a product of dK adds up.
  int64_t slots() const { return head_summed_ ? side_->heads / together_ : 1; }
  int64_t strips() const { return side_->heads / strip_heads_; }
  int64_t strips_of_slot() const { return together_ / strip_heads_; }
  // A part with the rows of a strip in its slot; a slot of one head has those of the part.
  Part within(int64_t strip, const Part& part) const {
    if (together_ == 1) return part;
    const int64_t rows = strip_heads_ * rows_, first = strip % strips_of_slot() * rows;
    return {first, first + rows, part.j0, part.j1};
  }
  float* heads_of(int64_t strip) const { return head_.data() + (kept_ ? strip * kBlockK * kStrip : 0); }
  void multiply(int64_t strip, const Part& part) {
    side_->product(strip / strips_of_slot(), within(strip, part), heads_of(strip));
  }
  float scale_of_head() const { return static_cast<float>(side_->scale); }
  template <typename Work>
  void with_cut(const Work& work) const {
    if (!side_->relu || side_->scale == 0.0) work(std::integral_constant<Cut, Cut::kNone>{});  // inf times 0 is nan
    else if (side_->scale > 0.0) work(std::integral_constant<Cut, Cut::kNegative>{});
    else work(std::integral_constant<Cut, Cut::kPositive>{});
  }
  // Adds up the heads of the first strips.
  void add_strips(const Part& part, int64_t count, float* x) {
    with_cut([&](auto cut) {
      for (int64_t strip = 0; strip < count; strip++) {
        multiply(strip, part);
        add_heads<cut()>(heads_of(strip), x, part, &weight_[strip * strip_heads_], strip_heads_, rows_, strip == 0);
      }
    });
  }
  // Sets the gradient of a strip's heads, from that of their sum.
  void set_heads(int64_t strip, const Part& part) {
    const Part columns = within(strip, part);
    if (!kept_ && part.j0 < part.j1) multiply(strip, part);
    side_->set_gradient(columns, nullptr, 0, part.j0);
    // What is computed of a few keys is rounded while it is in the first cache.
    for (int64_t j = part.j0; j < part.j1; j += kFewKeys) {
      const Part few{part.i0, part.i1, j, std::min(j + kFewKeys, part.j1)};
      with_cut([&](auto cut) {
        for (int64_t n = 0; n < strip_heads_; n++) {
          const int64_t head = strip * strip_heads_ + n;
          head_gradient<cut()>(heads_of(strip) + n * rows_, db_.data() + part.i0 * kBlockK, few, scale_of_head(), weight_[head], d_weight_[head]);
        }
      });
      side_->set_gradient(columns, heads_of(strip), few.j0, few.j1);
    }
    side_->set_gradient(columns, nullptr, part.j1);
  }

  std::unique_ptr<DenseSide> side_;
  const std::optional<Tensor> weights_;
  const bool head_summed_;
  int64_t rows_ = 0, strip_heads_ = 1, together_ = 1;
  bool kept_ = false;
  std::vector<Row> weight_, d_weight_;  // weights include the scale
  std::vector<Part> parts_;
  Buffer<float> head_, db_, dk_;
};

}  // namespace streamkl::cpu

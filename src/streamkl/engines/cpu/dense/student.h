// The compared distribution, side b: one head, or head-summed.
#pragma once

#include "passes/side_gradient.h"

#include <memory>
#include <optional>
#include <vector>

namespace streamkl::cpu {

// x[keys, rows] (+)= the sum of weight relu(scale x of a head) over heads that lie `apart` rows apart.
template <bool relu>
void add_heads(const float* heads, float* x, const Part& part, float factor, const Row* weights, int64_t count, int64_t apart, bool first) {
  const Lanes scale = splat(factor);
  for (int64_t j = part.j0; j < part.j1; j++)
    for (int64_t i = 0; i < part.i1 - part.i0; i += kLanes) {
      const auto value = [&](int64_t n) { return logit<relu>(load(heads + j * kStrip + n * apart + i), scale) * weights[n][part.i0 + i]; };
      Lanes sum = first ? value(0) : load(x + j * kStrip + i) + value(0);
      for (int64_t n = 1; n < count; n++) sum += value(n);
      store(x + j * kStrip + i, sum);
    }
}

// dx of a head from db, the gradient of the sum; it overwrites the head's x. Where db is 0, dx is 0, even if x is nan.
template <bool relu>
void head_gradient(float* head, const float* db, const Part& part, float factor, const Row& weight, Row& d_weight) {
  const Lanes scale = splat(factor);
  for (int64_t i = 0; i < part.i1 - part.i0; i += kLanes) {
    const Lanes by = weight[part.i0 + i] * scale;
    Lanes sum[4] = {};  // in four parts, to be more exact
    for (int64_t j = part.j0; j < part.j1; j++) {
      const Lanes x = load(head + j * kStrip + i), d = load(db + j * kStrip + i);
      sum[j % 4] += d == 0.0f ? Lanes{} : d * logit<relu>(x, scale);
      Lanes dx = d == 0.0f ? Lanes{} : d * by;
      if constexpr (relu) dx = x * scale <= 0.0f ? Lanes{} : dx;
      store(head + j * kStrip + i, dx);
    }
    store(d_weight.data + part.i0 + i, d_weight[part.i0 + i] + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
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
    together_ = heads_together(rows_);
    for (int64_t slot = 0; slot < slots(); slot++)
      side_->take_rows(slot, block.seq.batch, head_summed_ ? slot * together_ : r, block.first_row(), rows_, for_gradient, together_);
    for (size_t n = 0; n < weight_.size(); n++) weight_[n].take(Rows(*weights_).at(block, n), rows_);
    // Where heads lie side by side, a block has one part, so what a tile's gradient needs of them is still there.
    kept_ = for_gradient && together_ > 1 && slots() <= kKeptSlots;
    if (head_summed_) head_.reserve((kept_ ? slots() : 1) * kBlockK * kStrip);
  }
  void take_keys(const Block& block, const KeyTile& tile, int64_t r, bool for_gradient) {
    side_->take_keys(block.seq.batch, side_->kv_head(r), tile.key(block), tile.keys(), for_gradient);
  }

  // x[j, i - i0] for the part's keys and rows, kStrip rows apart.
  void product(const Part& part, float* x) {
    if (!head_summed_) return side_->product(0, part, x);
    const auto add = side_->relu ? &add_heads<true> : &add_heads<false>;
    for (int64_t slot = 0; slot < slots(); slot++) {
      side_->product(slot, wide(part), heads_of(slot));
      add(heads_of(slot), x, part, static_cast<float>(side_->scale), &weight_[slot * together_], together_, rows_, slot == 0);
    }
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
  void add_gradient(float* dk) {
    if (!head_summed_) return side_->add_gradient(0, dk);
    const auto gradient = side_->relu ? &head_gradient<true> : &head_gradient<false>;
    for (int64_t slot = 0; slot < slots(); slot++) {
      for (const auto& part : parts_) {
        if (part.j0 < part.j1) {
          if (!kept_) side_->product(slot, wide(part), heads_of(slot));
          for (int64_t n = 0; n < together_; n++) {
            const int64_t head = slot * together_ + n;
            gradient(heads_of(slot) + n * rows_, db_.data() + part.i0 * kBlockK, part, static_cast<float>(side_->scale), weight_[head], d_weight_[head]);
          }
        }
        side_->set_gradient(wide(part), heads_of(slot));
      }
      side_->add_gradient(slot, dk);
    }
    parts_.clear();
  }
  void end_gradient(const Block& block, int64_t r, const SideGradient& gradient, const Tensor& d_weights, bool as_floats) {
    for (int64_t slot = 0; slot < slots(); slot++)
      side_->end_gradient(slot, gradient.rows(block, head_summed_ ? slot * together_ : r), as_floats, gradient.q.size(2) * gradient.q.size(3));
    for (size_t n = 0; n < d_weight_.size(); n++) std::copy_n(d_weight_[n].data, block.rows(), Rows(d_weights).at(block, n));
  }

  int64_t kv_head(int64_t r) const { return side_->kv_head(r); }

 private:
  static constexpr int64_t kKeptSlots = 8;  // of a strip and 256 keys each: 1 MB. More is computed again sooner than read again

  int64_t slots() const { return head_summed_ ? side_->heads / together_ : 1; }
  // How many heads lie side by side in a slot: with many heads a block has few rows, and products want to be wide.
  int64_t heads_together(int64_t rows) const {
    if (!head_summed_ || rows % kLanes != 0) return 1;
    int64_t count = std::clamp<int64_t>(kStrip / rows, 1, side_->heads);
    while (side_->heads % count != 0) count--;
    return count;
  }
  // A part with all rows of its slot.
  Part wide(const Part& part) const { return together_ == 1 ? part : Part{0, together_ * rows_, part.j0, part.j1}; }
  float* heads_of(int64_t slot) const { return head_.data() + (kept_ ? slot * kBlockK * kStrip : 0); }

  std::unique_ptr<DenseSide> side_;
  const std::optional<Tensor> weights_;
  const bool head_summed_;
  int64_t rows_ = 0, together_ = 1;
  bool kept_ = false;
  std::vector<Row> weight_, d_weight_;
  std::vector<Part> parts_;
  Buffer<float> head_, db_;
};

}  // namespace streamkl::cpu

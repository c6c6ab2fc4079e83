// The compared distribution, side b: one head, or head-summed.
#pragma once

#include "passes/side_gradient.h"

#include <memory>
#include <optional>
#include <vector>

namespace streamkl::cpu {

// x[keys, rows] (+)= weight relu(scale x of a head).
template <bool relu>
void add_head(const float* head, float* x, const Part& part, float factor, const Row& weight, bool first) {
  const Lanes scale = splat(factor);
  for (int64_t j = part.j0; j < part.j1; j++)
    for (int64_t i = 0; i < part.i1 - part.i0; i += kLanes) {
      const Lanes value = logit<relu>(load(head + j * kStrip + i), scale) * weight[part.i0 + i];
      store(x + j * kStrip + i, first ? value : load(x + j * kStrip + i) + value);
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
    head_.reserve(kBlockK * kStrip);
  }

  static int64_t distributions(const Tensor& q, const std::optional<Tensor>& weights) { return weights ? 1 : q.size(1); }
  // The factor and the relu that turn the result of product() into logits: head sums are logits already.
  double scale() const { return head_summed_ ? 1.0 : side_->scale; }
  bool relu() const { return !head_summed_ && side_->relu; }
  int64_t bytes_of_row(bool for_gradient) const {
    return side_->bytes_of_row() * heads() + (for_gradient ? (side_->bytes_of_row() + 4 * side_->padded_dim) * heads() : 0);
  }

  void take_rows(const Block& block, int64_t r, bool for_gradient) {
    for (int64_t n = 0; n < heads(); n++) {
      side_->take_rows(n, block.seq.batch, head_summed_ ? n : r, block.first_row(), block.rows(), for_gradient);
      if (head_summed_) weight_[n].take(Rows(*weights_).at(block, n), block.rows());
    }
  }
  void take_keys(const Block& block, const KeyTile& tile, int64_t r, bool for_gradient) {
    side_->take_keys(block.seq.batch, side_->kv_head(r), tile.key(block), tile.keys(), for_gradient);
  }

  // x[j, i - i0] for the part's keys and rows, kStrip rows apart.
  void product(const Part& part, float* x) {
    if (!head_summed_) return side_->product(0, part, x);
    const auto add = side_->relu ? &add_head<true> : &add_head<false>;
    for (int64_t n = 0; n < heads(); n++) {
      side_->product(n, part, head_.data());
      add(head_.data(), x, part, static_cast<float>(side_->scale), weight_[n], n == 0);
    }
  }

  // As in DenseSide; dx is the gradient of the result of product().
  void begin_gradient() {
    for (int64_t n = 0; n < heads(); n++) side_->begin_gradient(n);
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
    for (int64_t n = 0; n < heads(); n++) {
      for (const auto& part : parts_) {
        if (part.j0 < part.j1) {
          side_->product(n, part, head_.data());
          gradient(head_.data(), db_.data() + part.i0 * kBlockK, part, static_cast<float>(side_->scale), weight_[n], d_weight_[n]);
        }
        side_->set_gradient(part, head_.data());
      }
      side_->add_gradient(n, dk);
    }
    parts_.clear();
  }
  void end_gradient(const Block& block, int64_t r, const SideGradient& gradient, const Tensor& d_weights, bool as_floats) {
    for (int64_t n = 0; n < heads(); n++) {
      side_->end_gradient(n, gradient.rows(block, head_summed_ ? n : r), as_floats);
      if (head_summed_) std::copy_n(d_weight_[n].data, block.rows(), Rows(d_weights).at(block, n));
    }
  }

  int64_t kv_head(int64_t r) const { return side_->kv_head(r); }

 private:
  int64_t heads() const { return head_summed_ ? side_->heads : 1; }

  std::unique_ptr<DenseSide> side_;
  const std::optional<Tensor> weights_;
  const bool head_summed_;
  std::vector<Row> weight_, d_weight_;
  std::vector<Part> parts_;
  Buffer<float> head_, db_;
};

}  // namespace streamkl::cpu

// The compared distribution, side b, over selected keys: one head, or head-summed.
#pragma once

#include "gathered/side.h"
#include "passes/side_gradient.h"

#include <optional>
#include <vector>

namespace streamkl::cpu {

class GatheredStudent {
 public:
  // With weights [B, J, Nq] the side is head-summed; without them each head is a distribution.
  GatheredStudent(const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, double scale, bool relu)
      : side_(gathered_side_of(q, k, scale, relu)), weights_(weights), head_summed_(weights.has_value()) {
    if (!head_summed_) return;
    weight_.resize(side_->heads);
    d_weight_.resize(side_->heads);
    sum_.reserve(kSelected);
  }

  static int64_t distributions(const Tensor& q, const std::optional<Tensor>& weights) { return weights ? 1 : q.size(1); }
  // The factor and the relu that turn the result of product() into logits: head sums are logits already.
  double scale() const { return head_summed_ ? 1.0 : side_->scale; }
  bool relu() const { return !head_summed_ && side_->relu; }

  // Takes row i of a block: distributions [first, last), or all heads of a head-summed side.
  void take_row(const Block& block, int64_t i, int64_t first, int64_t last, bool for_gradient) {
    first_ = head_summed_ ? 0 : first;
    last_ = head_summed_ ? side_->heads : last;
    x_.reserve(gathered_size(last_ - first_));
    side_->take_row(block.seq.batch, block.first_row() + i, first_, last_, for_gradient);
    if (head_summed_)
      for (int64_t n = 0; n < last_; n++) weight_[n] = Rows(*weights_).at(block, n)[i];
  }
  // x[distribution - first][kSelected] for the keys, which are counted from the first of the sequence.
  float* product(const Block& block, const int64_t* keys, int64_t count) {
    side_->product(block.seq.k_start, keys, count, x_.data());
    if (!head_summed_) return x_.data();
    side_->relu ? add_heads<true>(count) : add_heads<false>(count);
    return sum_.data();
  }

  // Gradients of the row; dx is the gradient of the last result of product(), for as many keys.
  void begin_gradient() {
    side_->begin_gradient();
    std::fill(d_weight_.begin(), d_weight_.end(), 0.0f);
  }
  void add_gradient(const Block& block, const float* dx, int64_t count, const SideGradient& gradient, int64_t partition) {
    if (head_summed_) side_->relu ? head_gradients<true>(dx, count) : head_gradients<false>(dx, count);
    side_->add_gradient(head_summed_ ? x_.data() : dx, gradient.keys(block, partition), gradient.head_stride());
  }
  void end_gradient(const Block& block, int64_t i, const SideGradient& gradient, const Tensor& d_weights, bool as_floats) {
    for (int64_t head = first_; head < last_; head++) {
      side_->end_gradient(head, gradient.row(block, head, i), as_floats);
      if (head_summed_) Rows(d_weights).at(block, head)[i] = d_weight_[head];
    }
  }

 private:
  template <bool relu>
  void add_heads(int64_t count) {
    const Lanes scale = splat(static_cast<float>(side_->scale));
    for (int64_t j = 0; j < count; j += kLanes) {
      Lanes sum = {};
      for (int64_t n = 0; n < last_; n++) sum += logit<relu>(load(x_.data() + n * kSelected + j), scale) * weight_[n];
      store(sum_.data() + j, sum);
    }
  }

  // dx of each head from db, the gradient of the sum; it overwrites the head's x. Where db is 0, dx is 0, even if x is
  // nan.
  template <bool relu>
  void head_gradients(const float* db, int64_t count) {
    const Lanes scale = splat(static_cast<float>(side_->scale));
    for (int64_t n = 0; n < last_; n++) {
      const Lanes by = weight_[n] * scale;
      Lanes d_weight = {};
      float* x = x_.data() + n * kSelected;
      for (int64_t j = 0; j < count; j += kLanes) {
        const Lanes product = load(x + j), d = load(db + j);
        d_weight += select(d == 0.0f, Lanes{}, d * logit<relu>(product, scale));
        Lanes dx = select(d == 0.0f, Lanes{}, d * by);
        if constexpr (relu) dx = select(product * scale <= 0.0f, Lanes{}, dx);
        store(x + j, dx);
      }
      d_weight_[n] += sum(d_weight);
    }
  }

  std::unique_ptr<GatheredSide> side_;
  const std::optional<Tensor> weights_;
  const bool head_summed_;
  int64_t first_ = 0, last_ = 0;
  std::vector<float> weight_, d_weight_;
  Buffer<float> x_, sum_;
};

}  // namespace streamkl::cpu

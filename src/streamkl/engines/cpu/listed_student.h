// The distribution that is compared, on the keys that rows name: of one head, or of several that are added up.
#pragma once

#include "listed_side.h"
#include "units.h"

#include <optional>
#include <vector>

namespace streamkl::cpu {

class ListedStudent {
 public:
  // weights [B, J, Nq] make one distribution of all J heads of q; without them each head is one.
  ListedStudent(const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, double scale, bool relu)
      : side_(listed_side_of(q, k, scale, relu)), weights_(weights), summed_(weights.has_value()) {
    if (!summed_) return;
    weight_.resize(side_->heads);
    d_weight_.resize(side_->heads);
    sum_.reserve(kListed);
  }

  static int64_t distributions(const Tensor& q, const std::optional<Tensor>& weights) { return weights ? 1 : q.size(1); }
  // What product() gives is multiplied by to be logits, and whether a relu follows: sums of heads are logits already.
  double scale() const { return summed_ ? 1.0 : side_->scale; }
  bool relu() const { return !summed_ && side_->relu; }

  // Takes row i of a block: distributions [first, last), or the sum of all heads.
  void take_row(const Block& block, int64_t i, int64_t first, int64_t last, bool for_gradient) {
    first_ = summed_ ? 0 : first;
    last_ = summed_ ? side_->heads : last;
    x_.reserve(listed_size(last_ - first_));
    side_->take_row(block.seq.batch, block.first_row() + i, first_, last_, for_gradient);
    if (summed_)
      for (int64_t n = 0; n < last_; n++) weight_[n] = Rows(*weights_).at(block, n)[i];
  }
  // x[distribution - first][kListed] for the keys, which are counted from the sequence's first.
  float* product(const Block& block, const int64_t* keys, int64_t count) {
    side_->product(block.seq.k_start, keys, count, x_.data());
    if (!summed_) return x_.data();
    side_->relu ? add_heads<true>(count) : add_heads<false>(count);
    return sum_.data();
  }

  // Gradients of the row; dx is that of what product() gave last, for as many keys.
  void begin_gradient() {
    side_->begin_gradient();
    std::fill(d_weight_.begin(), d_weight_.end(), 0.0f);
  }
  void add_gradient(const Block& block, const float* dx, int64_t count, const SideGradient& gradient, int64_t share) {
    if (summed_) side_->relu ? head_gradients<true>(dx, count) : head_gradients<false>(dx, count);
    side_->add_gradient(summed_ ? x_.data() : dx, gradient.keys(block, share), gradient.head_stride());
  }
  void end_gradient(const Block& block, int64_t i, const SideGradient& gradient, const Tensor& d_weights, bool as_floats) {
    for (int64_t head = first_; head < last_; head++) {
      side_->end_gradient(head, gradient.row(block, head, i), as_floats);
      if (summed_) Rows(d_weights).at(block, head)[i] = d_weight_[head];
    }
  }

 private:
  template <bool relu>
  void add_heads(int64_t count) {
    const Lanes scale = splat(static_cast<float>(side_->scale));
    for (int64_t j = 0; j < count; j += kLanes) {
      Lanes sum = {};
      for (int64_t n = 0; n < last_; n++) sum += logit<relu>(load(x_.data() + n * kListed + j), scale) * weight_[n];
      store(sum_.data() + j, sum);
    }
  }

  // dx of each head from db, that of the sum; it overwrites the head's x. What is 0 in db stays so, whatever it meets.
  template <bool relu>
  void head_gradients(const float* db, int64_t count) {
    const Lanes scale = splat(static_cast<float>(side_->scale));
    for (int64_t n = 0; n < last_; n++) {
      const Lanes by = weight_[n] * scale;
      Lanes d_weight = {};
      float* x = x_.data() + n * kListed;
      for (int64_t j = 0; j < count; j += kLanes) {
        const Lanes product = load(x + j), d = load(db + j);
        d_weight += d == 0.0f ? Lanes{} : d * logit<relu>(product, scale);
        Lanes dx = d == 0.0f ? Lanes{} : d * by;
        if constexpr (relu) dx = product * scale <= 0.0f ? Lanes{} : dx;
        store(x + j, dx);
      }
      d_weight_[n] += sum(d_weight);
    }
  }

  std::unique_ptr<ListedSide> side_;
  const std::optional<Tensor> weights_;
  const bool summed_;
  int64_t first_ = 0, last_ = 0;
  std::vector<float> weight_, d_weight_;
  Buffer<float> x_, sum_;
};

}  // namespace streamkl::cpu

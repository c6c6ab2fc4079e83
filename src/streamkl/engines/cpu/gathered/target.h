// The target, side a, over selected keys: the mean of a head group, or the largest of the means of its runs.
#pragma once

#include "gathered/side.h"

#include <vector>

namespace streamkl::cpu {

class GatheredTarget {
 public:
  GatheredTarget(const Tensor& q, const Tensor& k, double scale, bool relu, int64_t group, int64_t runs, bool fast)
      : a_(gathered_side_of(q, k, scale, relu)), group_(group), heads_(group / runs), m_(heads_), ln_l_(heads_), x_(gathered_size(heads_)) {
    add_ = dispatch(fast, false, relu, [](auto precision, auto, auto with_relu) { return &GatheredTarget::add<precision(), with_relu()>; });
  }

  // p[row][key] of distribution r, for all selected keys of a block's rows.
  void compute(const Block& block, const SelectedKeys& selected, int64_t r, const Rows& m, const Rows& ln_l, float* p) {
    const int64_t group = r * group_;
    mean(block, selected, group, m, ln_l, p);
    for (int64_t begin = group + heads_; begin < group + group_; begin += heads_) {
      const float* run = run_.reserve(block.rows() * selected.stride());
      mean(block, selected, begin, m, ln_l, run_.data());
      for (int64_t i = 0; i < block.rows(); i++)
        for (int64_t j = i * selected.stride(); j < i * selected.stride() + selected.count(i); j += kLanes)
          store(p + j, max(load(p + j), load(run + j)));
    }
  }

 private:
  // The mean of the heads of a run. One key head after another, so that rows that selected the same keys find them in
  // the cache.
  void mean(const Block& block, const SelectedKeys& selected, int64_t begin, const Rows& m, const Rows& ln_l, float* p) {
    const int64_t end = begin + heads_;
    for (int64_t first = begin; first < end; first = a_->end_of_group(first)) {
      const int64_t last = std::min(end, a_->end_of_group(first));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (selected.count(i) == 0) continue;
        a_->take_row(block.seq.batch, block.first_row() + i, first, last, false);
        for (int64_t head = first; head < last; head++) {
          m_[head - first] = m.at(block, head)[i];
          ln_l_[head - first] = ln_l.at(block, head)[i];
        }
        each_piece(selected.count(i), [&](int64_t j, int64_t keys) {
          a_->product(block.seq.k_start, selected.of(i) + j, keys, x_.data());
          (this->*add_)(p + i * selected.stride() + j, keys, last - first, first == begin, last == end ? heads_ : 1);
        });
      }
    }
  }

  // The mean of ones must be 1: all heads are added up before they are divided by their number.
  template <Precision precision, bool relu>
  void add(float* p, int64_t keys, int64_t heads, bool begin, int64_t divisor) const {
    const Lanes scale = splat(static_cast<float>(a_->scale)), by = splat(static_cast<float>(divisor));
    for (int64_t j = 0; j < keys; j += kLanes) {
      Lanes value = begin ? Lanes{} : load(p + j);
      for (int64_t n = 0; n < heads; n++)
        value += exponential<precision>((logit<relu>(load(x_.data() + n * kSelected + j), scale) - m_[n]) - ln_l_[n]);
      store(p + j, divisor == 1 ? value : value / by);
    }
  }

  std::unique_ptr<GatheredSide> a_;
  const int64_t group_, heads_;
  std::vector<float> m_, ln_l_;
  Buffer<float> x_, run_;
  void (GatheredTarget::*add_)(float*, int64_t, int64_t, bool, int64_t) const;
};

}  // namespace streamkl::cpu

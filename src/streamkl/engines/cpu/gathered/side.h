// One side over selected keys: they are gathered for one row at a time, and lie along the lanes.
#pragma once

#include "gathered/topk_indices.h"

#include <memory>

namespace streamkl::cpu {

// One side's tensors, and the products of one row with its selected keys. A GatheredSide belongs to one thread.
class GatheredSide {
 public:
  GatheredSide(int64_t heads, int64_t kv_heads, double scale, bool relu) : heads(heads), kv_heads(kv_heads), scale(scale), relu(relu) {}
  virtual ~GatheredSide() = default;

  // Takes heads [first, last) of a row.
  virtual void take_row(int64_t batch, int64_t row, int64_t first, int64_t last, bool for_gradient) = 0;
  // x[head - first][kSelected] = <k, q> before scale and relu, for at most kSelected keys, counted from the key start;
  // 0 after the last one, up to whole lanes. x has room for fifteen more heads.
  virtual void product(int64_t start, const int64_t* keys, int64_t count, float* x) = 0;

  // Gradients of a row that was taken for them: begin, then after each product add dx, which is 0 after the last key.
  virtual void begin_gradient() = 0;
  // dk[kv_head][start + key] += dx q, rows of floats of a padded width; dq += dx^T k is kept.
  virtual void add_gradient(const float* dx, float* dk, int64_t dk_head_stride) = 0;
  // Writes dq[dim] of a head, in the tensors' dtype or as floats.
  virtual void end_gradient(int64_t head, void* dq, bool as_floats) = 0;

  int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }
  // The end of the heads that share the key head of this one.
  int64_t end_of_group(int64_t head) const { return (kv_head(head) + 1) * (heads / kv_heads); }

  const int64_t heads, kv_heads;
  const double scale;
  const bool relu;
};

std::unique_ptr<GatheredSide> gathered_side_of(const Tensor& q, const Tensor& k, double scale, bool relu);

// The size of x for a number of heads.
inline int64_t gathered_size(int64_t heads) { return (heads + kLanes - 1) * kSelected; }

}  // namespace streamkl::cpu

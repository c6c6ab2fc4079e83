// One side of rows that name their keys: these are gathered for a row at a time, and lie along the lanes.
#pragma once

#include "lists.h"

#include <memory>

namespace streamkl::cpu {

// One side's tensors, and its products with the keys that one row names. A ListedSide belongs to one thread.
class ListedSide {
 public:
  ListedSide(int64_t heads, int64_t kv_heads, double scale, bool relu) : heads(heads), kv_heads(kv_heads), scale(scale), relu(relu) {}
  virtual ~ListedSide() = default;

  // Takes heads [first, last) of a row.
  virtual void take_row(int64_t batch, int64_t row, int64_t first, int64_t last, bool for_gradient) = 0;
  // x[head - first][kListed] = <k, q> before scale and relu, for at most kListed keys, counted from the key start; 0 after the
  // last one, up to whole lanes. x has room for fifteen heads more than there are.
  virtual void product(int64_t start, const int64_t* keys, int64_t count, float* x) = 0;

  // Gradients of the row, if it was taken for them: begin, then after each product add dx, which is 0 where x is said to be.
  virtual void begin_gradient() = 0;
  // dk[kv_head][start + key] += dx q, rows of floats of a padded width; dq += dx^T k is kept.
  virtual void add_gradient(const float* dx, float* dk, int64_t dk_head_stride) = 0;
  // Writes dq[dim] of a head, in the tensors' dtype or as floats.
  virtual void end_gradient(int64_t head, void* dq, bool as_floats) = 0;

  int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }
  // The head after those that share a key head with one.
  int64_t end_of_group(int64_t head) const { return (kv_head(head) + 1) * (heads / kv_heads); }

  const int64_t heads, kv_heads;
  const double scale;
  const bool relu;
};

std::unique_ptr<ListedSide> listed_side_of(const Tensor& q, const Tensor& k, double scale, bool relu);

// What x of so many heads takes.
inline int64_t listed_size(int64_t heads) { return (heads + kLanes - 1) * kListed; }

}  // namespace streamkl::cpu

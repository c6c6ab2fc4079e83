// The gradients of a side that a backward pass writes.
#pragma once

#include "passes/pass.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <vector>

namespace streamkl::cpu {

// Gradients of one side: dQ whole, dK in floats, its width padded, one copy per row partition.
struct SideGradient {
  Tensor q;
  std::vector<Tensor> k;
  int64_t dim;
  SideGradient(bool wanted, const Tensor& q_, const Tensor& k_, bool floats, int64_t partitions = 1) : dim(k_.size(3)) {
    const auto options = k_.options().dtype(at::kFloat);
    q = wanted ? at::zeros(q_.sizes(), floats ? options : q_.options()) : at::empty({0}, options);
    for (int64_t partition = 0; wanted && partition < partitions; partition++)
      k.push_back(at::zeros({k_.size(0), k_.size(1), k_.size(2), round_up(dim, kLanes)}, options));
  }
  void* row(const Block& block, int64_t head, int64_t i) const {
    const int64_t row = (block.seq.batch * q.size(1) + head) * q.size(2) + block.first_row() + i;
    return static_cast<char*>(q.data_ptr()) + row * q.size(3) * q.element_size();
  }
  void* rows(const Block& block, int64_t head) const { return row(block, head, 0); }
  // Where the keys of a block's batch element begin in a partition's dK, and how far apart two key heads of it are.
  float* keys(const Block& block, int64_t partition) const {
    return k[partition].data_ptr<float>() + block.seq.batch * k[partition].size(1) * head_stride();
  }
  int64_t head_stride() const { return k[0].size(2) * k[0].size(3); }
  // The keys of a tile, where there is one dK.
  float* keys(const Block& block, const KeyTile& tile, int64_t kv) const {
    return keys(block, 0) + kv * head_stride() + tile.key(block) * k[0].size(3);
  }
  void fetch_keys(const Block& block, const KeyTile& tile, int64_t kv) const {
    fetch(keys(block, tile, kv), tile.keys() * k[0].size(3) * sizeof(float));
  }
  // The sum of all partitions, in their order; each is freed as soon as it is added.
  Tensor dk() {
    if (k.empty()) return q;
    for (size_t partition = 1; partition < k.size(); partition++) {
      k[0].add_(k[partition]);
      k[partition].reset();
    }
    return k[0].slice(3, 0, dim);
  }
};

}  // namespace streamkl::cpu

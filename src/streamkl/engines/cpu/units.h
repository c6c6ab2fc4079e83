// What a backward sweep is dealt out by, and what it writes: units of key heads of their own, and the gradients of a side.
#pragma once

#include "sweep.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <memory>
#include <vector>

namespace streamkl::cpu {

// A unit of a backward sweep: a sequence and the distributions whose key heads nobody else writes.
struct Unit {
  std::shared_ptr<const std::vector<Block>> blocks;
  int64_t first, last;
};

inline std::vector<Unit> units_of(const Tensor& table, const Window& window, int64_t rows, int64_t heads, int64_t together) {
  std::vector<Unit> units;
  for (const auto& seq : sequences_of(table)) {
    const auto blocks = std::make_shared<const std::vector<Block>>(blocks_of(seq, window, rows));
    if (blocks->empty()) continue;
    for (int64_t r = 0; r < heads; r += together) units.push_back({blocks, r, r + together});
  }
  return units;
}

// Gradients of one side: dQ whole, dK in floats, its width padded; of dK as many copies as there are shares that add to it.
struct SideGradient {
  Tensor q;
  std::vector<Tensor> k;
  int64_t dim;
  SideGradient(bool wanted, const Tensor& q_, const Tensor& k_, bool floats, int64_t shares = 1) : dim(k_.size(3)) {
    const auto options = k_.options().dtype(at::kFloat);
    q = wanted ? at::zeros(q_.sizes(), floats ? options : q_.options()) : at::empty({0}, options);
    for (int64_t share = 0; wanted && share < shares; share++)
      k.push_back(at::zeros({k_.size(0), k_.size(1), k_.size(2), round_up(dim, kLanes)}, options));
  }
  void* row(const Block& block, int64_t head, int64_t i) const {
    const int64_t row = (block.seq.batch * q.size(1) + head) * q.size(2) + block.first_row() + i;
    return static_cast<char*>(q.data_ptr()) + row * q.size(3) * q.element_size();
  }
  void* rows(const Block& block, int64_t head) const { return row(block, head, 0); }
  // Where the keys of a block's batch element begin in a share's dK, and how far apart two key heads of it are.
  float* keys(const Block& block, int64_t share) const {
    return k[share].data_ptr<float>() + block.seq.batch * k[share].size(1) * head_stride();
  }
  int64_t head_stride() const { return k[0].size(2) * k[0].size(3); }
  // Those of a tile, where there is one dK.
  float* keys(const Block& block, const Tile& tile, int64_t kv) const {
    return keys(block, 0) + kv * head_stride() + tile.key(block) * k[0].size(3);
  }
  void fetch_keys(const Block& block, const Tile& tile, int64_t kv) const {
    fetch(keys(block, tile, kv), tile.keys() * k[0].size(3) * sizeof(float));
  }
  // The sum of all shares, in their order; each is given back as soon as it is added.
  Tensor dk() {
    if (k.empty()) return q;
    for (size_t share = 1; share < k.size(); share++) {
      k[0].add_(k[share]);
      k[share].reset();
    }
    return k[0].slice(3, 0, dim);
  }
};

}  // namespace streamkl::cpu

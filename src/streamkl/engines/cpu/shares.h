// How a backward sweep is dealt out so that it is deterministic: units that write keys of their own, and shares of their rows.
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

// Into how many shares each unit's rows are dealt, so that no thread is without work.
inline int64_t shares_of(const std::vector<Unit>& units) {
  return units.empty() ? 1 : std::max<int64_t>(1, at::get_num_threads() / static_cast<int64_t>(units.size()));
}

// Runs the tasks of a backward sweep, a share of a unit each: sweep(block, r, share) of what make() makes a thread.
template <typename Make>
void each_share(const std::vector<Unit>& units, int64_t shares, bool fast, const Make& make) {
  on_all_threads(units.size() * shares, [&](const auto& next) {
    const FlushDenormals flush(fast);
    auto sweep = make();
    for (int64_t task; (task = next()) >= 0;) {
      const Unit& unit = units[task / shares];
      const int64_t share = task % shares;
      for (int64_t r = unit.first; r < unit.last; r++)
        for (size_t n = share; n < unit.blocks->size(); n += shares) sweep((*unit.blocks)[n], r, share);
    }
  });
}

// Gradients of one side: dQ whole, dK in floats once for each share of a unit's rows, its width padded.
struct SideGradient {
  Tensor q, k;
  int64_t dim;
  SideGradient(bool wanted, const Tensor& q_, const Tensor& k_, int64_t shares, bool floats) : dim(k_.size(3)) {
    if (!wanted) {
      q = k = at::empty({0}, q_.options().dtype(at::kFloat));
      return;
    }
    q = at::zeros(q_.sizes(), floats ? q_.options().dtype(at::kFloat) : q_.options());
    k = at::zeros({shares, k_.size(0), k_.size(1), k_.size(2), round_up(dim, kLanes)}, k_.options().dtype(at::kFloat));
  }
  void* row(const Block& block, int64_t head, int64_t i) const {
    const int64_t row = (block.seq.batch * q.size(1) + head) * q.size(2) + block.first_row() + i;
    return static_cast<char*>(q.data_ptr()) + row * q.size(3) * q.element_size();
  }
  void* rows(const Block& block, int64_t head) const { return row(block, head, 0); }
  float* keys(const Block& block, const Tile& tile, int64_t kv, int64_t share) const {
    const int64_t head = (share * k.size(1) + block.seq.batch) * k.size(2) + kv;
    return k.data_ptr<float>() + (head * k.size(3) + tile.key(block)) * k.size(4);
  }
  // Where the keys of a block's batch element begin, and how far apart two key heads of it are.
  float* keys(const Block& block, int64_t share) const {
    return k.data_ptr<float>() + (share * k.size(1) + block.seq.batch) * k.size(2) * head_stride();
  }
  int64_t head_stride() const { return k.size(3) * k.size(4); }
  void fetch_keys(const Block& block, const Tile& tile, int64_t kv, int64_t share) const {
    fetch(keys(block, tile, kv, share), tile.keys() * k.size(4) * sizeof(float));
  }
  Tensor dk() const {
    if (k.dim() == 1) return k;
    for (int64_t share = 1; share < k.size(0); share++) k[0].add_(k[share]);
    return k[0].slice(3, 0, dim);
  }
};

}  // namespace streamkl::cpu

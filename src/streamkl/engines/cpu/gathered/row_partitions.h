// Row partitions of a backward pass over selected keys: each has a dK of its own, and these are added in order, so that
// the pass is deterministic. Any row may add to any key, so rows cannot take turns as in dense/turns.h.
#pragma once

#include "passes/key_owners.h"

namespace streamkl::cpu {

// How many partitions the rows of a key owner have: enough that no thread is idle, but no more than two, or than have
// dKs that take as much memory together as the top-k indices do. Partitions with more keys than their rows selected
// would not pay.
inline int64_t partition_count(const std::vector<KeyOwner>& owners, const Tensor& topk, int64_t bytes_of_dk) {
  if (owners.empty()) return 1;
  const int64_t idle = at::get_num_threads() / static_cast<int64_t>(owners.size());
  const int64_t most = topk.numel() * topk.element_size() / std::max<int64_t>(1, bytes_of_dk);
  return std::max<int64_t>(1, std::min(idle, std::max<int64_t>(2, most)));
}

// The bytes of one partition's dK.
inline int64_t bytes_of_dk(const Tensor& k) {
  return k.size(0) * k.size(1) * k.size(2) * round_up(k.size(3), kLanes) * static_cast<int64_t>(sizeof(float));
}

// Runs the tasks of a backward pass, a row partition of a key owner each: make() gives each thread its pass(block, r,
// partition).
template <typename Make>
void each_row_partition(const std::vector<KeyOwner>& owners, int64_t partitions, bool fast, const Make& make) {
  on_all_threads(owners.size() * partitions, [&](const auto& next) {
    const FlushDenormals flush(fast);
    auto pass = make();
    for (int64_t task; (task = next()) >= 0;) {
      const KeyOwner& owner = owners[task / partitions];
      const int64_t partition = task % partitions;
      for (int64_t r = owner.first; r < owner.last; r++)
        for (size_t n = partition; n < owner.blocks->size(); n += partitions) pass((*owner.blocks)[n], r, partition);
    }
  });
}

}  // namespace streamkl::cpu

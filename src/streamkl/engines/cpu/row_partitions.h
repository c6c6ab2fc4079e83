// Row partitions of a backward pass over selected keys: each has a dK of its own, and these are added in order, so that
// the pass is deterministic. Any row may add to any key, so rows cannot take turns as in turns.h.
#pragma once

#include "head_groups.h"

namespace streamkl::cpu {

// How many partitions the rows of a head group have: enough that no thread is idle, but no more than two, or than have
// dKs that take as much memory together as the top-k indices do. Partitions with more keys than their rows selected
// would not pay.
inline int64_t partition_count(const std::vector<HeadGroup>& head_groups, const Tensor& topk, int64_t bytes_of_dk) {
  if (head_groups.empty()) return 1;
  const int64_t idle = at::get_num_threads() / static_cast<int64_t>(head_groups.size());
  const int64_t most = topk.numel() * topk.element_size() / std::max<int64_t>(1, bytes_of_dk);
  return std::max<int64_t>(1, std::min(idle, std::max<int64_t>(2, most)));
}

// The bytes of one partition's dK.
inline int64_t bytes_of_dk(const Tensor& k) {
  return k.size(0) * k.size(1) * k.size(2) * round_up(k.size(3), kLanes) * static_cast<int64_t>(sizeof(float));
}

// Runs the tasks of a backward pass, a row partition of a head group each: make() gives each thread its pass(block, r,
// partition).
template <typename Make>
void each_row_partition(const std::vector<HeadGroup>& head_groups, int64_t partitions, bool fast, const Make& make) {
  on_all_threads(head_groups.size() * partitions, [&](const auto& next) {
    const FlushDenormals flush(fast);
    auto pass = make();
    for (int64_t task; (task = next()) >= 0;) {
      const HeadGroup& head_group = head_groups[task / partitions];
      const int64_t partition = task % partitions;
      for (int64_t r = head_group.first; r < head_group.last; r++)
        for (size_t n = partition; n < head_group.blocks->size(); n += partitions) pass((*head_group.blocks)[n], r, partition);
    }
  });
}

}  // namespace streamkl::cpu

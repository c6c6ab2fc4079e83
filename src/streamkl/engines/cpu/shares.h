// How a backward sweep over rows that name their keys is dealt out so that it is deterministic: into shares, each with a dK of
// its own, which are added in order. Any row may add to any key, so that rows cannot take turns as in turns.h.
#pragma once

#include "units.h"

namespace streamkl::cpu {

// Into how many shares each unit's rows are dealt: so many that no thread is without work, but no more than two, or than have
// dKs that take as much memory together as the lists do. Shares of more keys than their rows name would not pay.
inline int64_t shares_of(const std::vector<Unit>& units, const Tensor& lists, int64_t bytes_of_dk) {
  if (units.empty()) return 1;
  const int64_t idle = at::get_num_threads() / static_cast<int64_t>(units.size());
  const int64_t most = lists.numel() * lists.element_size() / std::max<int64_t>(1, bytes_of_dk);
  return std::max<int64_t>(1, std::min(idle, std::max<int64_t>(2, most)));
}

// Of the dK of one share.
inline int64_t bytes_of_dk(const Tensor& k) {
  return k.size(0) * k.size(1) * k.size(2) * round_up(k.size(3), kLanes) * static_cast<int64_t>(sizeof(float));
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

}  // namespace streamkl::cpu

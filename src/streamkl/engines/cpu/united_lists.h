// Lists of neighbouring rows that name much the same keys, united: each key is gathered once for all of them, and each row has a
// bit for each key that says whether it is its own.
#pragma once

#include "shared_lists.h"

#include <ATen/Parallel.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>

#include <utility>
#include <vector>

namespace streamkl::cpu {

constexpr int64_t kUnitedRows = 64;      // rows whose lists are united, at most,
constexpr int64_t kUnitedProducts = 256;  // and rows of a product, which has those of all heads that read a key head
constexpr int64_t kGather = 40;          // to gather a key and its value takes as long as so many rows' products with them

// Rows that are attended together, and the keys that they do it with.
struct UnitedRows {
  SharedRows rows;
  ListedKeys listed;
  std::vector<int32_t> keys;  // those of several lists
  std::vector<uint16_t> own;  // of several lists, [rows, words()]: a bit for each key

  int64_t words() const { return (listed.count + kLanes - 1) / kLanes; }
  // The bits of a row from a key on, or null where a list is of all its rows.
  const uint16_t* own_of(int64_t row, int64_t key) const { return own.empty() ? nullptr : own.data() + row * words() + key / kLanes; }
};

// A value that is not finite would reach all rows of a product, even those with a weight of 0 for it: lists that name such a key
// stay apart. finite [B, Nk] says which keys have none.
class Uniting {
 public:
  Uniting(const std::vector<SharedRows>& shared, const SortedLists& lists, const Window& window, int64_t group, const Tensor& finite)
      : shared_(shared), lists_(lists), window_(window), group_(group), finite_(finite.const_data_ptr<bool>()), nk_(finite.size(1)),
        marks_(nk_), place_(nk_) {}

  // Unites the lists [first, last) of a sequence where that is cheaper than to attend to each by itself, else those of each half.
  void unite(int64_t first, int64_t last, std::vector<UnitedRows>& to) {
    SharedRows rows = shared_[first];
    if (last - first == 1) {
      to.push_back({rows, lists_[first], {}, {}});
      return;
    }
    rows.rows = shared_[last - 1].i0 + shared_[last - 1].rows - rows.i0;
    int64_t apart = 0;
    for (int64_t n = first; n < last; n++) {
      apart += lists_[n].count * (kGather + shared_[n].rows * group_);
      for (int64_t c = 0; c < lists_[n].count; c++) marks_.mark(lists_[n].keys[c]);
    }
    std::vector<int32_t> keys;
    marks_.take([&](int64_t key) { keys.push_back(static_cast<int32_t>(key)); });
    const int64_t count = keys.size();
    const bool* finite = finite_ + rows.seq.batch * nk_ + rows.seq.k_start;
    const bool harmless = std::all_of(keys.begin(), keys.end(), [&](int32_t key) { return finite[key]; });
    if (!harmless || count * (kGather + rows.rows * group_) >= apart) {
      const int64_t middle = (first + last) / 2;
      unite(first, middle, to);
      return unite(middle, last, to);
    }
    for (int64_t c = 0; c < count; c++) place_[keys[c]] = static_cast<int32_t>(c);
    UnitedRows united{rows, {keys.data(), count}, std::move(keys), {}};
    united.own.assign(rows.rows * united.words(), 0);
    for (int64_t n = first; n < last; n++)
      for (int64_t i = 0; i < shared_[n].rows; i++) {
        uint16_t* own = united.own.data() + (shared_[n].i0 - rows.i0 + i) * united.words();
        each_seen(n, i, [&](int32_t key) { own[place_[key] / kLanes] |= 1 << place_[key] % kLanes; });
      }
    to.push_back(std::move(united));
  }

 private:
  template <typename Visit>
  void each_seen(int64_t n, int64_t i, const Visit& visit) const {
    const int64_t begin = window_.first(shared_[n].on + i), end = window_.last(shared_[n].on + i);
    for (int64_t c = 0; c < lists_[n].count; c++)
      if (lists_[n].keys[c] >= begin && lists_[n].keys[c] < end) visit(lists_[n].keys[c]);
  }

  const std::vector<SharedRows>& shared_;
  const SortedLists& lists_;
  const Window window_;
  const int64_t group_;
  const bool* const finite_;
  const int64_t nk_;
  Marks marks_;
  std::vector<int32_t> place_;
};

// The lists of all rows, united where that is cheaper and leaves each thread some. Values are looked at as a whole, so lists that name
// fewer keys than there are stay as they are.
inline std::vector<UnitedRows> united_rows_of(
    const std::vector<SharedRows>& shared, const SortedLists& lists, const Window& window, int64_t block, int64_t group, const Tensor& v) {
  int64_t most = std::min(kUnitedRows, kUnitedProducts / group) / block;
  most = std::min<int64_t>(most, shared.size() * v.size(1) / (2 * at::get_num_threads()));
  if (lists.places() < v.size(0) * v.size(2)) most = 1;
  std::vector<std::pair<int64_t, int64_t>> runs;  // of lists of one sequence
  for (int64_t n = 0; n < static_cast<int64_t>(shared.size()); n++) {
    const bool follows = n > 0 && shared[n].i0 > 0 && runs.back().second - runs.back().first < most;
    if (follows) runs.back().second++;
    else runs.push_back({n, n + 1});
  }
  const bool some = runs.size() < shared.size();
  const Tensor finite = some ? v.amax({1, 3}).isfinite().logical_and_(v.amin({1, 3}).isfinite()) : at::empty({0, 0}, v.options().dtype(at::kBool));
  std::vector<std::vector<UnitedRows>> found(runs.size());
  on_all_threads(runs.size(), [&](const auto& next) {
    Uniting uniting(shared, lists, window, group, finite);
    for (int64_t n; (n = next()) >= 0;) uniting.unite(runs[n].first, runs[n].second, found[n]);
  });
  std::vector<UnitedRows> all;
  for (auto& of_run : found)
    for (auto& rows : of_run) all.push_back(std::move(rows));
  return all;
}

}  // namespace streamkl::cpu

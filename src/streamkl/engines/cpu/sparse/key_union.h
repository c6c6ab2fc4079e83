// The union of neighbouring queries' keys: neighbours select mostly the same keys, so each key is gathered once for all
// of them, and each row has a bit per key that says whether it selected it. Keys that few of them selected are left to
// these rows, if a pass can multiply single rows.
#pragma once

#include "sparse/shared_topk.h"

#include <ATen/Parallel.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>

#include <utility>
#include <vector>

namespace streamkl::cpu {

constexpr int64_t kUnionRows = 64;       // rows of a union, at most
constexpr int64_t kUnionProducts = 256;  // rows of a product, at most: those of all heads that read a key head
// Costs of a key and its value, in rows' products with them.
constexpr int64_t kGather = 40;  // of gathering it
constexpr int64_t kSingle = 6;   // of reading it for a single row

// Rows that attend together, and their keys.
struct UnionRows {
  QueryBlock rows;
  SortedKeys selected;
  std::vector<int32_t> keys;  // for several query blocks: their union
  std::vector<uint16_t> own;  // for several query blocks, [rows, words()]: a bit per key
  const int32_t* rest = nullptr;   // keys that are left to single rows, a row's after the other's
  std::vector<int64_t> rest_ends;  // where those of a row end; empty if there are none
  std::vector<int32_t> rest_keys;  // for several query blocks: what rest is in

  int64_t words() const { return (selected.count + kLanes - 1) / kLanes; }
  // The bits of a row from a key on, or null for a single query block, whose rows have all keys.
  const uint16_t* own_of(int64_t row, int64_t key) const { return own.empty() ? nullptr : own.data() + row * words() + key / kLanes; }
  SortedKeys rest_of(int64_t row) const {
    if (rest_ends.empty()) return {nullptr, 0};
    const int64_t begin = row == 0 ? 0 : rest_ends[row - 1];
    return {rest + begin, rest_ends[row] - begin};
  }
};

// A set of places with a byte each: unlike bits of one word, neighbours are set without waiting for each other.
class Flags {
 public:
  explicit Flags(int64_t places) : flags_(round_up(places, kLanes)) {}

  template <typename Place>
  void set(const SortedKeys& row, const Place& place) {
    uint8_t* const flags = flags_.data();
    for (int64_t c = 0; c < row.count; c++) flags[place(row.keys[c])] = 0xff;
  }
  // Visits sixteen places at a time, of at least the first `places`, with a bit for each, and clears them.
  template <typename Visit>
  void take(int64_t places, const Visit& visit) {
    for (int64_t at = 0; at < places; at += kLanes) {
      const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags_.data() + at));
      visit(at, static_cast<uint32_t>(_mm_movemask_epi8(some)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(flags_.data() + at), _mm_setzero_si128());
    }
  }

 private:
  std::vector<uint8_t> flags_;
};

// Builds unions. A value that is not finite would reach all rows of a product, even those with a weight of 0 for it, so
// query blocks that selected such a key stay apart, or it is left to them. finite [B, Nk] says which keys have finite
// values.
class KeyUnion {
 public:
  KeyUnion(const std::vector<QueryBlock>& blocks, const SortedTopk& topk, const Window& window, int64_t group, const Tensor& finite, bool single_rows)
      : blocks_(blocks), topk_(topk), window_(window), group_(group), finite_(finite.const_data_ptr<bool>()), nk_(finite.size(1)),
        single_rows_(single_rows), selected_(nk_), own_(nk_ + kLanes), place_(nk_), rows_of_(nk_) {}

  // Merges the query blocks [first, last) of a sequence if that is cheaper than attending to each by itself, else tries
  // each half.
  void merge(int64_t first, int64_t last, std::vector<UnionRows>& to) {
    if (last - first == 1) return to.push_back(by_itself(first));
    QueryBlock rows = blocks_[first];
    rows.rows = blocks_[last - 1].i0 + blocks_[last - 1].rows - rows.i0;
    int64_t apart = 0, merged_cost = 0;
    for (int64_t n = first; n < last; n++) {
      apart += topk_[n].count * (is_single(n) ? singly(1) : together(blocks_[n].rows));
      const SortedKeys row = topk_[n];
      selected_.set(row, [](int32_t key) { return key; });
      if (single_rows_)
        for (int64_t c = 0; c < row.count; c++) rows_of_[row.keys[c]] += static_cast<int32_t>(blocks_[n].rows);
    }
    const bool* finite = finite_ + rows.seq.batch * nk_ + rows.seq.k_start;
    std::vector<int32_t> keys;
    const auto nowhere = static_cast<int32_t>(round_up(nk_, kLanes));  // the place of a key that is left to single rows
    bool harmless = true;
    selected_.take(nk_, [&](int64_t at, uint32_t bits) {
      for (; bits != 0; bits &= bits - 1) {
        const int64_t key = at + __builtin_ctz(bits);
        const int64_t cost = single_rows_ ? singly(std::exchange(rows_of_[key], 0)) : 0;
        const bool left = single_rows_ && (!finite[key] || cost < together(rows.rows));
        harmless &= left || finite[key];
        merged_cost += left ? cost : together(rows.rows);
        place_[key] = left ? nowhere : static_cast<int32_t>(keys.size());
        if (!left) keys.push_back(static_cast<int32_t>(key));
      }
    });
    if (!harmless || merged_cost >= apart) {
      const int64_t middle = (first + last) / 2;
      merge(first, middle, to);
      return merge(middle, last, to);
    }
    const int64_t count = keys.size();
    UnionRows merged{rows, {keys.data(), count}, std::move(keys), {}};
    merged.own.resize(rows.rows * merged.words());
    for (int64_t n = first; n < last; n++)
      for (int64_t i = 0; i < blocks_[n].rows; i++) {
        uint16_t* own = merged.own.data() + (blocks_[n].i0 - rows.i0 + i) * merged.words();
        const SortedKeys row = seen(n, i);
        const int32_t* place = place_.data();
        own_.set(row, [place](int32_t key) { return place[key]; });
        for (int64_t c = 0; single_rows_ && c < row.count; c++)
          if (place[row.keys[c]] == nowhere) merged.rest_keys.push_back(row.keys[c]);
        own_.take(count, [&](int64_t at, uint32_t bits) { own[at / kLanes] = static_cast<uint16_t>(bits); });
        if (single_rows_) merged.rest_ends.push_back(merged.rest_keys.size());
      }
    merged.rest = merged.rest_keys.data();
    to.push_back(std::move(merged));
  }

 private:
  int64_t together(int64_t rows) const { return kGather + rows * group_; }
  int64_t singly(int64_t rows) const { return rows * (kSingle + group_); }
  bool is_single(int64_t n) const { return single_rows_ && blocks_[n].rows == 1; }

  UnionRows by_itself(int64_t n) const {
    if (is_single(n)) return {blocks_[n], {nullptr, 0}, {}, {}, topk_[n].keys, {topk_[n].count}, {}};
    return {blocks_[n], topk_[n], {}, {}};
  }

  // The keys of a query block that one of its rows sees.
  SortedKeys seen(int64_t n, int64_t i) const {
    const SortedKeys all = topk_[n];
    const auto place = [&](int64_t key) { return std::lower_bound(all.keys, all.keys + all.count, key); };
    const int32_t *first = place(window_.first(blocks_[n].on + i)), *last = place(window_.last(blocks_[n].on + i));
    return {first, std::max<int64_t>(0, last - first)};
  }

  const std::vector<QueryBlock>& blocks_;
  const SortedTopk& topk_;
  const Window window_;
  const int64_t group_;
  const bool* const finite_;
  const int64_t nk_;
  const bool single_rows_;
  Flags selected_, own_;
  std::vector<int32_t> place_, rows_of_;
};

// All query blocks, merged where that is cheaper and leaves enough work for each thread. All values are checked for
// finiteness, so there is no union where fewer keys are selected than exist, nor of keys in pages. single_rows: keys may
// be left to single rows.
inline std::vector<UnionRows> union_rows_of(
    const std::vector<QueryBlock>& blocks, const SortedTopk& topk, const Window& window, int64_t query_block, int64_t group, const Tensor& v,
    bool paged, bool single_rows) {
  int64_t most = std::min(kUnionRows, kUnionProducts / group) / query_block;
  most = std::min<int64_t>(most, blocks.size() * v.size(1) / (2 * at::get_num_threads()));
  if (paged || topk.places() < v.size(0) * v.size(2)) most = 1;
  std::vector<std::pair<int64_t, int64_t>> runs;  // of query blocks of one sequence
  for (int64_t n = 0; n < static_cast<int64_t>(blocks.size()); n++) {
    const bool follows = n > 0 && blocks[n].i0 > 0 && runs.back().second - runs.back().first < most;
    if (follows) runs.back().second++;
    else runs.push_back({n, n + 1});
  }
  const bool some = runs.size() < blocks.size();
  const Tensor finite = some ? v.amax({1, 3}).isfinite().logical_and_(v.amin({1, 3}).isfinite()) : at::empty({0, 0}, v.options().dtype(at::kBool));
  std::vector<std::vector<UnionRows>> found(runs.size());
  on_all_threads(runs.size(), [&](const auto& next) {
    KeyUnion key_union(blocks, topk, window, group, finite, single_rows);
    for (int64_t n; (n = next()) >= 0;) key_union.merge(runs[n].first, runs[n].second, found[n]);
  });
  std::vector<UnionRows> all;
  for (auto& of_run : found)
    for (auto& rows : of_run) all.push_back(std::move(rows));
  return all;
}

}  // namespace streamkl::cpu

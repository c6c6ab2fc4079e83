// A set of keys as a bit mask, and the rule for the selected keys of a row.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

namespace streamkl::cpu {

// Keys are marked in any order, and visited by rising key.
class Marks {
 public:
  explicit Marks(int64_t keys) : words_((keys + 63) / 64) {}

  // Marks a key; returns whether it was marked already.
  bool mark(int64_t key) {
    uint64_t& word = words_[key / 64];
    const uint64_t bit = uint64_t(1) << key % 64;
    const bool before = word & bit;
    word |= bit;
    return before;
  }
  // Unmarks a key and the others of its word.
  void forget(int64_t key) { words_[key / 64] = 0; }
  // Visits the marked keys, and unmarks them.
  template <typename Visit>
  void take(const Visit& visit) {
    for (size_t w = 0; w < words_.size(); w++)
      for (; words_[w] != 0; words_[w] &= words_[w] - 1) visit(static_cast<int64_t>(w) * 64 + __builtin_ctzll(words_[w]));
  }

 private:
  std::vector<uint64_t> words_;
};

// The selected keys of a row: `columns` of them, `stride` apart.
template <typename T>
struct SelectedRow {
  const T* keys;
  int64_t columns, stride;
  int64_t operator[](int64_t c) const { return keys[c * stride]; }
};

inline bool is_key(int64_t key, int64_t nk) { return key >= 0 && key < nk; }

// Marks the keys of a row; returns whether it keeps the rule of value_checks.check_topk: keys from 0 to nk - 1, or -1
// for none, and no key twice.
template <typename T>
bool mark_row(const SelectedRow<T>& row, int64_t nk, Marks& marks) {
  bool good = true;
  for (int64_t c = 0; c < row.columns; c++) {
    const int64_t key = row[c];
    if (is_key(key, nk)) good &= !marks.mark(key);
    else good &= key == -1;
  }
  return good;
}

// The first of the rows that were noted, by any thread.
class FirstRow {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  void note(int64_t row) {
    int64_t before = row_.load(std::memory_order_relaxed);
    while (row < before && !row_.compare_exchange_weak(before, row, std::memory_order_relaxed)) {}
  }
  // Read once all threads are done.
  int64_t row() const { return row_.load(); }
  bool none() const { return row() == kNone; }

 private:
  std::atomic<int64_t> row_{kNone};
};

}  // namespace streamkl::cpu

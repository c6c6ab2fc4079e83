// The top-k of query blocks, sorted by key.
#pragma once

#include "gathered/marks.h"
#include "passes/pass.h"

#include <algorithm>
#include <vector>

namespace streamkl::cpu {

// Consecutive rows [i0, i0 + rows) of a sequence that share their top-k; row i0 lies on key `on`. Its top-k is row
// `index` of the indices.
struct QueryBlock {
  Sequence seq;
  int64_t index, i0, rows, on;
  int64_t first_row() const { return seq.q_start + i0; }
};

// table [sequences, 7]: the fields of a Sequence, and its first query block.
inline std::vector<QueryBlock> query_blocks_of(const Tensor& table, int64_t query_block) {
  const auto sequences = table.contiguous();
  const int64_t* p = sequences.const_data_ptr<int64_t>();
  std::vector<QueryBlock> blocks;
  for (int64_t n = 0; n < sequences.size(0); n++, p += 7) {
    const Sequence seq{p[0], p[1], p[2], p[3], p[4], p[5]};
    for (int64_t i0 = 0; i0 < seq.q_len; i0 += query_block)
      blocks.push_back({seq, p[6] + i0 / query_block, i0, std::min(query_block, seq.q_len - i0), i0 + seq.diagonal});
  }
  return blocks;
}

// The selected keys that some row of a query block sees, by rising key, counted from the first of the sequence.
struct SortedKeys {
  const int32_t* keys;
  int64_t count;
};

// The rows of indices [B, query_blocks, K], one per query block: where they lie if their keys rise, else sorted copies.
// So nobody may write to the indices as long as this is read.
class SortedTopk {
 public:
  SortedTopk(const Tensor& indices, const std::vector<QueryBlock>& blocks, const Window& window, int64_t nk)
      : columns_(indices.size(2)), sorted_(std::max<int64_t>(1, blocks.size() * columns_)), rows_(blocks.size()) {
    const int32_t* from = indices.const_data_ptr<int32_t>();
    const auto row_of = [&](int64_t n) -> SelectedRow<int32_t> {
      return {from + (blocks[n].seq.batch * indices.size(1) + blocks[n].index) * columns_, columns_, 1};
    };
    FirstRow wrong;
    on_all_threads(blocks.size(), [&](const auto& next) {
      Marks marks(nk);
      for (int64_t n; (n = next()) >= 0;) {
        const auto& rows = blocks[n];
        const int64_t low = std::max<int64_t>(0, window.first(rows.on));
        const int64_t high = std::min(rows.seq.k_len, window.last(rows.on + rows.rows - 1));
        const SelectedRow<int32_t> row = row_of(n);
        if (const int64_t count = rising(row.keys, columns_, nk); count >= 0) {
          const int32_t *first = std::lower_bound(row.keys, row.keys + count, low), *last = std::lower_bound(first, row.keys + count, high);
          rows_[n] = {first, last - first};
          continue;
        }
        if (!mark_row(row, nk, marks)) wrong.note(n);
        int32_t* to = sorted_.data() + n * columns_;
        int64_t count = 0;
        marks.take([&](int64_t key) {
          if (key >= low && key < high) to[count++] = static_cast<int32_t>(key);
        });
        rows_[n] = {to, count};
      }
    });
    if (!wrong.none()) refuse(row_of(wrong.row()), nk);
  }

  SortedKeys operator[](int64_t n) const { return rows_[n]; }
  // How many keys they can hold.
  int64_t places() const { return static_cast<int64_t>(rows_.size()) * columns_; }

 private:
  // How many keys a row has if they rise and -1 follows them, or -1: such a row is sorted, and none is there twice.
  static int64_t rising(const int32_t* keys, int64_t columns, int64_t nk) {
    int64_t count = columns;
    while (count > 0 && keys[count - 1] == -1) count--;
    if (count > 0 && (keys[0] < 0 || !is_key(keys[count - 1], nk))) return -1;
    bool rise = true;
    for (int64_t c = 1; c < count; c++) rise &= keys[c - 1] < keys[c];
    return rise ? count : -1;
  }

  // Raises with the messages of value_checks.check_topk.
  static void refuse(const SelectedRow<int32_t>& row, int64_t nk) {
    Marks marks(nk);
    int64_t twice = -1;
    for (int64_t c = 0; c < row.columns; c++) {
      TORCH_CHECK_VALUE(
          row[c] == -1 || is_key(row[c], nk), "indices must be keys from 0 to ", nk - 1, ", or -1 for none: got ", row[c]);
      if (row[c] >= 0 && marks.mark(row[c]) && twice < 0) twice = row[c];
    }
    TORCH_CHECK_VALUE(twice < 0, "indices must not have a key twice in a row: got ", twice);
  }

  const int64_t columns_;
  Buffer<int32_t> sorted_;
  std::vector<SortedKeys> rows_;
};

}  // namespace streamkl::cpu

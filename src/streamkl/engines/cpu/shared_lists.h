// Lists of keys that blocks of rows share, by rising key, and which of them each row sees.
#pragma once

#include "marks.h"
#include "sweep.h"

#include <vector>

namespace streamkl::cpu {

// The rows that share a list, counted from the first of their sequence: [i0, i0 + rows), on key `on` and the following.
struct SharedRows {
  Sequence seq;
  int64_t list, i0, rows, on;
  int64_t first_row() const { return seq.q_start + i0; }
};

// table [sequences, 7]: the fields of a Sequence, and its first list.
inline std::vector<SharedRows> shared_rows_of(const Tensor& table, int64_t block) {
  const auto sequences = table.contiguous();
  const int64_t* p = sequences.const_data_ptr<int64_t>();
  std::vector<SharedRows> shared;
  for (int64_t n = 0; n < sequences.size(0); n++, p += 7) {
    const Sequence seq{p[0], p[1], p[2], p[3], p[4], p[5]};
    for (int64_t i0 = 0; i0 < seq.q_len; i0 += block)
      shared.push_back({seq, p[6] + i0 / block, i0, std::min(block, seq.q_len - i0), i0 + seq.diagonal});
  }
  return shared;
}

// What a list names: the keys that some of its rows see, rising, counted from the sequence's first.
struct ListedKeys {
  const int32_t* keys;
  int64_t count;
};

// Sorted copies of indices [B, lists, K], one for each of `shared`.
class SortedLists {
 public:
  SortedLists(const Tensor& indices, const std::vector<SharedRows>& shared, const Window& window, int64_t nk)
      : columns_(indices.size(2)), sorted_(std::max<int64_t>(1, shared.size() * columns_)), counts_(shared.size()) {
    const int32_t* from = indices.const_data_ptr<int32_t>();
    const auto row_of = [&](int64_t n) -> NamedRow<int32_t> {
      return {from + (shared[n].seq.batch * indices.size(1) + shared[n].list) * columns_, columns_, 1};
    };
    FirstRow wrong;
    on_all_threads(shared.size(), [&](const auto& next) {
      Marks marks(nk);
      for (int64_t n; (n = next()) >= 0;) {
        const auto& rows = shared[n];
        int32_t* to = sorted_.data() + n * columns_;
        const int64_t low = std::max<int64_t>(0, window.first(rows.on));
        const int64_t high = std::min(rows.seq.k_len, window.last(rows.on + rows.rows - 1));
        if (!mark_row(row_of(n), nk, marks)) wrong.note(n);
        int64_t count = 0;
        marks.take([&](int64_t key) {
          if (key >= low && key < high) to[count++] = static_cast<int32_t>(key);
        });
        counts_[n] = count;
      }
    });
    if (!wrong.none()) refuse(row_of(wrong.row()), nk);
  }

  ListedKeys operator[](int64_t n) const { return {sorted_.data() + n * columns_, counts_[n]}; }
  // How many keys they could name.
  int64_t places() const { return static_cast<int64_t>(counts_.size()) * columns_; }

 private:
  // In the words of validation.check_topk.
  static void refuse(const NamedRow<int32_t>& row, int64_t nk) {
    Marks marks(nk);
    int64_t twice = -1;
    for (int64_t c = 0; c < row.columns; c++) {
      TORCH_CHECK_VALUE(
          row[c] == -1 || is_key(row[c], nk), "indices must name keys from 0 to ", nk - 1, ", or -1 for none: got ", row[c]);
      if (row[c] >= 0 && marks.mark(row[c]) && twice < 0) twice = row[c];
    }
    TORCH_CHECK_VALUE(twice < 0, "indices must not name a key twice in a row: got ", twice);
  }

  const int64_t columns_;
  Buffer<int32_t> sorted_;
  std::vector<int64_t> counts_;
};

}  // namespace streamkl::cpu

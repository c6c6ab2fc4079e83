// What all passes have in common: tiles, row vectors, and how tasks are distributed over threads.
#pragma once

#include "tile/rows.h"
#include "tile/threads.h"
#include "tile/tile.h"

#include <ATen/ops/full.h>

#include <memory>
#include <vector>

#include <xmmintrin.h>

namespace streamkl::cpu {

using at::Tensor;

// A row of the table: the fields of problem.py's Sequence, in their order.
struct Sequence {
  int64_t batch, q_start, q_len, k_start, k_len, diagonal;
};

// A block of live rows of a sequence, and the keys they see together.
struct Block {
  Sequence seq;
  int64_t i0, i1, j0, j1;
  int64_t first_row() const { return seq.q_start + i0; }
  int64_t rows() const { return i1 - i0; }
};

inline std::vector<Block> blocks_of(const Sequence& seq, const Window& window, int64_t rows) {
  std::vector<Block> blocks;
  if (seq.k_len == 0) return blocks;
  const int64_t first = window.right < 0 ? 0 : std::max<int64_t>(0, window.key_span - 1 - seq.diagonal - window.right);
  const int64_t last = window.left < 0 ? seq.q_len : std::min(seq.q_len, seq.k_len - seq.diagonal + window.left);
  for (int64_t i0 = first; i0 < last; i0 += rows) {
    const int64_t i1 = std::min(i0 + rows, last);
    const int64_t j0 = std::max<int64_t>(0, window.first(i0 + seq.diagonal));
    const int64_t j1 = std::min(seq.k_len, window.last(i1 - 1 + seq.diagonal));
    blocks.push_back({seq, i0, i1, j0, j1});
  }
  return blocks;
}

inline std::vector<Sequence> sequences_of(const Tensor& table) {
  const auto rows = table.contiguous();
  const int64_t* p = rows.const_data_ptr<int64_t>();
  std::vector<Sequence> sequences(rows.size(0));
  for (size_t n = 0; n < sequences.size(); n++, p += 6) sequences[n] = {p[0], p[1], p[2], p[3], p[4], p[5]};
  return sequences;
}

// How many rows are taken at once: fewer where they have many heads, so that they fit the caches.
inline int64_t rows_at_once(int64_t bytes_of_row) {
  const int64_t fit = (int64_t(2) << 20) / bytes_of_row;
  return std::clamp(fit / kLanes * kLanes, kLanes, kBlockQ);
}

// How many heads of `rows` rows each lie side by side where `room` rows fit: a divisor of all, and a multiple of `step`,
// which is one itself.
inline int64_t heads_that_fit(int64_t rows, int64_t room, int64_t heads, int64_t step = 1) {
  int64_t count = std::clamp<int64_t>(room / rows, step, heads);
  while (heads % count != 0 || count % step != 0) count--;
  return count;
}

static_assert(kBlockK < kLate, "a tile whose weights are at most 1 is not late");

// The keys of a tile, counted from the first of their sequence. Its rows are those of a block, or a part of them.
struct KeyTile {
  int64_t j0, j1;
  int64_t key(const Block& block) const { return block.seq.k_start + j0; }
  int64_t keys() const { return j1 - j0; }
};

template <typename Visit>
void each_tile(const Block& block, const Visit& visit) {
  for (int64_t j0 = block.j0; j0 < block.j1; j0 += kBlockK) visit(KeyTile{j0, std::min(j0 + kBlockK, block.j1)});
}

// Visits the strips of a block that see keys of a tile, and the part of the tile that holds them. Strips that see none
// are visited with an empty part if they are wanted.
template <typename Visit>
void each_part(const Block& block, const KeyTile& tile, const Window& window, bool want_empty, const Visit& visit) {
  for (int64_t i = 0; i < block.rows(); i += kStrip) {
    const int64_t end = std::min(i + kStrip, block.rows()), diagonal = block.i0 + block.seq.diagonal;
    const int64_t first = std::max(window.first(i + diagonal), tile.j0) - tile.j0;
    const int64_t last = std::min(window.last(end - 1 + diagonal), tile.j1) - tile.j0;
    if (first < last) {
      visit(Part{i, end, first / kStrip * kStrip, std::min(round_up(last, kStrip), round_up(tile.keys(), kLanes))});
    } else if (want_empty) {
      visit(Part{i, end, 0, 0});
    }
  }
}

// Visits a part sixteen rows at a time: visit(i, span) with the first row's place in the block.
template <typename Visit>
STREAMKL_INLINE void each_group(const Block& block, const KeyTile& tile, const Window& window, const Part& part, const Visit& visit) {
  for (int64_t i = part.i0; i < part.i1; i += kLanes) {
    const int64_t j1 = std::min(tile.j0 + part.j1, tile.j1);
    visit(i, window.span(block.i0 + i + block.seq.diagonal, tile.j0 + part.j0, j1, tile.j0));
  }
}

// Calls work with the precision and the relus of the sides, as types.
template <typename Work>
auto dispatch(bool fast, bool relu_a, bool relu_b, const Work& work) {
  const auto with = [&](auto precision) {
    const auto with_a = [&](auto a) { return relu_b ? work(precision, a, std::true_type{}) : work(precision, a, std::false_type{}); };
    return relu_a ? with_a(std::true_type{}) : with_a(std::false_type{});
  };
  if (fast) return with(std::integral_constant<Precision, Precision::kFast>{});
  return with(std::integral_constant<Precision, Precision::kExact>{});
}

inline bool fast(const Tensor& a, const Tensor& b, double a_scale, double b_scale) {
  return a.scalar_type() != at::kFloat && b.scalar_type() != at::kFloat && a_scale > 0.0 && b_scale > 0.0;
}

inline Precision precision_of(bool fast) { return fast ? Precision::kFast : Precision::kExact; }

// Weights far below the largest one would otherwise be denormal, and a denormal costs a hundred times as much.
class FlushDenormals {
 public:
  explicit FlushDenormals(bool wanted) : saved_(_mm_getcsr()) {
    if (wanted) _mm_setcsr(saved_ | 0x8040);
  }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
};

// Row vectors [B, heads, Nq], contiguous.
struct Rows {
  float* data;
  int64_t heads, nq;
  explicit Rows(const Tensor& x) : data(x.data_ptr<float>()), heads(x.size(1)), nq(x.size(2)) {}
  float* at(const Block& block, int64_t head) const {
    return data + (block.seq.batch * heads + head) * nq + block.first_row();
  }
};

inline Tensor rows_like(const Tensor& q, int64_t heads, float value) {
  return at::full({q.size(0), heads, q.size(2)}, value, q.options().dtype(at::kFloat));
}

// A block's part of a row vector, in whole lanes: rows after the last one have 0.
struct Row {
  alignas(64) float data[kBlockQ];
  void take(const float* from, int64_t rows, float factor = 1.0f) {
    for (int64_t i = 0; i < rows; i++) data[i] = from[i] * factor;
    std::fill(data + rows, data + round_up(rows, kLanes), 0.0f);
  }
  Lanes operator[](int64_t i) const { return load(data + i); }
};

// Row max and ln of the row sum of a block's rows: ln p = (logit - m) - ln_l.
struct BlockStats {
  Row m, ln_l;
  void take(const Block& block, int64_t head, const Rows& from_m, const Rows& from_ln_l) {
    m.take(from_m.at(block, head), block.rows());
    ln_l.take(from_ln_l.at(block, head), block.rows());
  }
};

// Runs the tasks of a forward pass, a block of rows and a head each: make() gives each thread its pass(block, head).
template <typename Make>
void each_block(const Tensor& table, const Window& window, int64_t rows, int64_t heads, bool fast, const Make& make) {
  std::vector<Block> blocks;
  for (const auto& seq : sequences_of(table))
    for (const auto& block : blocks_of(seq, window, rows)) blocks.push_back(block);
  const int64_t count = blocks.size();
  on_all_threads(count * heads, [&](const auto& next) {
    const FlushDenormals flush(fast);
    auto pass = make();
    // The last rows of a causal problem see the most keys, so they come first.
    for (int64_t task; (task = next()) >= 0;) pass(blocks[count - 1 - task % count], task / count);
  });
}

}  // namespace streamkl::cpu

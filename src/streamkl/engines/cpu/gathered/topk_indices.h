// The selected keys of rows. They lie along the lanes: the keys of one row are distributed over sixteen lanes.
#pragma once

#include "passes/pass.h"

#include <vector>

namespace streamkl::cpu {

constexpr int64_t kSelected = 256;             // selected keys of a row that are processed at once
constexpr int64_t kSelectedOfBlock = 1 << 15;  // selected keys of a block of rows, approximately

// topk [B, topk_heads, Nq, K], of int32 or int64 and any strides: one top-k head per run of consecutive heads.
class TopkIndices {
 public:
  explicit TopkIndices(const Tensor& topk)
      : columns(topk.size(3)), topk_(topk), wide_(topk.scalar_type() == at::kLong) {}

  // The rows of a block: many, so that the keys they have in common are read once, but no more than fit the cache.
  int64_t rows_at_once() const { return std::clamp<int64_t>(kSelectedOfBlock / std::max<int64_t>(columns, 1), 1, 64); }
  // How many heads read one top-k head, and the top-k head of a head.
  int64_t heads_per_topk_head(int64_t heads) const { return heads / topk_.size(1); }
  int64_t topk_head(int64_t head, int64_t heads) const { return head / heads_per_topk_head(heads); }

  // Writes the selected keys of row i of a block that it may see, counted from the first of its sequence; returns their
  // number.
  int64_t read(const Block& block, int64_t i, int64_t topk_head, const Window& window, int64_t* to) const {
    return wide_ ? read_as<int64_t>(block, i, topk_head, window, to) : read_as<int32_t>(block, i, topk_head, window, to);
  }

  const int64_t columns;

 private:
  template <typename T>
  int64_t read_as(const Block& block, int64_t i, int64_t topk_head, const Window& window, int64_t* to) const {
    const int64_t on = block.i0 + i + block.seq.diagonal, stride = topk_.stride(3);
    const int64_t first = std::max<int64_t>(0, window.first(on)), last = std::min(block.seq.k_len, window.last(on));
    const T* from = topk_.const_data_ptr<T>() + block.seq.batch * topk_.stride(0) + topk_head * topk_.stride(1) +
                    (block.first_row() + i) * topk_.stride(2);
    int64_t count = 0;
    for (int64_t c = 0; c < columns; c++) {
      const int64_t key = from[c * stride];
      to[count] = key;
      count += key >= first && key < last;
    }
    return count;
  }

  const Tensor topk_;
  const bool wide_;
};

// The selected keys that the rows of a block may see. It belongs to one thread.
class SelectedKeys {
 public:
  SelectedKeys(const TopkIndices& topk, const Window& window)
      : topk_(topk), window_(window), keys_(topk.rows_at_once() * stride()), counts_(topk.rows_at_once()) {}

  // Rows of weight 0 are treated as dead.
  void take(const Block& block, int64_t topk_head, const float* weights = nullptr) {
    for (int64_t i = 0; i < block.rows(); i++)
      counts_[i] = weights && weights[i] == 0.0f ? 0 : topk_.read(block, i, topk_head, window_, keys_.data() + i * stride());
  }
  const int64_t* of(int64_t i) const { return keys_.data() + i * stride(); }
  int64_t count(int64_t i) const { return counts_[i]; }
  // How far apart the keys of two rows are, and the values kept per key.
  int64_t stride() const { return round_up(topk_.columns, kLanes); }

 private:
  const TopkIndices& topk_;
  const Window window_;
  Buffer<int64_t> keys_;
  std::vector<int64_t> counts_;
};

// Visits a row's keys, at most kSelected at a time: visit(first, keys).
template <typename Visit>
STREAMKL_INLINE void each_piece(int64_t count, const Visit& visit) {
  for (int64_t j = 0; j < count; j += kSelected) visit(j, std::min(kSelected, count - j));
}

// Key j of a row lies in lane j % 16 of vector j / 16. The span says how many vectors each lane sees.
inline Span dealt(int64_t keys) {
  Span span{0, 0, keys / kLanes, (keys + kLanes - 1) / kLanes, {}, {}};
  if (span.full_end < span.end) span.last = (static_cast<int32_t>(keys) - iota() + int32_t(kLanes - 1)) / int32_t(kLanes);
  return span;
}

// The state of a row, in every lane, from those of the sixteen lanes that its keys were distributed over: the merge of
// state.py.
template <Precision precision>
LogSumExp merged_lse(const LogSumExp& lanes, double scale) {
  const Units<precision, false> units(scale);
  const Lanes m = splat(largest(lanes.m));
  return {m, splat(sum(lanes.l * units.shrink(lanes.m, m)))};
}

inline PairedState merged_pair(const PairedState& lanes, double scale_a, double scale_b) {
  const Units<Precision::kExact, false> units_a(scale_a), units_b(scale_b);
  const Lanes m_a = splat(largest(lanes.m_a)), m_b = splat(largest(lanes.m_b));
  const Lanes alpha = units_a.shrink(lanes.m_a, m_a), beta = units_b.shrink(lanes.m_b, m_b);
  const Lanes moved = units_a.difference(lanes.m_a, m_a) - units_b.difference(lanes.m_b, m_b);
  const Lanes acc = select(lanes.l_a == 0.0f, lanes.acc, alpha * (lanes.acc + lanes.l_a * moved));
  return {m_a, splat(sum(alpha * lanes.l_a)), m_b, splat(sum(beta * lanes.l_b)), splat(sum(acc))};
}

template <Precision precision>
MixtureState merged_mixture(const MixtureState& lanes) {
  const Lanes m = splat(largest(lanes.m_b));
  const Lanes beta = select(lanes.m_b == m, splat(1.0f), select(lanes.m_b == -kInf, Lanes{}, exponential<precision>(lanes.m_b - m)));
  const Lanes acc = select(lanes.s == 0.0f, lanes.acc, lanes.acc + lanes.s * (m - lanes.m_b));
  return {m, splat(sum(beta * lanes.l_b)), splat(sum(lanes.s)), splat(sum(acc))};
}

}  // namespace streamkl::cpu

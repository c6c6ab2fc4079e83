// The keys that rows name, and what follows from their lying along the lanes: one row's keys are dealt out to sixteen.
#pragma once

#include "sweep.h"

#include <vector>

namespace streamkl::cpu {

constexpr int64_t kListed = 256;      // named keys of a row that are worked on at once
constexpr int64_t kNamed = 1 << 15;   // named keys of the rows that are taken together, about

// lists [B, lists, Nq, K], of int32 or int64 and any strides: there is one for each run of consecutive heads.
class Lists {
 public:
  explicit Lists(const Tensor& lists)
      : columns(lists.size(3)), lists_(lists), wide_(lists.scalar_type() == at::kLong) {}

  // How many rows are taken together: many, so that the keys they have in common are read once, but no more than fit the cache.
  int64_t rows_at_once() const { return std::clamp<int64_t>(kNamed / std::max<int64_t>(columns, 1), 1, 64); }
  // How many of the heads share a list, and which list is that of a head.
  int64_t heads_of_list(int64_t heads) const { return heads / lists_.size(1); }
  int64_t list_of(int64_t head, int64_t heads) const { return head / heads_of_list(heads); }

  // Writes the keys that row i of a block names and may see, counted from its sequence's first; returns how many they are.
  int64_t read(const Block& block, int64_t i, int64_t list, const Window& window, int64_t* to) const {
    return wide_ ? read_as<int64_t>(block, i, list, window, to) : read_as<int32_t>(block, i, list, window, to);
  }

  const int64_t columns;

 private:
  template <typename T>
  int64_t read_as(const Block& block, int64_t i, int64_t list, const Window& window, int64_t* to) const {
    const int64_t on = block.i0 + i + block.seq.diagonal, stride = lists_.stride(3);
    const int64_t first = std::max<int64_t>(0, window.first(on)), last = std::min(block.seq.k_len, window.last(on));
    const T* from = lists_.const_data_ptr<T>() + block.seq.batch * lists_.stride(0) + list * lists_.stride(1) +
                    (block.first_row() + i) * lists_.stride(2);
    int64_t count = 0;
    for (int64_t c = 0; c < columns; c++) {
      const int64_t key = from[c * stride];
      to[count] = key;
      count += key >= first && key < last;
    }
    return count;
  }

  const Tensor lists_;
  const bool wide_;
};

// The keys that the rows of a block may see, of those that they name. It belongs to one thread.
class NamedKeys {
 public:
  NamedKeys(const Lists& lists, const Window& window)
      : lists_(lists), window_(window), keys_(lists.rows_at_once() * stride()), counts_(lists.rows_at_once()) {}

  // Rows whose weight is 0 are taken to see none.
  void take(const Block& block, int64_t list, const float* weights = nullptr) {
    for (int64_t i = 0; i < block.rows(); i++)
      counts_[i] = weights && weights[i] == 0.0f ? 0 : lists_.read(block, i, list, window_, keys_.data() + i * stride());
  }
  const int64_t* of(int64_t i) const { return keys_.data() + i * stride(); }
  int64_t count(int64_t i) const { return counts_[i]; }
  // How far apart the keys of two rows are, and what is kept for each of them.
  int64_t stride() const { return round_up(lists_.columns, kLanes); }

 private:
  const Lists& lists_;
  const Window window_;
  Buffer<int64_t> keys_;
  std::vector<int64_t> counts_;
};

// Visits a row's keys so many at a time: visit(first, keys).
template <typename Visit>
STREAMKL_INLINE void each_piece(int64_t count, const Visit& visit) {
  for (int64_t j = 0; j < count; j += kListed) visit(j, std::min(kListed, count - j));
}

// Key j of a row lies in lane j % 16 of vector j / 16: of so many keys, the lanes see as many as the span says.
inline Span dealt(int64_t keys) {
  Span span{0, 0, keys / kLanes, (keys + kLanes - 1) / kLanes, {}, {}};
  if (span.full_end < span.end) span.last = (static_cast<int32_t>(keys) - iota() + int32_t(kLanes - 1)) / int32_t(kLanes);
  return span;
}

// The state of a row, in every lane, from those of the sixteen lanes that its keys were dealt out to: the merge of state.py.
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
  const Lanes acc = lanes.l_a == 0.0f ? lanes.acc : alpha * (lanes.acc + lanes.l_a * moved);
  return {m_a, splat(sum(alpha * lanes.l_a)), m_b, splat(sum(beta * lanes.l_b)), splat(sum(acc))};
}

template <Precision precision>
MixtureState merged_mixture(const MixtureState& lanes) {
  const Lanes m = splat(largest(lanes.m_b));
  const Lanes beta = lanes.m_b == m ? splat(1.0f) : lanes.m_b == -kInf ? Lanes{} : exponential<precision>(lanes.m_b - m);
  const Lanes acc = lanes.s == 0.0f ? lanes.acc : lanes.acc + lanes.s * (m - lanes.m_b);
  return {m, splat(sum(beta * lanes.l_b)), splat(sum(lanes.s)), splat(sum(acc))};
}

}  // namespace streamkl::cpu

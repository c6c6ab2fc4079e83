// Rows of q and k as operands of products: copied, transposed, or interleaved in pairs.
#pragma once

#include "tile/lanes.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace streamkl::cpu {

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// How far apart the rows of a right operand are, for a width in whole lanes. A power of two apart, they would share too
// few cache sets.
inline int64_t right_stride(int64_t width) {
  const int64_t stride = width + kLanes;
  return (stride & (stride - 1)) != 0 ? stride : stride + kLanes;
}

struct Strides {
  int64_t batch, head, token, dim;
  explicit Strides(const at::Tensor& x) : batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)), dim(x.stride(3)) {}
};

// T is the dtype of the tensors, P that of the products: bfloat16 where the CPU has such products, float elsewhere.
template <typename T, typename P>
struct Packing {
  static constexpr bool kVnni = !std::is_same_v<P, float>;  // B operands in pairs of k
  static constexpr int64_t kPair = kVnni ? 2 : 1;           // elements of a word
  using Bits = std::conditional_t<kVnni, uint16_t, uint32_t>;
  using Vector = std::conditional_t<kVnni, Shorts, Words>;  // sixteen elements

  const int64_t dim, padded_dim, inner, width;
  explicit Packing(int64_t dim)
      : dim(dim), padded_dim(round_up(dim, kLanes)), inner(round_up(dim, kPair)), width(round_up(dim, kLanes * kPair)) {}

  // How far apart the rows of pairs() are.
  int64_t pairs_stride() const { return right_stride(padded_dim); }

  // One row, and zeros after it up to the width.
  STREAMKL_INLINE void copy_row(const T* from, int64_t stride, P* to) const {
    int64_t c = 0;
    if (stride == 1) {
      if constexpr (std::is_same_v<T, P>) {
        for (; c + kLanes * kPair <= dim; c += kLanes * kPair) store(to + c, load<Words>(from + c));
        for (; c + kLanes <= dim; c += kLanes) store(to + c, load<Vector>(from + c));
      } else {
        for (; c + kLanes <= dim; c += kLanes) store(to + c, widened<T>(load<Shorts>(from + c)));
      }
    }
    for (; c < dim; c++) to[c] = static_cast<P>(from[c * stride]);
    std::fill(to + dim, to + width, P(0.0f));
  }

  // Rows beside each other, width apart, and zeros after the last one and after the width.
  void copy(const T* from, int64_t row_stride, int64_t stride, int64_t rows, int64_t padded, P* to) const {
    for (int64_t i = 0; i < rows; i++, from += row_stride, to += width) copy_row(from, stride, to);
    std::fill_n(to, (padded - rows) * width, P(0.0f));
  }

  // to[word, i] = from[i, word], for all words of the width.
  void transpose(const P* from, int64_t stride, int64_t rows, P* to, int64_t to_stride) const {
    for (int64_t i = 0; i < rows; i += kLanes)
      for (int64_t c = 0; c < width; c += kLanes * kPair)
        transpose_words(from + i * stride + c, stride * sizeof(P), to + c * to_stride + i * kPair, to_stride * 4);
  }

  // Copied rows as a right operand; values that are not finite become 0. A row has room up to the stride.
  void pairs(const P* from, int64_t rows, P* to) const {
    for (int64_t i = 0; i < rows; i += kPair)
      for (int64_t c = 0; c < padded_dim; c += kLanes * kPair) {
        const P* at = from + i * width + c;
        P* pair = to + i * pairs_stride() + c * kPair;
        if constexpr (kVnni) store_paired(pair, finite(load<Pairs>(at)), finite(load<Pairs>(at + width)));
        else store(pair, finite(load<Words>(at)));
      }
  }

  // A copied row as padded_dim floats; values that are not finite become 0.
  void floats(const P* from, float* to) const {
    for (int64_t c = 0; c < padded_dim; c += kLanes) {
      if constexpr (kVnni) store(to + c, widened<P>(finite(load<Shorts>(from + c))));
      else store(to + c, finite(load<Words>(from + c)));
    }
  }

  // Values that are not finite would turn masked pairs of a gradient's product into nan. Where they count, dx is nan
  // already.
  template <typename V>
  static V finite(V x) {
    constexpr Bits exponent = kVnni ? Bits(0x7f80) : Bits(0x7f800000u);
    return select((x & exponent) == exponent, V{}, x);
  }
};

}  // namespace streamkl::cpu

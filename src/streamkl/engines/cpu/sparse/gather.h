// Selected keys and values, gathered and packed for brgemm a tile at a time.
#pragma once

#include "tile/tile.h"

namespace streamkl::cpu {

// T is the tensor's dtype, P what products are made of, as in tile.cpp.
template <typename T, typename P>
class Gathered {
 public:
  static constexpr bool kVnni = !std::is_same_v<P, float>;
  static constexpr int64_t kPair = kVnni ? 2 : 1;

  explicit Gathered(const at::Tensor& x)
      : dim(x.size(3)), width(round_up(dim, kLanes * kPair)), data_(x.const_data_ptr<T>()), strides_(x),
        direct_(std::is_same_v<T, P> && strides_.dim == 1 && dim == width), zeros_(width), staged_(kLanes * width) {
    std::fill_n(zeros_.data(), width, P(0.0f));
  }

  void take_head(int64_t batch, int64_t head, int64_t first_token) {
    from_ = data_ + batch * strides_.batch + head * strides_.head + first_token * strides_.token;
  }

  void fetch_token(int64_t token) const { fetch(from_ + token * strides_.token, dim * sizeof(T)); }

  // to[word of the width, j] of the tokens, `stride` words apart; zeros from count up to padded, a multiple of kLanes.
  void columns(const int32_t* tokens, int64_t count, int64_t padded, P* to, int64_t stride) {
    const P* rows[kLanes];
    for (int64_t j = 0; j < padded; j += kLanes) {
      for (int64_t l = 0; l < kLanes; l++) rows[l] = row(tokens, j + l, count, l);
      for (int64_t c = 0; c < width; c += kLanes * kPair)
        transpose_words([&](int r) { return rows[r] + c; }, to + c * stride + j * kPair, stride * 4);
    }
  }

  // to[j / 2, column] of pairs of tokens for bfloat16, to[j, column] for floats; `stride` columns apart.
  void rows(const int32_t* tokens, int64_t count, int64_t padded, P* to, int64_t stride) {
    for (int64_t j = 0; j < padded; j += kPair) {
      const P* even = row(tokens, j, count, 0);
      if constexpr (kVnni) {
        const P* odd = row(tokens, j + 1, count, 1);
        for (int64_t c = 0; c < width; c += kLanes * 2) store_paired(to + j * stride + c * 2, load<Pairs>(even + c), load<Pairs>(odd + c));
      } else {
        std::copy_n(even, width, to + j * stride);
      }
    }
  }

  const int64_t dim, width;

 private:
  const P* row(const int32_t* tokens, int64_t j, int64_t count, int64_t place) {
    if (j >= count) return zeros_.data();
    const T* from = from_ + tokens[j] * strides_.token;
    if constexpr (std::is_same_v<T, P>) {
      if (direct_) return from;
    }
    P* to = staged_.data() + place * width;
    Packing<T, P>(dim).copy_row(from, strides_.dim, to);
    return to;
  }

  const T* const data_;
  const Strides strides_;
  const bool direct_;
  const T* from_ = nullptr;
  Buffer<P> zeros_, staged_;
};

}  // namespace streamkl::cpu

// Selected keys and values, gathered and packed for brgemm a tile at a time.
#pragma once

#include "tile/tile.h"

#include <optional>

namespace streamkl::cpu {

constexpr int64_t kCopiesAhead = 8;  // tokens that are fetched before they are copied

// T is the tensor's dtype, P what products are made of, as in tile.cpp.
template <typename T, typename P>
class Gathered {
 public:
  static constexpr bool kVnni = !std::is_same_v<P, float>;
  static constexpr int64_t kPair = kVnni ? 2 : 1;

  // x [B, Hkv, Nk, D]; with a page table, int32 and contiguous, [pages, Hkv, page_size, D].
  Gathered(const at::Tensor& x, const std::optional<at::Tensor>& page_table)
      : dim(x.size(3)), width(round_up(dim, kLanes * kPair)), data_(x.const_data_ptr<T>()),
        pages_(page_table ? page_table->const_data_ptr<int32_t>() : nullptr), page_size_(x.size(2)), strides_(x),
        direct_(std::is_same_v<T, P> && strides_.dim == 1 && dim == width), zeros_(width), staged_(kLanes * width) {
    std::fill_n(zeros_.data(), width, P(0.0f));
  }

  // Tokens are counted from first_token, in pages over all of the page table.
  void take_head(int64_t batch, int64_t head, int64_t first_token) {
    from_ = data_ + head * strides_.head;
    if (pages_ == nullptr) from_ += batch * strides_.batch + first_token * strides_.token;
    else first_token_ = first_token;
  }

  void fetch_token(int64_t token) const {
    if (strides_.dim == 1) return fetch(address(token), dim * sizeof(T));
    const T* from = address(token);
    for (int64_t c = 0; c < dim; c++) __builtin_prefetch(from + c * strides_.dim, 0, 2);
  }

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

  // Where the row of each token is: in the tensor, or copied to `to`; a row of zeros from count up to padded.
  void find(const int32_t* tokens, int64_t count, int64_t padded, P* to, const P** found) {
    for (int64_t j = 0; j < count; j++) {
      const T* from = address(tokens[j]);
      if constexpr (std::is_same_v<T, P>) {
        if (direct_) {
          found[j] = from;
          continue;
        }
      }
      if (j + kCopiesAhead < count) fetch_token(tokens[j + kCopiesAhead]);
      Packing<T, P>(dim).copy_row(from, strides_.dim, to + j * width);
      found[j] = to + j * width;
    }
    std::fill(found + count, found + padded, zeros_.data());
  }

  const int64_t dim, width;

 private:
  const T* address(int64_t token) const {
    if (pages_ == nullptr) return from_ + token * strides_.token;
    const int64_t place = first_token_ + token;
    return from_ + pages_[place / page_size_] * strides_.batch + place % page_size_ * strides_.token;
  }

  const P* row(const int32_t* tokens, int64_t j, int64_t count, int64_t place) {
    if (j >= count) return zeros_.data();
    const T* from = address(tokens[j]);
    if constexpr (std::is_same_v<T, P>) {
      if (direct_) return from;
    }
    P* to = staged_.data() + place * width;
    Packing<T, P>(dim).copy_row(from, strides_.dim, to);
    return to;
  }

  const T* const data_;
  const int32_t* const pages_;
  const int64_t page_size_;
  const Strides strides_;
  const bool direct_;
  const T* from_ = nullptr;
  int64_t first_token_ = 0;
  Buffer<P> zeros_, staged_;
};

}  // namespace streamkl::cpu

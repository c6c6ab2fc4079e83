// The tile: packing, products on PyTorch's own brgemm, and the row updates, with the names of state.py and tiled.py.
#pragma once

#include <ATen/ATen.h>
#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

namespace streamkl::cpu {

constexpr int64_t kBlockQ = 128;
constexpr int64_t kBlockK = 256;
constexpr int64_t kPiece = 64;
constexpr float kInf = std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// e^x and ln x within 2 ulp, as straight code that compilers vectorise. NaN and infinities come out as libm's would.
[[gnu::always_inline]] inline float exp_(float x) {
  const float clamped = std::min(std::max(x, -104.0f), 89.0f);
  const float n = std::nearbyintf(clamped * 1.44269504088896341f);
  float r = std::fma(n, -0.693359375f, clamped);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  p = std::fma(p, r * r, r) + 1.0f;
  // 2^n in two steps, so that results below the smallest normal are reached.
  const int32_t half = static_cast<int32_t>(n) >> 1, rest = static_cast<int32_t>(n) - half;
  const int32_t bits1 = (half + 127) << 23, bits2 = (rest + 127) << 23;
  float s1, s2;
  std::memcpy(&s1, &bits1, 4);
  std::memcpy(&s2, &bits2, 4);
  const float value = p * s1 * s2;
  return x != x ? x : value;
}

[[gnu::always_inline]] inline float log_(float x) {  // x > 0
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool small = x < 1.17549435e-38f;
  const float scaled = small ? x * 8388608.0f : x;
  std::memcpy(&bits, &scaled, 4);
  int32_t exponent = ((bits - 0x3f3504f3) >> 23);
  bits -= exponent << 23;
  float m;
  std::memcpy(&m, &bits, 4);
  const float f = m - 1.0f, e = static_cast<float>(exponent) - (small ? 23.0f : 0.0f);
  float p = 7.0376836292e-2f;
  p = std::fma(p, f, -1.1514610310e-1f);
  p = std::fma(p, f, 1.1676998740e-1f);
  p = std::fma(p, f, -1.2420140846e-1f);
  p = std::fma(p, f, 1.4249322787e-1f);
  p = std::fma(p, f, -1.6668057665e-1f);
  p = std::fma(p, f, 2.0000714765e-1f);
  p = std::fma(p, f, -2.4999993993e-1f);
  p = std::fma(p, f, 3.3333331174e-1f);
  const float f2 = f * f;
  p = p * f * f2;
  p = std::fma(e, -2.12194440e-4f, p);
  p = std::fma(-0.5f, f2, p);
  return x != x ? x : std::fma(e, 0.693359375f, f + p);
}

// Rounds to nearest even, as straight code.
template <typename P>
inline P rounded(float x) {
  return static_cast<P>(x);
}
template <>
inline at::BFloat16 rounded<at::BFloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t up = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return at::BFloat16(static_cast<uint16_t>(x != x ? 0x7fc0u : up), at::BFloat16::from_bits());
}

// Which keys of a tile a row may see: a causal mask and a window leave a run of them.
struct Run {
  int64_t first, last;
};

struct Window {
  int64_t left, right;  // -1 is unbounded

  // The run of row i (of its sequence) among the keys [j0, j1) of the sequence, relative to j0.
  Run run(int64_t i, int64_t diagonal, int64_t j0, int64_t j1) const {
    int64_t first = j0, last = j1;
    if (left >= 0) first = std::max(first, i + diagonal - left);
    if (right >= 0) last = std::min(last, i + diagonal + right + 1);
    return {std::min(std::max(first - j0, int64_t(0)), j1 - j0), std::max(std::min(last - j0, j1 - j0), int64_t(0))};
  }
};

// One side's tensors, and its products. A Side belongs to one thread.
class Side {
 public:
  Side(int64_t heads, int64_t kv_heads, int64_t dim, float scale, bool relu)
      : heads(heads), kv_heads(kv_heads), dim(dim), scale(scale), relu(relu) {}
  virtual ~Side() = default;

  // Takes the rows [row, row + rows) of a head; what follows is about them.
  virtual void take_rows(int64_t batch, int64_t head, int64_t row, int64_t rows, bool for_gradient) = 0;
  // Takes the keys [key, key + keys) of the head's key head.
  virtual void take_keys(int64_t batch, int64_t head, int64_t key, int64_t keys, bool for_gradient) = 0;
  // x[rows, keys] = <q, k>, before scale and relu; the rest of the tile is undefined.
  virtual void product(float* x) = 0;
  // dq[rows, dim] += dx k, dk[dim, keys] += q^T dx, with rows of dk dk_stride apart. dx is 0 outside of [rows, keys].
  virtual void add_gradient(const float* dx, float* dq, float* dk, int64_t dk_stride) = 0;

  int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }

  const int64_t heads, kv_heads, dim;
  const float scale;
  const bool relu;
};

struct Strides {
  int64_t batch, head, token, dim;
  explicit Strides(const at::Tensor& x) : batch(x.stride(0)), head(x.stride(1)), token(x.stride(2)), dim(x.stride(3)) {}
};

// T is the tensors' dtype, P what products are made of: T where the CPU has such products, float elsewhere.
template <typename T, typename P>
class TypedSide final : public Side {
  static constexpr bool kVnni = !std::is_same_v<P, float>;  // B operands in pairs of k

 public:
  TypedSide(const at::Tensor& q, const at::Tensor& k, float scale, bool relu)
      : Side(q.size(1), k.size(1), q.size(3), scale, relu),
        q_(q.const_data_ptr<T>()), k_(k.const_data_ptr<T>()), q_strides_(q), k_strides_(k),
        inner_(round_up(dim, 2)), outer_(round_up(dim, 16)),
        q_rows_(kBlockQ * inner_), k_columns_(kBlockK * inner_) {}

  void take_rows(int64_t batch, int64_t head, int64_t row, int64_t rows, bool for_gradient) override {
    rows_ = rows;
    rows_padded_ = round_up(rows, 16);
    const T* from = q_ + batch * q_strides_.batch + head * q_strides_.head + row * q_strides_.token;
    for (int64_t i = 0; i < rows_padded_; i++) {
      P* to = q_rows_.data() + i * inner_;
      if (i < rows) {
        for (int64_t c = 0; c < dim; c++) to[c] = convert(from[i * q_strides_.token + c * q_strides_.dim]);
        for (int64_t c = dim; c < inner_; c++) to[c] = P(0.0f);
      } else {
        std::fill_n(to, inner_, P(0.0f));
      }
    }
    if (!for_gradient) return;
    q_columns_.resize(outer_ * kBlockQ);
    for (int64_t c = 0; c < outer_; c++) {
      P* to = q_columns_.data() + c * kBlockQ;
      for (int64_t i = 0; i < rows_padded_; i++)
        to[i] = c < dim ? finite(q_rows_[i * inner_ + std::min(c, dim - 1)]) : P(0.0f);
    }
  }

  void take_keys(int64_t batch, int64_t head, int64_t key, int64_t keys, bool for_gradient) override {
    keys_ = keys;
    keys_padded_ = round_up(keys, 32);
    const int64_t token = k_strides_.token, step = k_strides_.dim;
    const T* from = k_ + batch * k_strides_.batch + kv_head(head) * k_strides_.head + key * token;
    if constexpr (kVnni) {
      // Pairs of the width beside each other: a transpose of 32-bit words.
      for (int64_t c = 0; c < inner_; c += 2) {
        auto* to = reinterpret_cast<uint32_t*>(k_columns_.data() + c * kBlockK);
        if (step == 1 && c + 1 < dim) {
          for (int64_t j = 0; j < keys; j++) std::memcpy(to + j, from + j * token + c, 4);
        } else {
          for (int64_t j = 0; j < keys; j++)
            to[j] = word(from[j * token + c * step], c + 1 < dim ? from[j * token + (c + 1) * step] : P(0.0f));
        }
        std::fill(to + keys, to + keys_padded_, 0u);
      }
    } else {
      for (int64_t c = 0; c < inner_; c++) {
        P* to = k_columns_.data() + c * kBlockK;
        if (c < dim) {
          for (int64_t j = 0; j < keys; j++) to[j] = convert(from[j * token + c * step]);
          std::fill(to + keys, to + keys_padded_, P(0.0f));
        } else {
          std::fill_n(to, keys_padded_, P(0.0f));
        }
      }
    }
    if (!for_gradient) return;
    k_pairs_.resize(kBlockK * outer_);
    std::fill_n(k_pairs_.data(), keys_padded_ * outer_, P(0.0f));
    for (int64_t j = 0; j < keys; j++) {
      P* to = kVnni ? k_pairs_.data() + (j / 2) * outer_ * 2 + j % 2 : k_pairs_.data() + j * outer_;
      for (int64_t c = 0; c < dim; c++) to[c * (kVnni ? 2 : 1)] = finite(convert(from[j * token + c * step]));
    }
  }

  void product(float* x) override {
    if constexpr (kVnni) {
      multiply(0, inner_, x);
    } else {
      // brgemm adds along the whole width one by one. In pieces, float products err as little as a library's do.
      multiply(0, std::min(inner_, kPiece), x);
      for (int64_t c = kPiece; c < inner_; c += kPiece) {
        piece_.resize(kBlockQ * kBlockK);
        multiply(c, std::min(inner_ - c, kPiece), piece_.data());
        for (int64_t i = 0; i < rows_padded_; i++)
          for (int64_t j = 0; j < keys_padded_; j++) x[i * kBlockK + j] += piece_[i * kBlockK + j];
      }
    }
  }

  void add_gradient(const float* dx, float* dq, float* dk, int64_t dk_stride) override {
    dq_.resize(kBlockQ * outer_);
    dk_.resize(kBlockK * outer_);
    const P *rows, *pairs;  // dx as the left operand, and as the right one
    if constexpr (kVnni) {
      dx_rows_.resize(kBlockQ * kBlockK);
      dx_pairs_.resize(kBlockQ * kBlockK);
      for (int64_t i = 0; i < rows_padded_; i += 2) {
        const float *even = dx + i * kBlockK, *odd = even + kBlockK;
        P *to_even = dx_rows_.data() + i * kBlockK, *to_odd = to_even + kBlockK;
        for (int64_t j = 0; j < keys_padded_; j++) to_even[j] = rounded<P>(even[j]);
        for (int64_t j = 0; j < keys_padded_; j++) to_odd[j] = rounded<P>(odd[j]);
        auto* to = reinterpret_cast<uint32_t*>(dx_pairs_.data() + i * kBlockK);
        for (int64_t j = 0; j < keys_padded_; j++) to[j] = word(to_even[j], to_odd[j]);
      }
      rows = dx_rows_.data();
      pairs = dx_pairs_.data();
    } else {
      rows = pairs = dx;
    }
    at::native::cpublas::brgemm(
        rows_padded_, outer_, keys_padded_, kBlockK, outer_, outer_, false, rows, k_pairs_.data(), dq_.data(), kVnni);
    at::native::cpublas::brgemm(
        outer_, keys_padded_, rows_padded_, kBlockQ, kBlockK, kBlockK, false, q_columns_.data(), pairs, dk_.data(), kVnni);
    for (int64_t i = 0; i < rows_; i++)
      for (int64_t c = 0; c < dim; c++) dq[i * dim + c] += dq_[i * outer_ + c];
    for (int64_t c = 0; c < dim; c++)
      for (int64_t j = 0; j < keys_; j++) dk[c * dk_stride + j] += dk_[c * kBlockK + j];
  }

 private:
  static P convert(T x) {
    if constexpr (std::is_same_v<T, P>) return x;
    else return static_cast<P>(static_cast<float>(x));
  }

  // What is not finite would make nan of masked pairs in a gradient's product; where it counts, dx is nan.
  static P finite(P x) {
    const auto value = static_cast<float>(x);
    return value - value == 0.0f ? x : P(0.0f);
  }

  static uint32_t word(P low, P high) {
    uint16_t l, h;
    std::memcpy(&l, &low, 2);
    std::memcpy(&h, &high, 2);
    return static_cast<uint32_t>(h) << 16 | l;
  }

  void multiply(int64_t c, int64_t width, float* x) {
    at::native::cpublas::brgemm(
        rows_padded_, keys_padded_, width, inner_, kBlockK, kBlockK, false, q_rows_.data() + c,
        k_columns_.data() + c * kBlockK, x, kVnni);
  }

  const T* q_;
  const T* k_;
  const Strides q_strides_, k_strides_;
  const int64_t inner_, outer_;
  int64_t rows_ = 0, rows_padded_ = 0, keys_ = 0, keys_padded_ = 0;
  std::vector<P> q_rows_, k_columns_, q_columns_, k_pairs_, dx_rows_, dx_pairs_;
  std::vector<float> dq_, dk_, piece_;
};

}  // namespace streamkl::cpu

// A side's tiles in each dtype: packed for brgemm, multiplied, and their gradients added up.
#include "tile/tile.h"

#include <ATen/native/CPUBlas.h>

namespace streamkl::cpu {
namespace {

template <typename T, typename P>
class TypedDenseSide final : public DenseSide {
  using Pack = Packing<T, P>;
  using Bits = typename Pack::Bits;
  static constexpr bool kVnni = Pack::kVnni;
  static constexpr int64_t kPair = Pack::kPair;

 public:
  TypedDenseSide(const at::Tensor& q, const at::Tensor& k, double scale, bool relu)
      : DenseSide(q.size(1), k.size(1), q.size(3), scale, relu),
        pack_(dim), q_(q.const_data_ptr<T>()), k_(k.const_data_ptr<T>()), q_strides_(q), k_strides_(k),
        inner_(pack_.inner), width_(pack_.width) {}

  void take_rows(int64_t slot, int64_t batch, int64_t head, int64_t row, int64_t rows, bool for_gradient, int64_t heads) override {
    if (slot >= static_cast<int64_t>(slots_.size())) slots_.resize(slot + 1);
    rows_ = rows * heads;
    rows_of_head_ = rows;
    const int64_t padded = round_up(rows_, kLanes);
    P* staged = staged_.reserve(padded * width_);
    const T* from = q_ + batch * q_strides_.batch + head * q_strides_.head + row * q_strides_.token;
    for (int64_t n = 0; n < heads; n++)
      pack_.copy(
          from + n * q_strides_.head, q_strides_.token, q_strides_.dim, rows, n + 1 < heads ? rows : padded - n * rows,
          staged + n * rows * width_);
    // Words of the width in columns: [width words, rows].
    q_stride_ = right_stride(padded);
    P* columns = slots_[slot].columns.reserve(width_ * q_stride_);
    pack_.transpose(staged, width_, padded, columns, q_stride_);
    if (!for_gradient) return;
    pack_.pairs(staged, padded, slots_[slot].pairs.reserve(padded * pack_.pairs_stride()));
    dx_rows_.reserve(kBlockK * q_stride_);
    if constexpr (kVnni) dx_pairs_.reserve(kBlockK * q_stride_);
  }

  void take_keys(int64_t batch, int64_t kv_head, int64_t key, int64_t keys, bool for_gradient) override {
    keys_ = keys;
    const int64_t padded = round_up(keys, kLanes);
    const T* from = k_ + batch * k_strides_.batch + kv_head * k_strides_.head + key * k_strides_.token;
    // Prefetch the next tile's keys while this one is processed. Keys one after another the CPU fetches by itself.
    if (k_strides_.token != dim)
      for (int64_t j = keys; j < keys + kBlockK; j++) fetch(from + j * k_strides_.token, dim * sizeof(T));
    bool copied = true;
    if constexpr (std::is_same_v<T, P>) {
      if (k_strides_.dim == 1 && k_strides_.token >= dim && k_strides_.token <= kFar && dim == width_ && keys == padded) {
        rows_of_k_ = from;
        k_stride_ = k_strides_.token;
        copied = false;
      }
    }
    if (copied) {
      pack_.copy(from, k_strides_.token, k_strides_.dim, keys, padded, k_rows_.reserve(kBlockK * width_));
      rows_of_k_ = k_rows_.data();
      k_stride_ = width_;
    }
    if (for_gradient) take_columns(padded);
  }

  void take_selected(
      int64_t batch, int64_t kv_head, int64_t first, const int32_t* keys, int64_t count, int64_t padded, int64_t ahead,
      bool for_gradient) override {
    keys_ = padded;
    const T* from = k_ + batch * k_strides_.batch + kv_head * k_strides_.head + first * k_strides_.token;
    P* rows = k_rows_.reserve(kBlockK * width_);
    for (int64_t j = 0; j < count; j++) pack_.copy_row(from + keys[j] * k_strides_.token, k_strides_.dim, rows + j * width_);
    std::fill_n(rows + count * width_, (padded - count) * width_, P(0.0f));
    for (int64_t j = count; j < count + ahead; j++) fetch(from + keys[j] * k_strides_.token, dim * sizeof(T));
    rows_of_k_ = rows;
    k_stride_ = width_;
    if (for_gradient) take_columns(padded);
  }

  void product(int64_t slot, const Part& part, float* x) override {
    const int64_t most = product_piece(dim);
    const int64_t width = kVnni ? inner_ : std::min(dim, most);
    multiply(slot, part, 0, width, x);
    if constexpr (!kVnni) {
      // brgemm adds along the whole width one by one. In pieces, float products err as little as a library's.
      for (int64_t c = most; c < dim; c += most) {
        float* piece = piece_.reserve(kBlockK * kStrip);
        multiply(slot, part, c, std::min(dim - c, most), piece);
        for (int64_t j = part.j0; j < part.j1; j++)
          for (int64_t i = 0; i < kStrip; i += kLanes) store(x + j * kStrip + i, load(x + j * kStrip + i) + load(piece + j * kStrip + i));
      }
    }
  }

  void begin_gradient(int64_t slot) override {
    const int64_t size = padded_dim * q_stride_;
    std::fill_n(slots_[slot].dq.reserve(size), size, 0.0f);
  }

  void set_gradient(const Part& part, const float* dx, int64_t first, int64_t last) override {
    last = std::min(last, round_up(keys_, kLanes));
    for (int64_t j = first; j < last; j += 2) {
      const bool seen = j >= part.j0 && j < part.j1;
      for (int64_t i = part.i0; i < part.i1; i += kLanes) {
        const float* at = seen ? dx + j * kStrip + i - part.i0 : nullptr;
        const Lanes even = seen ? load(at) : Lanes{}, odd = seen ? load(at + kStrip) : Lanes{};
        P* rows = dx_rows_.data() + j * q_stride_ + i;
        if constexpr (kVnni) {
          const Shorts low = rounded(even), high = rounded(odd);
          store(rows, low);
          store(rows + q_stride_, high);
          store(dx_pairs_.data() + j * q_stride_ + 2 * i, paired(low, high));
        } else {
          store(rows, even);
          store(rows + q_stride_, odd);
        }
      }
    }
  }

  void add_query_gradient(int64_t slot) override {
    const int64_t rows = round_up(rows_, kLanes), keys = round_up(keys_, kLanes);
    const P* right = kVnni ? dx_pairs_.data() : dx_rows_.data();
    at::native::cpublas::brgemm(
        padded_dim, rows, keys, kBlockK, q_stride_, q_stride_, true, k_columns_.data(), right, slots_[slot].dq.data(), kVnni);
  }

  void add_key_gradient(int64_t slot, float* dk) override {
    if (keys_ % kLanes == 0) return key_gradient(slot, true, dk);
    float* sums = dk_.reserve(kBlockK * padded_dim);
    key_gradient(slot, false, sums);
    for (int64_t c = 0; c < keys_ * padded_dim; c++) dk[c] += sums[c];
  }

  void key_gradient(int64_t slot, bool add, float* dk) override {
    at::native::cpublas::brgemm(
        round_up(keys_, kLanes), padded_dim, round_up(rows_, kLanes), q_stride_, pack_.pairs_stride(), padded_dim, add,
        dx_rows_.data(), slots_[slot].pairs.data(), dk, kVnni);
  }

  void end_gradient(int64_t slot, void* dq, bool as_floats, int64_t head_stride) override {
    const float* columns = slots_[slot].dq.data();
    alignas(64) float block[kLanes * kLanes];
    for (int64_t i = 0; i < rows_; i += kLanes)
      for (int64_t c = 0; c < dim; c += kLanes) {
        transpose_words(columns + c * q_stride_ + i, q_stride_ * sizeof(float), block, kLanes * sizeof(float));
        for (int64_t row = 0; row < std::min(kLanes, rows_ - i); row++) {
          const int64_t first = (i + row) / rows_of_head_ * head_stride + (i + row) % rows_of_head_ * dim + c;
          for (int64_t n = 0; n < std::min(kLanes, dim - c); n++) {
            const int64_t at = first + n;
            if (as_floats) static_cast<float*>(dq)[at] = block[row * kLanes + n];
            else static_cast<T*>(dq)[at] = static_cast<T>(block[row * kLanes + n]);
          }
        }
      }
  }

  int64_t bytes_of_row() const override { return width_ * sizeof(P); }
  int64_t widest() const override { return kVnni ? kWide : kBlockQ; }  // float products err more, the more they add up

 private:
  // The keys as a left operand [width, keys] of dQ; values that are not finite become 0.
  void take_columns(int64_t padded) {
    P* columns = k_columns_.reserve(width_ * kBlockK);
    if constexpr (kVnni) {
      P* words = staged_.reserve(width_ * kBlockK);
      pack_.transpose(rows_of_k_, k_stride_, padded, words, kBlockK);
      for (int64_t c = 0; c < width_; c += 2) {
        const Bits* from_pair = reinterpret_cast<const Bits*>(words + c * kBlockK);
        Bits* even = reinterpret_cast<Bits*>(columns + c * kBlockK);
        for (int64_t j = 0; j < padded; j += kLanes) {
          const Words pair = load<Words>(from_pair + 2 * j);
          store(even + j, Pack::finite(converted<Shorts>(pair & 0xffffu)));
          store(even + kBlockK + j, Pack::finite(converted<Shorts>(pair >> 16)));
        }
      }
    } else {
      pack_.transpose(rows_of_k_, k_stride_, padded, columns, kBlockK);
      for (int64_t c = 0; c < width_; c++)
        for (int64_t j = 0; j < padded; j += kLanes) {
          float* at = columns + c * kBlockK + j;
          store(at, Pack::finite(load<Words>(at)));
        }
    }
  }

  void multiply(int64_t slot, const Part& part, int64_t c, int64_t width, float* x) {
    at::native::cpublas::brgemm(
        part.j1 - part.j0, round_up(part.i1 - part.i0, kLanes), width, k_stride_, q_stride_, kStrip, false,
        rows_of_k_ + part.j0 * k_stride_ + c, slots_[slot].columns.data() + c * q_stride_ + part.i0 * kPair, x + part.j0 * kStrip,
        kVnni);
  }

  const Pack pack_;
  const T* q_;
  const T* k_;
  const Strides q_strides_, k_strides_;
  const int64_t inner_, width_;
  int64_t rows_ = 0, rows_of_head_ = 0, keys_ = 0, q_stride_ = 0, k_stride_ = 0;
  const P* rows_of_k_ = nullptr;
  struct Slot {
    Buffer<P> columns, pairs;
    Buffer<float> dq;
  };
  std::vector<Slot> slots_;
  Buffer<P> staged_, k_rows_, k_columns_, dx_rows_, dx_pairs_;
  Buffer<float> dk_, piece_;
};

}  // namespace

bool native(at::ScalarType dtype) {
  return dtype == at::kFloat || (dtype == at::kBFloat16 && at::native::cpublas::could_pack(dtype));
}

std::unique_ptr<DenseSide> dense_side_of(const at::Tensor& q, const at::Tensor& k, double scale, bool relu) {
  return with_products(q.scalar_type(), [&](auto of_tensors, auto of_products) -> std::unique_ptr<DenseSide> {
    return std::make_unique<TypedDenseSide<decltype(of_tensors), decltype(of_products)>>(q, k, scale, relu);
  });
}

}  // namespace streamkl::cpu

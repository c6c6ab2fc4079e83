// The tile: packing, and products on PyTorch's own brgemm. Rows lie along the lanes: a tile is [keys, rows].
#pragma once

#include "tile/pack.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

namespace streamkl::cpu {

constexpr int64_t kBlockQ = 256;  // rows of a block, at most
constexpr int64_t kStrip = 128;   // rows of a tile
constexpr int64_t kBlockK = 256;  // keys of a tile
constexpr int64_t kWide = 512;    // rows of several heads that lie side by side, at most
constexpr int64_t kFewThreads = 8;  // up to so many threads, the allocator keeps their scratch
constexpr int64_t kFar = 1 << 20;  // keys further apart are copied: brgemm counts bytes in 32 bits

// The width that float products add up at once: shorter pieces for wide heads.
inline int64_t product_piece(int64_t dim) { return dim > 128 ? 32 : 128; }

// Uninitialised memory on cache lines, which grows and never shrinks.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) { reserve(size); }
  Buffer(Buffer&&) = default;
  ~Buffer() { give_back(); }
  T* reserve(int64_t size) {
    if (size > size_) {
      give_back();
      void* memory = nullptr;
      TORCH_CHECK(posix_memalign(&memory, 64, size * sizeof(T)) == 0, "streamkl cpu engine: out of memory");
      data_.reset(static_cast<T*>(memory));
      size_ = size;
    }
    return data();
  }
  T* data() const { return data_.get(); }

 private:
  // The allocator keeps freed memory for the next call. With many threads that is a lot beside the gradients, so the
  // pages are returned to the system.
  void give_back() {
    constexpr uintptr_t page = 4096;
    if (!data_ || at::get_num_threads() <= kFewThreads) return;
    const auto at = reinterpret_cast<uintptr_t>(data_.get());
    const uintptr_t first = (at + page - 1) / page * page, last = (at + size_ * sizeof(T)) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }

  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T[], Free> data_;
  int64_t size_ = 0;
};

// Prefetches from main memory: long sequences do not fit the caches.
template <int locality = 2>
inline void fetch(const void* memory, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(memory) + at, 0, locality);
}

// A part of a tile: rows [i0, i1) and keys [j0, j1) of those taken, only keys that some row sees.
struct Part {
  int64_t i0, i1, j0, j1;
};

// One side's tensors, and the products of its rows with runs of keys. A DenseSide belongs to one thread.
class DenseSide {
 public:
  DenseSide(int64_t heads, int64_t kv_heads, int64_t dim, double scale, bool relu)
      : heads(heads), kv_heads(kv_heads), dim(dim), padded_dim(round_up(dim, kLanes)), scale(scale), relu(relu) {}
  virtual ~DenseSide() = default;

  // Takes the rows [row, row + rows) of a head, or of several heads one after another, into a slot. All slots have as
  // many rows.
  virtual void take_rows(int64_t slot, int64_t batch, int64_t head, int64_t row, int64_t rows, bool for_gradient, int64_t heads = 1) = 0;
  // Takes the keys [key, key + keys) of a key head.
  virtual void take_keys(int64_t batch, int64_t kv_head, int64_t key, int64_t keys, bool for_gradient) = 0;
  // Takes selected keys, counted from `first`, and zeros from count up to padded; `ahead` more will be taken next.
  virtual void take_selected(
      int64_t batch, int64_t kv_head, int64_t first, const int32_t* keys, int64_t count, int64_t padded, int64_t ahead,
      bool for_gradient) = 0;
  // x[j, i - i0] = <k_j, q_i> before scale and relu, for the part's keys and the slot's rows; kStrip rows apart.
  virtual void product(int64_t slot, const Part& part, float* x) = 0;

  // Gradients of the rows in a slot: begin, then for each tile set dx[j, i - i0] for parts that cover it, and add.
  virtual void begin_gradient(int64_t slot) = 0;
  // Sets those of the keys [first, last), all by default; keys outside of the part get 0.
  virtual void set_gradient(const Part& part, const float* dx, int64_t first = 0, int64_t last = kBlockK) = 0;
  // dq += dx^T k, which is kept in the slot.
  virtual void add_query_gradient(int64_t slot) = 0;
  // dk[keys, padded_dim] += dx q.
  virtual void add_key_gradient(int64_t slot, float* dk) = 0;
  // dk (+)= dx q for the keys in whole lanes: those past the last one get 0.
  virtual void key_gradient(int64_t slot, bool add, float* dk) = 0;
  // Writes dq[rows, dim], in the tensors' dtype or as floats; heads are head_stride apart.
  virtual void end_gradient(int64_t slot, void* dq, bool as_floats, int64_t head_stride = 0) = 0;
  virtual int64_t bytes_of_row() const = 0;
  // How many rows a slot should have, at most: products of dK add up so many.
  virtual int64_t widest() const = 0;

  int64_t kv_head(int64_t head) const { return head / (heads / kv_heads); }

  const int64_t heads, kv_heads, dim, padded_dim;
  const double scale;
  const bool relu;
};

// Whether a dtype is multiplied as it is, or in float32. float16 is always multiplied in float32: gradients of logits,
// which are divided by the number of rows before they are rounded, would vanish in float16.
bool native(at::ScalarType dtype);

// Calls work with a value of the tensors' dtype and one of the products' dtype.
template <typename Work>
auto with_products(at::ScalarType dtype, const Work& work) {
  switch (dtype) {
    case at::kBFloat16:
      return native(dtype) ? work(at::BFloat16(), at::BFloat16()) : work(at::BFloat16(), 0.0f);
    case at::kHalf:
      return work(at::Half(), 0.0f);
    case at::kFloat:
      return work(0.0f, 0.0f);
    default:
      TORCH_CHECK(false, "streamkl cpu engine: unsupported dtype ", dtype);
  }
}

// The side of q [B, H, N, D] and k [B, Hkv, N, D], of any strides.
std::unique_ptr<DenseSide> dense_side_of(const at::Tensor& q, const at::Tensor& k, double scale, bool relu);

}  // namespace streamkl::cpu

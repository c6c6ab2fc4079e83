// The tile products of a forward and nothing else, on packed operands: a baseline of the benchmark.
#include "tile/threads.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace streamkl::cpu {
namespace {

using at::Tensor;

// q [B, H, N, inner]; k [B, Hkv, tiles, inner, stride], in pairs of inner for bfloat16 and float16.
template <typename P>
struct Packed {
  const P *q, *k;
  int64_t heads, kv_heads, rows, inner, tiles, stride;
  Packed(const Tensor& q_, const Tensor& k_)
      : q(q_.const_data_ptr<P>()), k(k_.const_data_ptr<P>()), heads(q_.size(1)), kv_heads(k_.size(1)), rows(q_.size(2)),
        inner(q_.size(3)), tiles(k_.size(2)), stride(k_.size(4)) {}

  // x[count, keys] = the rows from `row` on against the first keys of a tile; returns the last of them.
  float product(int64_t batch, int64_t head, int64_t row, int64_t count, int64_t tile, int64_t keys, float* x) const {
    const int64_t kv = batch * kv_heads + head / (heads / kv_heads);
    at::native::cpublas::brgemm(
        count, keys, inner, inner, stride, stride, false, q + ((batch * heads + head) * rows + row) * inner,
        k + (kv * tiles + tile) * inner * stride, x, !std::is_same_v<P, float>);
    return x[(count - 1) * stride + keys - 1];
  }
};

template <typename P>
void multiply(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, int64_t block_q, int64_t block_k,
    bool causal, float* sums) {
  const Packed<P> a(a_q, a_k), b(b_q, b_k);
  const int64_t batch = a_q.size(0), group = a.heads / b.heads, blocks = (a.rows + block_q - 1) / block_q;
  const int64_t tasks = batch * b.heads * blocks;
  on_all_threads(tasks, [&](const auto& take) {
    std::vector<float> xa(block_q * a.stride), xb(block_q * a.stride);
    for (int64_t task; (task = take()) >= 0;) {
      const int64_t block = blocks - 1 - task % blocks, r = task / blocks % b.heads, n = task / blocks / b.heads;
      const int64_t row = block * block_q, count = std::min(block_q, a.rows - row);
      const int64_t tiles = causal ? std::min(a.tiles, (row + count + block_k - 1) / block_k) : a.tiles;
      float sum = 0.0f;
      for (int64_t tile = 0; tile < tiles; tile++) {
        // The tile on the diagonal has two parts, and the first one has fewer keys.
        const int64_t step = causal && tile + 1 == tiles ? (block_q + 1) / 2 : block_q;
        for (int64_t i = 0; i < count; i += step) {
          const int64_t rows = std::min(step, count - i);
          const int64_t keys = causal ? std::min(block_k, row + i + rows - tile * block_k) : block_k;
          if (keys <= 0) continue;
          float last = 0.0f;
          for (int64_t head = r * group; head < (r + 1) * group; head++)
            last += a.product(n, head, row + i, rows, tile, keys, xa.data());
          last += b.product(n, r, row + i, rows, tile, keys, xb.data());
          if (i + rows == count) sum += last;
        }
      }
      sums[task] = sum;
    }
  });
}

// Returns, for each block of rows, the sum of its tiles' last products, [B * R * blocks], the last block of a head
// first.
Tensor bare_products(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, int64_t block_q, int64_t block_k,
    bool causal) {
  TORCH_CHECK(
      a_q.is_contiguous() && a_k.is_contiguous() && b_q.is_contiguous() && b_k.is_contiguous() &&
          a_k.size(4) == b_k.size(4) && a_k.scalar_type() == a_q.scalar_type() &&
          b_q.scalar_type() == a_q.scalar_type() && b_k.scalar_type() == a_q.scalar_type(),
      "bare_products: contiguous operands of one dtype and tile size");
  const int64_t blocks = (a_q.size(2) + block_q - 1) / block_q;
  auto sums = at::zeros({a_q.size(0) * b_q.size(1) * blocks}, a_q.options().dtype(at::kFloat));
  auto* out = sums.mutable_data_ptr<float>();
  switch (a_q.scalar_type()) {
    case at::kBFloat16: multiply<at::BFloat16>(a_q, a_k, b_q, b_k, block_q, block_k, causal, out); break;
    case at::kHalf: multiply<at::Half>(a_q, a_k, b_q, b_k, block_q, block_k, causal, out); break;
    default: multiply<float>(a_q, a_k, b_q, b_k, block_q, block_k, causal, out);
  }
  return sums;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(streamkl_cpu, library) {
  library.def("bare_products(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, int block_q, int block_k, bool causal) -> Tensor");
}

TORCH_LIBRARY_IMPL(streamkl_cpu, CPU, library) { library.impl("bare_products", &bare_products); }

}  // namespace streamkl::cpu

// The forward passes of tiled.py over the tiles of tile.h.
#include "dense/student.h"
#include "dense/target.h"
#include "kernels.h"
#include "passes/outputs.h"

namespace streamkl::cpu {

std::tuple<Tensor, Tensor> logsumexp(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, const Tensor& table, double scale, bool relu,
    int64_t left, int64_t right, int64_t key_span) {
  const Window window{left, right, key_span};
  const int64_t heads = Student::distributions(q, weights);
  const Student like(q, k, weights, scale, relu);
  const bool quick = fast(q, q, like.scale(), like.scale());
  const LogSumExpRows out(q, heads, precision_of(quick), like.scale());
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto with_relu) {
    return &LogSumExp::update<precision(), with_relu()>;
  });
  each_block(table, window, rows_at_once(like.bytes_of_row(false)), heads, quick, [&] {
    return [&, side = Student(q, k, weights, scale, relu), x = Buffer<float>(kBlockK * kStrip)](const Block& block, int64_t head) mutable {
      LogSumExp state[kBlockQ / kLanes];
      side.take_rows(block, head, false);
      each_tile(block, [&](const KeyTile& tile) {
        side.take_keys(block, tile, head, false);
        each_part(block, tile, window, false, [&](const Part& part) {
          side.product(part, x.data());
          each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
            (state[i / kLanes].*update)(x.data() + i - part.i0, kStrip, span, side.scale());
          });
        });
      });
      for (int64_t i = 0; i < block.rows(); i++) out.write(state[i / kLanes], i % kLanes, block, head, i);
    };
  });
  return {out.m, out.ln_l};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> paired_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span) {
  const Window window{left, right, key_span};
  const int64_t heads = b_q.size(1);
  const bool quick = fast(a_q, b_q, a_scale, b_scale);
  const PairedRows out(b_q, heads, precision_of(quick), a_scale, b_scale);
  const auto update = dispatch(quick, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &PairedState::update<precision(), relu_a(), relu_b()>;
  });
  each_block(table, window, kBlockQ, heads, quick, [&] {
    return [&, a = dense_side_of(a_q, a_k, a_scale, a_relu), b = dense_side_of(b_q, b_k, b_scale, b_relu),
            xa = Buffer<float>(kBlockK * kStrip), xb = Buffer<float>(kBlockK * kStrip)](const Block& block, int64_t r) {
      PairedState state[kBlockQ / kLanes];
      a->take_rows(0, block.seq.batch, r, block.first_row(), block.rows(), false);
      b->take_rows(0, block.seq.batch, r, block.first_row(), block.rows(), false);
      each_tile(block, [&](const KeyTile& tile) {
        a->take_keys(block.seq.batch, a->kv_head(r), tile.key(block), tile.keys(), false);
        b->take_keys(block.seq.batch, b->kv_head(r), tile.key(block), tile.keys(), false);
        each_part(block, tile, window, false, [&](const Part& part) {
          a->product(0, part, xa.data());
          b->product(0, part, xb.data());
          each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
            const int64_t at = i - part.i0;
            (state[i / kLanes].*update)(xa.data() + at, xb.data() + at, kStrip, span, a_scale, b_scale);
          });
        });
      });
      for (int64_t i = 0; i < block.rows(); i++) out.write(state[i / kLanes], i % kLanes, block, r, i);
    };
  });
  return {out.kl, out.mean, out.m_a, out.ln_l_a, out.m_b, out.ln_l_b};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mixture_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& m_a, const Tensor& ln_l_a, double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs) {
  const Window window{left, right, key_span};
  const int64_t heads = Student::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const Student like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale());
  const MixtureRows out(b_q, heads);
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &MixtureState::update<precision(), relu()>;
  });
  const int64_t rows = rows_at_once(std::max(dense_side_of(a_q, a_k, a_scale, a_relu)->bytes_of_row() * group, like.bytes_of_row(false)));
  each_block(table, window, rows, heads, quick, [&] {
    return [&, target = Target(dense_side_of(a_q, a_k, a_scale, a_relu), group, runs, quick), b = Student(b_q, b_k, b_w, b_scale, b_relu),
            x = Buffer<float>(kBlockK * kStrip), p = Buffer<float>(kBlockK * kBlockQ)](const Block& block, int64_t r) mutable {
      MixtureState state[kBlockQ / kLanes];
      target.take_rows(block, r, Rows(m_a), Rows(ln_l_a));
      b.take_rows(block, r, false);
      each_tile(block, [&](const KeyTile& tile) {
        target.compute(block, tile, window, r, x.data(), p.data());
        b.take_keys(block, tile, r, false);
        each_part(block, tile, window, false, [&](const Part& part) {
          b.product(part, x.data());
          each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
            const int64_t at = i - part.i0;
            (state[i / kLanes].*update)(p.data() + part.i0 * kBlockK + at, x.data() + at, kStrip, span, b.scale());
          });
        });
      });
      for (int64_t i = 0; i < block.rows(); i++) out.write(state[i / kLanes], i % kLanes, block, r, i);
    };
  });
  return {out.kl, out.m_b, out.ln_l_b, out.s};
}

}  // namespace streamkl::cpu

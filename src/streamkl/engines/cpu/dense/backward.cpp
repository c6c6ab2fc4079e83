// The backward passes of tiled.py, which compute dQ and dK at once, and the pass that computes the loss as well.
#include "dense/student.h"
#include "dense/target.h"
#include "dense/turns.h"
#include "kernels.h"
#include "passes/gradient.h"

#include <ATen/ops/zeros_like.h>

#include <numeric>
#include <optional>

namespace streamkl::cpu {

// Sets the gradients of keys that none of the sixteen rows sees to 0.
STREAMKL_INLINE void clear_outside(float* dx, const Span& span, const Part& part) {
  for (int64_t j = part.j0; j < span.begin; j++) store(dx + j * kStrip, Lanes{});
  for (int64_t j = span.end; j < part.j1; j++) store(dx + j * kStrip, Lanes{});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& mean, const Tensor& row_grad,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs, bool want_a, bool want_b) {
  const Window window{left, right, key_span};
  const int64_t heads = Student::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const Student like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale()), paired = group == 1 && !b_w;
  int64_t together = heads / b_k.size(1);
  if (want_a) together = std::lcm(together, heads / a_k.size(1));
  const int64_t bytes = std::max(dense_side_of(a_q, a_k, a_scale, a_relu)->bytes_of_row() * group, like.bytes_of_row(want_b));
  const auto owners = key_owners_of(table, window, rows_at_once(bytes), heads, together);
  SideGradient grad_a(want_a, a_q, a_k, false), grad_b(want_b, b_q, b_k, false);
  const Tensor d_w = b_w && want_b ? at::zeros_like(*b_w) : at::empty({0}, m_b.options());
  const auto gradient = dispatch(quick, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &paired_gradient<precision(), relu_a(), relu_b(), kStrip>;
  });
  const auto gradient_b = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &mixture_gradient<precision(), relu(), kStrip>;
  });
  const auto factor_a = static_cast<float>(a_scale), factor_b = static_cast<float>(like.scale());
  each_turn(owners, quick, [&] {
    return [&, a = dense_side_of(a_q, a_k, a_scale, a_relu), b = Student(b_q, b_k, b_w, b_scale, b_relu),
            target = paired ? std::optional<Target>() : Target(dense_side_of(a_q, a_k, a_scale, a_relu), group, runs, quick),
            xa = Buffer<float>(kBlockK * kStrip), xb = Buffer<float>(kBlockK * kStrip), p = Buffer<float>(paired ? 0 : kBlockK * kBlockQ), rows_a = GradientRows(),
            rows_b = GradientRows()](const Block& block, int64_t r, const Turns::Task& task) mutable {
      const int64_t batch = block.seq.batch;
      Row mu;
      b.take_rows(block, r, want_b);
      rows_b.take(block, r, Rows(m_b), Rows(ln_l_b), Rows(row_grad), b.scale());
      if (paired) {
        a->take_rows(0, batch, r, block.first_row(), block.rows(), want_a);
        rows_a.take(block, r, Rows(m_a), Rows(ln_l_a), Rows(row_grad), a_scale);
        mu.take(Rows(mean).at(block, r), block.rows());
      } else {
        target->take_rows(block, r, Rows(m_a), Rows(ln_l_a));
      }
      if (want_a) a->begin_gradient(0);
      if (want_b) b.begin_gradient();
      each_common_tile(block, [&](const KeyTile& tile) {
        b.take_keys(block, tile, r, want_b);
        if (want_a) grad_a.fetch_keys(block, tile, a->kv_head(r));
        if (want_b) grad_b.fetch_keys(block, tile, b.kv_head(r));
        if (paired) a->take_keys(batch, a->kv_head(r), tile.key(block), tile.keys(), want_a);
        else target->compute(block, tile, window, r, xa.data(), p.data());
        each_part(block, tile, window, true, [&](const Part& part) {
          if (part.j0 < part.j1) {
            b.product(part, xb.data());
            if (paired) a->product(0, part, xa.data());
            each_group(block, tile, window, part, [&](int64_t i, const Span& seen) {
              const Span span = without(seen, rows_b.weight[i] == 0.0f);
              float *xa_i = xa.data() + i - part.i0, *xb_i = xb.data() + i - part.i0;
              if (paired) gradient(xa_i, xb_i, span, factor_a, factor_b, rows_a[i], rows_b[i], mu[i], want_a);
              else gradient_b(p.data() + part.i0 * kBlockK + i - part.i0, xb_i, span, factor_b, rows_b[i]);
              if (want_a) clear_outside(xa_i, span, part);
              clear_outside(xb_i, span, part);
            });
          }
          if (want_a) a->set_gradient(part, xa.data());
          if (want_b) b.set_gradient(part, xb.data());
        });
        if (want_a) a->add_query_gradient(0);
        if (want_b) b.compute_gradient();
        task.add(tile, [&] {
          if (want_a) a->add_key_gradient(0, grad_a.keys(block, tile, a->kv_head(r)));
          if (want_b) b.add_key_gradient(tile, grad_b.keys(block, tile, b.kv_head(r)));
        });
      });
      if (want_a) a->end_gradient(0, grad_a.rows(block, r), false);
      if (want_b) b.end_gradient(block, r, grad_b, d_w, false);
    };
  });
  return {grad_a.q, grad_a.dk(), grad_b.q, grad_b.dk(), d_w};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> train(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs) {
  const Window window{left, right, key_span};
  const int64_t heads = Student::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const Student like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale());
  const int64_t rows = rows_at_once(std::max(dense_side_of(a_q, a_k, a_scale, a_relu)->bytes_of_row() * group, like.bytes_of_row(true)));
  const auto owners = key_owners_of(table, window, rows, heads, heads / b_k.size(1));
  SideGradient grad_b(true, b_q, b_k, true);
  const Tensor d_w = b_w ? at::zeros_like(*b_w) : at::empty({0}, m_b.options());
  auto kl = rows_like(b_q, heads, 0.0f), mass = rows_like(b_q, heads, 1.0f);
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &TrainState::update<precision(), relu(), kStrip>;
  });
  const auto factor = static_cast<float>(like.scale());
  each_turn(owners, quick, [&] {
    return [&, target = Target(dense_side_of(a_q, a_k, a_scale, a_relu), group, runs, quick), b = Student(b_q, b_k, b_w, b_scale, b_relu),
            x = Buffer<float>(kBlockK * kStrip), p = Buffer<float>(kBlockK * kBlockQ),
            rows_b = GradientRows()](const Block& block, int64_t r, const Turns::Task& task) mutable {
      const float* weight = Rows(weights).at(block, r);
      TrainState state[kBlockQ / kLanes];
      target.take_rows(block, r, Rows(m_a), Rows(ln_l_a));
      b.take_rows(block, r, true);
      rows_b.take(block, r, Rows(m_b), Rows(ln_l_b), Rows(weights), b.scale());
      b.begin_gradient();
      each_common_tile(block, [&](const KeyTile& tile) {
        target.compute(block, tile, window, r, x.data(), p.data());
        b.take_keys(block, tile, r, true);
        grad_b.fetch_keys(block, tile, b.kv_head(r));
        each_part(block, tile, window, true, [&](const Part& part) {
          if (part.j0 < part.j1) {
            b.product(part, x.data());
            each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
              float* x_i = x.data() + i - part.i0;
              (state[i / kLanes].*update)(p.data() + part.i0 * kBlockK + i - part.i0, x_i, span, factor, rows_b[i]);
              clear_outside(x_i, span, part);
            });
          }
          b.set_gradient(part, x.data());
        });
        b.compute_gradient();
        task.add(tile, [&] { b.add_key_gradient(tile, grad_b.keys(block, tile, b.kv_head(r))); });
      });
      b.end_gradient(block, r, grad_b, d_w, true);
      for (int64_t i = 0; i < block.rows(); i++) {
        const float s = state[i / kLanes].s[i % kLanes], acc = state[i / kLanes].acc[i % kLanes];
        Rows(kl).at(block, r)[i] = trained(s, acc);
        if (weight[i] != 0.0f) Rows(mass).at(block, r)[i] = s;
      }
    };
  });
  return {weighted_sum(weights, kl), grad_b.q, grad_b.dk(), d_w, mass};
}

}  // namespace streamkl::cpu

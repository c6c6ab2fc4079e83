// The backward passes over selected keys, and the pass that computes the loss as well.
#include "gathered/row_partitions.h"
#include "gathered/student.h"
#include "gathered/target.h"
#include "kernels.h"
#include "passes/gradient.h"

#include <ATen/ops/zeros_like.h>

#include <numeric>

namespace streamkl::cpu {

namespace {

// What the gradients of a row need, in every lane.
GradientLanes gradient_lanes(const Block& block, int64_t r, int64_t i, const Tensor& m, const Tensor& ln_l, float weight, double scale) {
  return {splat(Rows(m).at(block, r)[i]), splat(Rows(ln_l).at(block, r)[i]), splat(weight), splat(weight * static_cast<float>(scale))};
}

struct MixturePass {
  SideGradient grad_b;
  Tensor d_w, kl, mass;
};

// Against a head mean, or for a head-summed side b: gradients to side b, and the terms of the loss.
MixturePass mixture_pass(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w, const Tensor& table,
    const Tensor& topk_, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs, bool floats) {
  const Window window{left, right, key_span};
  const TopkIndices topk(topk_);
  const int64_t heads = GatheredStudent::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const GatheredStudent like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale());
  const auto owners = key_owners_of(table, window, topk.rows_at_once(), heads, heads / std::min(heads, b_k.size(1)));
  const int64_t partitions = partition_count(owners, topk_, bytes_of_dk(b_k));
  MixturePass out{
      SideGradient(true, b_q, b_k, floats, partitions), b_w ? at::zeros_like(*b_w) : at::empty({0}, m_b.options()),
      rows_like(b_q, heads, 0.0f), rows_like(b_q, heads, 1.0f)};
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &TrainState::update<precision(), relu(), kLanes>;
  });
  const auto factor = static_cast<float>(like.scale());
  each_row_partition(owners, partitions, quick, [&] {
    return [&, target = GatheredTarget(a_q, a_k, a_scale, a_relu, group, runs, quick), b = GatheredStudent(b_q, b_k, b_w, b_scale, b_relu),
            selected = SelectedKeys(topk, window), p = Buffer<float>()](const Block& block, int64_t r, int64_t partition) mutable {
      const float* weight = Rows(weights).at(block, r);
      selected.take(block, topk.topk_head(r, heads), weight);
      target.compute(block, selected, r, Rows(m_a), Rows(ln_l_a), p.reserve(topk.rows_at_once() * selected.stride()));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (selected.count(i) == 0) continue;
        TrainState state;
        const GradientLanes row = gradient_lanes(block, r, i, m_b, ln_l_b, weight[i], like.scale());
        b.take_row(block, i, r, r + 1, true);
        b.begin_gradient();
        each_piece(selected.count(i), [&](int64_t j, int64_t keys) {
          float* x = b.product(block, selected.of(i) + j, keys);
          (state.*update)(p.data() + i * selected.stride() + j, x, dealt(keys), factor, row);
          b.add_gradient(block, x, keys, out.grad_b, partition);
        });
        b.end_gradient(block, i, out.grad_b, out.d_w, floats);
        Rows(out.mass).at(block, r)[i] = sum(state.s);
        Rows(out.kl).at(block, r)[i] = trained(sum(state.s), sum(state.acc));
      }
    };
  });
  return out;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gathered_backward(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w, const Tensor& table,
    const Tensor& topk_, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& mean,
    const Tensor& row_grad, double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs, bool want_a,
    bool want_b) {
  const Tensor none = at::empty({0}, m_b.options());
  if (b_w || a_q.size(1) != b_q.size(1)) {
    auto made = mixture_pass(
        a_q, a_k, b_q, b_k, b_w, table, topk_, m_a, ln_l_a, m_b, ln_l_b, row_grad, a_scale, b_scale, a_relu, b_relu, left, right, key_span, runs, false);
    return {none, none, made.grad_b.q, made.grad_b.dk(), made.d_w};
  }
  const Window window{left, right, key_span};
  const TopkIndices topk(topk_);
  const int64_t heads = b_q.size(1), owned = std::lcm(heads / a_k.size(1), heads / b_k.size(1));
  const int64_t together = std::gcd(owned, topk.heads_per_topk_head(heads));
  const bool quick = fast(a_q, b_q, a_scale, b_scale);
  const auto owners = key_owners_of(table, window, topk.rows_at_once(), heads / together, owned / together);
  const int64_t partitions = partition_count(owners, topk_, (want_a ? bytes_of_dk(a_k) : 0) + (want_b ? bytes_of_dk(b_k) : 0));
  SideGradient grad_a(want_a, a_q, a_k, false, partitions), grad_b(want_b, b_q, b_k, false, partitions);
  const auto gradient = dispatch(false, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &paired_gradient<precision(), relu_a(), relu_b(), kLanes>;
  });
  const auto factor_a = static_cast<float>(a_scale), factor_b = static_cast<float>(b_scale);
  each_row_partition(owners, partitions, quick, [&] {
    return [&, a = gathered_side_of(a_q, a_k, a_scale, a_relu), b = gathered_side_of(b_q, b_k, b_scale, b_relu),
            selected = SelectedKeys(topk, window), xa = Buffer<float>(gathered_size(together)),
            xb = Buffer<float>(gathered_size(together))](const Block& block, int64_t run, int64_t partition) mutable {
      const int64_t first = run * together, last = first + together;
      const auto weight = [&](int64_t head, int64_t i) { return Rows(row_grad).at(block, head)[i]; };
      const struct {
        GatheredSide& side;
        const SideGradient& gradient;
        float* x;
        bool wanted;
      } sides[] = {{*a, grad_a, xa.data(), want_a}, {*b, grad_b, xb.data(), want_b}};
      selected.take(block, topk.topk_head(first, heads));
      for (int64_t i = 0; i < block.rows(); i++) {
        bool counts = false;
        for (int64_t head = first; head < last; head++) counts |= weight(head, i) != 0.0f;
        if (selected.count(i) == 0 || !counts) continue;
        for (const auto& [side, gradients, x, wanted] : sides) {
          side.take_row(block.seq.batch, block.first_row() + i, first, last, wanted);
          if (wanted) side.begin_gradient();
        }
        each_piece(selected.count(i), [&](int64_t j, int64_t keys) {
          for (const auto& [side, gradients, x, wanted] : sides) side.product(block.seq.k_start, selected.of(i) + j, keys, x);
          for (int64_t head = first; head < last; head++) {
            float *xa_h = xa.data() + (head - first) * kSelected, *xb_h = xb.data() + (head - first) * kSelected;
            if (weight(head, i) == 0.0f) {
              for (float* x : {xa_h, xb_h}) std::fill_n(x, round_up(keys, kLanes), 0.0f);
              continue;
            }
            const GradientLanes row_a = gradient_lanes(block, head, i, m_a, ln_l_a, weight(head, i), a_scale);
            const GradientLanes row_b = gradient_lanes(block, head, i, m_b, ln_l_b, weight(head, i), b_scale);
            gradient(xa_h, xb_h, dealt(keys), factor_a, factor_b, row_a, row_b, splat(Rows(mean).at(block, head)[i]), want_a);
          }
          for (const auto& [side, gradients, x, wanted] : sides)
            if (wanted) side.add_gradient(x, gradients.keys(block, partition), gradients.head_stride());
        });
        for (const auto& [side, gradients, x, wanted] : sides)
          for (int64_t head = first; wanted && head < last; head++) side.end_gradient(head, gradients.row(block, head, i), false);
      }
    };
  });
  return {grad_a.q, grad_a.dk(), grad_b.q, grad_b.dk(), none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gathered_train(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w, const Tensor& table,
    const Tensor& topk, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span, int64_t runs) {
  auto made = mixture_pass(
      a_q, a_k, b_q, b_k, b_w, table, topk, m_a, ln_l_a, m_b, ln_l_b, weights, a_scale, b_scale, a_relu, b_relu, left, right, key_span, runs, true);
  return {weighted_sum(weights, made.kl), made.grad_b.q, made.grad_b.dk(), made.d_w, made.mass};
}

}  // namespace streamkl::cpu

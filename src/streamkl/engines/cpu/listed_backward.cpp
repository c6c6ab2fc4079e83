// The backward sweeps over rows that name their keys, and the one that makes the loss as well.
#include "gradient.h"
#include "kernels.h"
#include "listed_student.h"
#include "listed_target.h"
#include "shares.h"

#include <ATen/ops/zeros_like.h>

#include <numeric>

namespace streamkl::cpu {

namespace {

// What the gradients of a row need, in every lane.
GradientLanes gradient_lanes(const Block& block, int64_t r, int64_t i, const Tensor& m, const Tensor& ln_l, float weight, double scale) {
  return {splat(Rows(m).at(block, r)[i]), splat(Rows(ln_l).at(block, r)[i]), splat(weight), splat(weight * static_cast<float>(scale))};
}

struct MixtureSweep {
  SideGradient grad_b;
  Tensor d_w, kl, mass;
};

// Against the mean of a group of heads, or with a sum of heads: gradients to side b, and what the loss is made of.
MixtureSweep sweep_mixture(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w, const Tensor& table,
    const Tensor& lists_, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, bool floats) {
  const Window window{left, right};
  const Lists lists(lists_);
  const int64_t heads = ListedStudent::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const ListedStudent like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale());
  const auto units = units_of(table, window, lists.rows_at_once(), heads, heads / std::min(heads, b_k.size(1)));
  const int64_t shares = shares_of(units, lists_, bytes_of_dk(b_k));
  MixtureSweep out{
      SideGradient(true, b_q, b_k, floats, shares), b_w ? at::zeros_like(*b_w) : at::empty({0}, m_b.options()),
      rows_like(b_q, heads, 0.0f), rows_like(b_q, heads, 1.0f)};
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &TrainState::update<precision(), relu(), kLanes>;
  });
  const auto factor = static_cast<float>(like.scale());
  each_share(units, shares, quick, [&] {
    return [&, target = ListedTarget(a_q, a_k, a_scale, a_relu, group, quick), b = ListedStudent(b_q, b_k, b_w, b_scale, b_relu),
            named = NamedKeys(lists, window), p = Buffer<float>()](const Block& block, int64_t r, int64_t share) mutable {
      const float* weight = Rows(weights).at(block, r);
      named.take(block, lists.list_of(r, heads), weight);
      target.compute(block, named, r, Rows(m_a), Rows(ln_l_a), p.reserve(lists.rows_at_once() * named.stride()));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (named.count(i) == 0) continue;
        TrainState state;
        const GradientLanes row = gradient_lanes(block, r, i, m_b, ln_l_b, weight[i], like.scale());
        b.take_row(block, i, r, r + 1, true);
        b.begin_gradient();
        each_piece(named.count(i), [&](int64_t j, int64_t keys) {
          float* x = b.product(block, named.of(i) + j, keys);
          (state.*update)(p.data() + i * named.stride() + j, x, dealt(keys), factor, row);
          b.add_gradient(block, x, keys, out.grad_b, share);
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

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> listed_backward(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w, const Tensor& table,
    const Tensor& lists_, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& mean,
    const Tensor& row_grad, double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, bool want_a,
    bool want_b) {
  const Tensor none = at::empty({0}, m_b.options());
  if (b_w || a_q.size(1) != b_q.size(1)) {
    auto swept = sweep_mixture(
        a_q, a_k, b_q, b_k, b_w, table, lists_, m_a, ln_l_a, m_b, ln_l_b, row_grad, a_scale, b_scale, a_relu, b_relu, left, right, false);
    return {none, none, swept.grad_b.q, swept.grad_b.dk(), swept.d_w};
  }
  const Window window{left, right};
  const Lists lists(lists_);
  const int64_t heads = b_q.size(1), unit = std::lcm(heads / a_k.size(1), heads / b_k.size(1));
  const int64_t together = std::gcd(unit, lists.heads_of_list(heads));
  const bool quick = fast(a_q, b_q, a_scale, b_scale);
  const auto units = units_of(table, window, lists.rows_at_once(), heads / together, unit / together);
  const int64_t shares = shares_of(units, lists_, (want_a ? bytes_of_dk(a_k) : 0) + (want_b ? bytes_of_dk(b_k) : 0));
  SideGradient grad_a(want_a, a_q, a_k, false, shares), grad_b(want_b, b_q, b_k, false, shares);
  const auto gradient = dispatch(false, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &paired_gradient<precision(), relu_a(), relu_b(), kLanes>;
  });
  const auto factor_a = static_cast<float>(a_scale), factor_b = static_cast<float>(b_scale);
  each_share(units, shares, quick, [&] {
    return [&, a = listed_side_of(a_q, a_k, a_scale, a_relu), b = listed_side_of(b_q, b_k, b_scale, b_relu),
            named = NamedKeys(lists, window), xa = Buffer<float>(listed_size(together)),
            xb = Buffer<float>(listed_size(together))](const Block& block, int64_t run, int64_t share) mutable {
      const int64_t first = run * together, last = first + together;
      const auto weight = [&](int64_t head, int64_t i) { return Rows(row_grad).at(block, head)[i]; };
      const struct {
        ListedSide& side;
        const SideGradient& gradient;
        float* x;
        bool wanted;
      } sides[] = {{*a, grad_a, xa.data(), want_a}, {*b, grad_b, xb.data(), want_b}};
      named.take(block, lists.list_of(first, heads));
      for (int64_t i = 0; i < block.rows(); i++) {
        bool counts = false;
        for (int64_t head = first; head < last; head++) counts |= weight(head, i) != 0.0f;
        if (named.count(i) == 0 || !counts) continue;
        for (const auto& [side, gradients, x, wanted] : sides) {
          side.take_row(block.seq.batch, block.first_row() + i, first, last, wanted);
          if (wanted) side.begin_gradient();
        }
        each_piece(named.count(i), [&](int64_t j, int64_t keys) {
          for (const auto& [side, gradients, x, wanted] : sides) side.product(block.seq.k_start, named.of(i) + j, keys, x);
          for (int64_t head = first; head < last; head++) {
            float *xa_h = xa.data() + (head - first) * kListed, *xb_h = xb.data() + (head - first) * kListed;
            if (weight(head, i) == 0.0f) {
              for (float* x : {xa_h, xb_h}) std::fill_n(x, round_up(keys, kLanes), 0.0f);
              continue;
            }
            const GradientLanes row_a = gradient_lanes(block, head, i, m_a, ln_l_a, weight(head, i), a_scale);
            const GradientLanes row_b = gradient_lanes(block, head, i, m_b, ln_l_b, weight(head, i), b_scale);
            gradient(xa_h, xb_h, dealt(keys), factor_a, factor_b, row_a, row_b, splat(Rows(mean).at(block, head)[i]), want_a);
          }
          for (const auto& [side, gradients, x, wanted] : sides)
            if (wanted) side.add_gradient(x, gradients.keys(block, share), gradients.head_stride());
        });
        for (const auto& [side, gradients, x, wanted] : sides)
          for (int64_t head = first; wanted && head < last; head++) side.end_gradient(head, gradients.row(block, head, i), false);
      }
    };
  });
  return {grad_a.q, grad_a.dk(), grad_b.q, grad_b.dk(), none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> listed_train(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w, const Tensor& table,
    const Tensor& lists, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  auto swept = sweep_mixture(
      a_q, a_k, b_q, b_k, b_w, table, lists, m_a, ln_l_a, m_b, ln_l_b, weights, a_scale, b_scale, a_relu, b_relu, left, right, true);
  return {weighted_sum(weights, swept.kl), swept.grad_b.q, swept.grad_b.dk(), swept.d_w, swept.mass};
}

}  // namespace streamkl::cpu

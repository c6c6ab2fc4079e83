// Gradients of logits, and the loss computed with them: of sixteen rows at a time, or of sixteen keys of one row.
#pragma once

#include "passes/pass.h"

#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

namespace streamkl::cpu {

// What the gradients of sixteen lanes need: row max, ln of the row sum, weight, and the factor of dx. Rows of weight 0
// have a gradient of 0, whatever their logits are.
struct GradientLanes {
  Lanes m, ln_l, weight, factor;
};

// The same for the rows of a block.
struct GradientRows {
  BlockStats stats;
  Row weight, factor;
  void take(const Block& block, int64_t r, const Rows& m, const Rows& ln_l, const Rows& weights, double scale) {
    stats.take(block, r, m, ln_l);
    weight.take(weights.at(block, r), block.rows());
    factor.take(weights.at(block, r), block.rows(), static_cast<float>(scale));
  }
  GradientLanes operator[](int64_t i) const { return {stats.m[i], stats.ln_l[i], weight[i], factor[i]}; }
};

// dx overwrites x; lanes of the same rows are stride apart.
template <Precision precision, bool relu_a, bool relu_b, int64_t stride>
void paired_gradient(
    float* a, float* b, const Span& span, float factor_a, float factor_b, const GradientLanes& rows_a,
    const GradientLanes& rows_b, const Lanes& mean, bool want_a) {
  const Lanes scale_a = splat(factor_a), scale_b = splat(factor_b), mu = mean;
  const Lanes m_a = rows_a.m, ln_l_a = rows_a.ln_l, weight_a = rows_a.factor;
  const Lanes m_b = rows_b.m, ln_l_b = rows_b.ln_l, weight_b = rows_b.factor;
  const auto run = [&](auto with_a) {
    each_key(span, [&](int64_t j, auto mask, int) {
      const Lanes xa = load(a + j * stride), xb = load(b + j * stride);
      const Lanes za = (logit<relu_a>(xa, scale_a) - m_a), zb = (logit<relu_b>(xb, scale_b) - m_b);
      const Lanes p = exponential<precision>(za - ln_l_a);
      Lanes db = (exponential<precision>(zb - ln_l_b) - p) * weight_b;
      if constexpr (relu_b) db = select(xb * scale_b <= 0.0f, Lanes{}, db);
      store(b + j * stride, select(mask, db, Lanes{}));
      if constexpr (with_a()) {
        Lanes da = p * ((za - zb) - mu) * weight_a;
        if constexpr (relu_a) da = select(xa * scale_a <= 0.0f, Lanes{}, da);
        store(a + j * stride, select(mask, da, Lanes{}));
      }
    });
  };
  want_a ? run(std::true_type{}) : run(std::false_type{});
}

template <Precision precision, bool relu, int64_t stride>
void mixture_gradient(const float* p, float* b, const Span& span, float factor, const GradientLanes& rows) {
  const Lanes scale = splat(factor), m = rows.m, ln_l = rows.ln_l, weight = rows.factor;
  each_key(span, [&](int64_t j, auto mask, int) {
    const Lanes x = load(b + j * stride);
    Lanes db = (exponential<precision>((logit<relu>(x, scale) - m) - ln_l) - load(p + j * stride)) * weight;
    if constexpr (relu) db = select(x * scale <= 0.0f, Lanes{}, db);
    store(b + j * stride, select(mask, db, Lanes{}));
  });
}

// The sums of p and of p (ln p - ln q) over a row's keys.
struct TrainState {
  Lanes s = {}, acc = {};

  template <Precision precision, bool relu, int64_t stride>
  void update(const float* p, float* b, const Span& span, float factor, const GradientLanes& rows) {
    const Lanes scale = splat(factor), m = rows.m, ln_l = rows.ln_l, weight = rows.factor;
    const Ints without = rows.weight == 0.0f;
    Lanes sum_p[2] = {}, sum[2] = {};
    each_key(span, [&](int64_t j, auto mask, int turn) {
      const Lanes value = load(p + j * stride), x = load(b + j * stride);
      const Lanes log_q = (logit<relu>(x, scale) - m) - ln_l;
      sum_p[turn] += select(mask, value, Lanes{});
      sum[turn] += select(mask, mixture_term<precision>(value, log_q), Lanes{});
      Lanes db = (exponential<precision>(log_q) - value) * weight;
      if constexpr (relu) db = select(x * scale <= 0.0f, Lanes{}, db);
      db = select(without, Lanes{}, db);
      store(b + j * stride, select(mask, db, Lanes{}));
    });
    s += sum_p[0] + sum_p[1];
    acc += sum[0] + sum[1];
  }
};

// The divergence of a row, and the loss of all rows: rows of weight 0 do not count, whatever their divergence is.
inline float trained(float s, float acc) { return s == 0.0f ? acc : acc / s - std::log(s); }
inline Tensor weighted_sum(const Tensor& weights, const Tensor& kl) {
  return at::where(weights.ne(0), weights.mul(kl), at::zeros({}, kl.options())).sum();
}

}  // namespace streamkl::cpu

// The row vectors [B, heads, Nq] that forward passes write. They are initialised to the values of a dead row.
#pragma once

#include "passes/pass.h"

namespace streamkl::cpu {

// Writes row max and ln of the row sum; nan for a row whose logits are all -inf.
inline void write_pair(float m, float l, const Tensor& to_m, const Tensor& to_ln_l, const Block& block, int64_t head, int64_t i) {
  Rows(to_m).at(block, head)[i] = m == -kInf ? NAN : m;
  Rows(to_ln_l).at(block, head)[i] = std::log(l);
}

struct LogSumExpRows {
  Tensor m, ln_l;
  float value;
  LogSumExpRows(const Tensor& q, int64_t heads, Precision precision, double scale)
      : m(rows_like(q, heads, -kInf)), ln_l(rows_like(q, heads, 0.0f)), value(natural_value(precision, scale)) {}

  // Lane l of a state is row i of the block.
  void write(const LogSumExp& state, int64_t l, const Block& block, int64_t head, int64_t i) const {
    write_pair(value * state.m[l], state.l[l], m, ln_l, block, head, i);
  }
};

struct PairedRows {
  Tensor kl, mean, m_a, ln_l_a, m_b, ln_l_b;
  float value_a, value_b, difference;
  PairedRows(const Tensor& q, int64_t heads, Precision precision, double scale_a, double scale_b)
      : kl(rows_like(q, heads, 0.0f)), mean(rows_like(q, heads, 0.0f)), m_a(rows_like(q, heads, -kInf)),
        ln_l_a(rows_like(q, heads, 0.0f)), m_b(rows_like(q, heads, -kInf)), ln_l_b(rows_like(q, heads, 0.0f)),
        value_a(natural_value(precision, scale_a)), value_b(natural_value(precision, scale_b)), difference(natural_difference(precision)) {}

  void write(const PairedState& state, int64_t l, const Block& block, int64_t r, int64_t i) const {
    const float mu = difference * state.acc[l] / state.l_a[l];
    Rows(mean).at(block, r)[i] = mu;
    Rows(kl).at(block, r)[i] = mu + std::log(state.l_b[l] / state.l_a[l]);
    write_pair(value_a * state.m_a[l], state.l_a[l], m_a, ln_l_a, block, r, i);
    write_pair(value_b * state.m_b[l], state.l_b[l], m_b, ln_l_b, block, r, i);
  }
};

struct MixtureRows {
  Tensor kl, m_b, ln_l_b, s;
  MixtureRows(const Tensor& q, int64_t heads)
      : kl(rows_like(q, heads, 0.0f)), m_b(rows_like(q, heads, -kInf)), ln_l_b(rows_like(q, heads, 0.0f)), s(rows_like(q, heads, 0.0f)) {}

  void write(const MixtureState& state, int64_t l, const Block& block, int64_t r, int64_t i) const {
    const float sum = state.s[l];
    // ln(l_b / s). Both are 1 up to rounding if a row has one key: their difference is exact, their quotient is not.
    const float divergence = sum == 0.0f ? state.acc[l] : state.acc[l] / sum + std::log1p((state.l_b[l] - sum) / sum);
    Rows(kl).at(block, r)[i] = state.m_b[l] == -kInf ? NAN : divergence;
    Rows(s).at(block, r)[i] = sum;
    write_pair(state.m_b[l], state.l_b[l], m_b, ln_l_b, block, r, i);
  }
};

}  // namespace streamkl::cpu

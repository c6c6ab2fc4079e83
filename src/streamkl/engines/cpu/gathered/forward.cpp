// The forward passes over selected keys: one row at a time, its keys along the lanes.
#include "gathered/student.h"
#include "gathered/target.h"
#include "kernels.h"
#include "passes/outputs.h"

#include <numeric>

namespace streamkl::cpu {

std::tuple<Tensor, Tensor> gathered_logsumexp(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, const Tensor& table, const Tensor& topk_, double scale,
    bool relu, int64_t left, int64_t right, int64_t key_span) {
  const Window window{left, right, key_span};
  const TopkIndices topk(topk_);
  const int64_t heads = GatheredStudent::distributions(q, weights);
  const GatheredStudent like(q, k, weights, scale, relu);
  const bool quick = fast(q, q, like.scale(), like.scale());
  const LogSumExpRows out(q, heads, precision_of(quick), like.scale());
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto with_relu) {
    return &LogSumExp::update<precision(), with_relu()>;
  });
  const auto merge = quick ? &merged_lse<Precision::kFast> : &merged_lse<Precision::kExact>;
  // Heads that share both a key head and a top-k head are taken together.
  const int64_t together = weights ? 1 : std::gcd(heads / k.size(1), topk.heads_per_topk_head(heads));
  each_block(table, window, topk.rows_at_once(), heads / together, quick, [&] {
    return [&, side = GatheredStudent(q, k, weights, scale, relu), selected = SelectedKeys(topk, window),
            state = std::vector<LogSumExp>(together)](const Block& block, int64_t run) mutable {
      const int64_t first = run * together;
      selected.take(block, topk.topk_head(first, heads));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (selected.count(i) == 0) continue;
        side.take_row(block, i, first, first + together, false);
        std::fill(state.begin(), state.end(), LogSumExp());
        each_piece(selected.count(i), [&](int64_t j, int64_t keys) {
          const float* x = side.product(block, selected.of(i) + j, keys);
          for (int64_t n = 0; n < together; n++) (state[n].*update)(x + n * kSelected, kLanes, dealt(keys), like.scale());
        });
        for (int64_t n = 0; n < together; n++) out.write(merge(state[n], like.scale()), 0, block, first + n, i);
      }
    };
  });
  return {out.m, out.ln_l};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> gathered_paired_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& topk_,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, int64_t key_span) {
  const Window window{left, right, key_span};
  const TopkIndices topk(topk_);
  const int64_t heads = b_q.size(1);
  const bool quick = fast(a_q, b_q, a_scale, b_scale);
  // Exact units also in half dtypes: a gradient is a difference from the mean. It is 0 for the only key of weight in a
  // row only if the logits of forward and backward are bit-equal.
  const PairedRows out(b_q, heads, Precision::kExact, a_scale, b_scale);
  const auto update = dispatch(false, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &PairedState::update<precision(), relu_a(), relu_b()>;
  });
  const int64_t together = std::gcd(std::lcm(heads / a_k.size(1), heads / b_k.size(1)), topk.heads_per_topk_head(heads));
  each_block(table, window, topk.rows_at_once(), heads / together, quick, [&] {
    return [&, a = gathered_side_of(a_q, a_k, a_scale, a_relu), b = gathered_side_of(b_q, b_k, b_scale, b_relu),
            selected = SelectedKeys(topk, window), state = std::vector<PairedState>(together), xa = Buffer<float>(gathered_size(together)),
            xb = Buffer<float>(gathered_size(together))](const Block& block, int64_t run) mutable {
      const int64_t first = run * together;
      selected.take(block, topk.topk_head(first, heads));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (selected.count(i) == 0) continue;
        for (GatheredSide* side : {a.get(), b.get()}) side->take_row(block.seq.batch, block.first_row() + i, first, first + together, false);
        std::fill(state.begin(), state.end(), PairedState());
        each_piece(selected.count(i), [&](int64_t j, int64_t keys) {
          a->product(block.seq.k_start, selected.of(i) + j, keys, xa.data());
          b->product(block.seq.k_start, selected.of(i) + j, keys, xb.data());
          for (int64_t n = 0; n < together; n++)
            (state[n].*update)(xa.data() + n * kSelected, xb.data() + n * kSelected, kLanes, dealt(keys), a_scale, b_scale);
        });
        for (int64_t n = 0; n < together; n++) out.write(merged_pair(state[n], a_scale, b_scale), 0, block, first + n, i);
      }
    };
  });
  return {out.kl, out.mean, out.m_a, out.ln_l_a, out.m_b, out.ln_l_b};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> gathered_mixture_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w, const Tensor& table,
    const Tensor& topk_, const Tensor& m_a, const Tensor& ln_l_a, double a_scale, double b_scale, bool a_relu, bool b_relu,
    int64_t left, int64_t right, int64_t key_span, int64_t runs) {
  const Window window{left, right, key_span};
  const TopkIndices topk(topk_);
  const int64_t heads = GatheredStudent::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const GatheredStudent like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale());
  const MixtureRows out(b_q, heads);
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &MixtureState::update<precision(), relu()>;
  });
  const auto merge = quick ? &merged_mixture<Precision::kFast> : &merged_mixture<Precision::kExact>;
  each_block(table, window, topk.rows_at_once(), heads, quick, [&] {
    return [&, target = GatheredTarget(a_q, a_k, a_scale, a_relu, group, runs, quick), b = GatheredStudent(b_q, b_k, b_w, b_scale, b_relu),
            selected = SelectedKeys(topk, window), p = Buffer<float>()](const Block& block, int64_t r) mutable {
      selected.take(block, topk.topk_head(r, heads));
      target.compute(block, selected, r, Rows(m_a), Rows(ln_l_a), p.reserve(topk.rows_at_once() * selected.stride()));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (selected.count(i) == 0) continue;
        MixtureState state;
        b.take_row(block, i, r, r + 1, false);
        each_piece(selected.count(i), [&](int64_t j, int64_t keys) {
          const float* x = b.product(block, selected.of(i) + j, keys);
          (state.*update)(p.data() + i * selected.stride() + j, x, kLanes, dealt(keys), like.scale());
        });
        out.write(merge(state), 0, block, r, i);
      }
    };
  });
  return {out.kl, out.m_b, out.ln_l_b, out.s};
}

}  // namespace streamkl::cpu

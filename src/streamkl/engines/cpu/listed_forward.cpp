// The forward sweeps over rows that name their keys: one row at a time, its keys along the lanes.
#include "kernels.h"
#include "listed_student.h"
#include "listed_target.h"
#include "outputs.h"

#include <numeric>

namespace streamkl::cpu {

std::tuple<Tensor, Tensor> listed_logsumexp(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, const Tensor& table, const Tensor& lists_, double scale,
    bool relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const Lists lists(lists_);
  const int64_t heads = ListedStudent::distributions(q, weights);
  const ListedStudent like(q, k, weights, scale, relu);
  const bool quick = fast(q, q, like.scale(), like.scale());
  const LogSumExpRows out(q, heads, precision_of(quick), like.scale());
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto with_relu) {
    return &LogSumExp::update<precision(), with_relu()>;
  });
  const auto merge = quick ? &merged_lse<Precision::kFast> : &merged_lse<Precision::kExact>;
  // Heads that share both their keys and their list are taken together.
  const int64_t together = weights ? 1 : std::gcd(heads / k.size(1), lists.heads_of_list(heads));
  each_block(table, window, lists.rows_at_once(), heads / together, quick, [&] {
    return [&, side = ListedStudent(q, k, weights, scale, relu), named = NamedKeys(lists, window),
            state = std::vector<LogSumExp>(together)](const Block& block, int64_t run) mutable {
      const int64_t first = run * together;
      named.take(block, lists.list_of(first, heads));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (named.count(i) == 0) continue;
        side.take_row(block, i, first, first + together, false);
        std::fill(state.begin(), state.end(), LogSumExp());
        each_piece(named.count(i), [&](int64_t j, int64_t keys) {
          const float* x = side.product(block, named.of(i) + j, keys);
          for (int64_t n = 0; n < together; n++) (state[n].*update)(x + n * kListed, kLanes, dealt(keys), like.scale());
        });
        for (int64_t n = 0; n < together; n++) out.write(merge(state[n], like.scale()), 0, block, first + n, i);
      }
    };
  });
  return {out.m, out.ln_l};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> listed_paired_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& lists_,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const Lists lists(lists_);
  const int64_t heads = b_q.size(1);
  const bool quick = fast(a_q, b_q, a_scale, b_scale);
  // Exact units also in half dtypes: a gradient is a difference from the mean, which is 0 for a row's only key of weight if the
  // backward's logits are the forward's to the bit.
  const PairedRows out(b_q, heads, Precision::kExact, a_scale, b_scale);
  const auto update = dispatch(false, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &PairedState::update<precision(), relu_a(), relu_b()>;
  });
  const int64_t together = std::gcd(std::lcm(heads / a_k.size(1), heads / b_k.size(1)), lists.heads_of_list(heads));
  each_block(table, window, lists.rows_at_once(), heads / together, quick, [&] {
    return [&, a = listed_side_of(a_q, a_k, a_scale, a_relu), b = listed_side_of(b_q, b_k, b_scale, b_relu),
            named = NamedKeys(lists, window), state = std::vector<PairedState>(together), xa = Buffer<float>(listed_size(together)),
            xb = Buffer<float>(listed_size(together))](const Block& block, int64_t run) mutable {
      const int64_t first = run * together;
      named.take(block, lists.list_of(first, heads));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (named.count(i) == 0) continue;
        for (ListedSide* side : {a.get(), b.get()}) side->take_row(block.seq.batch, block.first_row() + i, first, first + together, false);
        std::fill(state.begin(), state.end(), PairedState());
        each_piece(named.count(i), [&](int64_t j, int64_t keys) {
          a->product(block.seq.k_start, named.of(i) + j, keys, xa.data());
          b->product(block.seq.k_start, named.of(i) + j, keys, xb.data());
          for (int64_t n = 0; n < together; n++)
            (state[n].*update)(xa.data() + n * kListed, xb.data() + n * kListed, kLanes, dealt(keys), a_scale, b_scale);
        });
        for (int64_t n = 0; n < together; n++) out.write(merged_pair(state[n], a_scale, b_scale), 0, block, first + n, i);
      }
    };
  });
  return {out.kl, out.mean, out.m_a, out.ln_l_a, out.m_b, out.ln_l_b};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> listed_mixture_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w, const Tensor& table,
    const Tensor& lists_, const Tensor& m_a, const Tensor& ln_l_a, double a_scale, double b_scale, bool a_relu, bool b_relu,
    int64_t left, int64_t right) {
  const Window window{left, right};
  const Lists lists(lists_);
  const int64_t heads = ListedStudent::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const ListedStudent like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale());
  const MixtureRows out(b_q, heads);
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &MixtureState::update<precision(), relu()>;
  });
  const auto merge = quick ? &merged_mixture<Precision::kFast> : &merged_mixture<Precision::kExact>;
  each_block(table, window, lists.rows_at_once(), heads, quick, [&] {
    return [&, target = ListedTarget(a_q, a_k, a_scale, a_relu, group, quick), b = ListedStudent(b_q, b_k, b_w, b_scale, b_relu),
            named = NamedKeys(lists, window), p = Buffer<float>()](const Block& block, int64_t r) mutable {
      named.take(block, lists.list_of(r, heads));
      target.compute(block, named, r, Rows(m_a), Rows(ln_l_a), p.reserve(lists.rows_at_once() * named.stride()));
      for (int64_t i = 0; i < block.rows(); i++) {
        if (named.count(i) == 0) continue;
        MixtureState state;
        b.take_row(block, i, r, r + 1, false);
        each_piece(named.count(i), [&](int64_t j, int64_t keys) {
          const float* x = b.product(block, named.of(i) + j, keys);
          (state.*update)(p.data() + i * named.stride() + j, x, kLanes, dealt(keys), like.scale());
        });
        out.write(merge(state), 0, block, r, i);
      }
    };
  });
  return {out.kl, out.m_b, out.ln_l_b, out.s};
}

}  // namespace streamkl::cpu

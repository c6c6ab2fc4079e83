// The backward sweeps of tiled.py, which make dQ and dK at once, and the one that makes the loss as well.
#include "kernels.h"
#include "student.h"
#include "target.h"

#include <numeric>
#include <optional>

namespace streamkl::cpu {

// A unit of a backward sweep: a sequence and the distributions whose key heads nobody else writes.
struct Unit {
  std::shared_ptr<const std::vector<Block>> blocks;
  int64_t first, last;
};

std::vector<Unit> units_of(const Tensor& table, const Window& window, int64_t rows, int64_t heads, int64_t together) {
  std::vector<Unit> units;
  for (const auto& seq : sequences_of(table)) {
    const auto blocks = std::make_shared<const std::vector<Block>>(blocks_of(seq, window, rows));
    if (blocks->empty()) continue;
    for (int64_t r = 0; r < heads; r += together) units.push_back({blocks, r, r + together});
  }
  return units;
}

// Into how many shares each unit's rows are dealt, so that no thread is without work.
int64_t shares_of(const std::vector<Unit>& units) {
  return units.empty() ? 1 : std::max<int64_t>(1, at::get_num_threads() / static_cast<int64_t>(units.size()));
}

// Runs the tasks of a backward sweep, a share of a unit each: sweep(block, r, share) of what make() makes a thread.
template <typename Make>
void each_share(const std::vector<Unit>& units, int64_t shares, bool fast, const Make& make) {
  on_all_threads(units.size() * shares, [&](const auto& next) {
    const FlushDenormals flush(fast);
    auto sweep = make();
    for (int64_t task; (task = next()) >= 0;) {
      const Unit& unit = units[task / shares];
      const int64_t share = task % shares;
      for (int64_t r = unit.first; r < unit.last; r++)
        for (size_t n = share; n < unit.blocks->size(); n += shares) sweep((*unit.blocks)[n], r, share);
    }
  });
}

// What the gradients of rows need: their normalisers, their weights, and the factor that dx is multiplied by. Rows of weight 0
// have a gradient of 0 whatever their logits are.
struct GradientRows {
  Normaliser norm;
  Row weight, factor;
  void take(const Block& block, int64_t r, const Rows& m, const Rows& ln_l, const Rows& weights, double scale) {
    norm.take(block, r, m, ln_l);
    weight.take(weights.at(block, r), block.rows());
    factor.take(weights.at(block, r), block.rows(), static_cast<float>(scale));
  }
};

// Keys that sixteen rows do not see have a gradient of 0, too.
STREAMKL_INLINE void clear_outside(float* dx, const Span& span, const Part& part) {
  for (int64_t j = part.j0; j < span.begin; j++) store(dx + j * kStrip, Lanes{});
  for (int64_t j = span.end; j < part.j1; j++) store(dx + j * kStrip, Lanes{});
}

// dx overwrites x.
template <Precision precision, bool relu_a, bool relu_b>
void paired_gradient(
    float* a, float* b, const Span& span, float factor_a, float factor_b, const GradientRows& rows_a,
    const GradientRows& rows_b, const Row& mean, int64_t i, bool want_a) {
  const Lanes scale_a = splat(factor_a), scale_b = splat(factor_b);
  const Lanes m_a = rows_a.norm.m[i], ln_l_a = rows_a.norm.ln_l[i], weight_a = rows_a.factor[i];
  const Lanes m_b = rows_b.norm.m[i], ln_l_b = rows_b.norm.ln_l[i], weight_b = rows_b.factor[i];
  const Lanes mu = mean[i];
  const auto sweep = [&](auto with_a) {
    each_key(span, [&](int64_t j, auto mask, int) {
      const Lanes xa = load(a + j * kStrip), xb = load(b + j * kStrip);
      const Lanes za = (logit<relu_a>(xa, scale_a) - m_a), zb = (logit<relu_b>(xb, scale_b) - m_b);
      const Lanes p = exponential<precision>(za - ln_l_a);
      Lanes db = (exponential<precision>(zb - ln_l_b) - p) * weight_b;
      if constexpr (relu_b) db = xb * scale_b <= 0.0f ? Lanes{} : db;
      store(b + j * kStrip, select(mask, db, Lanes{}));
      if constexpr (with_a()) {
        Lanes da = p * ((za - zb) - mu) * weight_a;
        if constexpr (relu_a) da = xa * scale_a <= 0.0f ? Lanes{} : da;
        store(a + j * kStrip, select(mask, da, Lanes{}));
      }
    });
  };
  want_a ? sweep(std::true_type{}) : sweep(std::false_type{});
}

template <Precision precision, bool relu>
void mixture_gradient(const float* p, float* b, const Span& span, float factor, const GradientRows& rows, int64_t i) {
  const Lanes scale = splat(factor), m = rows.norm.m[i], ln_l = rows.norm.ln_l[i], weight = rows.factor[i];
  each_key(span, [&](int64_t j, auto mask, int) {
    const Lanes x = load(b + j * kStrip);
    Lanes db = (exponential<precision>((logit<relu>(x, scale) - m) - ln_l) - load(p + j * kStrip)) * weight;
    if constexpr (relu) db = x * scale <= 0.0f ? Lanes{} : db;
    store(b + j * kStrip, select(mask, db, Lanes{}));
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& mean, const Tensor& row_grad,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, bool want_a, bool want_b) {
  const Window window{left, right};
  const int64_t heads = Student::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const Student like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale()), paired = group == 1 && !b_w;
  int64_t together = heads / b_k.size(1);
  if (want_a) together = std::lcm(together, heads / a_k.size(1));
  const int64_t bytes = std::max(side_of(a_q, a_k, a_scale, a_relu)->bytes_of_row() * group, like.bytes_of_row(want_b));
  const auto units = units_of(table, window, rows_at_once(bytes), heads, together);
  const int64_t shares = shares_of(units);
  const SideGradient grad_a(want_a, a_q, a_k, shares, false), grad_b(want_b, b_q, b_k, shares, false);
  const Tensor d_w = b_w && want_b ? at::zeros_like(*b_w) : at::empty({0}, m_b.options());
  const auto gradient = dispatch(quick, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &paired_gradient<precision(), relu_a(), relu_b()>;
  });
  const auto gradient_b = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &mixture_gradient<precision(), relu()>;
  });
  const auto factor_a = static_cast<float>(a_scale), factor_b = static_cast<float>(like.scale());
  each_share(units, shares, quick, [&] {
    return [&, a = side_of(a_q, a_k, a_scale, a_relu), b = Student(b_q, b_k, b_w, b_scale, b_relu),
            target = paired ? std::optional<Target>() : Target(side_of(a_q, a_k, a_scale, a_relu), group, quick),
            xa = Buffer<float>(kBlockK * kStrip), xb = Buffer<float>(kBlockK * kStrip), p = Buffer<float>(paired ? 0 : kBlockK * kBlockQ), rows_a = GradientRows(),
            rows_b = GradientRows()](const Block& block, int64_t r, int64_t share) mutable {
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
      each_tile(block, [&](const Tile& tile) {
        b.take_keys(block, tile, r, want_b);
        if (want_a) grad_a.fetch_keys(block, tile, a->kv_head(r), share);
        if (want_b) grad_b.fetch_keys(block, tile, b.kv_head(r), share);
        if (paired) a->take_keys(batch, a->kv_head(r), tile.key(block), tile.keys(), want_a);
        else target->compute(block, tile, window, r, p.data());
        each_part(block, tile, window, true, [&](const Part& part) {
          if (part.j0 < part.j1) {
            b.product(part, xb.data());
            if (paired) a->product(0, part, xa.data());
            each_group(block, tile, window, part, [&](int64_t i, const Span& seen) {
              const Span span = without(seen, rows_b.weight[i] == 0.0f);
              float *xa_i = xa.data() + i - part.i0, *xb_i = xb.data() + i - part.i0;
              if (paired) gradient(xa_i, xb_i, span, factor_a, factor_b, rows_a, rows_b, mu, i, want_a);
              else gradient_b(p.data() + part.i0 * kBlockK + i - part.i0, xb_i, span, factor_b, rows_b, i);
              if (want_a) clear_outside(xa_i, span, part);
              clear_outside(xb_i, span, part);
            });
          }
          if (want_a) a->set_gradient(part, xa.data());
          if (want_b) b.set_gradient(part, xb.data());
        });
        if (want_a) a->add_gradient(0, grad_a.keys(block, tile, a->kv_head(r), share));
        if (want_b) b.add_gradient(grad_b.keys(block, tile, b.kv_head(r), share));
      });
      if (want_a) a->end_gradient(0, grad_a.rows(block, r), false);
      if (want_b) b.end_gradient(block, r, grad_b, d_w, false);
    };
  });
  return {grad_a.q, grad_a.dk(), grad_b.q, grad_b.dk(), d_w};
}

// The sums of p and of p (ln p - ln q) over a row's keys; dx overwrites x.
struct TrainState {
  Lanes s = {}, acc = {};

  template <Precision precision, bool relu>
  void update(const float* p, float* b, const Span& span, float factor, const GradientRows& rows, int64_t i) {
    const Lanes scale = splat(factor), m = rows.norm.m[i], ln_l = rows.norm.ln_l[i], weight = rows.factor[i];
    Lanes sum_p[2] = {}, sum[2] = {};
    each_key(span, [&](int64_t j, auto mask, int turn) {
      const Lanes value = load(p + j * kStrip), x = load(b + j * kStrip);
      const Lanes log_q = (logit<relu>(x, scale) - m) - ln_l;
      sum_p[turn] += select(mask, value, Lanes{});
      const Lanes term = value == 0.0f ? Lanes{} : value * (logarithm(value) - log_q);
      sum[turn] += select(mask, term, Lanes{});
      Lanes db = (exponential<precision>(log_q) - value) * weight;
      if constexpr (relu) db = x * scale <= 0.0f ? Lanes{} : db;
      db = rows.weight[i] == 0.0f ? Lanes{} : db;
      store(b + j * kStrip, select(mask, db, Lanes{}));
    });
    s += sum_p[0] + sum_p[1];
    acc += sum[0] + sum[1];
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> train(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const std::optional<Tensor>& b_w,
    const Tensor& table, const Tensor& m_a, const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const int64_t heads = Student::distributions(b_q, b_w), group = a_q.size(1) / heads;
  const Student like(b_q, b_k, b_w, b_scale, b_relu);
  const bool quick = fast(a_q, b_q, a_scale, like.scale());
  const int64_t rows = rows_at_once(std::max(side_of(a_q, a_k, a_scale, a_relu)->bytes_of_row() * group, like.bytes_of_row(true)));
  const auto units = units_of(table, window, rows, heads, heads / b_k.size(1));
  const int64_t shares = shares_of(units);
  const SideGradient grad_b(true, b_q, b_k, shares, true);
  const Tensor d_w = b_w ? at::zeros_like(*b_w) : at::empty({0}, m_b.options());
  auto kl = rows_like(b_q, heads, 0.0f), mass = rows_like(b_q, heads, 1.0f);
  const auto update = dispatch(quick, false, like.relu(), [](auto precision, auto, auto relu) {
    return &TrainState::update<precision(), relu()>;
  });
  const auto factor = static_cast<float>(like.scale());
  each_share(units, shares, quick, [&] {
    return [&, target = Target(side_of(a_q, a_k, a_scale, a_relu), group, quick), b = Student(b_q, b_k, b_w, b_scale, b_relu),
            x = Buffer<float>(kBlockK * kStrip), p = Buffer<float>(kBlockK * kBlockQ),
            rows_b = GradientRows()](const Block& block, int64_t r, int64_t share) mutable {
      const float* weight = Rows(weights).at(block, r);
      TrainState state[kBlockQ / kLanes];
      target.take_rows(block, r, Rows(m_a), Rows(ln_l_a));
      b.take_rows(block, r, true);
      rows_b.take(block, r, Rows(m_b), Rows(ln_l_b), Rows(weights), b.scale());
      b.begin_gradient();
      each_tile(block, [&](const Tile& tile) {
        target.compute(block, tile, window, r, p.data());
        b.take_keys(block, tile, r, true);
        grad_b.fetch_keys(block, tile, b.kv_head(r), share);
        each_part(block, tile, window, true, [&](const Part& part) {
          if (part.j0 < part.j1) {
            b.product(part, x.data());
            each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
              float* x_i = x.data() + i - part.i0;
              (state[i / kLanes].*update)(p.data() + part.i0 * kBlockK + i - part.i0, x_i, span, factor, rows_b, i);
              clear_outside(x_i, span, part);
            });
          }
          b.set_gradient(part, x.data());
        });
        b.add_gradient(grad_b.keys(block, tile, b.kv_head(r), share));
      });
      b.end_gradient(block, r, grad_b, d_w, true);
      for (int64_t i = 0; i < block.rows(); i++) {
        const float s = state[i / kLanes].s[i % kLanes], acc = state[i / kLanes].acc[i % kLanes];
        Rows(kl).at(block, r)[i] = s == 0.0f ? 0.0f : acc / s - std::log(s);
        if (weight[i] != 0.0f) Rows(mass).at(block, r)[i] = s;
      }
    };
  });
  auto loss = at::where(weights.ne(0), weights * kl, at::zeros({}, kl.options())).sum();
  return {loss, grad_b.q, grad_b.dk(), d_w, mass};
}

}  // namespace streamkl::cpu

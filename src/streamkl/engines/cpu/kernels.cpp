// The sweeps of tiled.py over the tiles of tile.h, and their registration as operators.
#include "tile.h"

#include <ATen/Parallel.h>
#include <torch/library.h>

#include <atomic>
#include <numeric>
#include <tuple>

namespace streamkl::cpu {
namespace {

using at::Tensor;

struct Sequence {
  int64_t batch, q_start, q_len, k_start, k_len, diagonal;
};

// A block of live rows of a sequence, and the keys they see together.
struct Block {
  Sequence seq;
  int64_t i0, i1, j0, j1;
};

std::vector<Block> blocks_of(const Sequence& seq, const Window& window) {
  std::vector<Block> blocks;
  if (seq.k_len == 0) return blocks;
  const int64_t first = window.right < 0 ? 0 : std::max<int64_t>(0, -seq.diagonal - window.right);
  const int64_t last = window.left < 0 ? seq.q_len : std::min(seq.q_len, seq.k_len - seq.diagonal + window.left);
  for (int64_t i0 = first; i0 < last; i0 += kBlockQ) {
    const int64_t i1 = std::min(i0 + kBlockQ, last);
    const int64_t j0 = window.left < 0 ? 0 : std::max<int64_t>(0, i0 + seq.diagonal - window.left);
    const int64_t j1 = window.right < 0 ? seq.k_len : std::min(seq.k_len, i1 + seq.diagonal + window.right);
    blocks.push_back({seq, i0, i1, j0, j1});
  }
  return blocks;
}

std::vector<Sequence> sequences_of(const Tensor& table) {
  const auto rows = table.contiguous();
  const int64_t* p = rows.const_data_ptr<int64_t>();
  std::vector<Sequence> sequences(rows.size(0));
  for (size_t n = 0; n < sequences.size(); n++, p += 6) sequences[n] = {p[0], p[1], p[2], p[3], p[4], p[5]};
  return sequences;
}

std::vector<Block> all_blocks(const Tensor& table, const Window& window) {
  std::vector<Block> blocks;
  for (const auto& seq : sequences_of(table))
    for (const auto& block : blocks_of(seq, window)) blocks.push_back(block);
  return blocks;
}

// Whether this CPU multiplies a dtype as it is; elsewhere it is multiplied in float32.
bool native(at::ScalarType dtype) { return dtype == at::kFloat || at::native::cpublas::could_pack(dtype); }

std::unique_ptr<Side> side_of(const Tensor& q, const Tensor& k, double scale, bool relu) {
  const auto s = static_cast<float>(scale);
  const bool as_is = native(q.scalar_type());
  switch (q.scalar_type()) {
    case at::kBFloat16:
      if (as_is) return std::make_unique<TypedSide<at::BFloat16, at::BFloat16>>(q, k, s, relu);
      return std::make_unique<TypedSide<at::BFloat16, float>>(q, k, s, relu);
    case at::kHalf:
      if (as_is) return std::make_unique<TypedSide<at::Half, at::Half>>(q, k, s, relu);
      return std::make_unique<TypedSide<at::Half, float>>(q, k, s, relu);
    case at::kFloat:
      return std::make_unique<TypedSide<float, float>>(q, k, s, relu);
    default:
      TORCH_CHECK(false, "streamkl cpu engine: unsupported dtype ", q.scalar_type());
  }
}

// Runs work(worker) on every thread; a worker takes tasks until there are none left.
template <typename Worker>
void on_all_threads(int64_t tasks, const Worker& work) {
  if (tasks == 0) return;
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) work([&]() -> int64_t {
        const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
        return task < tasks ? task : -1;
      });
    at::native::cpublas::brgemm_release();
  });
}

// Sixteen floats at any address: a maximum that keeps its meaning for nan is not vectorised from a plain loop.
using Lanes = float __attribute__((vector_size(64), aligned(4), may_alias));

// Scales a row's products and applies the relu; returns the largest logit.
template <bool relu>
inline float finish_logits(float* x, int64_t n, float scale) {
  Lanes top = Lanes{} - kInf;
  int64_t j = 0;
  for (; j + 16 <= n; j += 16) {
    auto* lanes = reinterpret_cast<Lanes*>(x + j);
    Lanes v = *lanes * scale;
    if constexpr (relu) v = v < 0.0f ? Lanes{} : v;
    *lanes = v;
    top = v > top ? v : top;
  }
  float m = -kInf;
  for (; j < n; j++) {
    float v = x[j] * scale;
    if constexpr (relu) v = v < 0.0f ? 0.0f : v;
    x[j] = v;
    m = v > m ? v : m;
  }
  for (int l = 0; l < 16; l++) m = top[l] > m ? top[l] : m;
  return m;
}

inline float finish_logits(float* x, int64_t n, float scale, bool relu) {
  return relu ? finish_logits<true>(x, n, scale) : finish_logits<false>(x, n, scale);
}

inline float shrink(float m, float merged) { return m == -kInf ? 0.0f : exp_(m - merged); }

struct LogSumExp {
  float m = -kInf, l = 0.0f;

  void update(float* x, int64_t n, float scale, bool relu) {
    const float top = std::max(m, finish_logits(x, n, scale, relu));
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) sum += exp_(x[j] - top);
    l = l * shrink(m, top) + sum;
    m = top;
  }
};

struct PairedState {
  float m_a = -kInf, l_a = 0.0f, m_b = -kInf, l_b = 0.0f, acc = 0.0f;

  void update(float* a, float* b, int64_t n, const Side& side_a, const Side& side_b) {
    const float top_a = std::max(m_a, finish_logits(a, n, side_a.scale, side_a.relu));
    const float top_b = std::max(m_b, finish_logits(b, n, side_b.scale, side_b.relu));
    float sum_a = 0.0f, sum_b = 0.0f, sum = 0.0f;
#pragma omp simd reduction(+ : sum_a, sum_b, sum)
    for (int64_t j = 0; j < n; j++) {
      const float da = a[j] - top_a, db = b[j] - top_b, weight = exp_(da);
      sum_a += weight;
      sum_b += exp_(db);
      sum += weight * (da - db);
    }
    const float alpha = shrink(m_a, top_a), beta = shrink(m_b, top_b);
    if (l_a != 0.0f) acc = alpha * (acc + l_a * ((m_a - top_a) - (m_b - top_b)));
    acc += sum;
    l_a = alpha * l_a + sum_a;
    l_b = beta * l_b + sum_b;
    m_a = top_a;
    m_b = top_b;
  }

  float mean() const { return acc / l_a; }
  float kl() const { return mean() + std::log(l_b / l_a); }
};

struct MixtureState {
  float m_b = -kInf, l_b = 0.0f, s = 0.0f, acc = 0.0f;

  void update(const float* p, float* b, int64_t n, const Side& side_b) {
    const float top = std::max(m_b, finish_logits(b, n, side_b.scale, side_b.relu));
    float sum_b = 0.0f, sum_p = 0.0f, sum = 0.0f;
#pragma omp simd reduction(+ : sum_b, sum_p, sum)
    for (int64_t j = 0; j < n; j++) {
      const float db = b[j] - top;
      sum_b += exp_(db);
      sum_p += p[j];
      sum += p[j] == 0.0f ? 0.0f : p[j] * (log_(p[j]) - db);
    }
    if (s != 0.0f) acc += s * (top - m_b);
    acc += sum;
    s += sum_p;
    l_b = l_b * shrink(m_b, top) + sum_b;
    m_b = top;
  }

  float kl() const { return s == 0.0f ? 0.0f : acc / s + std::log(l_b / s); }
};

// Row vectors [B, heads, Nq], contiguous.
struct Rows {
  float* data;
  int64_t heads, nq;
  explicit Rows(const Tensor& x) : data(x.data_ptr<float>()), heads(x.size(1)), nq(x.size(2)) {}
  float* at(const Block& block, int64_t head) const {
    return data + (block.seq.batch * heads + head) * nq + block.seq.q_start + block.i0;
  }
};

Tensor rows_like(const Tensor& q, int64_t heads, float value) {
  return at::full({q.size(0), heads, q.size(2)}, value, q.options().dtype(at::kFloat));
}

struct Tile {
  int64_t j0, j1;
  int64_t key(const Block& block) const { return block.seq.k_start + j0; }
  int64_t keys() const { return j1 - j0; }
};

template <typename Visit>
void each_tile(const Block& block, const Visit& visit) {
  for (int64_t j0 = block.j0; j0 < block.j1; j0 += kBlockK) visit(Tile{j0, std::min(j0 + kBlockK, block.j1)});
}

inline int64_t first_row(const Block& block) { return block.seq.q_start + block.i0; }
inline int64_t row_count(const Block& block) { return block.i1 - block.i0; }

void take(Side& side, const Block& block, const Tile& tile, int64_t head, bool rows, bool for_gradient) {
  if (rows) side.take_rows(block.seq.batch, head, first_row(block), row_count(block), for_gradient);
  side.take_keys(block.seq.batch, head, tile.key(block), tile.keys(), for_gradient);
}

std::tuple<Tensor, Tensor> logsumexp(
    const Tensor& q, const Tensor& k, const Tensor& table, double scale, bool relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const auto blocks = all_blocks(table, window);
  auto m = rows_like(q, q.size(1), -kInf), ln_l = rows_like(q, q.size(1), 0.0f);
  const Rows m_rows(m), ln_l_rows(ln_l);
  const int64_t count = blocks.size();
  on_all_threads(count * q.size(1), [&](const auto& next) {
    const auto side = side_of(q, k, scale, relu);
    std::vector<float> x(kBlockQ * kBlockK);
    for (int64_t task; (task = next()) >= 0;) {
      const Block& block = blocks[count - 1 - task % count];
      const int64_t head = task / count;
      std::vector<LogSumExp> state(row_count(block));
      bool first = true;
      each_tile(block, [&](const Tile& tile) {
        take(*side, block, tile, head, first, false);
        first = false;
        side->product(x.data());
        for (int64_t i = 0; i < row_count(block); i++) {
          const Run run = window.run(block.i0 + i, block.seq.diagonal, tile.j0, tile.j1);
          if (run.first < run.last)
            state[i].update(x.data() + i * kBlockK + run.first, run.last - run.first, side->scale, side->relu);
        }
      });
      for (int64_t i = 0; i < row_count(block); i++) {
        m_rows.at(block, head)[i] = state[i].m == -kInf ? NAN : state[i].m;
        ln_l_rows.at(block, head)[i] = std::log(state[i].l);
      }
    }
  });
  return {m, ln_l};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> paired_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const auto blocks = all_blocks(table, window);
  const int64_t heads = b_q.size(1), count = blocks.size();
  auto kl = rows_like(b_q, heads, 0.0f), mean = rows_like(b_q, heads, 0.0f);
  auto m_a = rows_like(b_q, heads, -kInf), ln_l_a = rows_like(b_q, heads, 0.0f);
  auto m_b = rows_like(b_q, heads, -kInf), ln_l_b = rows_like(b_q, heads, 0.0f);
  on_all_threads(count * heads, [&](const auto& next) {
    const auto a = side_of(a_q, a_k, a_scale, a_relu), b = side_of(b_q, b_k, b_scale, b_relu);
    std::vector<float> xa(kBlockQ * kBlockK), xb(kBlockQ * kBlockK);
    for (int64_t task; (task = next()) >= 0;) {
      const Block& block = blocks[count - 1 - task % count];
      const int64_t r = task / count, rows = row_count(block);
      std::vector<PairedState> state(rows);
      bool first = true;
      each_tile(block, [&](const Tile& tile) {
        take(*a, block, tile, r, first, false);
        take(*b, block, tile, r, first, false);
        first = false;
        a->product(xa.data());
        b->product(xb.data());
        for (int64_t i = 0; i < rows; i++) {
          const Run run = window.run(block.i0 + i, block.seq.diagonal, tile.j0, tile.j1);
          const int64_t at = i * kBlockK + run.first;
          if (run.first < run.last) state[i].update(xa.data() + at, xb.data() + at, run.last - run.first, *a, *b);
        }
      });
      for (int64_t i = 0; i < rows; i++) {
        Rows(kl).at(block, r)[i] = state[i].kl();
        Rows(mean).at(block, r)[i] = state[i].mean();
        Rows(m_a).at(block, r)[i] = state[i].m_a == -kInf ? NAN : state[i].m_a;
        Rows(m_b).at(block, r)[i] = state[i].m_b == -kInf ? NAN : state[i].m_b;
        Rows(ln_l_a).at(block, r)[i] = std::log(state[i].l_a);
        Rows(ln_l_b).at(block, r)[i] = std::log(state[i].l_b);
      }
    }
  });
  return {kl, mean, m_a, ln_l_a, m_b, ln_l_b};
}

// p[rows, keys]: the mean over the heads of a that distribution r is compared with.
void target(
    Side& a, const Block& block, const Tile& tile, const Window& window, int64_t r, int64_t group, const Rows& m_a,
    const Rows& ln_l_a, float* x, float* p) {
  const int64_t rows = row_count(block);
  for (int64_t head = r * group; head < (r + 1) * group; head++) {
    take(a, block, tile, head, true, false);
    a.product(x);
    const float *m = m_a.at(block, head), *ln_l = ln_l_a.at(block, head);
    const bool first = head == r * group;
    const float mean = 1.0f / static_cast<float>(group);
    for (int64_t i = 0; i < rows; i++) {
      const Run run = window.run(block.i0 + i, block.seq.diagonal, tile.j0, tile.j1);
      float *xi = x + i * kBlockK, *pi = p + i * kBlockK;
      finish_logits(xi + run.first, run.last - run.first, a.scale, a.relu);
      for (int64_t j = run.first; j < run.last; j++) {
        const float value = exp_((xi[j] - m[i]) - ln_l[i]);
        pi[j] = first ? value * mean : pi[j] + value * mean;
      }
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> mixture_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& m_a,
    const Tensor& ln_l_a, double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const auto blocks = all_blocks(table, window);
  const int64_t heads = b_q.size(1), group = a_q.size(1) / heads, count = blocks.size();
  auto kl = rows_like(b_q, heads, 0.0f), m_b = rows_like(b_q, heads, -kInf), ln_l_b = rows_like(b_q, heads, 0.0f);
  on_all_threads(count * heads, [&](const auto& next) {
    const auto a = side_of(a_q, a_k, a_scale, a_relu), b = side_of(b_q, b_k, b_scale, b_relu);
    std::vector<float> xa(kBlockQ * kBlockK), xb(kBlockQ * kBlockK), p(kBlockQ * kBlockK);
    for (int64_t task; (task = next()) >= 0;) {
      const Block& block = blocks[count - 1 - task % count];
      const int64_t r = task / count, rows = row_count(block);
      std::vector<MixtureState> state(rows);
      bool first = true;
      each_tile(block, [&](const Tile& tile) {
        target(*a, block, tile, window, r, group, Rows(m_a), Rows(ln_l_a), xa.data(), p.data());
        take(*b, block, tile, r, first, false);
        first = false;
        b->product(xb.data());
        for (int64_t i = 0; i < rows; i++) {
          const Run run = window.run(block.i0 + i, block.seq.diagonal, tile.j0, tile.j1);
          const int64_t at = i * kBlockK + run.first;
          if (run.first < run.last) state[i].update(p.data() + at, xb.data() + at, run.last - run.first, *b);
        }
      });
      for (int64_t i = 0; i < rows; i++) {
        Rows(kl).at(block, r)[i] = state[i].m_b == -kInf ? NAN : state[i].kl();
        Rows(m_b).at(block, r)[i] = state[i].m_b == -kInf ? NAN : state[i].m_b;
        Rows(ln_l_b).at(block, r)[i] = std::log(state[i].l_b);
      }
    }
  });
  return {kl, m_b, ln_l_b};
}

// A unit of a backward sweep: a sequence and the distributions whose key heads nobody else writes.
struct Unit {
  std::vector<Block> blocks;
  int64_t first, last;
};

// Float gradients of one side: dQ whole, dK^T once for each share of a unit's rows.
struct SideGradient {
  Tensor q, k;
  SideGradient(const Tensor& q_, const Tensor& k_, int64_t shares)
      : q(at::zeros(q_.sizes(), q_.options().dtype(at::kFloat).memory_format(at::MemoryFormat::Contiguous))),
        k(at::zeros({shares, k_.size(0), k_.size(1), k_.size(3), k_.size(2)}, k_.options().dtype(at::kFloat))) {}
  float* rows(const Block& block, int64_t head) const {
    return q.data_ptr<float>() + ((block.seq.batch * q.size(1) + head) * q.size(2) + first_row(block)) * q.size(3);
  }
  float* keys(const Block& block, const Tile& tile, int64_t kv, int64_t share) const {
    const int64_t head = (share * k.size(1) + block.seq.batch) * k.size(2) + kv;
    return k.data_ptr<float>() + head * k.size(3) * k.size(4) + tile.key(block);
  }
  int64_t stride() const { return k.size(4); }
  Tensor dk() const { return (k.size(0) == 1 ? k.squeeze(0) : k.sum(0)).transpose(2, 3); }
};

std::vector<Unit> units_of(const Tensor& table, const Window& window, int64_t heads, int64_t together) {
  std::vector<Unit> units;
  for (const auto& seq : sequences_of(table)) {
    const auto blocks = blocks_of(seq, window);
    if (blocks.empty()) continue;
    for (int64_t r = 0; r < heads; r += together) units.push_back({blocks, r, r + together});
  }
  return units;
}

// Into how many shares each unit's rows are dealt, so that no thread is without work.
int64_t shares_of(const std::vector<Unit>& units) {
  return units.empty() ? 1 : std::max<int64_t>(1, at::get_num_threads() / static_cast<int64_t>(units.size()));
}

// Visits the blocks of rows of one share of a unit, head by head: visit(block, r).
template <typename Visit>
void each_block(const Unit& unit, int64_t share, int64_t shares, const Visit& visit) {
  for (int64_t r = unit.first; r < unit.last; r++)
    for (size_t n = share; n < unit.blocks.size(); n += shares) visit(unit.blocks[n], r);
}

// Multiplies a row of dx by its weight and the scale, and by the relu's derivative; 0 outside of its run.
inline void weigh(float* dx, const float* x, const Run& run, int64_t padded, float weight, const Side& side) {
  const float factor = weight * side.scale;
  for (int64_t j = 0; j < run.first; j++) dx[j] = 0.0f;
  if (weight == 0.0f || run.first >= run.last) {
    for (int64_t j = run.first; j < padded; j++) dx[j] = 0.0f;
    return;
  }
  if (side.relu) {
    for (int64_t j = run.first; j < run.last; j++) dx[j] = x[j] <= 0.0f ? 0.0f : dx[j] * factor;
  } else {
    for (int64_t j = run.first; j < run.last; j++) dx[j] *= factor;
  }
  for (int64_t j = run.last; j < padded; j++) dx[j] = 0.0f;
}

inline void clear_rows(float* dx, int64_t rows) {
  for (int64_t i = rows; i < round_up(rows, 16); i++) std::fill_n(dx + i * kBlockK, kBlockK, 0.0f);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& m_a,
    const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& mean, const Tensor& row_grad,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, bool want_a, bool want_b) {
  const Window window{left, right};
  const int64_t heads = b_q.size(1), group = a_q.size(1) / heads;
  int64_t together = heads / b_k.size(1);
  if (want_a) together = std::lcm(together, heads / a_k.size(1));
  const auto units = units_of(table, window, heads, together);
  const int64_t shares = shares_of(units);
  const SideGradient grad_a(want_a ? a_q : a_q.slice(0, 0, 0), want_a ? a_k : a_k.slice(0, 0, 0), shares);
  const SideGradient grad_b(want_b ? b_q : b_q.slice(0, 0, 0), want_b ? b_k : b_k.slice(0, 0, 0), shares);
  on_all_threads(units.size() * shares, [&](const auto& next) {
    const auto a = side_of(a_q, a_k, a_scale, a_relu), b = side_of(b_q, b_k, b_scale, b_relu);
    const size_t size = kBlockQ * kBlockK;
    std::vector<float> xa(size), xb(size), p(size), da(want_a ? size : 0), db(size);
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t share = task % shares;
      each_block(units[task / shares], share, shares, [&](const Block& block, int64_t r) {
        const int64_t rows = row_count(block);
        const float* weight = Rows(row_grad).at(block, r);
        bool first = true;
        each_tile(block, [&](const Tile& tile) {
          const int64_t padded = round_up(tile.keys(), 32);
          take(*b, block, tile, r, first, want_b);
          b->product(xb.data());
          if (want_a) {
            take(*a, block, tile, r, first, true);
            a->product(xa.data());
          } else {
            target(*a, block, tile, window, r, group, Rows(m_a), Rows(ln_l_a), xa.data(), p.data());
          }
          first = false;
          for (int64_t i = 0; i < rows; i++) {
            const Run run = window.run(block.i0 + i, block.seq.diagonal, tile.j0, tile.j1);
            const float mb = Rows(m_b).at(block, r)[i], lb = Rows(ln_l_b).at(block, r)[i];
            float *xbi = xb.data() + i * kBlockK, *dbi = db.data() + i * kBlockK, *pi = p.data() + i * kBlockK;
            finish_logits(xbi + run.first, run.last - run.first, b->scale, b->relu);
            if (want_a) {
              float *xai = xa.data() + i * kBlockK, *dai = da.data() + i * kBlockK;
              const float ma = Rows(m_a).at(block, r)[i], la = Rows(ln_l_a).at(block, r)[i];
              const float mu = Rows(mean).at(block, r)[i];
              finish_logits(xai + run.first, run.last - run.first, a->scale, a->relu);
              for (int64_t j = run.first; j < run.last; j++) {
                const float shifted_a = xai[j] - ma, shifted_b = xbi[j] - mb;
                pi[j] = exp_(shifted_a - la);
                dai[j] = pi[j] * (shifted_a - shifted_b - mu);
                dbi[j] = exp_(shifted_b - lb) - pi[j];
              }
              weigh(dai, xai, run, padded, weight[i], *a);
            } else {
              for (int64_t j = run.first; j < run.last; j++) dbi[j] = exp_((xbi[j] - mb) - lb) - pi[j];
            }
            weigh(dbi, xbi, run, padded, weight[i], *b);
          }
          if (want_a) {
            clear_rows(da.data(), rows);
            a->add_gradient(da.data(), grad_a.rows(block, r), grad_a.keys(block, tile, a->kv_head(r), share), grad_a.stride());
          }
          if (want_b) {
            clear_rows(db.data(), rows);
            b->add_gradient(db.data(), grad_b.rows(block, r), grad_b.keys(block, tile, b->kv_head(r), share), grad_b.stride());
          }
        });
      });
    }
  });
  return {grad_a.q, grad_a.dk(), grad_b.q, grad_b.dk()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> train(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& m_a,
    const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const int64_t heads = b_q.size(1), group = a_q.size(1) / heads;
  const auto units = units_of(table, window, heads, heads / b_k.size(1));
  const int64_t shares = shares_of(units);
  const SideGradient grad_b(b_q, b_k, shares);
  auto kl = rows_like(b_q, heads, 0.0f), mass = rows_like(b_q, heads, 1.0f);
  on_all_threads(units.size() * shares, [&](const auto& next) {
    const auto a = side_of(a_q, a_k, a_scale, a_relu), b = side_of(b_q, b_k, b_scale, b_relu);
    const size_t size = kBlockQ * kBlockK;
    std::vector<float> xa(size), xb(size), p(size), db(size), s(kBlockQ), acc(kBlockQ);
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t share = task % shares;
      each_block(units[task / shares], share, shares, [&](const Block& block, int64_t r) {
        const int64_t rows = row_count(block);
        const float* weight = Rows(weights).at(block, r);
        std::fill(s.begin(), s.end(), 0.0f);
        std::fill(acc.begin(), acc.end(), 0.0f);
        bool first = true;
        each_tile(block, [&](const Tile& tile) {
          const int64_t padded = round_up(tile.keys(), 32);
          target(*a, block, tile, window, r, group, Rows(m_a), Rows(ln_l_a), xa.data(), p.data());
          take(*b, block, tile, r, first, true);
          first = false;
          b->product(xb.data());
          for (int64_t i = 0; i < rows; i++) {
            const Run run = window.run(block.i0 + i, block.seq.diagonal, tile.j0, tile.j1);
            const float mb = Rows(m_b).at(block, r)[i], lb = Rows(ln_l_b).at(block, r)[i];
            float *xbi = xb.data() + i * kBlockK, *dbi = db.data() + i * kBlockK, *pi = p.data() + i * kBlockK;
            finish_logits(xbi + run.first, run.last - run.first, b->scale, b->relu);
            float sum_p = 0.0f, sum = 0.0f;
#pragma omp simd reduction(+ : sum_p, sum)
            for (int64_t j = run.first; j < run.last; j++) {
              const float log_q = (xbi[j] - mb) - lb;
              sum_p += pi[j];
              sum += pi[j] == 0.0f ? 0.0f : pi[j] * (log_(pi[j]) - log_q);
              dbi[j] = exp_(log_q) - pi[j];
            }
            s[i] += sum_p;
            acc[i] += sum;
            weigh(dbi, xbi, run, padded, weight[i], *b);
          }
          clear_rows(db.data(), rows);
          b->add_gradient(db.data(), grad_b.rows(block, r), grad_b.keys(block, tile, b->kv_head(r), share), grad_b.stride());
        });
        for (int64_t i = 0; i < rows; i++) {
          Rows(kl).at(block, r)[i] = s[i] == 0.0f ? 0.0f : acc[i] / s[i] - std::log(s[i]);
          if (weight[i] != 0.0f) Rows(mass).at(block, r)[i] = s[i];
        }
      });
    }
  });
  auto loss = at::where(weights.ne(0), weights * kl, at::zeros({}, kl.options())).sum();
  return {loss, grad_b.q, grad_b.dk(), mass};
}

}  // namespace

TORCH_LIBRARY(streamkl_cpu, library) {
  library.def("native(ScalarType dtype) -> bool", &native);
  library.def("logsumexp(Tensor q, Tensor k, Tensor table, float scale, bool relu, int left, int right) -> (Tensor, Tensor)");
  library.def("paired_rows(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor table, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def("mixture_rows(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor table, Tensor m_a, Tensor ln_l_a, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right) -> (Tensor, Tensor, Tensor)");
  library.def("backward(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor table, Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b, Tensor mean, Tensor row_grad, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right, bool want_a, bool want_b) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def("train(Tensor a_q, Tensor a_k, Tensor b_q, Tensor b_k, Tensor table, Tensor m_a, Tensor ln_l_a, Tensor m_b, Tensor ln_l_b, Tensor weight, float a_scale, float b_scale, bool a_relu, bool b_relu, int left, int right) -> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(streamkl_cpu, CPU, library) {
  library.impl("logsumexp", &logsumexp);
  library.impl("paired_rows", &paired_rows);
  library.impl("mixture_rows", &mixture_rows);
  library.impl("backward", &backward);
  library.impl("train", &train);
}

}  // namespace streamkl::cpu

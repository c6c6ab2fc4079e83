// The sweeps of tiled.py over the tiles of tile.h, and their registration as operators.
#include "rows.h"
#include "threads.h"
#include "tile.h"

#include <torch/library.h>

#include <numeric>
#include <optional>
#include <tuple>

#include <xmmintrin.h>

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
  int64_t first_row() const { return seq.q_start + i0; }
  int64_t rows() const { return i1 - i0; }
};

std::vector<Block> blocks_of(const Sequence& seq, const Window& window, int64_t rows) {
  std::vector<Block> blocks;
  if (seq.k_len == 0) return blocks;
  const int64_t first = window.right < 0 ? 0 : std::max<int64_t>(0, -seq.diagonal - window.right);
  const int64_t last = window.left < 0 ? seq.q_len : std::min(seq.q_len, seq.k_len - seq.diagonal + window.left);
  for (int64_t i0 = first; i0 < last; i0 += rows) {
    const int64_t i1 = std::min(i0 + rows, last);
    const int64_t j0 = std::max<int64_t>(0, window.first(i0 + seq.diagonal));
    const int64_t j1 = std::min(seq.k_len, window.last(i1 - 1 + seq.diagonal));
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

// How many rows are taken at once: fewer where a group of heads is, so that what they take fits the caches.
int64_t rows_at_once(const Side& a, int64_t group) {
  const int64_t fit = (int64_t(2) << 20) / (a.bytes_of_row() * group);
  return std::clamp(fit / kLanes * kLanes, kLanes, kBlockQ);
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

// Visits the strips of a block that see keys of a tile, and the part of the tile that holds them. Strips that see none
// are visited with an empty part if they are wanted.
template <typename Visit>
void each_part(const Block& block, const Tile& tile, const Window& window, bool want_empty, const Visit& visit) {
  for (int64_t i = 0; i < block.rows(); i += kStrip) {
    const int64_t end = std::min(i + kStrip, block.rows()), diagonal = block.i0 + block.seq.diagonal;
    const int64_t first = std::max(window.first(i + diagonal), tile.j0) - tile.j0;
    const int64_t last = std::min(window.last(end - 1 + diagonal), tile.j1) - tile.j0;
    if (first < last) {
      visit(Part{i, end, first / kStrip * kStrip, std::min(round_up(last, kStrip), round_up(tile.keys(), kLanes))});
    } else if (want_empty) {
      visit(Part{i, end, 0, 0});
    }
  }
}

// Visits a part sixteen rows at a time: visit(i, span) with the first row's place in the block.
template <typename Visit>
STREAMKL_INLINE void each_group(const Block& block, const Tile& tile, const Window& window, const Part& part, const Visit& visit) {
  for (int64_t i = part.i0; i < part.i1; i += kLanes) {
    const int64_t j1 = std::min(tile.j0 + part.j1, tile.j1);
    visit(i, window.span(block.i0 + i + block.seq.diagonal, tile.j0 + part.j0, j1, tile.j0));
  }
}

// Whether a dtype is multiplied as it is; elsewhere it is in float32. float16 always is: gradients of logits, which are
// divided by the number of rows before they are rounded, would vanish in it.
bool native(at::ScalarType dtype) {
  return dtype == at::kFloat || (dtype == at::kBFloat16 && at::native::cpublas::could_pack(dtype));
}

std::unique_ptr<Side> side_of(const Tensor& q, const Tensor& k, double scale, bool relu) {
  switch (q.scalar_type()) {
    case at::kBFloat16:
      if (native(at::kBFloat16)) return std::make_unique<TypedSide<at::BFloat16, at::BFloat16>>(q, k, scale, relu);
      return std::make_unique<TypedSide<at::BFloat16, float>>(q, k, scale, relu);
    case at::kHalf:
      return std::make_unique<TypedSide<at::Half, float>>(q, k, scale, relu);
    case at::kFloat:
      return std::make_unique<TypedSide<float, float>>(q, k, scale, relu);
    default:
      TORCH_CHECK(false, "streamkl cpu engine: unsupported dtype ", q.scalar_type());
  }
}

// Calls work with the precision that the sides' dtypes ask for, and with their relus, as types.
template <typename Work>
auto dispatch(bool fast, bool relu_a, bool relu_b, const Work& work) {
  const auto with = [&](auto precision) {
    const auto with_a = [&](auto a) { return relu_b ? work(precision, a, std::true_type{}) : work(precision, a, std::false_type{}); };
    return relu_a ? with_a(std::true_type{}) : with_a(std::false_type{});
  };
  if (fast) return with(std::integral_constant<Precision, Precision::kFast>{});
  return with(std::integral_constant<Precision, Precision::kExact>{});
}

bool fast(const Tensor& a, const Tensor& b, double a_scale, double b_scale) {
  return a.scalar_type() != at::kFloat && b.scalar_type() != at::kFloat && a_scale > 0.0 && b_scale > 0.0;
}

Precision precision_of(bool fast) { return fast ? Precision::kFast : Precision::kExact; }

// Weights far below the largest one would otherwise be denormal, which costs a hundred times as much as they are worth.
class FlushDenormals {
 public:
  explicit FlushDenormals(bool wanted) : saved_(_mm_getcsr()) {
    if (wanted) _mm_setcsr(saved_ | 0x8040);
  }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
};

// Row vectors [B, heads, Nq], contiguous.
struct Rows {
  float* data;
  int64_t heads, nq;
  explicit Rows(const Tensor& x) : data(x.data_ptr<float>()), heads(x.size(1)), nq(x.size(2)) {}
  float* at(const Block& block, int64_t head) const {
    return data + (block.seq.batch * heads + head) * nq + block.first_row();
  }
};

Tensor rows_like(const Tensor& q, int64_t heads, float value) {
  return at::full({q.size(0), heads, q.size(2)}, value, q.options().dtype(at::kFloat));
}

// A block's share of row vectors, in whole lanes: rows after the last one have 0.
struct Row {
  alignas(64) float data[kBlockQ];
  void take(const float* from, int64_t rows, float factor = 1.0f) {
    for (int64_t i = 0; i < rows; i++) data[i] = from[i] * factor;
    std::fill(data + rows, data + round_up(rows, kLanes), 0.0f);
  }
  Lanes operator[](int64_t i) const { return load(data + i); }
};

// ln p = (logit - m) - ln_l.
struct Normaliser {
  Row m, ln_l;
  void take(const Block& block, int64_t head, const Rows& from_m, const Rows& from_ln_l) {
    m.take(from_m.at(block, head), block.rows());
    ln_l.take(from_ln_l.at(block, head), block.rows());
  }
};

// Writes a row's normaliser. A row whose logits are all -inf has nan.
void write(float m, float l, const Tensor& to_m, const Tensor& to_ln_l, const Block& block, int64_t head, int64_t i) {
  Rows(to_m).at(block, head)[i] = m == -kInf ? NAN : m;
  Rows(to_ln_l).at(block, head)[i] = std::log(l);
}

// Runs the tasks of a forward sweep, a block of rows and a head each: sweep(block, head) of what make() makes a thread.
template <typename Make>
void each_block(const Tensor& table, const Window& window, int64_t rows, int64_t heads, bool fast, const Make& make) {
  std::vector<Block> blocks;
  for (const auto& seq : sequences_of(table))
    for (const auto& block : blocks_of(seq, window, rows)) blocks.push_back(block);
  const int64_t count = blocks.size();
  on_all_threads(count * heads, [&](const auto& next) {
    const FlushDenormals flush(fast);
    auto sweep = make();
    // The last rows of a causal problem have the most to do, so they come first.
    for (int64_t task; (task = next()) >= 0;) sweep(blocks[count - 1 - task % count], task / count);
  });
}

std::tuple<Tensor, Tensor> logsumexp(
    const Tensor& q, const Tensor& k, const Tensor& table, double scale, bool relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const int64_t heads = q.size(1);
  const bool quick = fast(q, q, scale, scale);
  auto m = rows_like(q, heads, -kInf), ln_l = rows_like(q, heads, 0.0f);
  const auto update = dispatch(quick, false, relu, [](auto precision, auto, auto with_relu) {
    return &LogSumExp::update<precision(), with_relu()>;
  });
  const float value = natural_value(precision_of(quick), scale);
  each_block(table, window, kBlockQ, heads, quick, [&] {
    return [&, side = side_of(q, k, scale, relu), x = Buffer<float>(kBlockK * kStrip)](const Block& block, int64_t head) {
      LogSumExp state[kBlockQ / kLanes];
      side->take_rows(0, block.seq.batch, head, block.first_row(), block.rows(), false);
      each_tile(block, [&](const Tile& tile) {
        side->take_keys(block.seq.batch, side->kv_head(head), tile.key(block), tile.keys(), false);
        each_part(block, tile, window, false, [&](const Part& part) {
          side->product(0, part, x.data());
          each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
            (state[i / kLanes].*update)(x.data() + i - part.i0, kStrip, span, scale);
          });
        });
      });
      for (int64_t i = 0; i < block.rows(); i++)
        write(value * state[i / kLanes].m[i % kLanes], state[i / kLanes].l[i % kLanes], m, ln_l, block, head, i);
    };
  });
  return {m, ln_l};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> paired_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const int64_t heads = b_q.size(1);
  const bool quick = fast(a_q, b_q, a_scale, b_scale);
  auto kl = rows_like(b_q, heads, 0.0f), mean = rows_like(b_q, heads, 0.0f);
  auto m_a = rows_like(b_q, heads, -kInf), ln_l_a = rows_like(b_q, heads, 0.0f);
  auto m_b = rows_like(b_q, heads, -kInf), ln_l_b = rows_like(b_q, heads, 0.0f);
  const auto update = dispatch(quick, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &PairedState::update<precision(), relu_a(), relu_b()>;
  });
  const float value_a = natural_value(precision_of(quick), a_scale), value_b = natural_value(precision_of(quick), b_scale);
  const float difference = natural_difference(precision_of(quick));
  each_block(table, window, kBlockQ, heads, quick, [&] {
    return [&, a = side_of(a_q, a_k, a_scale, a_relu), b = side_of(b_q, b_k, b_scale, b_relu),
            xa = Buffer<float>(kBlockK * kStrip), xb = Buffer<float>(kBlockK * kStrip)](const Block& block, int64_t r) {
      PairedState state[kBlockQ / kLanes];
      a->take_rows(0, block.seq.batch, r, block.first_row(), block.rows(), false);
      b->take_rows(0, block.seq.batch, r, block.first_row(), block.rows(), false);
      each_tile(block, [&](const Tile& tile) {
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
      for (int64_t i = 0; i < block.rows(); i++) {
        const PairedState& rows = state[i / kLanes];
        const int64_t l = i % kLanes;
        const float mu = difference * rows.acc[l] / rows.l_a[l];
        Rows(mean).at(block, r)[i] = mu;
        Rows(kl).at(block, r)[i] = mu + std::log(rows.l_b[l] / rows.l_a[l]);
        write(value_a * rows.m_a[l], rows.l_a[l], m_a, ln_l_a, block, r, i);
        write(value_b * rows.m_b[l], rows.l_b[l], m_b, ln_l_b, block, r, i);
      }
    };
  });
  return {kl, mean, m_a, ln_l_a, m_b, ln_l_b};
}

// The heads of a that a distribution is compared with: their rows taken once a block, and p[keys, rows], their mean.
class Target {
 public:
  Target(std::unique_ptr<Side> a, int64_t group, bool fast)
      : a_(std::move(a)), group_(group), factor_(static_cast<float>(a_->scale)),
        x_(kBlockK * kStrip), norm_(group) {
    add_ = dispatch(fast, false, a_->relu, [](auto precision, auto, auto relu) { return &add<precision(), relu()>; });
  }

  void take_rows(const Block& block, int64_t r, const Rows& m, const Rows& ln_l) {
    for (int64_t n = 0; n < group_; n++) {
      const int64_t head = r * group_ + n;
      a_->take_rows(n, block.seq.batch, head, block.first_row(), block.rows(), false);
      norm_[n].take(block, head, m, ln_l);
    }
  }

  // All parts of a tile at once, p[part][keys, rows]: the keys of a key head are taken once for all its heads.
  void compute(const Block& block, const Tile& tile, const Window& window, int64_t r, float* p) {
    for (int64_t n = 0; n < group_; n++) {
      const int64_t kv = a_->kv_head(r * group_ + n);
      if (n == 0 || kv != a_->kv_head(r * group_ + n - 1)) a_->take_keys(block.seq.batch, kv, tile.key(block), tile.keys(), false);
      each_part(block, tile, window, false, [&](const Part& part) {
        a_->product(n, part, x_.data());
        each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
          const int64_t at = i - part.i0;
          add_(x_.data() + at, p + part.i0 * kBlockK + at, span, factor_, norm_[n], i, 1.0f / static_cast<float>(group_), n == 0);
        });
      });
    }
  }

 private:
  template <Precision precision, bool relu>
  static void add(const float* x, float* p, const Span& span, float factor, const Normaliser& norm, int64_t i, float mean, bool first) {
    const Lanes scale = splat(factor), m = norm.m[i], ln_l = norm.ln_l[i];
    Span all = span;  // p has a value wherever some row of the sixteen sees a key
    all.full_begin = span.begin;
    all.full_end = span.end;
    each_key(all, [&](int64_t j, auto, int) {
      const Lanes value = mean * exponential<precision>((logit<relu>(load(x + j * kStrip), scale) - m) - ln_l);
      store(p + j * kStrip, first ? value : load(p + j * kStrip) + value);
    });
  }

  std::unique_ptr<Side> a_;
  const int64_t group_;
  const float factor_;
  Buffer<float> x_;
  std::vector<Normaliser> norm_;
  void (*add_)(const float*, float*, const Span&, float, const Normaliser&, int64_t, float, bool);
};

std::tuple<Tensor, Tensor, Tensor> mixture_rows(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& m_a,
    const Tensor& ln_l_a, double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const int64_t heads = b_q.size(1), group = a_q.size(1) / heads;
  const bool quick = fast(a_q, b_q, a_scale, b_scale);
  auto kl = rows_like(b_q, heads, 0.0f), m_b = rows_like(b_q, heads, -kInf), ln_l_b = rows_like(b_q, heads, 0.0f);
  const auto update = dispatch(quick, false, b_relu, [](auto precision, auto, auto relu) {
    return &MixtureState::update<precision(), relu()>;
  });
  const int64_t rows = rows_at_once(*side_of(a_q, a_k, a_scale, a_relu), group);
  each_block(table, window, rows, heads, quick, [&] {
    return [&, target = Target(side_of(a_q, a_k, a_scale, a_relu), group, quick), b = side_of(b_q, b_k, b_scale, b_relu),
            x = Buffer<float>(kBlockK * kStrip), p = Buffer<float>(kBlockK * kBlockQ)](const Block& block, int64_t r) mutable {
      MixtureState state[kBlockQ / kLanes];
      target.take_rows(block, r, Rows(m_a), Rows(ln_l_a));
      b->take_rows(0, block.seq.batch, r, block.first_row(), block.rows(), false);
      each_tile(block, [&](const Tile& tile) {
        target.compute(block, tile, window, r, p.data());
        b->take_keys(block.seq.batch, b->kv_head(r), tile.key(block), tile.keys(), false);
        each_part(block, tile, window, false, [&](const Part& part) {
          b->product(0, part, x.data());
          each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
            const int64_t at = i - part.i0;
            (state[i / kLanes].*update)(p.data() + part.i0 * kBlockK + at, x.data() + at, kStrip, span, b_scale);
          });
        });
      });
      for (int64_t i = 0; i < block.rows(); i++) {
        const MixtureState& row = state[i / kLanes];
        const int64_t l = i % kLanes;
        const float divergence = row.s[l] == 0.0f ? 0.0f : row.acc[l] / row.s[l] + std::log(row.l_b[l] / row.s[l]);
        Rows(kl).at(block, r)[i] = row.m_b[l] == -kInf ? NAN : divergence;
        write(row.m_b[l], row.l_b[l], m_b, ln_l_b, block, r, i);
      }
    };
  });
  return {kl, m_b, ln_l_b};
}

// A unit of a backward sweep: a sequence and the distributions whose key heads nobody else writes.
struct Unit {
  std::shared_ptr<const std::vector<Block>> blocks;
  int64_t first, last;
};

// Gradients of one side: dQ whole, dK in floats once for each share of a unit's rows, its width padded.
struct SideGradient {
  Tensor q, k;
  int64_t dim;
  SideGradient(bool wanted, const Tensor& q_, const Tensor& k_, int64_t shares, bool floats) : dim(k_.size(3)) {
    if (!wanted) {
      q = k = at::empty({0}, q_.options().dtype(at::kFloat));
      return;
    }
    q = at::zeros(q_.sizes(), floats ? q_.options().dtype(at::kFloat) : q_.options());
    k = at::zeros({shares, k_.size(0), k_.size(1), k_.size(2), round_up(dim, kLanes)}, k_.options().dtype(at::kFloat));
  }
  void* rows(const Block& block, int64_t head) const {
    const int64_t row = (block.seq.batch * q.size(1) + head) * q.size(2) + block.first_row();
    return static_cast<char*>(q.data_ptr()) + row * q.size(3) * q.element_size();
  }
  float* keys(const Block& block, const Tile& tile, int64_t kv, int64_t share) const {
    const int64_t head = (share * k.size(1) + block.seq.batch) * k.size(2) + kv;
    return k.data_ptr<float>() + (head * k.size(3) + tile.key(block)) * k.size(4);
  }
  void fetch_keys(const Block& block, const Tile& tile, int64_t kv, int64_t share) const {
    fetch(keys(block, tile, kv, share), tile.keys() * k.size(4) * sizeof(float));
  }
  Tensor dk() const {
    if (k.dim() == 1) return k;
    for (int64_t share = 1; share < k.size(0); share++) k[0].add_(k[share]);
    return k[0].slice(3, 0, dim);
  }
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

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& m_a,
    const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& mean, const Tensor& row_grad,
    double a_scale, double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right, bool want_a, bool want_b) {
  const Window window{left, right};
  const int64_t heads = b_q.size(1), group = a_q.size(1) / heads;
  const bool quick = fast(a_q, b_q, a_scale, b_scale), paired = group == 1;
  int64_t together = heads / b_k.size(1);
  if (want_a) together = std::lcm(together, heads / a_k.size(1));
  const auto units = units_of(table, window, rows_at_once(*side_of(a_q, a_k, a_scale, a_relu), group), heads, together);
  const int64_t shares = shares_of(units);
  const SideGradient grad_a(want_a, a_q, a_k, shares, false), grad_b(want_b, b_q, b_k, shares, false);
  const auto gradient = dispatch(quick, a_relu, b_relu, [](auto precision, auto relu_a, auto relu_b) {
    return &paired_gradient<precision(), relu_a(), relu_b()>;
  });
  const auto gradient_b = dispatch(quick, false, b_relu, [](auto precision, auto, auto relu) {
    return &mixture_gradient<precision(), relu()>;
  });
  const auto factor_a = static_cast<float>(a_scale), factor_b = static_cast<float>(b_scale);
  each_share(units, shares, quick, [&] {
    return [&, a = side_of(a_q, a_k, a_scale, a_relu), b = side_of(b_q, b_k, b_scale, b_relu),
            target = paired ? std::optional<Target>() : Target(side_of(a_q, a_k, a_scale, a_relu), group, quick),
            xa = Buffer<float>(kBlockK * kStrip), xb = Buffer<float>(kBlockK * kStrip), p = Buffer<float>(paired ? 0 : kBlockK * kBlockQ), rows_a = GradientRows(),
            rows_b = GradientRows()](const Block& block, int64_t r, int64_t share) mutable {
      const int64_t batch = block.seq.batch;
      Row mu;
      b->take_rows(0, batch, r, block.first_row(), block.rows(), want_b);
      rows_b.take(block, r, Rows(m_b), Rows(ln_l_b), Rows(row_grad), b_scale);
      if (paired) {
        a->take_rows(0, batch, r, block.first_row(), block.rows(), want_a);
        rows_a.take(block, r, Rows(m_a), Rows(ln_l_a), Rows(row_grad), a_scale);
        mu.take(Rows(mean).at(block, r), block.rows());
      } else {
        target->take_rows(block, r, Rows(m_a), Rows(ln_l_a));
      }
      if (want_a) a->begin_gradient();
      if (want_b) b->begin_gradient();
      each_tile(block, [&](const Tile& tile) {
        b->take_keys(batch, b->kv_head(r), tile.key(block), tile.keys(), want_b);
        if (want_a) grad_a.fetch_keys(block, tile, a->kv_head(r), share);
        if (want_b) grad_b.fetch_keys(block, tile, b->kv_head(r), share);
        if (paired) a->take_keys(batch, a->kv_head(r), tile.key(block), tile.keys(), want_a);
        else target->compute(block, tile, window, r, p.data());
        each_part(block, tile, window, true, [&](const Part& part) {
          if (part.j0 < part.j1) {
            b->product(0, part, xb.data());
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
          if (want_b) b->set_gradient(part, xb.data());
        });
        if (want_a) a->add_gradient(grad_a.keys(block, tile, a->kv_head(r), share));
        if (want_b) b->add_gradient(grad_b.keys(block, tile, b->kv_head(r), share));
      });
      if (want_a) a->end_gradient(grad_a.rows(block, r), false);
      if (want_b) b->end_gradient(grad_b.rows(block, r), false);
    };
  });
  return {grad_a.q, grad_a.dk(), grad_b.q, grad_b.dk()};
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

std::tuple<Tensor, Tensor, Tensor, Tensor> train(
    const Tensor& a_q, const Tensor& a_k, const Tensor& b_q, const Tensor& b_k, const Tensor& table, const Tensor& m_a,
    const Tensor& ln_l_a, const Tensor& m_b, const Tensor& ln_l_b, const Tensor& weights, double a_scale,
    double b_scale, bool a_relu, bool b_relu, int64_t left, int64_t right) {
  const Window window{left, right};
  const int64_t heads = b_q.size(1), group = a_q.size(1) / heads;
  const bool quick = fast(a_q, b_q, a_scale, b_scale);
  const int64_t rows = rows_at_once(*side_of(a_q, a_k, a_scale, a_relu), group);
  const auto units = units_of(table, window, rows, heads, heads / b_k.size(1));
  const int64_t shares = shares_of(units);
  const SideGradient grad_b(true, b_q, b_k, shares, true);
  auto kl = rows_like(b_q, heads, 0.0f), mass = rows_like(b_q, heads, 1.0f);
  const auto update = dispatch(quick, false, b_relu, [](auto precision, auto, auto relu) {
    return &TrainState::update<precision(), relu()>;
  });
  const auto factor = static_cast<float>(b_scale);
  each_share(units, shares, quick, [&] {
    return [&, target = Target(side_of(a_q, a_k, a_scale, a_relu), group, quick), b = side_of(b_q, b_k, b_scale, b_relu),
            x = Buffer<float>(kBlockK * kStrip), p = Buffer<float>(kBlockK * kBlockQ),
            rows_b = GradientRows()](const Block& block, int64_t r, int64_t share) mutable {
      const float* weight = Rows(weights).at(block, r);
      TrainState state[kBlockQ / kLanes];
      target.take_rows(block, r, Rows(m_a), Rows(ln_l_a));
      b->take_rows(0, block.seq.batch, r, block.first_row(), block.rows(), true);
      rows_b.take(block, r, Rows(m_b), Rows(ln_l_b), Rows(weights), b_scale);
      b->begin_gradient();
      each_tile(block, [&](const Tile& tile) {
        target.compute(block, tile, window, r, p.data());
        b->take_keys(block.seq.batch, b->kv_head(r), tile.key(block), tile.keys(), true);
        grad_b.fetch_keys(block, tile, b->kv_head(r), share);
        each_part(block, tile, window, true, [&](const Part& part) {
          if (part.j0 < part.j1) {
            b->product(0, part, x.data());
            each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
              float* x_i = x.data() + i - part.i0;
              (state[i / kLanes].*update)(p.data() + part.i0 * kBlockK + i - part.i0, x_i, span, factor, rows_b, i);
              clear_outside(x_i, span, part);
            });
          }
          b->set_gradient(part, x.data());
        });
        b->add_gradient(grad_b.keys(block, tile, b->kv_head(r), share));
      });
      b->end_gradient(grad_b.rows(block, r), true);
      for (int64_t i = 0; i < block.rows(); i++) {
        const float s = state[i / kLanes].s[i % kLanes], acc = state[i / kLanes].acc[i % kLanes];
        Rows(kl).at(block, r)[i] = s == 0.0f ? 0.0f : acc / s - std::log(s);
        if (weight[i] != 0.0f) Rows(mass).at(block, r)[i] = s;
      }
    };
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

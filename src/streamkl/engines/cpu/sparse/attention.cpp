// Attention over the selected keys of query blocks and unions: keys are gathered once per block and key head, with an
// online softmax over tiles.
#include "kernels.h"
#include "passes/outputs.h"
#include "sparse/gather.h"
#include "sparse/key_union.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace streamkl::cpu {
namespace {

constexpr int64_t kTile = 256;                 // selected keys of a tile
static_assert(kTile < kLate);                  // so that m moves once per tile, as rows.h says
constexpr int64_t kTileStride = kTile + kLanes;  // as right_stride() gives it
constexpr int64_t kTileStep = 64;              // keys are padded to whole steps, so that products have few shapes
constexpr int64_t kPiece = 128;                // keys whose values float products add up at once
constexpr int64_t kValuesAhead = 8;            // values that are fetched ahead where they are read where they lie
constexpr int64_t kSingleHeads = 32;           // of a key head, at most, for single rows: those of more heads are a product
constexpr int64_t kRows = 32;                  // rows of a product of logits: they stay in the first-level cache

template <int turn>
using Turn = std::integral_constant<int, turn>;

// The softmax of rows of a tile, lanes along the keys. Logits are multiplied by log2 e for kFast.
template <Precision precision>
struct Softmax {
  float factor;
  explicit Softmax(double scale)
      : factor(static_cast<float>(precision == Precision::kFast ? scale * 1.44269504088896341 : scale)) {}

  // The keys [begin, end) of a tile that a row sees, out of `padded`; `own` are the bits of those it selected, or null
  // for all. All of p is written.
  struct Run {
    int64_t begin, end, padded;
    const uint16_t* own;
  };

  // visit(j, mask, turn): turn is 0 or 1, for sums that are kept in two parts.
  template <typename Visit>
  STREAMKL_INLINE static void each(const Run& run, const Visit& visit) {
    const int64_t first = run.begin / kLanes * kLanes, full = round_up(run.begin, kLanes), last = run.end / kLanes * kLanes;
    const auto two = [&](int64_t j, int64_t end, const auto& mask_of) {
      for (; j + kLanes < end; j += 2 * kLanes) {
        visit(j, mask_of(j), Turn<0>{});
        visit(j + kLanes, mask_of(j + kLanes), Turn<1>{});
      }
      if (j < end) visit(j, mask_of(j), Turn<0>{});
    };
    const auto masked = [&](int64_t j) {
      const Ints key = iota() + static_cast<int32_t>(j);
      visit(j, (key >= static_cast<int32_t>(run.begin)) & (key < static_cast<int32_t>(run.end)), Turn<1>{});
    };
    if (run.own != nullptr) return two(first, run.end, [&](int64_t j) { return LaneBits{run.own[j / kLanes]}; });
    if (first < full) masked(first);
    two(full, last, [](int64_t) { return All{}; });
    if (std::max(full, last) < run.end) masked(last);
  }

  STREAMKL_INLINE float top(const float* x, const Run& run) const {
    Lanes top = splat(-kInf);
    each(run, [&](int64_t j, auto mask, auto) { top = max(select(mask, load(x + j) * factor, splat(-kInf)), top); });
    return largest(top);
  }

  // p = e^(x - m); returns their sum.
  template <typename P>
  STREAMKL_INLINE float weights(const float* x, const Run& run, float m, P* p) const {
    const float at = m == -kInf ? 0.0f : m;  // logits of -inf have weight 0; the next tile may have others
    Lanes total[2] = {};
    each(run, [&](int64_t j, auto mask, auto turn) {
      Lanes weight;
      if constexpr (precision == Precision::kFast) weight = power_of_two(fma(load(x + j), splat(factor), splat(-at)));
      else weight = exponential<precision>(load(x + j) * factor - at);
      weight = select(mask, weight, Lanes{});
      total[turn()] += weight;
      if constexpr (std::is_same_v<P, float>) store(p + j, weight);
      else store(p + j, rounded(weight));
    });
    return sum(total[0] + total[1]);
  }

  // Adds a tile to a row's (m, l) and writes its weights; returns the factor for the row's output so far.
  template <typename P>
  STREAMKL_INLINE float update(const float* x, const Run& run, float& m, float& l, P* p) const {
    std::fill(p, p + std::min(run.begin / kLanes * kLanes, run.padded), P(0.0f));
    if (run.begin >= run.end) {
      std::fill(p, p + run.padded, P(0.0f));
      return 1.0f;
    }
    std::fill(p + round_up(run.end, kLanes), p + run.padded, P(0.0f));
    float shrink = 1.0f;
    const auto move = [&] {
      const float to = std::max(top(x, run), m);
      if (to != m) shrink *= m == -kInf ? 0.0f : precision == Precision::kFast ? std::exp2(m - to) : std::exp(m - to);
      m = to;
    };
    if (precision == Precision::kExact || m == -kInf) move();
    float total = weights(x, run, m, p);
    if (precision == Precision::kFast && total > kLate) {
      move();
      total = weights(x, run, m, p);
    }
    l = l * shrink + total;
    return shrink;
  }
};

// One per thread. The rows of its products are the rows of a block, for each head that reads a key head.
template <typename T, typename P, Precision precision>
class Attention {
  static constexpr bool kVnni = !std::is_same_v<P, float>;

 public:
  Attention(
      const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& page_table, const Tensor& out, const Tensor& rest,
      const LogSumExpRows& stats, double scale, const Window& window)
      : q_(q.const_data_ptr<T>()), out_(out.data_ptr<T>()), rest_(rest.numel() > 0 ? rest.data_ptr<T>() : nullptr), stats_(stats), q_strides_(q), heads_(q.size(1)), nq_(q.size(2)),
        group_(q.size(1) / k.size(1)), k_(k, page_table), v_(v, page_table), softmax_(scale), window_(window),
        k_tile_(k_.width * kTileStride), v_tile_(kTile * right_stride(v_.width)), x_(kRows * kTile) {}

  void attend(const UnionRows& union_rows, int64_t kv) {
    const auto& block = union_rows.rows;
    const auto& selected = union_rows.selected;
    const int64_t rows = block.rows * group_, width = v_.width;
    take_rows(block, kv);
    see(union_rows);
    k_.take_head(block.seq.batch, kv, block.seq.k_start);
    v_.take_head(block.seq.batch, kv, block.seq.k_start);
    P* p = p_.reserve(rows * kTileStride);
    float* y = y_.reserve(rows * width);
    std::fill_n(y, rows * width, 0.0f);
    m_.assign(rows, -kInf);
    l_.assign(rows, 0.0f);
    for (int64_t j0 = 0; j0 < selected.count; j0 += kTile) {
      const int64_t count = std::min(kTile, selected.count - j0), padded = round_up(count, kTileStep);
      k_.columns(selected.keys + j0, count, padded, k_tile_.data(), kTileStride);
      v_.rows(selected.keys + j0, count, padded, v_tile_.data(), right_stride(width));
      const int64_t next = j0 + kTile, ahead = std::max<int64_t>(0, std::min(kTile, selected.count - next));
      for (int64_t i0 = 0; i0 < rows; i0 += kRows) {
        const int64_t i1 = std::min(i0 + kRows, rows);
        logits(i0, i1 - i0, padded);
        for (int64_t i = i0; i < i1; i++) {
          // Prefetch the next tile's keys and values while this one's weights are computed.
          for (int64_t j = ahead * i / rows; j < ahead * (i + 1) / rows; j++) {
            k_.fetch_token(selected.keys[next + j]);
            v_.fetch_token(selected.keys[next + j]);
          }
          const auto& seen = seen_[i % block.rows];
          const typename Softmax<precision>::Run run{
              std::clamp<int64_t>(seen.first - j0, 0, count), std::clamp<int64_t>(seen.last - j0, 0, count), padded,
              union_rows.own_of(i % block.rows, j0)};
          const float shrink = softmax_.update(x_.data() + (i - i0) * kTile, run, m_[i], l_[i], p + i * kTileStride);
          if (shrink != 1.0f) scale_row(y + i * width, shrink);
        }
      }
      add_values(rows, padded, p, y);
    }
    if constexpr (!kVnni)
      for (int64_t i = 0; i < block.rows; i++) attend_singly(union_rows.rest_of(i), i, block.rows, p, y);
    write(block, kv, y);
  }

 private:
  struct Seen {
    int64_t first, last;
    bool dead;
  };

  // Adds the keys that are left to a row, for each of its heads, `apart` rows apart. They are multiplied where they lie:
  // a product of so few rows would mostly be packing.
  void attend_singly(const SortedKeys& selected, int64_t row, int64_t apart, float* p, float* y) {
    const int64_t width = v_.width;
    float* x = x_.reserve(group_ * kTile);
    const float *keys[kTile], *values[kTile];
    for (int64_t j0 = 0; j0 < selected.count; j0 += kTile) {
      const int64_t count = std::min(kTile, selected.count - j0), padded = round_up(count, kLanes);
      k_.find(selected.keys + j0, count, padded, k_tile_.data(), keys);
      v_.find(selected.keys + j0, count, padded, v_tile_.data(), values);
      for (int64_t j = 0; j < padded; j += kLanes) {
        for (int64_t next = j + kLanes; next < std::min(j + 2 * kLanes, padded); next++) fetch<3>(keys[next], k_.width * sizeof(float));
        for (int64_t n = 0; n < group_; n++)
          store(x + n * kTile + j, inner_products([&](int r) { return keys[j + r]; }, q_rows_.data() + (n * apart + row) * k_.width, k_.width));
      }
      for (int64_t n = 0; n < group_; n++) {
        const int64_t i = n * apart + row;
        const float shrink = softmax_.update(x + n * kTile, {0, count, padded, nullptr}, m_[i], l_[i], p + n * kTileStride);
        if (shrink != 1.0f) scale_row(y + i * width, shrink);
      }
      for (int64_t j = 0; j < count; j += kPiece) {
        const int64_t end = std::min(j + kPiece, count);
        for (int64_t n = 0; n < group_;) {
          float* to = y + (n * apart + row) * width;
          const float* weights = p + n * kTileStride;
          if (group_ - n >= 3) add_values_singly<3>(values, j, end, weights, to, apart * width), n += 3;
          else if (group_ - n == 2) add_values_singly<2>(values, j, end, weights, to, apart * width), n += 2;
          else add_values_singly<1>(values, j, end, weights, to, apart * width), n++;
        }
      }
    }
  }

  void scale_row(float* y, float by) const {
    for (int64_t c = 0; c < v_.width; c += kLanes) store(y + c, load(y + c) * by);
  }

  // y += p v for some heads, `apart` floats apart, and the keys [begin, end), which are added up before.
  template <int heads>
  void add_values_singly(const float* const* values, int64_t begin, int64_t end, const float* p, float* y, int64_t apart) {
    const auto add = [&](auto vectors, int64_t c) {
      Lanes sum[heads][vectors()] = {};
      for (int64_t j = begin; j < end; j++) {
        if (j + kValuesAhead < end) fetch<3>(values[j + kValuesAhead] + c, vectors() * kLanes * sizeof(float));
#pragma GCC unroll 4
        for (int i = 0; i < vectors(); i++) {
          const Lanes value = load(values[j] + c + i * kLanes);
#pragma GCC unroll 4
          for (int n = 0; n < heads; n++) sum[n][i] = fma(value, splat(p[n * kTileStride + j]), sum[n][i]);
        }
      }
      for (int n = 0; n < heads; n++)
        for (int i = 0; i < vectors(); i++) {
          float* to = y + n * apart + c + i * kLanes;
          store(to, load(to) + sum[n][i]);
        }
    };
    constexpr int most = kHalves<Lanes> ? 1 : 4;  // sums that fit the registers
    int64_t c = 0;
    for (; c + most * kLanes <= v_.width; c += most * kLanes) add(std::integral_constant<int, most>{}, c);
    for (; c < v_.width; c += kLanes) add(std::integral_constant<int, 1>{}, c);
  }

  void take_rows(const QueryBlock& block, int64_t kv) {
    P* to = q_rows_.reserve(block.rows * group_ * k_.width);
    for (int64_t n = 0; n < group_; n++)
      for (int64_t i = 0; i < block.rows; i++, to += k_.width) {
        const T* from = q_ + block.seq.batch * q_strides_.batch + (kv * group_ + n) * q_strides_.head +
            (block.first_row() + i) * q_strides_.token;
        Packing<T, P>(k_.dim).copy_row(from, q_strides_.dim, to);
      }
  }

  // The keys are sorted, so each row sees a run of them; it may have selected none of these.
  void see(const UnionRows& union_rows) {
    const auto& block = union_rows.rows;
    const auto& selected = union_rows.selected;
    seen_.resize(block.rows);
    const auto place = [&](int64_t key) { return std::lower_bound(selected.keys, selected.keys + selected.count, key) - selected.keys; };
    for (int64_t i = 0; i < block.rows; i++) {
      auto& seen = seen_[i] = {place(window_.first(block.on + i)), place(window_.last(block.on + i)), false};
      const uint16_t* own = union_rows.own_of(i, 0);
      if (own != nullptr && std::all_of(own, own + union_rows.words(), [](uint16_t bits) { return bits == 0; })) seen = {0, 0, false};
      seen.dead = seen.first >= seen.last && union_rows.rest_of(i).count == 0;
    }
  }

  // x[i - i0, j] = <q_i, k_j> before the scale.
  void logits(int64_t i0, int64_t rows, int64_t keys) {
    const P* q = q_rows_.data() + i0 * k_.width;
    const auto multiply = [&](int64_t c, int64_t inner, float* x) {
      at::native::cpublas::brgemm(
          rows, keys, inner, k_.width, kTileStride, kTile, false, q + c, k_tile_.data() + c * kTileStride, x, kVnni);
    };
    if constexpr (kVnni) {
      multiply(0, round_up(k_.dim, 2), x_.data());
    } else {
      // In pieces: float products then err as little as a library's.
      const int64_t most = product_piece(k_.dim);
      multiply(0, std::min(k_.dim, most), x_.data());
      for (int64_t c = most; c < k_.dim; c += most) {
        float* piece = piece_.reserve(kRows * kTile);
        multiply(c, std::min(k_.dim - c, most), piece);
        for (int64_t j = 0; j < rows * kTile; j += kLanes) store(x_.data() + j, load(x_.data() + j) + load(piece + j));
      }
    }
  }

  // y += p v.
  void add_values(int64_t rows, int64_t keys, const P* p, float* y) {
    const int64_t stride = right_stride(v_.width);
    if constexpr (kVnni) {
      at::native::cpublas::brgemm(rows, v_.width, keys, kTileStride, stride, v_.width, true, p, v_tile_.data(), y, true);
    } else {
      float* piece = values_.reserve(rows * v_.width);
      for (int64_t j = 0; j < keys; j += kPiece) {
        at::native::cpublas::brgemm(
            rows, v_.width, std::min(kPiece, keys - j), kTileStride, stride, v_.width, false, p + j, v_tile_.data() + j * stride,
            piece, false);
        for (int64_t c = 0; c < rows * v_.width; c += kLanes) store(y + c, load(y + c) + load(piece + c));
      }
    }
  }

  void write(const QueryBlock& block, int64_t kv, const float* y) {
    for (int64_t n = 0; n < group_; n++)
      for (int64_t i = 0; i < block.rows; i++, y += v_.width) {
        const int64_t at = ((block.seq.batch * nq_ + block.first_row() + i) * heads_ + kv * group_ + n) * v_.dim;
        T* to = out_ + at;
        const bool dead = seen_[i].dead;
        const float m = m_[n * block.rows + i], l = l_[n * block.rows + i];
        for (int64_t c = 0; c < v_.dim; c++) to[c] = static_cast<T>(dead ? 0.0f : y[c] / l);
        if (rest_ != nullptr)
          for (int64_t c = 0; c < v_.dim; c++) rest_[at + c] = static_cast<T>(dead ? 0.0f : y[c] / l - static_cast<float>(to[c]));
        if (!dead) write_stats((block.seq.batch * heads_ + kv * group_ + n) * nq_ + block.first_row() + i, m, l);
      }
  }

  // Row max and ln of the row sum, in logits: what the one loses by rounding the other one has.
  void write_stats(int64_t row, float m, float l) {
    const double natural = m * (precision == Precision::kFast ? 0.693147180559945309 : 1.0);
    const auto rounded = static_cast<float>(natural);
    stats_.m.template data_ptr<float>()[row] = m == -kInf ? NAN : rounded;
    stats_.ln_l.template data_ptr<float>()[row] = m == -kInf ? std::log(l) : static_cast<float>(std::log(l) + (natural - rounded));
  }

  const T* const q_;
  T* const out_;
  T* const rest_;
  const LogSumExpRows stats_;
  const Strides q_strides_;
  const int64_t heads_, nq_, group_;
  Gathered<T, P> k_, v_;
  const Softmax<precision> softmax_;
  const Window window_;
  Buffer<P> q_rows_, k_tile_, v_tile_, p_;
  Buffer<float> x_, y_, piece_, values_;
  std::vector<Seen> seen_;
  std::vector<float> m_, l_;
};

template <typename T, typename P>
void run(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& page_table, const Tensor& out, const Tensor& rest,
    const LogSumExpRows& stats, const std::vector<UnionRows>& rows, double scale, const Window& window) {
  constexpr auto precision = std::is_same_v<T, float> ? Precision::kExact : Precision::kFast;
  const int64_t count = rows.size();
  on_all_threads(count * k.size(1), [&](const auto& next) {
    const FlushDenormals flush(precision == Precision::kFast);
    Attention<T, P, precision> attention(q, k, v, page_table, out, rest, stats, scale, window);
    // One key head at a time, so that its keys and values stay in the caches; the rows with the most keys first.
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t n = count - 1 - task % count;
      attention.attend(rows[n], task / count);
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> sparse_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& table, int64_t query_block,
    double scale, int64_t left, int64_t right, bool for_backward, const std::optional<Tensor>& page_table) {
  const Window window{left, right};
  const auto query_blocks = query_blocks_of(table, query_block);
  const SortedTopk topk(indices, query_blocks, window, page_table ? page_table->size(1) * k.size(2) : k.size(2));
  const bool in_floats = q.scalar_type() != at::kBFloat16 || !native(at::kBFloat16);
  // A backward multiplies whole tiles, and its logits must be those of its forward to the last bit.
  const int64_t group = q.size(1) / k.size(1);
  const bool single_rows = in_floats && !for_backward && group <= kSingleHeads;
  const auto rows = union_rows_of(query_blocks, topk, window, query_block, group, v, page_table.has_value(), single_rows);
  int64_t covered = 0;
  for (const auto& block : query_blocks) covered += block.rows;
  // Rows past the last packed sequence are 0.
  const bool all = covered == q.size(0) * q.size(2);
  const std::vector<int64_t> shape{q.size(0), q.size(2), q.size(1), v.size(3)};
  const auto make = [&] { return all ? at::empty(shape, q.options()) : at::zeros(shape, q.options()); };
  const bool rounds = for_backward && q.scalar_type() != at::kFloat;
  const auto out = make(), rest = rounds ? make() : at::empty({0}, q.options());
  const LogSumExpRows stats(q, q.size(1), Precision::kExact, scale);
  switch (q.scalar_type()) {
    case at::kBFloat16:
      if (in_floats) run<at::BFloat16, float>(q, k, v, page_table, out, rest, stats, rows, scale, window);
      else run<at::BFloat16, at::BFloat16>(q, k, v, page_table, out, rest, stats, rows, scale, window);
      break;
    case at::kHalf: run<at::Half, float>(q, k, v, page_table, out, rest, stats, rows, scale, window); break;
    default: run<float, float>(q, k, v, page_table, out, rest, stats, rows, scale, window);
  }
  return {out.transpose(1, 2), rounds ? rest.transpose(1, 2) : rest, stats.m, stats.ln_l};
}

}  // namespace streamkl::cpu

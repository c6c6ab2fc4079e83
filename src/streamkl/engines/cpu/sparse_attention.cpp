// Attention over lists of keys that rows share, or that are united: gathered once for them and a key head, softmax online over tiles.
#include "gathered.h"
#include "kernels.h"
#include "united_lists.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace streamkl::cpu {
namespace {

constexpr int64_t kTile = 256;                 // listed keys of a tile
constexpr int64_t kTileStride = kTile + kLanes;  // powers of two would share too few cache sets
constexpr int64_t kTileStep = 64;              // keys are padded to whole steps, so that few shapes are multiplied
constexpr int64_t kPiece = 128;                // keys whose values float products add up at once
constexpr int64_t kRows = 32;                  // rows of a product of logits: they stay in the first cache

// Rows of weights in a tile, lanes along the keys. Units are logits times log2 e for kFast.
template <Precision precision>
struct Softmax {
  float factor;
  explicit Softmax(double scale)
      : factor(static_cast<float>(precision == Precision::kFast ? scale * 1.44269504088896341 : scale)) {}

  // The keys [begin, end) of a tile that a row sees, of them its own if they are not all, and padded ones after them; p is
  // written whole.
  struct Run {
    int64_t begin, end, padded;
    const uint16_t* own;
  };

  template <typename Visit>
  STREAMKL_INLINE static void each(const Run& run, const Visit& visit) {
    const int64_t first = run.begin / kLanes * kLanes, full = round_up(run.begin, kLanes), last = run.end / kLanes * kLanes;
    const auto masked = [&](int64_t j) {
      const Ints key = iota() + static_cast<int32_t>(j);
      visit(j, (key >= static_cast<int32_t>(run.begin)) & (key < static_cast<int32_t>(run.end)));
    };
    int64_t j = first;
    if (run.own != nullptr) {
      for (; j < run.end; j += kLanes) visit(j, (((Ints{} + run.own[j / kLanes]) >> iota()) & 1) != 0);
      return;
    }
    if (j < full) masked(j), j = full;
    for (; j < last; j += kLanes) visit(j, All{});
    if (j < run.end) masked(j);
  }

  STREAMKL_INLINE float top(const float* x, const Run& run) const {
    Lanes top = splat(-kInf);
    each(run, [&](int64_t j, auto mask) { top = max(select(mask, load(x + j) * factor, splat(-kInf)), top); });
    return largest(top);
  }

  // p = e^(x - m); returns the sum of them.
  template <typename P>
  STREAMKL_INLINE float weights(const float* x, const Run& run, float m, P* p) const {
    const float at = m == -kInf ? 0.0f : m;  // -inf has no weight, and the next tile may have one
    Lanes total[2] = {};
    int turn = 0;
    each(run, [&](int64_t j, auto mask) {
      Lanes weight;
      if constexpr (precision == Precision::kFast) weight = power_of_two(fma(load(x + j), splat(factor), splat(-at)));
      else weight = exponential<precision>(load(x + j) * factor - at);
      weight = select(mask, weight, Lanes{});
      total[turn ^= 1] += weight;
      if constexpr (std::is_same_v<P, float>) store(p + j, weight);
      else store(p + j, rounded(weight));
    });
    return sum(total[0] + total[1]);
  }

  // Takes a tile into a row's (m, l): its weights, and what the row's output so far is to be multiplied by.
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

// A thread's share: the rows of a list and the heads that read a key head are the rows of its products.
template <typename T, typename P, Precision precision>
class Attention {
  static constexpr bool kVnni = !std::is_same_v<P, float>;

 public:
  Attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, double scale, const Window& window)
      : q_(q.const_data_ptr<T>()), out_(out.data_ptr<T>()), q_strides_(q), heads_(q.size(1)), nq_(q.size(2)),
        group_(q.size(1) / k.size(1)), k_(k), v_(v), softmax_(scale), window_(window),
        k_tile_(k_.width * kTileStride), v_tile_(kTile * (v_.width + kLanes)), x_(kRows * kTile) {}

  void attend(const UnitedRows& united, int64_t kv) {
    const auto& shared = united.rows;
    const auto& listed = united.listed;
    const int64_t rows = shared.rows * group_, width = v_.width;
    take_rows(shared, kv);
    see(united);
    k_.take_head(shared.seq.batch, kv, shared.seq.k_start);
    v_.take_head(shared.seq.batch, kv, shared.seq.k_start);
    P* p = p_.reserve(rows * kTileStride);
    float* y = y_.reserve(rows * width);
    std::fill_n(y, rows * width, 0.0f);
    m_.assign(rows, -kInf);
    l_.assign(rows, 0.0f);
    for (int64_t j0 = 0; j0 < listed.count; j0 += kTile) {
      const int64_t count = std::min(kTile, listed.count - j0), padded = round_up(count, kTileStep);
      k_.columns(listed.keys + j0, count, padded, k_tile_.data(), kTileStride);
      v_.rows(listed.keys + j0, count, padded, v_tile_.data(), width + kLanes);
      const int64_t next = j0 + kTile, ahead = std::max<int64_t>(0, std::min(kTile, listed.count - next));
      for (int64_t i0 = 0; i0 < rows; i0 += kRows) {
        const int64_t i1 = std::min(i0 + kRows, rows);
        logits(i0, i1 - i0, padded);
        for (int64_t i = i0; i < i1; i++) {
          // The next tile's keys and values are on their way while this one's weights are made.
          for (int64_t j = ahead * i / rows; j < ahead * (i + 1) / rows; j++) {
            k_.fetch_token(listed.keys[next + j]);
            v_.fetch_token(listed.keys[next + j]);
          }
          const auto& seen = seen_[i % shared.rows];
          const typename Softmax<precision>::Run run{
              std::clamp<int64_t>(seen.first - j0, 0, count), std::clamp<int64_t>(seen.last - j0, 0, count), padded,
              united.own_of(i % shared.rows, j0)};
          const float shrink = softmax_.update(x_.data() + (i - i0) * kTile, run, m_[i], l_[i], p + i * kTileStride);
          if (shrink != 1.0f)
            for (int64_t c = 0; c < width; c += kLanes) store(y + i * width + c, load(y + i * width + c) * shrink);
        }
      }
      add_values(rows, padded, p, y);
    }
    write(shared, kv, y);
  }

 private:
  struct Seen {
    int64_t first, last;
  };

  void take_rows(const SharedRows& shared, int64_t kv) {
    P* to = q_rows_.reserve(shared.rows * group_ * k_.width);
    for (int64_t n = 0; n < group_; n++)
      for (int64_t i = 0; i < shared.rows; i++, to += k_.width) {
        const T* from = q_ + shared.seq.batch * q_strides_.batch + (kv * group_ + n) * q_strides_.head +
            (shared.first_row() + i) * q_strides_.token;
        Packing<T, P>(k_.dim).copy_row(from, q_strides_.dim, to);
      }
  }

  // The keys rise, so each row sees a run of them; it may be that none of them is its own.
  void see(const UnitedRows& united) {
    const auto& shared = united.rows;
    const auto& listed = united.listed;
    seen_.resize(shared.rows);
    const auto place = [&](int64_t key) { return std::lower_bound(listed.keys, listed.keys + listed.count, key) - listed.keys; };
    for (int64_t i = 0; i < shared.rows; i++) {
      seen_[i] = {place(window_.first(shared.on + i)), place(window_.last(shared.on + i))};
      const uint16_t* own = united.own_of(i, 0);
      if (own != nullptr && std::all_of(own, own + united.words(), [](uint16_t bits) { return bits == 0; })) seen_[i] = {0, 0};
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
      // In pieces, float products err as little as a library's do.
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
    const int64_t stride = v_.width + kLanes;
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

  void write(const SharedRows& shared, int64_t kv, const float* y) {
    for (int64_t n = 0; n < group_; n++)
      for (int64_t i = 0; i < shared.rows; i++, y += v_.width) {
        T* to = out_ + ((shared.seq.batch * nq_ + shared.first_row() + i) * heads_ + kv * group_ + n) * v_.dim;
        const bool dead = seen_[i].first >= seen_[i].last;
        const float l = l_[n * shared.rows + i];
        for (int64_t c = 0; c < v_.dim; c++) to[c] = static_cast<T>(dead ? 0.0f : y[c] / l);
      }
  }

  const T* const q_;
  T* const out_;
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
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const std::vector<UnitedRows>& rows, double scale,
    const Window& window) {
  constexpr auto precision = std::is_same_v<T, float> ? Precision::kExact : Precision::kFast;
  const int64_t count = rows.size();
  on_all_threads(count * k.size(1), [&](const auto& next) {
    const FlushDenormals flush(precision == Precision::kFast);
    Attention<T, P, precision> attention(q, k, v, out, scale, window);
    // A key head at a time, so that its keys and values stay in the caches; the longest lists first.
    for (int64_t task; (task = next()) >= 0;) {
      const int64_t n = count - 1 - task % count;
      attention.attend(rows[n], task / count);
    }
  });
}

}  // namespace

Tensor sparse_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& table, int64_t block,
    double scale, int64_t left, int64_t right) {
  const Window window{left, right};
  const auto shared = shared_rows_of(table, block);
  const SortedLists lists(indices, shared, window, k.size(2));
  const auto united = united_rows_of(shared, lists, window, block, q.size(1) / k.size(1), v);
  int64_t covered = 0;
  for (const auto& rows : shared) covered += rows.rows;
  // Rows of no sequence, past the last packed one, are 0.
  const bool all = covered == q.size(0) * q.size(2);
  const std::vector<int64_t> shape{q.size(0), q.size(2), q.size(1), v.size(3)};
  const auto out = all ? at::empty(shape, q.options()) : at::zeros(shape, q.options());
  switch (q.scalar_type()) {
    case at::kBFloat16:
      if (native(at::kBFloat16)) run<at::BFloat16, at::BFloat16>(q, k, v, out, united, scale, window);
      else run<at::BFloat16, float>(q, k, v, out, united, scale, window);
      break;
    case at::kHalf: run<at::Half, float>(q, k, v, out, united, scale, window); break;
    default: run<float, float>(q, k, v, out, united, scale, window);
  }
  return out.transpose(1, 2);
}

}  // namespace streamkl::cpu

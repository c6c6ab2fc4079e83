// The best keys of each query block: scores tile by tile, their maximum over the rows of a block, top-k.
#include "dense/student.h"
#include "dense/target.h"
#include "kernels.h"
#include "sparse/shared_topk.h"
#include "sparse/topk.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

namespace streamkl::cpu {
namespace {

// Turns x[keys, rows] into scores less the row's log-sum-exp.
template <bool relu>
void normalise(float* x, const Part& part, float factor, const Row& lse) {
  const Lanes scale = splat(factor);
  for (int64_t j = part.j0; j < part.j1; j++)
    for (int64_t i = 0; i < part.i1 - part.i0; i += kLanes)
      store(x + j * kStrip + i, logit<relu>(load(x + j * kStrip + i), scale) - lse[part.i0 + i]);
}

constexpr int64_t kKept = int64_t(2) << 20;  // scores that a thread holds until their row's log-sum-exp is known, at most

// An indexer's scores of tiles [keys, rows]. With one head, and unless they are normalised, they are before scale and
// relu. Normalised ones are less their row's log-sum-exp, which takes a pass over all tiles before the first is visited;
// that pass keeps the scores of the first tiles, as many as kKept allows, and the others are computed twice.
class IndexScores {
 public:
  IndexScores(const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, double scale, bool relu, bool normalised)
      : student_(q, k, weights, scale, relu), normalised_(normalised), fast_(fast(q, q, student_.scale(), student_.scale())), x_(kBlockK * kStrip) {}
  static int64_t bytes_of_row(const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights) {
    return Student(q, k, weights, 1.0, false).bytes_of_row(false);
  }
  float scale() const { return normalised_ ? 1.0f : static_cast<float>(student_.scale()); }
  bool relu() const { return !normalised_ && student_.relu(); }
  void take_rows(const Block& block, const Window& window) {
    student_.take_rows(block, 0, false);
    if (normalised_) take_lse(block, window);
  }
  // visit(i, j, x) with the scores of sixteen rows from i on and sixteen keys from j on, if they are not normalised.
  template <typename Visit>
  void each_sixteen(const Block& block, const KeyTile& tile, const Window& window, const Visit& visit) {
    student_.take_keys(block, tile, 0, false);
    each_part(block, tile, window, false, [&](const Part& part) {
      student_.product(part, x_.data(), [&](int64_t i, int64_t j, Lanes* x) { visit(part.i0 + i, j, x); });
    });
  }
  template <typename Visit>
  void each(const Block& block, const KeyTile& tile, const Window& window, const Visit& visit) {
    const bool kept = normalised_ && is_kept(block, tile);
    if (!kept) student_.take_keys(block, tile, 0, false);
    each_part(block, tile, window, false, [&](const Part& part) {
      float* x = kept ? kept_at(block, tile, part) : x_.data();
      if (!kept) student_.product(part, x);
      if (normalised_) normalise_(x, part, static_cast<float>(student_.scale()), lse_);
      visit(part, x);
    });
  }

 private:
  static int64_t tile_size(const Block& block) { return round_up(block.rows(), kStrip) * kBlockK; }
  static bool is_kept(const Block& block, const KeyTile& tile) {
    return (tile.j0 - block.j0) / kBlockK < kKept / tile_size(block);
  }
  float* kept_at(const Block& block, const KeyTile& tile, const Part& part) const {
    return kept_.data() + (tile.j0 - block.j0) / kBlockK * tile_size(block) + part.i0 * kBlockK;
  }
  void take_lse(const Block& block, const Window& window) {
    const FlushDenormals flush(fast_);
    const int64_t tiles = (block.j1 - block.j0 + kBlockK - 1) / kBlockK;
    kept_.reserve(std::min(tiles, kKept / tile_size(block)) * tile_size(block));
    LogSumExp state[kBlockQ / kLanes];
    each_tile(block, [&](const KeyTile& tile) {
      student_.take_keys(block, tile, 0, false);
      each_part(block, tile, window, false, [&](const Part& part) {
        float* x = is_kept(block, tile) ? kept_at(block, tile, part) : x_.data();
        student_.product(part, x);
        each_group(block, tile, window, part, [&](int64_t i, const Span& span) {
          (state[i / kLanes].*update_)(x + i - part.i0, kStrip, span, student_.scale());
        });
      });
    });
    const float value = natural_value(precision_of(fast_), student_.scale());
    std::fill_n(lse_.data, kBlockQ, 0.0f);
    for (int64_t i = 0; i < block.rows(); i++) {
      const LogSumExp& found = state[i / kLanes];
      lse_.data[i] = value * found.m[i % kLanes] + std::log(found.l[i % kLanes]);
    }
  }

  Student student_;
  const bool normalised_, fast_;
  decltype(&normalise<true>) normalise_ = student_.relu() ? &normalise<true> : &normalise<false>;
  void (LogSumExp::*update_)(const float*, int64_t, const Span&, double) = dispatch(
      fast_, false, student_.relu(), [](auto precision, auto, auto with_relu) { return &LogSumExp::update<precision(), with_relu()>; });
  Row lse_;
  Buffer<float> x_, kept_;
};

// The head mean of the attention.
class AttentionScores {
 public:
  AttentionScores(const Tensor& q, const Tensor& k, const Tensor& m, const Tensor& ln_l, double scale)
      : target_(dense_side_of(q, k, scale, false), q.size(1), 1, fast(q, q, scale, scale)), m_(m), ln_l_(ln_l), x_(kBlockK * kStrip), p_(kBlockK * kBlockQ) {}
  float scale() const { return 1.0f; }
  bool relu() const { return false; }
  void take_rows(const Block& block, const Window&) { target_.take_rows(block, 0, m_, ln_l_); }
  template <typename Visit>
  void each(const Block& block, const KeyTile& tile, const Window& window, const Visit& visit) {
    target_.compute(block, tile, window, 0, x_.data(), p_.data());
    each_part(block, tile, window, false, [&](const Part& part) { visit(part, p_.data() + part.i0 * kBlockK); });
  }
  template <typename Visit>
  void each_sixteen(const Block& block, const KeyTile& tile, const Window& window, const Visit& visit) {
    each(block, tile, window, [&](const Part& part, const float* p) {
      for (int64_t i = part.i0; i < part.i1; i += kLanes)
        for (int64_t j = part.j0; j < part.j1; j += kLanes) {
          Lanes x[kLanes];
          for (int l = 0; l < kLanes; l++) x[l] = load(p + (j + l) * kStrip + i - part.i0);
          visit(i, j, x);
        }
    });
  }

 private:
  Target target_;
  const Rows m_, ln_l_;
  Buffer<float> x_, p_;
};

// The largest element of each of sixteen vectors.
STREAMKL_INLINE Lanes largest_of_each(Lanes* x) {
  return folded(x, [](const Lanes& a, const Lanes& b) { return max(a, b); });
}

// Query blocks that are selected for together: rows [i0, i1) of a sequence, from block `first_block` on.
struct SelectionTask {
  Sequence seq;
  int64_t i0, i1, first_block;
};

// One per thread: a row of scores for each query block of a task.
template <typename Scores>
class Selection {
 public:
  Selection(Scores scores, const Window& window, int64_t query_block, int64_t rows, bool sorted, const Tensor& out)
      : source_(std::move(scores)), window_(window), query_block_(query_block), rows_(rows), out_(out), best_(out.size(2), sorted) {}

  void run(const SelectionTask& task) {
    const int64_t query_blocks = (task.i1 - task.i0 + query_block_ - 1) / query_block_;
    low_ = std::max<int64_t>(0, window_.first(task.i0 + task.seq.diagonal));
    const int64_t high = std::min(task.seq.k_len, window_.last(task.i1 - 1 + task.seq.diagonal));
    stride_ = round_up(std::max<int64_t>(0, high - low_), kLanes) + 2 * kLanes;
    scores_.reserve(query_blocks * stride_);
    if (query_block_ > 1) std::fill_n(scores_.data(), query_blocks * stride_, -kInf);
    for (int64_t i0 = task.i0; i0 < task.i1; i0 += rows_) score_rows(task, i0, std::min(i0 + rows_, task.i1));
    for (int64_t n = 0; n < query_blocks; n++) {
      int32_t* keys = out_.data_ptr<int32_t>() + (task.seq.batch * out_.size(1) + task.first_block + n) * out_.size(2);
      const int64_t count = std::max<int64_t>(0, high - low_);
      if (query_block_ > 1) favour_diagonal(task, n, count);
      best_.select(scores_.data() + n * stride_, count, low_, keys);
    }
  }

 private:
  // The scores of rows [i0, i1) with all keys that they see.
  void score_rows(const SelectionTask& task, int64_t i0, int64_t i1) {
    const int64_t j0 = std::max<int64_t>(0, window_.first(i0 + task.seq.diagonal));
    const int64_t j1 = std::min(task.seq.k_len, window_.last(i1 - 1 + task.seq.diagonal));
    if (j0 >= j1) return;
    const Block rows{task.seq, i0, i1, j0, j1};
    source_.take_rows(rows, window_);
    each_tile(rows, [&](const KeyTile& tile) {
      if (query_block_ == 1)
        source_.each_sixteen(rows, tile, window_, [&](int64_t i, int64_t j, Lanes* x) { put(rows, tile, i, j, x); });
      else
        source_.each(rows, tile, window_, [&](const Part& part, const float* x) { reduce(task, rows, tile, part, x); });
    });
  }

  // Sixteen rows of a part, and which keys of the tile they see.
  struct Group {
    int64_t i;
    Span span;
    int64_t query_block;  // -1 if they belong to several
  };

  void reduce(const SelectionTask& task, const Block& rows, const KeyTile& tile, const Part& part, const float* x) {
    Group groups[kStrip / kLanes];
    int64_t count = 0;
    for (int64_t i = part.i0; i < part.i1; i += kLanes) {
      const int64_t first = rows.i0 - task.i0 + i, last = std::min(i + kLanes, part.i1) - 1 - i + first;
      Span span = window_.span(rows.i0 + i + rows.seq.diagonal, tile.j0 + part.j0, std::min(tile.j0 + part.j1, tile.j1), tile.j0);
      span = without(span, iota() >= static_cast<int32_t>(part.i1 - i));
      groups[count++] = {i - part.i0, span, first / query_block_ == last / query_block_ ? first / query_block_ : -1};
    }
    for (int64_t n = 0; n < count;) {
      int64_t end = n + 1;
      if (groups[n].query_block < 0) {
        reduce_apart(task, rows, tile, part, groups[n], x);
      } else {
        while (end < count && groups[end].query_block == groups[n].query_block) end++;
        reduce_together(groups + n, groups + end, tile, part, x);
      }
      n = end;
    }
  }

  float* scores_at(int64_t query_block, const KeyTile& tile, int64_t j) const { return scores_.data() + query_block * stride_ + tile.j0 + j - low_; }

  // A score of nan counts as -inf.
  STREAMKL_INLINE Lanes finished(Lanes top) const {
    top = max(top, splat(-kInf));
    if (scale_ == 1.0f && !source_.relu()) return top;
    const Lanes score = source_.relu() ? max(top * scale_, Lanes{}) : top * scale_;
    return select(top == -kInf, top, score);
  }

  // Whether all sixteen rows see the sixteen keys from j on, and whether no row sees any of them.
  static bool all(const Span& span, int64_t j) { return span.full_begin <= j && j + kLanes <= span.full_end; }
  static bool none(const Span& span, int64_t j) { return span.end <= j || j + kLanes <= span.begin; }

  STREAMKL_INLINE static Lanes seen(const Span& span, int64_t j, Lanes x) {
    if (span.full_begin <= j && j < span.full_end) return x;
    const auto key = static_cast<int32_t>(j);
    return j < span.begin || j >= span.end ? splat(-kInf) : select((span.first <= key) & (span.last > key), x, splat(-kInf));
  }

  // Rows of one query block.
  void reduce_together(const Group* begin, const Group* end, const KeyTile& tile, const Part& part, const float* x) {
    for (int64_t j = part.j0; j < part.j1; j += kLanes) {
      Lanes top[kLanes];
      bool whole = true, empty = true;
      for (const Group* g = begin; g < end; g++) whole &= all(g->span, j), empty &= none(g->span, j);
      if (empty) continue;
      if (whole) {
        const float* at = x + j * kStrip + begin->i;
        const int64_t width = (end - begin) * kLanes;
#pragma GCC unroll 16
        for (int l = 0; l < kLanes; l++) {
          top[l] = max(load(at + l * kStrip), splat(-kInf));
          for (int64_t i = kLanes; i < width; i += kLanes) top[l] = max(load(at + l * kStrip + i), top[l]);
        }
      } else {
        for (int l = 0; l < kLanes; l++) {
          top[l] = splat(-kInf);
          for (const Group* g = begin; g < end; g++) top[l] = max(seen(g->span, j + l, load(x + (j + l) * kStrip + g->i)), top[l]);
        }
      }
      float* to = scores_at(begin->query_block, tile, j);
      store(to, max(finished(largest_of_each(top)), load(to)));
    }
  }

  // Rows of several query blocks.
  void reduce_apart(const SelectionTask& task, const Block& rows, const KeyTile& tile, const Part& part, const Group& group, const float* x) {
    const int64_t first = rows.i0 - task.i0 + part.i0 + group.i, count = std::min(kLanes, part.i1 - part.i0 - group.i);
    for (int64_t j = part.j0; j < part.j1; j += kLanes) {
      if (none(group.span, j)) continue;
      Lanes scores[kLanes];
      for (int l = 0; l < kLanes; l++) scores[l] = seen(group.span, j + l, load(x + (j + l) * kStrip + group.i));
      turn(scores);
      for (int64_t l = 0; l < count; l++) {
        float* to = scores_at((first + l) / query_block_, tile, j);
        store(to, max(scores[l], load(to)));
      }
    }
  }

  // Rows that are query blocks: the scores of sixteen from i on with the keys j ... j + 15 of a tile.
  void put(const Block& rows, const KeyTile& tile, int64_t i, int64_t j, Lanes* scores) {
    const int64_t on = rows.i0 + i + rows.seq.diagonal, key = tile.j0 + j, end = key + kLanes;
    if (window_.first(on + kLanes - 1) > key || window_.last(on) < end || tile.j1 < end) {
      const Span span = window_.span(on, key, std::min(end, tile.j1), key);
      for (int l = 0; l < kLanes; l++) scores[l] = seen(span, l, scores[l]);
    }
    turn(scores);
    float* to = scores_at(i, tile, j);
    if (i + kLanes <= rows.rows()) {
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; l++) store(to + l * stride_, scores[l]);
    } else {
      for (int64_t l = 0; l < rows.rows() - i; l++) store(to + l * stride_, scores[l]);
    }
  }

  // From vectors of rows to vectors of keys.
  STREAMKL_INLINE void turn(Lanes* scores) const {
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; l++) scores[l] = finished(scores[l]);
    transpose(scores);
  }

  // Puts the keys on the diagonal of a query block before all others.
  void favour_diagonal(const SelectionTask& task, int64_t n, int64_t count) {
    float* scores = scores_.data() + n * stride_;
    constexpr float most = std::numeric_limits<float>::max();
    for (int64_t j = 0; j < count; j += kLanes) store(scores + j, min(splat(most), load(scores + j)));
    const int64_t first = task.i0 + n * query_block_, last = std::min(first + query_block_, task.i1);
    for (int64_t i = first; i < last; i++) {
      const int64_t key = i + task.seq.diagonal;
      if (key >= 0) scores[key - low_] = kInf;
    }
  }

  Scores source_;
  const Window window_;
  const int64_t query_block_, rows_;
  const Tensor out_;
  TopK best_;
  const float scale_ = source_.scale();
  int64_t low_ = 0, stride_ = 0;
  Buffer<float> scores_;
};

constexpr int64_t kQueryBlocks = 16;  // rows of scores that a thread holds, at most

template <typename Make>
Tensor select(const Tensor& q, const Tensor& table, int64_t topk, int64_t query_blocks, int64_t query_block, const Window& window, int64_t rows, bool sorted, bool fast, const Make& make) {
  const int64_t together = std::clamp<int64_t>(rows / query_block, 1, kQueryBlocks) * query_block;
  std::vector<SelectionTask> tasks;
  const auto sequences = table.contiguous();
  const int64_t* p = sequences.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < sequences.size(0); n++, p += 7)
    for (int64_t i0 = 0; i0 < p[2]; i0 += together)
      tasks.push_back({{p[0], p[1], p[2], p[3], p[4], p[5]}, i0, std::min(i0 + together, p[2]), p[6] + i0 / query_block});
  const int64_t count = tasks.size();
  int64_t selected = 0;
  for (const auto& task : tasks) selected += (task.i1 - task.i0 + query_block - 1) / query_block;
  const std::vector<int64_t> shape{q.size(0), query_blocks, topk};
  const auto options = q.options().dtype(at::kInt);
  // Query blocks past the last packed sequence select nothing.
  const auto out = selected == q.size(0) * query_blocks ? at::empty(shape, options) : at::full(shape, -1, options);
  on_all_threads(count, [&](const auto& next) {
    const FlushDenormals flush(fast);
    Selection selection(make(), window, query_block, rows, sorted, out);
    for (int64_t n; (n = next()) >= 0;) selection.run(tasks[count - 1 - n]);
  });
  return out;
}

}  // namespace

Tensor index_topk(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& weights, const Tensor& table, double scale, bool relu,
    bool normalised, bool sorted, int64_t topk, int64_t query_blocks, int64_t query_block, int64_t left, int64_t right) {
  int64_t rows = rows_at_once(IndexScores::bytes_of_row(q, k, weights));
  normalised = normalised && query_block > 1;  // the order of one query's scores is that of its log-probabilities
  if (normalised && rows > kStrip && kKept / rows < k.size(2)) rows = kStrip;  // twice as many tiles are kept
  return select(q, table, topk, query_blocks, query_block, Window{left, right}, rows, sorted, false, [&] { return IndexScores(q, k, weights, scale, relu, normalised); });
}

Tensor attention_topk(
    const Tensor& q, const Tensor& k, const Tensor& m, const Tensor& ln_l, const Tensor& table, double scale, int64_t topk,
    int64_t query_blocks, int64_t query_block, int64_t left, int64_t right) {
  const int64_t rows = rows_at_once(dense_side_of(q, k, scale, false)->bytes_of_row() * q.size(1));
  return select(
      q, table, topk, query_blocks, query_block, Window{left, right}, rows, true, fast(q, q, scale, scale),
      [&] { return AttentionScores(q, k, m, ln_l, scale); });
}

}  // namespace streamkl::cpu

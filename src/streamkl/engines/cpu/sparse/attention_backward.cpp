// The backward of sparse attention: rows lie along the lanes, as in the dense passes, whose products it takes. Keys and
// values are gathered once per query block, or union of query blocks, and key head.
#include "kernels.h"
#include "passes/side_gradient.h"
#include "sparse/add_order.h"
#include "sparse/key_union.h"

#include <tuple>
#include <vector>

namespace streamkl::cpu {
namespace {

constexpr int64_t kKeyStep = 64;  // keys are padded to whole steps, so that products have few shapes

// Rows of a query block, or of a union of some, that one task computes for a key head.
struct RowsTask {
  const UnionRows* blocks;
  int64_t i0, rows;
  int64_t first_row() const { return blocks->rows.first_row() + i0; }
};

// What the gradient of a slot's rows needs, padded to whole lanes: the row stats, the inner product of the gradient
// with the output, the factor of dx, and the run [first, last) of the sorted keys that a row sees.
struct SlotRows {
  Row m, ln_l, delta, of_lse, factor;
  alignas(64) int64_t first[kBlockQ], last[kBlockQ];
};

// The keys of a tile that sixteen rows see, from the row at i on.
Span span_of(const SlotRows& rows, int64_t i, int64_t j0, int64_t count) {
  Span span{count, 0, count, 0, {}, {}};
  for (int64_t l = 0; l < kLanes; l++) {
    const int64_t first = std::clamp<int64_t>(rows.first[i + l] - j0, 0, count), last = std::clamp<int64_t>(rows.last[i + l] - j0, 0, count);
    span.first[l] = static_cast<int32_t>(first);
    span.last[l] = static_cast<int32_t>(last);
    span.begin = std::min(span.begin, first);
    span.full_begin = std::max(span.full_begin, first);
    span.full_end = std::min(span.full_end, last);
    span.end = std::max(span.end, last);
  }
  span.begin = std::min(span.begin, span.end);
  span.full_begin = std::min(span.full_begin, span.end);
  span.full_end = std::max(span.full_end, span.full_begin);
  return span;
}

// Probabilities of sixteen rows from their products. kFast measures logits times log2 e, as the
// forward does.
template <Precision precision>
struct SoftmaxGradient {
  float factor;
  explicit SoftmaxGradient(double scale)
      : factor(static_cast<float>(precision == Precision::kFast ? scale * 1.44269504088896341 : scale)) {}

  // The row stats in these units: what one of them loses by rounding the other one has.
  void take(float m, float ln_l, float& to_m, float& to_ln_l) const {
    const double units = precision == Precision::kFast ? 1.44269504088896341 : 1.0;
    to_m = static_cast<float>(m * units);
    to_ln_l = static_cast<float>(ln_l * units + (m * units - to_m));
  }

  template <typename Mask>
  STREAMKL_INLINE Lanes probability(const float* x, Mask mask, Lanes m, Lanes ln_l) const {
    Lanes p;
    if constexpr (precision == Precision::kFast) p = power_of_two(fma(load(x), splat(factor), -m) - ln_l);
    else p = exponential<precision>((load(x) * factor - m) - ln_l);
    return select(mask, p, Lanes{});
  }
};

// One per thread.
template <typename T, Precision precision>
class AttentionGradient {
 public:
  AttentionGradient(
      const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& rest, const Tensor& m, const Tensor& ln_l,
      const Tensor& d_out, const std::optional<Tensor>& d_lse, double scale, const Window& window, const Tensor& dq, const Tensor& dk, const Tensor& dv)
      : logits_(dense_side_of(q, k, scale, false)), values_(dense_side_of(d_out, v, 1.0, false)), out_(out), rest_(rest), m_(m), ln_l_(ln_l),
        d_out_(d_out), d_lse_(d_lse), scale_(static_cast<float>(scale)), window_(window), dq_(dq), dk_(dk), dv_(dv), group_(q.size(1) / k.size(1)),
        softmax_(scale), x_(kBlockK * kStrip), d_p_(kBlockK * kStrip), dk_tile_(kBlockK * logits_->padded_dim),
        dv_tile_(kBlockK * values_->padded_dim), out_row_(values_->padded_dim), rest_row_(values_->padded_dim),
        d_row_(values_->padded_dim) {}

  void run(const RowsTask& task, int64_t kv, AddOrder& order, const OwnedTask& owned) {
    const auto& seq = task.blocks->rows.seq;
    const auto& selected = task.blocks->selected;
    const int64_t heads = heads_that_fit(task.rows, kBlockQ, group_);  // of a slot
    const int64_t slots = group_ / heads, rows = heads * task.rows;
    slots_.resize(slots);
    for (int64_t slot = 0; slot < slots; slot++) {
      const int64_t head = kv * group_ + slot * heads;
      logits_->take_rows(slot, seq.batch, head, task.first_row(), task.rows, true, heads);
      values_->take_rows(slot, seq.batch, head, task.first_row(), task.rows, true, heads);
      logits_->begin_gradient(slot);
      take_row_vectors(task, head, heads, slots_[slot]);
    }
    // In float32 delta errs as much as d_p, so it is the sum of p d_p: their errors cancel where p is close to 1.
    if constexpr (precision == Precision::kExact) {
      for (auto& slot : slots_) slot.delta = slot.of_lse;
      each_tile(task, kv, false, [&](int64_t j0, int64_t count, int64_t padded) {
        each_product(slots, rows, padded, [&](int64_t slot, const Part& part) {
          for (int64_t i = part.i0; i < part.i1; i += kLanes) add_delta(task, slots_[slot], i, i - part.i0, j0, count);
        }, [](int64_t) {});
      });
    }
    each_tile(task, kv, true, [&](int64_t j0, int64_t count, int64_t padded) {
      std::fill_n(dk_tile_.data(), padded * logits_->padded_dim, 0.0f);
      std::fill_n(dv_tile_.data(), padded * values_->padded_dim, 0.0f);
      each_product(slots, rows, padded, [&](int64_t slot, const Part& part) {
        for (int64_t i = part.i0; i < part.i1; i += kLanes) differentiate(task, slots_[slot], i, i - part.i0, j0, count, padded);
        logits_->set_gradient(part, x_.data());
        values_->set_gradient(part, d_p_.data());
      }, [&](int64_t slot) {
        logits_->add_query_gradient(slot);
        logits_->add_key_gradient(slot, dk_tile_.data());
        values_->add_key_gradient(slot, dv_tile_.data());
      });
      order.add(owned, selected.keys[j0 + count - 1], [&] {
        scatter(dk_, logits_->padded_dim, seq, kv, selected.keys + j0, count, dk_tile_.data());
        scatter(dv_, values_->padded_dim, seq, kv, selected.keys + j0, count, dv_tile_.data());
      });
    });
    for (int64_t slot = 0; slot < slots; slot++) {
      const int64_t row = (seq.batch * dq_.size(1) + kv * group_ + slot * heads) * dq_.size(2) + task.first_row();
      logits_->end_gradient(slot, dq_.data_ptr<T>() + row * dq_.size(3), false, dq_.size(2) * dq_.size(3));
    }
  }

 private:
  // Gathers the keys and values of each tile: visit(first key, keys, keys with padding).
  template <typename Visit>
  void each_tile(const RowsTask& task, int64_t kv, bool for_gradient, const Visit& visit) {
    const auto& seq = task.blocks->rows.seq;
    const auto& selected = task.blocks->selected;
    for (int64_t j0 = 0; j0 < selected.count; j0 += kBlockK) {
      const int64_t count = std::min(kBlockK, selected.count - j0), padded = round_up(count, kKeyStep);
      const int64_t ahead = std::min(kBlockK, selected.count - j0 - count);
      logits_->take_selected(seq.batch, kv, seq.k_start, selected.keys + j0, count, padded, ahead, for_gradient);
      values_->take_selected(seq.batch, kv, seq.k_start, selected.keys + j0, count, padded, ahead, false);
      visit(j0, count, padded);
    }
  }

  // Multiplies the parts of each slot's rows with the keys and values of a tile: visit(slot, part), then end(slot).
  template <typename Visit, typename End>
  void each_product(int64_t slots, int64_t rows, int64_t padded, const Visit& visit, const End& end) {
    for (int64_t slot = 0; slot < slots; slot++) {
      for (int64_t i0 = 0; i0 < rows; i0 += kStrip) {
        const Part part{i0, std::min(i0 + kStrip, rows), 0, padded};
        logits_->product(slot, part, x_.data());
        values_->product(slot, part, d_p_.data());
        visit(slot, part);
      }
      end(slot);
    }
  }

  void take_row_vectors(const RowsTask& task, int64_t first_head, int64_t heads, SlotRows& to) {
    const auto& rows = task.blocks->rows;
    const auto& selected = task.blocks->selected;
    const auto place = [&](int64_t key) { return std::lower_bound(selected.keys, selected.keys + selected.count, key) - selected.keys; };
    for (int64_t i = 0; i < task.rows; i++) {
      int64_t first = place(window_.first(rows.on + task.i0 + i)), last = place(window_.last(rows.on + task.i0 + i)), seen = last - first;
      if (const uint16_t* own = task.blocks->own_of(task.i0 + i, 0); own != nullptr) {
        seen = 0;
        for (int64_t w = 0; w < task.blocks->words(); w++) seen += __builtin_popcount(own[w]);
      }
      if (seen <= 0) first = last = 0;
      for (int64_t n = 0; n < heads; n++) {
        const int64_t at = n * task.rows + i, row = (rows.seq.batch * m_.size(1) + first_head + n) * m_.size(2) + task.first_row() + i;
        float finite = 0.0f;
        to.first[at] = first;
        to.last[at] = last;
        softmax_.take(m_.const_data_ptr<float>()[row], ln_l_.const_data_ptr<float>()[row], to.m.data[at], to.ln_l.data[at]);
        // p (d_p - delta) + p d_lse
        to.of_lse.data[at] = d_lse_ ? -d_lse_->const_data_ptr<float>()[row] : 0.0f;
        to.delta.data[at] = delta(rows.seq.batch, first_head + n, task.first_row() + i, finite) + to.of_lse.data[at];
        to.ln_l.data[at] += finite;  // a row whose gradient is not finite makes nan of all that it reaches
        // The softmax of one logit is constant: rounding must not give it a gradient. Its log-sum-exp is not.
        to.factor.data[at] = seen == 1 && !d_lse_ ? 0.0f : scale_;
      }
    }
    const int64_t end = heads * task.rows;
    for (int64_t at = end; at < round_up(end, kLanes); at++) {
      to.first[at] = to.last[at] = 0;
      for (Row* row : {&to.m, &to.ln_l, &to.delta, &to.of_lse, &to.factor}) row->data[at] = 0.0f;
    }
  }

  // The inner product of a row's output, before it was rounded, and gradient; finite is 0, or nan where the gradient is not finite.
  float delta(int64_t batch, int64_t head, int64_t token, float& finite) {
    const Packing<T, float> pack(values_->dim);
    const auto take = [&](const Tensor& x, float* to) {
      const Strides strides(x);
      pack.copy_row(x.const_data_ptr<T>() + batch * strides.batch + head * strides.head + token * strides.token, strides.dim, to);
    };
    take(out_, out_row_.data());
    if (rest_.numel() > 0) take(rest_, rest_row_.data());
    else std::fill_n(rest_row_.data(), pack.width, 0.0f);
    take(d_out_, d_row_.data());
    Lanes total = {}, zeros = {};
    for (int64_t c = 0; c < pack.width; c += kLanes) {
      const Lanes d = load(d_row_.data() + c);
      total += d * (load(out_row_.data() + c) + load(rest_row_.data() + c));
      zeros += d * 0.0f;
    }
    finite = sum(zeros);
    return sum(total);
  }

  // Turns the products of sixteen rows, from the row at i of the slot, which is at `column` of them, on.
  void differentiate(const RowsTask& task, const SlotRows& rows, int64_t i, int64_t column, int64_t j0, int64_t count, int64_t padded) {
    const Lanes m = rows.m[i], ln_l = rows.ln_l[i], delta = rows.delta[i], by = rows.factor[i];
    float *x = x_.data() + column, *d_p = d_p_.data() + column;
    const auto visit = [&](int64_t j, auto mask, int = 0) {
      const Lanes p = softmax_.probability(x + j * kStrip, mask, m, ln_l);
      store(x + j * kStrip, select(mask, p * (load(d_p + j * kStrip) - delta) * by, Lanes{}));
      store(d_p + j * kStrip, p);
    };
    const auto skip = [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; j++) {
        store(x + j * kStrip, Lanes{});
        store(d_p + j * kStrip, Lanes{});
      }
    };
    each_pair(task, rows, i, j0, count, padded, visit, skip);
  }

  // Adds p d_p of sixteen rows to their delta.
  void add_delta(const RowsTask& task, SlotRows& rows, int64_t i, int64_t column, int64_t j0, int64_t count) {
    const Lanes m = rows.m[i], ln_l = rows.ln_l[i];
    Lanes total = {};
    const auto visit = [&](int64_t j, auto mask, int = 0) {
      const Lanes p = softmax_.probability(x_.data() + column + j * kStrip, mask, m, ln_l);
      total += select(mask, p * load(d_p_.data() + column + j * kStrip), Lanes{});
    };
    each_pair(task, rows, i, j0, count, count, visit, [](int64_t, int64_t) {});
    store(rows.delta.data + i, rows.delta[i] + total);
  }

  // Visits the keys of a tile that some of sixteen rows see: visit(j, mask). Skips the others: skip(begin, end).
  template <typename Visit, typename Skip>
  void each_pair(
      const RowsTask& task, const SlotRows& rows, int64_t i, int64_t j0, int64_t count, int64_t padded, const Visit& visit, const Skip& skip) {
    if (task.blocks->own.empty()) {
      const Span span = span_of(rows, i, j0, count);
      skip(0, span.begin);
      each_key(span, visit);
      skip(span.end, padded);
      return;
    }
    for (int64_t j = 0; j < count; j += kLanes) {
      Ints own = {};  // by row, the bits of sixteen keys
      for (int64_t l = 0; l < kLanes; l++)
        if (rows.first[i + l] < rows.last[i + l]) own[l] = *task.blocks->own_of(task.i0 + (i + l) % task.rows, j0 + j);
      for (int64_t n = j; n < std::min(j + kLanes, count); n++) visit(n, ((own >> static_cast<int32_t>(n - j)) & 1) != 0);
    }
    skip(count, padded);
  }

  void scatter(const Tensor& to, int64_t width, const Sequence& seq, int64_t kv, const int32_t* keys, int64_t count, const float* from) {
    float* head = to.data_ptr<float>() + ((seq.batch * to.size(1) + kv) * to.size(2) + seq.k_start) * width;
    for (int64_t j = 0; j < count; j++)
      for (int64_t c = 0; c < width; c += kLanes) {
        float* at = head + keys[j] * width + c;
        store(at, load(at) + load(from + j * width + c));
      }
  }

  std::unique_ptr<DenseSide> logits_, values_;  // of q and k; of the gradient of the output and v
  const Tensor out_, rest_, m_, ln_l_, d_out_;
  const std::optional<Tensor> d_lse_;
  const float scale_;
  const Window window_;
  const Tensor dq_, dk_, dv_;
  const int64_t group_;
  const SoftmaxGradient<precision> softmax_;
  Buffer<float> x_, d_p_, dk_tile_, dv_tile_, out_row_, rest_row_, d_row_;
  std::vector<SlotRows> slots_;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor> sparse_attention_backward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& indices, const Tensor& table, int64_t query_block,
    double scale, int64_t left, int64_t right, const Tensor& out, const Tensor& rest, const Tensor& m, const Tensor& ln_l, const Tensor& d_out,
    const std::optional<Tensor>& d_lse) {
  const Window window{left, right};
  const auto query_blocks = query_blocks_of(table, query_block);
  const SortedTopk topk(indices, query_blocks, window, k.size(2));
  const auto unions = union_rows_of(query_blocks, topk, window, query_block, q.size(1) / k.size(1), v, false, false);
  std::vector<std::vector<RowsTask>> sequences;  // the last rows of each, which see the most keys, first
  for (size_t n = unions.size(); n-- > 0;) {
    const auto& rows = unions[n].rows;
    const bool starts = n + 1 == unions.size() || unions[n + 1].rows.seq.batch != rows.seq.batch || unions[n + 1].rows.seq.q_start != rows.seq.q_start;
    if (starts) sequences.emplace_back();
    if (unions[n].selected.count == 0) continue;
    for (int64_t i0 = 0; i0 < rows.rows; i0 += kBlockQ) sequences.back().push_back({&unions[n], i0, std::min(kBlockQ, rows.rows - i0)});
  }
  const int64_t kv_heads = k.size(1);
  std::vector<int64_t> tasks;  // an owner is a key head of a sequence
  for (const auto& sequence : sequences)
    for (int64_t kv = 0; kv < kv_heads; kv++) tasks.push_back(sequence.size());
  const auto floats = q.options().dtype(at::kFloat);
  const auto zeros_of = [&](const Tensor& x) { return at::zeros({x.size(0), x.size(1), x.size(2), round_up(x.size(3), kLanes)}, floats); };
  const Tensor dq = at::zeros(q.sizes(), q.options()), dk = zeros_of(k), dv = zeros_of(v);
  AddOrder order(tasks);
  with_products(q.scalar_type(), [&](auto of_tensors, auto) {
    using T = decltype(of_tensors);
    constexpr auto precision = std::is_same_v<T, float> ? Precision::kExact : Precision::kFast;
    order.run(precision == Precision::kFast, [&] {
      return [&, gradient = AttentionGradient<T, precision>(q, k, v, out, rest, m, ln_l, d_out, d_lse, scale, window, dq, dk, dv)](const OwnedTask& task) mutable {
        gradient.run(sequences[task.owner / kv_heads][task.number], task.owner % kv_heads, order, task);
      };
    });
  });
  return {dq, dk.slice(3, 0, k.size(3)), dv.slice(3, 0, v.size(3))};
}

}  // namespace streamkl::cpu

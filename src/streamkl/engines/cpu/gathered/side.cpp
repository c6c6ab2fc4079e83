// A side's gathered keys in each dtype: multiplied by the heads that share them, and their gradients added up.
#include "gathered/side.h"

namespace streamkl::cpu {
namespace {

constexpr int64_t kGatheredBytes = 1 << 13;  // of keys that are multiplied at once: they stay in the first-level cache
constexpr int64_t kRowsAhead = 8;            // keys, and gradients of keys, that are fetched before they are needed
constexpr int64_t kFew = 4;                  // heads whose gradients of keys are added up without a product

// Transposes rows of sixteen lanes into columns or back, for `most` rows or columns.
template <bool to_lanes, int most>
void turn(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  if constexpr (to_lanes) transpose_words<kLanes, most>(from, from_stride * 4, to, to_stride * 4);
  else transpose_words<most, kLanes>(from, from_stride * 4, to, to_stride * 4);
}

template <bool to_lanes>
void turn(int64_t live, const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  if (live == 1) return turn<to_lanes, 1>(from, from_stride, to, to_stride);
  if (live == 2) return turn<to_lanes, 2>(from, from_stride, to, to_stride);
  if (live <= 4) return turn<to_lanes, 4>(from, from_stride, to, to_stride);
  if (live <= 8) return turn<to_lanes, 8>(from, from_stride, to, to_stride);
  return turn<to_lanes, 16>(from, from_stride, to, to_stride);
}

template <typename T, typename P>
class TypedGatheredSide final : public GatheredSide {
  using Pack = Packing<T, P>;
  static constexpr bool kVnni = Pack::kVnni;
  static constexpr int64_t kPair = Pack::kPair;

  // Heads [first, last) of the row, which share a key head.
  struct Group {
    int64_t first, last, kv;
    Buffer<P> rows, columns, pairs, key_pairs;  // of queries, and of keys
    Buffer<float> q, dq;
    int64_t heads() const { return last - first; }
    int64_t padded() const { return round_up(heads(), kLanes); }
  };

 public:
  TypedGatheredSide(const Tensor& q, const Tensor& k, double scale, bool relu)
      : GatheredSide(q.size(1), k.size(1), scale, relu), pack_(q.size(3)), q_(q.const_data_ptr<T>()), k_(k.const_data_ptr<T>()),
        q_strides_(q), k_strides_(k),
        chunk_(std::clamp<int64_t>(kGatheredBytes / (pack_.width * sizeof(P)) / kLanes * kLanes, kLanes, kSelected)),
        gathered_(chunk_ * pack_.width) {}

  void take_row(int64_t batch, int64_t row, int64_t first, int64_t last, bool for_gradient) override {
    batch_ = batch;
    first_ = first;
    for_gradient_ = for_gradient;
    groups_ = 0;
    for (int64_t head = first; head < last; head = end_of_group(head)) {
      if (groups_ == static_cast<int64_t>(group_.size())) group_.emplace_back();
      Group& group = group_[groups_++];
      group.first = head;
      group.last = std::min(last, end_of_group(head));
      group.kv = kv_head(head);
      P* rows = group.rows.reserve(group.padded() * pack_.width);
      const T* from = q_ + batch * q_strides_.batch + head * q_strides_.head + row * q_strides_.token;
      pack_.copy(from, q_strides_.head, q_strides_.dim, group.heads(), group.padded(), rows);
      if (kVnni) pack_.transpose(rows, pack_.width, group.padded(), group.columns.reserve(pack_.width * group.padded()), group.padded());
      if (!for_gradient) continue;
      if (group.heads() > kFew) {
        pack_.pairs(rows, round_up(group.heads(), kPair), group.pairs.reserve(group.padded() * pack_.pairs_stride()));
      } else {
        float* q = group.q.reserve(kFew * pack_.padded_dim);
        for (int64_t h = 0; h < group.heads(); h++) pack_.floats(rows + h * pack_.width, q + h * pack_.padded_dim);
      }
    }
  }

  void product(int64_t start, const int64_t* keys, int64_t count, float* x) override {
    start_ = start;
    selected_ = keys;
    count_ = count;
    for (int64_t n = 0; n < groups_; n++) {
      Group& group = group_[n];
      const T* from = k_ + batch_ * k_strides_.batch + group.kv * k_strides_.head + start * k_strides_.token;
      P* pairs = for_gradient_ ? group.key_pairs.reserve(kSelected * pack_.pairs_stride()) : nullptr;
      for (int64_t j = 0; j < count; j += chunk_) {
        const int64_t live = std::min(chunk_, count - j), padded = round_up(live, kLanes);
        gather(from, keys + j, live, count - j);
        if (for_gradient_) pack_.pairs(gathered_.data(), padded, pairs + j * pack_.pairs_stride());
        multiply(group, padded, x + (group.first - first_) * kSelected + j);
      }
    }
  }

  void begin_gradient() override {
    for (int64_t n = 0; n < groups_; n++) {
      const int64_t size = group_[n].heads() * pack_.padded_dim;
      std::fill_n(group_[n].dq.reserve(size), size, 0.0f);
    }
  }

  void add_gradient(const float* dx, float* dk, int64_t dk_head_stride) override {
    for (int64_t n = 0; n < groups_; n++) {
      Group& group = group_[n];
      const float* of_group = dx + (group.first - first_) * kSelected;
      add_queries(group, of_group);
      float* keys = dk + group.kv * dk_head_stride + start_ * pack_.padded_dim;
      switch (group.heads()) {
        case 1: add_few<1>(group, of_group, keys); break;
        case 2: add_few<2>(group, of_group, keys); break;
        case 3: add_few<3>(group, of_group, keys); break;
        case 4: add_few<4>(group, of_group, keys); break;
        default: add_many(group, of_group, keys);
      }
    }
  }

  void end_gradient(int64_t head, void* dq, bool as_floats) override {
    int64_t n = 0;
    while (head >= group_[n].last) n++;
    const float* from = group_[n].dq.data() + (head - group_[n].first) * pack_.padded_dim;
    for (int64_t c = 0; c < pack_.dim; c++) {
      if (as_floats) static_cast<float*>(dq)[c] = from[c];
      else static_cast<T*>(dq)[c] = static_cast<T>(from[c]);
    }
  }

 private:
  int64_t padded() const { return round_up(count_, kLanes); }

  // gathered_[keys, width], and zeros after the last one, up to whole lanes. `following` keys are known from the first.
  void gather(const T* from, const int64_t* keys, int64_t count, int64_t following) {
    const Pack pack = pack_;  // in registers: a store might alias the member
    const int64_t token = k_strides_.token, stride = k_strides_.dim;
    P* to = gathered_.data();
    for (int64_t j = 0; j < count; j++, to += pack.width) {
      if (j + kRowsAhead < following) fetch(from + keys[j + kRowsAhead] * token, pack.dim * sizeof(T));
      pack.copy_row(from + keys[j] * token, stride, to);
    }
    std::fill_n(to, (round_up(count, kLanes) - count) * pack.width, P(0.0f));
  }

  // x[head][kSelected] of the gathered keys. Not by brgemm for floats: it adds products one by one, which errs too
  // much, and most of sixteen heads would be zeros.
  void multiply(const Group& group, int64_t keys, float* x) {
    if constexpr (kVnni) {
      const int64_t heads = group.padded();
      float* scores = scores_.reserve(chunk_ * heads);
      at::native::cpublas::brgemm(keys, heads, pack_.inner, pack_.width, heads, heads, false, gathered_.data(), group.columns.data(), scores, true);
      for (int64_t j = 0; j < keys; j += kLanes)
        for (int64_t h = 0; h < group.heads(); h += kLanes) turn<true>(group.heads() - h, scores + j * heads + h, heads, x + h * kSelected + j, kSelected);
    } else {
      for (int64_t j = 0; j < keys; j += kLanes)
        for (int64_t h = 0; h < group.heads(); h++)
          store(x + h * kSelected + j, inner_products([&](int r) { return gathered_.data() + (j + r) * pack_.width; }, group.rows.data() + h * pack_.width, pack_.width));
    }
  }

  // dq[heads, dim] += dx[heads, keys] k[keys, dim].
  void add_queries(Group& group, const float* dx) {
    const P* left;
    if constexpr (kVnni) {
      P* rounded_dx = dx_.reserve(group.heads() * kSelected);
      for (int64_t h = 0; h < group.heads(); h++)
        for (int64_t j = 0; j < padded(); j += kLanes) store(rounded_dx + h * kSelected + j, rounded(load(dx + h * kSelected + j)));
      left = rounded_dx;
    } else {
      left = dx;
    }
    at::native::cpublas::brgemm(
        group.heads(), pack_.padded_dim, padded(), kSelected, pack_.pairs_stride(), pack_.padded_dim, true, left, group.key_pairs.data(), group.dq.data(), kVnni);
  }

  // dk[selected keys, dim] += dx[heads, keys]^T q[heads, dim]: for few heads directly, for many by a product.
  template <int heads>
  void add_few(const Group& group, const float* dx, float* dk) const {
    const int64_t dim = pack_.padded_dim;
    const float* q = group.q.data();
    for (int64_t j = 0; j < count_; j++) {
      if (j + kRowsAhead < count_) fetch(dk + selected_[j + kRowsAhead] * dim, dim * sizeof(float));
      float* to = dk + selected_[j] * dim;
      for (int64_t c = 0; c < dim; c += kLanes) {
        Lanes sum = load(to + c);
        for (int h = 0; h < heads; h++) sum = fma(splat(dx[h * kSelected + j]), load(q + h * dim + c), sum);
        store(to + c, sum);
      }
    }
  }

  void add_many(const Group& group, const float* dx, float* dk) {
    const int64_t heads = group.padded(), dim = pack_.padded_dim;
    P* left = dx_columns_.reserve(chunk_ * heads);
    float* sums = dk_.reserve(chunk_ * dim);
    for (int64_t j = 0; j < count_; j += chunk_) {
      const int64_t live = std::min(chunk_, count_ - j), keys = round_up(live, kLanes);
      for (int64_t n = 0; n < keys; n += kLanes)
        for (int64_t h = 0; h < group.heads(); h += kLanes) turn_gradient(group.heads() - h, dx + h * kSelected + j + n, left + n * heads + h, heads);
      at::native::cpublas::brgemm(
          keys, dim, round_up(group.heads(), kPair), heads, pack_.pairs_stride(), dim, false, left, group.pairs.data(), sums, kVnni);
      for (int64_t n = 0; n < live; n++) {
        if (j + n + kRowsAhead < count_) fetch(dk + selected_[j + n + kRowsAhead] * dim, dim * sizeof(float));
        float* to = dk + selected_[j + n] * dim;
        for (int64_t c = 0; c < dim; c += kLanes) store(to + c, load(to + c) + load(sums + n * dim + c));
      }
    }
  }

  // to[key, head] = dx[head, key] for sixteen keys and at most sixteen heads.
  static void turn_gradient(int64_t live, const float* dx, P* to, int64_t stride) {
    if constexpr (kVnni) {
      alignas(64) float block[kLanes * kLanes];
      turn<false>(live, dx, kSelected, block, kLanes);
      if (live < kLanes)  // the other half of the last head's pair
        for (int64_t n = 0; n < kLanes; n++) block[n * kLanes + live] = 0.0f;
      for (int64_t n = 0; n < kLanes; n++) store(to + n * stride, rounded(load(block + n * kLanes)));
    } else {
      turn<false>(live, dx, kSelected, to, stride);
    }
  }

  const Pack pack_;
  const T* q_;
  const T* k_;
  const Strides q_strides_, k_strides_;
  const int64_t chunk_;
  int64_t batch_ = 0, first_ = 0, groups_ = 0, start_ = 0, count_ = 0;
  bool for_gradient_ = false;
  const int64_t* selected_ = nullptr;
  std::vector<Group> group_;
  Buffer<P> gathered_, dx_, dx_columns_;
  Buffer<float> scores_, dk_;
};

}  // namespace

std::unique_ptr<GatheredSide> gathered_side_of(const Tensor& q, const Tensor& k, double scale, bool relu) {
  return with_products(q.scalar_type(), [&](auto of_tensors, auto of_products) -> std::unique_ptr<GatheredSide> {
    return std::make_unique<TypedGatheredSide<decltype(of_tensors), decltype(of_products)>>(q, k, scale, relu);
  });
}

}  // namespace streamkl::cpu

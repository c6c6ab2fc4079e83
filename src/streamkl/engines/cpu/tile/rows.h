// Masks and row states, sixteen rows at a time, with the names of state.py.
#pragma once

#include "tile/lanes.h"

#include <algorithm>

namespace streamkl::cpu {

// Which keys of a tile sixteen rows see: each row sees a run [first, last), all rows see [full_begin, full_end), no row
// sees a key outside of [begin, end).
struct Span {
  int64_t begin, full_begin, full_end, end;
  Ints first, last;
};

// The run of keys that a causal mask and a window leave to a row, which lies on key i, or, where a key stands for several
// tokens, on token i.
struct Window {
  int64_t left, right;  // -1 is unbounded
  int64_t key_span = 1;

  int64_t first(int64_t i) const { return left < 0 ? std::numeric_limits<int64_t>::min() : i - left; }
  int64_t last(int64_t i) const { return right < 0 ? std::numeric_limits<int64_t>::max() : whole_keys(i + right + 1); }

  // The span of the rows i ... i + 15, counted from the diagonal, among the keys [j0, j1), relative to origin.
  Span span(int64_t i, int64_t j0, int64_t j1, int64_t origin) const {
    const auto within = [&](int64_t j) { return std::clamp(j, j0, j1) - origin; };
    Span span{within(first(i)), within(first(i + kLanes - 1)), within(last(i)), within(last(i + kLanes - 1)), {}, {}};
    if (span.begin == span.full_begin && span.full_end == span.end) return span;
    for (int l = 0; l < kLanes; l++) {
      span.first[l] = static_cast<int32_t>(within(first(i + l)));
      span.last[l] = static_cast<int32_t>(within(last(i + l)));
    }
    span.full_end = std::max(span.full_end, span.full_begin);
    return span;
  }

 private:
  // How many keys have all their tokens among the first ones, or 0 or less.
  int64_t whole_keys(int64_t tokens) const { return key_span == 1 ? tokens : tokens < 0 ? 0 : tokens / key_span; }
};

// The same span with some rows left out.
inline Span without(Span span, Ints rows) {
  if (!any(rows)) return span;
  const bool whole = span.begin == span.full_begin && span.full_end == span.end;
  const Ints first = whole ? Ints{} + static_cast<int32_t>(span.begin) : span.first;
  const Ints last = whole ? Ints{} + static_cast<int32_t>(span.end) : span.last;
  return {span.begin, span.end, span.end, span.end, first, select(rows, Ints{}, last)};
}

struct All {};
STREAMKL_INLINE Lanes select(All, Lanes a, Lanes) { return a; }

// A mask of a bit per lane.
struct LaneBits {
  uint16_t bits;
};
STREAMKL_INLINE Lanes select(LaneBits mask, Lanes a, Lanes b) {
#ifdef __AVX512F__
  return (Lanes)_mm512_mask_blend_ps(mask.bits, (__m512)b, (__m512)a);
#else
  return select((((Ints{} + mask.bits) >> iota()) & 1) != 0, a, b);
#endif
}

// Visits the keys of a span: visit(j, mask, turn). turn is 0 or 1, for sums that are kept in two parts to be more
// exact.
template <typename Visit>
STREAMKL_INLINE void each_key(const Span& span, const Visit& visit) {
  const auto masked = [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; j++) {
      const auto key = static_cast<int32_t>(j);
      visit(j, (span.first <= key) & (span.last > key), 0);
    }
  };
  if (span.begin < span.full_begin) masked(span.begin, std::min(span.full_begin, span.end));
  int64_t j = span.full_begin;
  for (; j + 2 <= span.full_end; j += 2) {
    visit(j, All{}, 0);
    visit(j + 1, All{}, 1);
  }
  for (; j < span.full_end; j++) visit(j, All{}, 0);
  if (j < span.end) masked(j, span.end);
}

template <bool relu>
STREAMKL_INLINE Lanes logit(Lanes x, Lanes scale) {
  return relu ? max(splat(0.0f), x * scale) : x * scale;
}

// The units of measure of row states. kExact: logits and their differences. kFast: products before the scale, which is
// positive, and differences of logits times log2 e, which saves an operation for each.
template <Precision precision, bool relu>
struct Units {
  Lanes factor;
  explicit Units(double scale) : factor(splat(static_cast<float>(precision == Precision::kFast ? scale * 1.44269504088896341 : scale))) {}

  STREAMKL_INLINE Lanes value(Lanes x) const {
    if constexpr (precision == Precision::kFast) return relu ? max(splat(0.0f), x) : x;
    else return logit<relu>(x, factor);
  }
  STREAMKL_INLINE Lanes difference(Lanes value, Lanes m) const {
    return precision == Precision::kFast ? (value - m) * factor : value - m;
  }
  STREAMKL_INLINE static Lanes weight(Lanes difference) {
    if constexpr (precision == Precision::kFast) return power_of_two(difference);
    else return exponential<precision>(difference);
  }
  // The factor of sums when m is raised to top; exactly 1 where it is not raised.
  STREAMKL_INLINE Lanes shrink(Lanes m, Lanes top) const {
    return select(m == top, splat(1.0f), select(m == -kInf, Lanes{}, weight(difference(m, top))));
  }

  STREAMKL_INLINE Lanes largest(const float* x, int64_t stride, const Span& span) const {
    Lanes top[2] = {splat(-kInf), splat(-kInf)};
    each_key(span, [&](int64_t j, auto mask, int turn) {
      top[turn] = max(select(mask, value(load(x + j * stride)), splat(-kInf)), top[turn]);
    });
    return max(top[0], top[1]);
  }
  // The m for a tile: kExact keeps it at the row max, kFast moves it only where `late` says so.
  STREAMKL_INLINE Lanes reference(Lanes m, Ints late, const float* x, int64_t stride, const Span& span) const {
    if (precision == Precision::kFast && !any(late)) return m;
    const Lanes top = max(largest(x, stride, span), m);
    return precision == Precision::kExact ? top : select(late, top, m);
  }
};

// The factors that turn values of a state into logits, and their differences into natural ones.
inline float natural_value(Precision precision, double scale) { return precision == Precision::kFast ? static_cast<float>(scale) : 1.0f; }
inline float natural_difference(Precision precision) { return precision == Precision::kFast ? kLn2 : 1.0f; }

// Tiles lie in the second-level cache, and their rows are too far apart for the CPU's prefetcher.
constexpr int64_t kAhead = 16;

// The moving reference. kExact keeps m at the row max. kFast leaves it where the first tile put it, and moves a lane to
// its row max only when that lane is late: the weights of a tile, 2^z relative to m, add up to more than kLate.
//
// The retry ends after one more round. A lane that moves has z <= 0 for every key of the tile, so its weights are at
// most 1 and add up to no more than the keys of a tile, which are fewer than kLate. A lane that does not move computes
// the same sum again. A nan is not late. What the first round summed, even to inf, is dropped.
//
// Precision holds since m <= row max <= m + 14 after every tile, in powers of two: m is a logit of the row, and no
// weight exceeds the sum of its tile. The key at m keeps the row sum at 1 or more, and a tile adds at most kLate to it:
// sums neither vanish nor overflow. z is rounded twice, by |z| 2^-23 at most. With m lower than the row max by s <= 14,
// it errs by s 2^-23 more than with m there: at most 1.2e-6 of a weight. But two logits that differ by s are not both
// smaller than s / 2, and eager's, rounded to float16 or bfloat16, err by s 2^-12 or s 2^-9. The bound does not grow
// with the number of tiles.
constexpr float kLate = 1 << 14;

struct LogSumExp {
  Lanes m = splat(-kInf), l = {};

  template <Precision precision, bool relu>
  void update(const float* x, int64_t stride, const Span& span, double scale) {
    const Units<precision, relu> units(scale);
    Lanes sum[2];
    Ints late = m == -kInf;
    do {
      const Lanes top = units.reference(m, late, x, stride, span);
      l *= units.shrink(m, top);
      m = top;
      sum[0] = sum[1] = Lanes{};
      const Lanes at = select(top == -kInf, Lanes{}, top);  // logits of -inf have weight 0; the next tile may have others
      each_key(span, [&](int64_t j, auto mask, int turn) {
        const Lanes z = units.difference(units.value(load(x + j * stride)), at);
        sum[turn] += select(mask, units.weight(z), Lanes{});
      });
      late = sum[0] + sum[1] > kLate;
    } while (precision == Precision::kFast && any(late));
    l += sum[0] + sum[1];
  }
};

struct PairedState {
  Lanes m_a = splat(-kInf), l_a = {}, m_b = splat(-kInf), l_b = {}, acc = {};

  template <Precision precision, bool relu_a, bool relu_b>
  void update(const float* a, const float* b, int64_t stride, const Span& span, double scale_a, double scale_b) {
    const Units<precision, relu_a> units_a(scale_a);
    const Units<precision, relu_b> units_b(scale_b);
    Lanes sum_a[2], sum_b[2], sum[2];
    Ints late_a = m_a == -kInf, late_b = m_b == -kInf;
    do {
      const Lanes top_a = units_a.reference(m_a, late_a, a, stride, span);
      const Lanes top_b = units_b.reference(m_b, late_b, b, stride, span);
      const Lanes alpha = units_a.shrink(m_a, top_a);
      const Lanes moved = units_a.difference(m_a, top_a) - units_b.difference(m_b, top_b);
      acc = select(l_a == 0.0f, acc, alpha * (acc + l_a * moved));
      l_a *= alpha;
      l_b *= units_b.shrink(m_b, top_b);
      m_a = top_a;
      m_b = top_b;
      for (int turn : {0, 1}) sum_a[turn] = sum_b[turn] = sum[turn] = Lanes{};
      const Lanes at_a = select(top_a == -kInf, Lanes{}, top_a);
      each_key(span, [&](int64_t j, auto mask, int turn) {
        __builtin_prefetch(a + (j + kAhead) * stride);
        __builtin_prefetch(b + (j + kAhead) * stride);
        const Lanes za = units_a.difference(units_a.value(load(a + j * stride)), at_a);
        const Lanes zb = units_b.difference(units_b.value(load(b + j * stride)), top_b);
        const Lanes weight = units_a.weight(za);
        sum_a[turn] += select(mask, weight, Lanes{});
        sum_b[turn] += select(mask, units_b.weight(zb), Lanes{});
        // A weight of 0 adds 0, if b is finite.
        sum[turn] = select(mask, fma(weight, max(za, splat(-kLargest)) - zb, sum[turn]), sum[turn]);
      });
      late_a = sum_a[0] + sum_a[1] > kLate;
      late_b = sum_b[0] + sum_b[1] > kLate;
    } while (precision == Precision::kFast && any(late_a | late_b));
    l_a += sum_a[0] + sum_a[1];
    l_b += sum_b[0] + sum_b[1];
    acc += sum[0] + sum[1];
  }
};

// p (ln p - b): 0 where p is, unless b is not finite.
template <Precision precision>
STREAMKL_INLINE Lanes mixture_term(Lanes p, Lanes b) {
  return p * (logarithm<precision>(max(p, splat(kSmallest))) - b);
}

// Against a head mean p, whose values are known. s is the sum of p, acc the sum of p (ln p - b), in logits.
struct MixtureState {
  Lanes m_b = splat(-kInf), l_b = {}, s = {}, acc = {};

  template <Precision precision, bool relu>
  void update(const float* p, const float* b, int64_t stride, const Span& span, double scale) {
    const Lanes factor = splat(static_cast<float>(scale));
    const Lanes m = max(Units<Precision::kExact, relu>(scale).largest(b, stride, span), m_b);
    Lanes sum_b[2] = {}, sum_p[2] = {}, sum[2] = {};
    each_key(span, [&](int64_t j, auto mask, int turn) {
      const Lanes weight = load(p + j * stride), zb = logit<relu>(load(b + j * stride), factor) - m;
      sum_b[turn] += select(mask, exponential<precision>(zb), Lanes{});
      sum_p[turn] += select(mask, weight, Lanes{});
      sum[turn] += select(mask, mixture_term<precision>(weight, zb), Lanes{});
    });
    acc = select(s == 0.0f, acc, acc + s * (m - m_b)) + (sum[0] + sum[1]);
    s += sum_p[0] + sum_p[1];
    l_b = select(m_b == m, l_b, select(m_b == -kInf, Lanes{}, l_b * exponential<precision>(m_b - m))) + (sum_b[0] + sum_b[1]);
    m_b = m;
  }
};

}  // namespace streamkl::cpu

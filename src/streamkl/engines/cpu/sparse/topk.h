// The top-k of a row of scores: exact, equal scores by lower key; best first, or in the order that costs nothing.
#pragma once

#include "tile/tile.h"

#include <array>
#include <vector>

namespace streamkl::cpu {

// Scores as integers in the same order; -0 is 0.
STREAMKL_INLINE Ints ordered(Lanes x) {
  const Ints bits = bits_of<Ints>(x + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

class TopK {
 public:
  TopK(int64_t topk, bool sorted) : topk_(topk), sorted_(sorted), values_(topk + kLanes), places_(topk + kLanes), best_(topk), other_(topk) {}

  // Writes topk keys, first + their places in scores[count], then -1. A score of -inf is never selected; scores from
  // count up to whole lanes are overwritten.
  void select(float* scores, int64_t count, int64_t first, int32_t* keys) {
    std::fill(scores + count, scores + round_up(count, kLanes), -kInf);
    int32_t* values = reinterpret_cast<int32_t*>(scores);
    Ints top = Ints{} + kNone, selectable = {};
    for (int64_t j = 0; j < count; j += kLanes) {
      const Ints value = ordered(load(scores + j));
      store(values + j, value);
      top = streamkl::cpu::select(value > top, value, top);
      selectable -= value > kNone;
    }
    int32_t highest = kNone;
    int64_t total = 0;
    for (int64_t l = 0; l < kLanes; l++) highest = std::max(highest, top[l]), total += selectable[l];
    const int32_t least = total <= topk_ ? kNone : threshold(values, count, total, highest);
    const int64_t found = collect(values, count, least);
    if (sorted_) {
      sort(found, highest);
      for (int64_t n = 0; n < found; n++) keys[n] = static_cast<int32_t>(first + static_cast<uint32_t>(best_[n]));
    } else {
      for (int64_t n = 0; n < found; n++) keys[n] = static_cast<int32_t>(first) + places_[n];
    }
    std::fill(keys + found, keys + topk_, -1);
  }

 private:
  static constexpr int32_t kNone = static_cast<int32_t>(0x807fffffu);  // -inf as an integer
  static constexpr int kDigit = 8;
  static constexpr int64_t kFirstStep = int64_t(1) << 20;  // an eighth of a score

  static int64_t above(const int32_t* values, int64_t count, int32_t least) {
    int32_t n = 0;
    for (int64_t j = 0; j < count; j++) n += values[j] > least;
    return n;
  }

  // All scores above it are selected; the places that are left go to scores equal to it. Found by bisection, which ends
  // early when exactly topk lie above. Neighbours are alike: it begins at the last threshold and moves away from it in
  // growing steps until it has bounds on both sides. Once few scores lie between its bounds, it looks at them alone.
  int32_t threshold(const int32_t* values, int64_t count, int64_t total, int32_t highest) {
    int64_t low = kNone, high = highest;      // more than topk lie above low, at most topk above high:
    int64_t over_low = total, over_high = 0;  // so many
    int64_t outside = 0;                      // of them are not looked at any more
    int64_t middle = last_, step = kFirstStep;
    while (high - low > 1) {
      middle = std::clamp(middle, low + 1, high - 1);
      const int64_t n = outside + above(values, count, static_cast<int32_t>(middle));
      if (n == topk_) return last_ = static_cast<int32_t>(middle);
      n > topk_ ? (low = middle, over_low = n) : (high = middle, over_high = n);
      if (low > kNone && high < highest) middle = low + (high - low) / 2;
      else middle += n > topk_ ? step : -step, step *= 4;
      if (const int64_t between = over_low - over_high; between < count / 4) {
        between_.resize(std::max<size_t>(between_.size(), between + kLanes));
        count = move_between(values, count, static_cast<int32_t>(low), static_cast<int32_t>(high));
        values = between_.data(), outside = over_high;
      }
    }
    return last_ = static_cast<int32_t>(high);
  }

  // Writes the values in (low, high], which may be there already, to the front of between_; returns how many there are.
  int64_t move_between(const int32_t* values, int64_t count, int32_t low, int32_t high) {
    int64_t found = 0;
    for (int64_t j = 0; j < count; j += kLanes) {
#ifdef __AVX512F__
      const Ints value = load<Ints>(values + j);
      const __mmask16 mask = _mm512_movepi32_mask((__m512i)((value > low) & (value <= high)));
      store(between_.data() + found, _mm512_maskz_compress_epi32(mask, (__m512i)value));
      found += __builtin_popcount(mask);
#else
      for (int64_t i = j; i < j + kLanes; i++) {
        between_[found] = values[i];
        found += values[i] > low && values[i] <= high;
      }
#endif
    }
    store(between_.data() + found, Ints{} + kNone);  // up to whole lanes
    return found;
  }

  // Appends the values for which `taken` holds, sixteen at once: a few beyond topk are written, and not counted.
  template <typename Taken>
  int64_t collect(const int32_t* values, int64_t count, int64_t found, const Taken& taken) {
    for (int64_t j = 0; j < count && found < topk_; j += kLanes) {
#ifdef __AVX512F__
      const Ints value = load<Ints>(values + j);
      const __mmask16 mask = _mm512_movepi32_mask((__m512i)taken(value));
      store(values_.data() + found, _mm512_maskz_compress_epi32(mask, (__m512i)value));
      store(places_.data() + found, _mm512_maskz_compress_epi32(mask, (__m512i)(iota() + static_cast<int32_t>(j))));
      found += __builtin_popcount(mask);
#else
      for (int64_t i = j; i < j + kLanes; i++) {
        values_[found] = values[i];
        places_[found] = static_cast<int32_t>(i);
        found += taken(values[i]);
      }
#endif
    }
    return std::min(found, topk_);
  }

  // Values above the threshold in the order of their places, then the first ones equal to it.
  int64_t collect(const int32_t* values, int64_t count, int32_t least) {
    const int64_t found = collect(values, count, 0, [&](auto value) { return value > least; });
    return least == kNone ? found : collect(values, count, found, [&](auto value) { return value == least; });
  }

  // By falling value; equal ones keep their order.
  void sort(int64_t found, int32_t highest) {
    uint32_t span = 0;
    for (int64_t i = 0; i < found; i++) {
      const uint32_t below = static_cast<uint32_t>(highest) - static_cast<uint32_t>(values_[i]);
      span |= below;
      best_[i] = static_cast<uint64_t>(below) << 32 | static_cast<uint32_t>(places_[i]);
    }
    for (int shift = 32; span != 0; shift += kDigit, span >>= kDigit) {
      const auto digit = [&](uint64_t entry) { return entry >> shift & ((1u << kDigit) - 1); };
      std::array<int32_t, 1 << kDigit> counts{};
      for (int64_t i = 0; i < found; i++) counts[digit(best_[i])]++;
      int32_t start = 0;
      for (auto& c : counts) c = std::exchange(start, start + c);
      for (int64_t i = 0; i < found; i++) other_[counts[digit(best_[i])]++] = best_[i];
      std::swap(best_, other_);
    }
  }

  const int64_t topk_;
  const bool sorted_;
  int32_t last_ = 0;  // the last threshold
  std::vector<int32_t> values_, places_, between_;
  std::vector<uint64_t> best_, other_;  // distance below the highest value, and place
};

}  // namespace streamkl::cpu

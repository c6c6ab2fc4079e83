// The top-k of a row of scores: exact, equal scores by lower key, best first.
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
  explicit TopK(int64_t topk) : topk_(topk), values_(topk + kLanes), places_(topk + kLanes), best_(topk), other_(topk) {}

  // Writes topk keys, first + their places in scores[count], then -1. A score of -inf is never selected; scores from
  // count up to whole lanes are overwritten.
  void select(float* scores, int64_t count, int64_t first, int32_t* keys) {
    std::fill(scores + count, scores + round_up(count, kLanes), -kInf);
    int32_t* values = reinterpret_cast<int32_t*>(scores);
    for (int64_t j = 0; j < count; j += kLanes) store(values + j, ordered(load(scores + j)));
    int32_t highest = kNone;
    for (int64_t j = 0; j < count; j++) highest = std::max(highest, values[j]);
    const int32_t least = threshold(values, count, highest);
    const int64_t found = collect(values, count, least);
    sort(found, highest);
    for (int64_t n = 0; n < found; n++) keys[n] = static_cast<int32_t>(first + static_cast<uint32_t>(best_[n]));
    std::fill(keys + found, keys + topk_, -1);
  }

 private:
  static constexpr int32_t kNone = static_cast<int32_t>(0x807fffffu);  // -inf as an integer
  static constexpr int kDigit = 8;

  static int64_t above(const int32_t* values, int64_t count, int32_t least) {
    int32_t n = 0;
    for (int64_t j = 0; j < count; j++) n += values[j] > least;
    return n;
  }

  // All scores above it are selected; the places that are left go to scores equal to it. Found by bisection, which ends
  // early when exactly topk lie above.
  int32_t threshold(const int32_t* values, int64_t count, int32_t highest) const {
    if (above(values, count, kNone) <= topk_) return kNone;
    int64_t low = kNone, high = highest;  // more than topk lie above low, at most topk above high
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2, n = above(values, count, static_cast<int32_t>(middle));
      if (n == topk_) return static_cast<int32_t>(middle);
      (n > topk_ ? low : high) = middle;
    }
    return static_cast<int32_t>(high);
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
  std::vector<int32_t> values_, places_;
  std::vector<uint64_t> best_, other_;  // distance below the highest value, and place
};

}  // namespace streamkl::cpu

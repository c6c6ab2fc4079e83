// The top-k of a row of scores: exact, equal scores by lower key; best first, or in the order that costs nothing.
#pragma once

#include "tile/rows.h"
#include "tile/tile.h"

#include <array>
#include <cmath>
#include <vector>

namespace streamkl::cpu {

// Scores as integers in the same order; -0 is 0.
STREAMKL_INLINE Ints ordered(Lanes x) {
  const Ints bits = bits_of<Ints>(x + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// A bit for each of sixteen numbers that exceed one.
STREAMKL_INLINE uint32_t more(const Ints& x, int32_t than) {
#ifdef __AVX512F__
  return _mm512_cmpgt_epi32_mask((__m512i)x, _mm512_set1_epi32(than));
#else
  const auto half = [&](__m256i part) { return _mm256_movemask_ps((__m256)_mm256_cmpgt_epi32(part, _mm256_set1_epi32(than))); };
  return half((__m256i)x.low) | half((__m256i)x.high) << 8;
#endif
}
STREAMKL_INLINE uint32_t more(const Lanes& x, float than) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(than), _CMP_GT_OQ);
#else
  const auto half = [&](__m256 part) { return _mm256_movemask_ps(_mm256_cmp_ps(part, _mm256_set1_ps(than), _CMP_GT_OQ)); };
  return half((__m256)x.low) | half((__m256)x.high) << 8;
#endif
}

// Writes those of sixteen integers that have a bit, one after another; up to sixteen are written. Returns how many have
// one.
STREAMKL_INLINE int64_t compress(uint32_t bits, const Ints& x, int32_t* to) {
#ifdef __AVX512F__
  store(to, _mm512_maskz_compress_epi32(bits, (__m512i)x));
#else
  for (int64_t n = 0; bits >> n != 0; n++) *to = x[n], to += bits >> n & 1;
#endif
  return __builtin_popcount(bits);
}

STREAMKL_INLINE int64_t compress(uint32_t bits, const Ints& x, const Ints& y, int32_t* to_x, int32_t* to_y) {
  compress(bits, y, to_y);
  return compress(bits, x, to_x);
}

// The same of one score, and back.
inline int32_t ordered(float x) {
  const int32_t bits = bits_of<int32_t>(x + 0.0f);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
inline float score_of(int32_t x) { return bits_of<float>(x ^ (x >> 31 & 0x7fffffff)); }

class TopK {
 public:
  TopK(int64_t topk, bool sorted) : topk_(topk), sorted_(sorted), best_(topk), other_(topk) {}

  // Writes topk keys, first + their places in scores[count], then -1. A score of -inf is never selected; scores from
  // count up to whole lanes are overwritten.
  void select(float* scores, int64_t count, int64_t first, int32_t* keys) {
    std::fill(scores + count, scores + round_up(count, kLanes), -kInf);
    int32_t bound = estimate(scores, count);
    int64_t found = gather(scores, count, bound);
    if (found < topk_ && bound > kNone) bound = kNone, found = gather(scores, count, bound);
    const int32_t highest = highest_of(values_.data(), found);
    if (found > topk_) {
      const Threshold last = threshold(values_.data(), found, bound, found, highest, topk_, topk_, last_);
      keep(found, last);
      last_ = last.score;
      found = topk_;
    }
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
  static constexpr int64_t kBeyond = 16;  // a guess goes beyond its aim by one of so many scores between the bounds
  static constexpr int64_t kTurns = 12;   // guesses, before the bounds are halved
  static constexpr int64_t kSampled = 8;  // one of so many scores

  // A score, and how many exceed it.
  struct Threshold {
    int32_t score;
    int64_t above;
  };

  // The highest value, or -inf.
  static int32_t highest_of(const int32_t* values, int64_t count) {
    int32_t top = kNone;
    for (int64_t j = 0; j < count; j++) top = std::max(top, values[j]);
    return top;
  }

  // How many values exceed one.
  static int64_t above(const int32_t* values, int64_t count, int32_t least) {
    int32_t n = 0;
    for (int64_t j = 0; j < count; j++) n += values[j] > least;
    return n;
  }

  // A score that `least` to `most` of the values exceed, or the lowest one that fewer exceed. `total` values, at least
  // `least`, exceed `low`, and none exceeds `high`. If low is -inf it begins at `guess`, and moves down in growing steps
  // until it has a lower bound. Then it goes to where as many would lie if they became fewer at an even rate, a little
  // beyond it, so that the other bound moves next; it halves the bounds if that takes long. Once few values lie between
  // these, it looks at them alone.
  Threshold threshold(const int32_t* values, int64_t count, int64_t low, int64_t total, int64_t high, int64_t least, int64_t most, int64_t guess) {
    int64_t over_low = total, over_high = 0;  // so many values exceed the bounds
    int64_t outside = 0;                      // of them are not looked at any more
    const auto aim = [&](int64_t beyond) -> int64_t {
      const float above_low = over_low, above_high = std::max(0.5f, static_cast<float>(over_high));
      const float to = std::clamp(0.5f * static_cast<float>(least + most) + static_cast<float>(beyond), above_high, above_low);
      const float from = score_of(static_cast<int32_t>(low)), until = score_of(static_cast<int32_t>(high));
      return ordered(from + (until - from) * (std::log(above_low / to) / std::log(above_low / above_high)));
    };
    int64_t middle = low == kNone ? guess : aim(-total / kBeyond), step = kFirstStep;
    for (int turn = 0; high - low > 1; turn++) {
      middle = std::clamp(middle, low + 1, high - 1);
      const int64_t n = outside + above(values, count, static_cast<int32_t>(middle));
      if (n >= least && n <= most) return {static_cast<int32_t>(middle), n};
      n > most ? (low = middle, over_low = n) : (high = middle, over_high = n);
      const int64_t between = over_low - over_high;
      if (low == kNone) middle -= step, step *= 4;
      else middle = turn < kTurns ? aim(n > most ? -between / kBeyond : between / kBeyond) : low + (high - low) / 2;
      if (between < count / 4) {
        between_.resize(std::max<size_t>(between_.size(), between + kLanes));
        count = move_between(values, count, static_cast<int32_t>(low), static_cast<int32_t>(high));
        values = between_.data(), outside = over_high;
      }
    }
    return {static_cast<int32_t>(high), over_high};
  }

  // A score that rather more than topk scores exceed, by a sample of them, or kNone.
  int32_t estimate(const float* scores, int64_t count) {
    const int64_t sampled = count / (kSampled * kLanes) * kLanes;
    const double share = static_cast<double>(topk_) / kSampled;
    const auto least = static_cast<int64_t>(share + 3.0 * std::sqrt(share)) + 4;  // of the sample, with its deviation
    if (least >= sampled) return kNone;
    sample_.resize(std::max<size_t>(sample_.size(), sampled));
    for (int64_t j = 0; j < sampled; j += kLanes, scores += kSampled * kLanes) {
      Lanes some = load(scores);
#pragma GCC unroll 8
      for (int l = 1; l < kSampled; l++) some = streamkl::cpu::select(LaneBits{static_cast<uint16_t>(0x0101 << l)}, load(scores + l * kLanes), some);
      store(sample_.data() + j, ordered(some));
    }
    const int64_t total = above(sample_.data(), sampled, kNone);
    if (total <= least) return kNone;
    const int32_t highest = highest_of(sample_.data(), sampled);
    const Threshold found = threshold(sample_.data(), sampled, kNone, total, highest, least, least + least / 4, last_estimate_);
    last_estimate_ = found.score;
    const int32_t bound = found.above >= least ? found.score : found.score - 1;
    return bound == -1 ? ordered(-kSmallest) : bound;  // -1 is -0, which does not lie below 0
  }

  // Writes the values in (low, high], which may be there already, to the front of between_; returns how many there are.
  int64_t move_between(const int32_t* values, int64_t count, int32_t low, int32_t high) {
    int32_t* const to = between_.data();
    int64_t found = 0;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Ints value = load<Ints>(values + j);
      found += compress(more(value, low) & ~more(value, high), value, to + found);
    }
    store(to + found, Ints{} + kNone);  // up to whole lanes
    return found;
  }

  // Writes the scores above a bound, as integers, and their places to values_ and places_; returns how many there are.
  int64_t gather(const float* scores, int64_t count, int32_t bound) {
    const size_t room = round_up(count, kLanes) + kLanes;
    if (values_.size() < room) values_.resize(room), places_.resize(room);
    int32_t* const values = values_.data();
    int32_t* const places = places_.data();
    const float least = score_of(bound);
    int64_t found = 0;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Lanes score = load(scores + j);
      found += compress(more(score, least), bits_of<Ints>(score), iota() + static_cast<int32_t>(j), values + found, places + found);
    }
    store(values + found, bits_of<Ints>(splat(-kInf)));  // up to whole lanes
    for (int64_t j = 0; j < found; j += kLanes) store(values + j, ordered(load(reinterpret_cast<const float*>(values + j))));
    return found;
  }

  // Moves the topk of `count` gathered scores to the front: those above the threshold, and the first ones equal to it.
  void keep(int64_t count, const Threshold& last) {
    int32_t* const values = values_.data();
    int32_t* const places = places_.data();
    int64_t found = 0, equal = topk_ - last.above;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Ints value = load<Ints>(values + j);
      uint32_t same = equal > 0 ? more(value, last.score - 1) & ~more(value, last.score) : 0;
      while (__builtin_popcount(same) > equal) same ^= 1u << (31 - __builtin_clz(same));
      equal -= __builtin_popcount(same);
      found += compress(more(value, last.score) | same, value, load<Ints>(places + j), values + found, places + found);
    }
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
  int32_t last_ = 0, last_estimate_ = 0;  // of the row before
  std::vector<int32_t> values_, places_, between_, sample_;
  std::vector<uint64_t> best_, other_;  // distance below the highest value, and place
};

}  // namespace streamkl::cpu

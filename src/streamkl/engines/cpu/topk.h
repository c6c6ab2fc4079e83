// The highest of a row of scores: exactly, equal ones by lower key, best first.
#pragma once

#include "tile.h"

#include <array>
#include <vector>

namespace streamkl::cpu {

// Scores as whole numbers in the same order; -0 is 0.
STREAMKL_INLINE Words ordered(Lanes x) {
  const Words bits = bits_of<Words>(x + 0.0f);
  const Words negative = bits_of<Words>(bits_of<Ints>(bits) >> 31);
  return bits ^ (negative | 0x80000000u);
}

class TopK {
 public:
  explicit TopK(int64_t topk) : topk_(topk), best_(topk), other_(topk) {}

  // Writes topk keys, first + their places in scores[count], then -1. Scores of -inf are none; scores[count ... ] up to
  // whole lanes is overwritten.
  void select(float* scores, int64_t count, int64_t first, int32_t* keys) {
    std::fill(scores + count, scores + round_up(count, kLanes), -kInf);
    uint32_t* values = reinterpret_cast<uint32_t*>(scores);
    for (int64_t j = 0; j < count; j += kLanes) store(values + j, ordered(load(scores + j)));
    const uint32_t least = threshold(values, count);
    const int64_t found = collect(values, count, least);
    sort(found);
    for (int64_t n = 0; n < found; n++) keys[n] = static_cast<int32_t>(first + best_[n].place);
    std::fill(keys + found, keys + topk_, -1);
  }

 private:
  static constexpr uint32_t kNone = 0x007fffffu;  // what -inf is as a whole number
  static constexpr int kDigit = 11, kDigits = 3;
  static constexpr uint32_t kRange = 1u << kDigit;
  using Counts = std::array<int32_t, kRange>;

  struct Entry {
    uint32_t value;
    int32_t place;
  };

  static uint32_t digit(uint32_t value, int n) { return value >> n * kDigit & (kRange - 1); }

  // The value of the last one that gets a place, or kNone + 1 if there is room for all: digit by digit from the top.
  uint32_t threshold(const uint32_t* values, int64_t count) {
    uint32_t prefix = 0;
    int64_t room = topk_;
    const uint32_t* from = values;
    for (int n = kDigits - 1; n >= 0; n--) {
      counts_.fill(0);
      for (int64_t j = 0; j < count; j++) counts_[digit(from[j], n)]++;
      uint32_t at = kRange - 1;
      while (at > 0 && counts_[at] < room) room -= counts_[at--];
      prefix |= at << n * kDigit;
      if (n == 0) break;
      same_.resize(count);
      int64_t same = 0;
      for (int64_t j = 0; j < count; j++) {
        same_[same] = from[j];
        same += digit(from[j], n) == at;
      }
      from = same_.data();
      count = same;
    }
    return std::max(prefix, kNone + 1);
  }

  // All above the least, and of those equal to it the first ones, in the order of their places.
  int64_t collect(const uint32_t* values, int64_t count, uint32_t least) {
    int64_t above = 0;
    for (int64_t j = 0; j < count; j++) above += values[j] > least;
    int64_t room = topk_ - above, found = 0;
    for (int64_t j = 0; j < count; j++) {
      if (values[j] < least || (values[j] == least && room-- <= 0)) continue;
      best_[found++] = {values[j], static_cast<int32_t>(j)};
    }
    return found;
  }

  // By falling value; equal ones keep their order.
  void sort(int64_t found) {
    for (int n = 0; n < kDigits; n++) {
      counts_.fill(0);
      for (int64_t i = 0; i < found; i++) counts_[digit(~best_[i].value, n)]++;
      int32_t start = 0;
      for (auto& c : counts_) c = std::exchange(start, start + c);
      for (int64_t i = 0; i < found; i++) other_[counts_[digit(~best_[i].value, n)]++] = best_[i];
      std::swap(best_, other_);
    }
  }

  const int64_t topk_;
  Counts counts_;
  std::vector<uint32_t> same_;
  std::vector<Entry> best_, other_;
};

}  // namespace streamkl::cpu

// Arithmetic of sixteen floats: exponentials and logarithms, rounding, transposition, inner products.
#pragma once

#include "tile/vectors.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace streamkl::cpu {

#ifndef __AVX512F__
STREAMKL_INLINE Lanes floor(const Lanes& x) { return {_mm256_floor_ps(x.low), _mm256_floor_ps(x.high)}; }
#endif

// The precision of exponentials. Products of bfloat16 and float16 err far more than kFast does.
enum class Precision { kFast, kExact };

// 2^x with an error of at most 2e-7, and 2^0 = 1. nan stays nan; -inf and results that would be denormal give 0.
STREAMKL_INLINE Lanes power_of_two(Lanes x) {
#ifdef __AVX512F__
  const Lanes f = (Lanes)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
#else
  const Lanes clamped = max(splat(-127.0f), min(splat(128.0f), x)), n = floor(clamped), f = clamped - n;
#endif
  Lanes p = fma(splat(1.86713017e-3f), f, splat(9.01702978e-3f));
  p = fma(p, f, splat(5.57999127e-2f));
  p = fma(p, f, splat(2.40164444e-1f));
  p = fma(p, f, splat(6.93151295e-1f));
  p = fma(p, f, splat(1.0f));
#ifdef __AVX512F__
  return (Lanes)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return p * bits_of<Lanes>((converted<Ints>(n) + 127) << 23);
#endif
}

constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

// e^x: by power_of_two() (kFast), or within 2 ulp (kExact).
template <Precision precision>
STREAMKL_INLINE Lanes exponential(Lanes x) {
  if constexpr (precision == Precision::kFast) return power_of_two(x * kLog2e);
  const Lanes clamped = max(splat(-104.0f), min(splat(89.0f), x));
  const Lanes n = (clamped * kLog2e + 12582912.0f) - 12582912.0f;
  Lanes r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  Lanes p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
#ifdef __AVX512F__
  return (Lanes)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // 2^n in two steps, so that results below the smallest normal are reached.
  const Ints whole = converted<Ints>(n), half = whole >> 1, rest = whole - half;
  return p * bits_of<Lanes>((half + 127) << 23) * bits_of<Lanes>((rest + 127) << 23);
#endif
}

// ln x for x > 0 that is neither nan nor denormal: within 2 ulp (kExact), or within 3e-7 of it, and ln 1 = 0 (kFast).
template <Precision precision>
STREAMKL_INLINE Lanes logarithm(Lanes x) {
  if constexpr (precision == Precision::kFast) {
    const Ints bits = bits_of<Ints>(x), exponent = (bits - 0x3f400000) >> 23;  // of a fraction in [0.75, 1.5)
    const Lanes f = bits_of<Lanes>(bits - (exponent << 23)) - 1.0f;
    Lanes p = fma(splat(-6.72037588e-2f), f, splat(1.41536218e-1f));
    p = fma(p, f, splat(-1.73371295e-1f));
    p = fma(p, f, splat(2.00953419e-1f));
    p = fma(p, f, splat(-2.49792699e-1f));
    p = fma(p, f, splat(3.3330707e-1f));
    p = fma(p, f, splat(-5.00001672e-1f));
    return fma(converted<Lanes>(exponent), splat(kLn2), fma(p, f * f, f));
  }
  const Ints bits = bits_of<Ints>(x), exponent = (bits - 0x3f3504f3) >> 23;
  const Lanes f = bits_of<Lanes>(bits - (exponent << 23)) - 1.0f, e = converted<Lanes>(exponent);
  Lanes p = fma(splat(7.0376836292e-2f), f, splat(-1.1514610310e-1f));
  p = fma(p, f, splat(1.1676998740e-1f));
  p = fma(p, f, splat(-1.2420140846e-1f));
  p = fma(p, f, splat(1.4249322787e-1f));
  p = fma(p, f, splat(-1.6668057665e-1f));
  p = fma(p, f, splat(2.0000714765e-1f));
  p = fma(p, f, splat(-2.4999993993e-1f));
  p = fma(p, f, splat(3.3333331174e-1f));
  const Lanes f2 = f * f;
  p = p * f * f2;
  p = fma(e, splat(-2.12194440e-4f), p);
  p = fma(splat(-0.5f), f2, p);
  return fma(e, splat(0.693359375f), f + p);
}

// x / n, where r is 1 / n, and n / n = 1. Without a division, which takes five times as long.
STREAMKL_INLINE Lanes divided(Lanes x, Lanes n, Lanes r) {
  const Lanes quotient = x * r, rest = fma(-quotient, n, x);
  return select(rest == rest, fma(rest, r, quotient), quotient);  // inf stays inf
}

// Sixteen floats as bfloat16, to nearest even.
STREAMKL_INLINE Shorts rounded(Lanes x) {
#ifdef __AVX512BF16__
  return bits_of<Shorts>(_mm512_cvtneps_pbh((__m512)x));
#else
  const Words bits = bits_of<Words>(x);
  const Words up = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return converted<Shorts>(select(x != x, Words{} + 0x7fc0u, up));
#endif
}

// Sixteen numbers of two bytes as floats.
template <typename T>
STREAMKL_INLINE Lanes widened(Shorts x) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return bits_of<Lanes>(converted<Words>(x) << 16);
  } else {
#ifdef __AVX512F__
    return (Lanes)_mm512_cvtph_ps(bits_of<__m256i>(x));
#else
    const auto both = bits_of<__m256i>(x);
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(both)), _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1))};
#endif
  }
}

// Pairs as matrix engines want them: the even ones in the low halves.
STREAMKL_INLINE Words paired(Shorts even, Shorts odd) {
  return converted<Words>(even) | converted<Words>(odd) << 16;
}

// The same of 32 numbers each, written side by side: to[2 c] = even[c], to[2 c + 1] = odd[c].
STREAMKL_INLINE void store_paired(void* to, Pairs even, Pairs odd) {
  const auto both = interleaved(even, odd);
  store(static_cast<char*>(to), both.low);
  store(static_cast<char*>(to) + sizeof(Pairs), both.high);
}

// Swaps rows and columns of 16 x 16 words: by four perfect shuffles of the whole.
template <typename V>
STREAMKL_INLINE void transpose(V* x) {
  V y[16];
#pragma GCC unroll 4
  for (int stage = 0; stage < 4; stage++) {
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
      const auto both = interleaved(x[r], x[r + 8]);
      y[2 * r] = both.low;
      y[2 * r + 1] = both.high;
    }
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) x[r] = y[r];
  }
}

// to[c][r] = row(r)[c], 16 x 16 words. Of fewer rows or columns, which cost less, the others are 0 or left out.
template <int rows = 16, int columns = 16, typename Row>
STREAMKL_INLINE void transpose_words(const Row& row, void* to, int64_t to_bytes) {
  Words x[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) x[r] = r < rows ? load<Words>(row(r)) : Words{};
  transpose(x);
#pragma GCC unroll 16
  for (int r = 0; r < columns; r++) store(static_cast<char*>(to) + r * to_bytes, x[r]);
}

template <int rows = 16, int columns = 16>
STREAMKL_INLINE void transpose_words(const void* from, int64_t from_bytes, void* to, int64_t to_bytes) {
  transpose_words<rows, columns>([&](int r) { return static_cast<const char*>(from) + r * from_bytes; }, to, to_bytes);
}

// x[r] += the sixteen partial products of row(r) and q from column c on, whose values stay in registers.
template <int vectors, typename Row>
STREAMKL_INLINE void add_products(const Row& row, const float* q, int64_t c, Lanes* x) {
  Lanes by[vectors];
#pragma GCC unroll 4
  for (int i = 0; i < vectors; i++) by[i] = load(q + c + i * kLanes);
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) {
    const float* from = row(r) + c;
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++) x[r] = fma(load(from + i * kLanes), by[i], x[r]);
  }
}

// The inner products of sixteen rows with one of a width in whole lanes. Sixteen sums of each product are kept, and
// folded in the order that transposes them: float products made so err less than a library's.
template <typename Row>
STREAMKL_INLINE Lanes inner_products(const Row& row, const float* q, int64_t width) {
  Lanes x[16];
#pragma GCC unroll 16
  for (int r = 0; r < 16; r++) x[r] = Lanes{};
  int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes) add_products<4>(row, q, c, x);
  for (; c < width; c += kLanes) add_products<1>(row, q, c, x);
  return folded(x, [](const Lanes& a, const Lanes& b) { return a + b; });
}

}  // namespace streamkl::cpu

// A vector of sixteen numbers: one register of AVX-512, or two of AVX2.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#define STREAMKL_INLINE [[gnu::always_inline]] inline

namespace streamkl::cpu {

constexpr int64_t kLanes = 16;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max(), kSmallest = std::numeric_limits<float>::min();

using Shorts = uint16_t __attribute__((vector_size(32)));

#ifdef __AVX512F__
using Lanes = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Words = uint32_t __attribute__((vector_size(64)));
using Pairs = uint16_t __attribute__((vector_size(64)));

template <typename V>
constexpr bool kHalves = false;
#else
// Two registers. GCC compares and selects vectors of 64 bytes number by number where no register is as wide, which
// takes ten times as long.
template <typename T>
struct Halves {
  typedef T Half __attribute__((vector_size(32)));
  Half low, high;

  T& operator[](int64_t lane) { return reinterpret_cast<T*>(this)[lane]; }
  T operator[](int64_t lane) const { return reinterpret_cast<const T*>(this)[lane]; }
};

using Lanes = Halves<float>;
using Ints = Halves<int32_t>;
using Words = Halves<uint32_t>;
using Pairs = Halves<uint16_t>;

template <typename V>
constexpr bool kHalves = false;
template <typename T>
constexpr bool kHalves<Halves<T>> = true;

// What a comparison of numbers gives: -1 where it holds, 0 where it does not.
template <typename T>
using Mask = Halves<std::conditional_t<sizeof(T) == 4, int32_t, int16_t>>;

#define STREAMKL_OPERATOR(op)                                                                                     \
  template <typename T>                                                                                           \
  STREAMKL_INLINE Halves<T> operator op(const Halves<T>& a, const Halves<T>& b) {                                 \
    return {a.low op b.low, a.high op b.high};                                                                    \
  }                                                                                                               \
  template <typename T>                                                                                           \
  STREAMKL_INLINE Halves<T> operator op(const Halves<T>& a, std::type_identity_t<T> b) {                          \
    return {a.low op b, a.high op b};                                                                             \
  }                                                                                                               \
  template <typename T>                                                                                           \
  STREAMKL_INLINE Halves<T> operator op(std::type_identity_t<T> a, const Halves<T>& b) {                          \
    return {a op b.low, a op b.high};                                                                             \
  }                                                                                                               \
  template <typename T, typename U>                                                                               \
  STREAMKL_INLINE Halves<T>& operator op##=(Halves<T>& a, const U& b) {                                           \
    return a = a op b;                                                                                            \
  }
#define STREAMKL_COMPARISON(op)                                                                                   \
  template <typename T>                                                                                           \
  STREAMKL_INLINE Mask<T> operator op(const Halves<T>& a, const Halves<T>& b) {                                   \
    return {a.low op b.low, a.high op b.high};                                                                    \
  }                                                                                                               \
  template <typename T>                                                                                           \
  STREAMKL_INLINE Mask<T> operator op(const Halves<T>& a, std::type_identity_t<T> b) {                            \
    return {a.low op b, a.high op b};                                                                             \
  }
STREAMKL_OPERATOR(+)
STREAMKL_OPERATOR(-)
STREAMKL_OPERATOR(*)
STREAMKL_OPERATOR(/)
STREAMKL_OPERATOR(&)
STREAMKL_OPERATOR(|)
STREAMKL_OPERATOR(^)
STREAMKL_OPERATOR(<<)
STREAMKL_OPERATOR(>>)
STREAMKL_COMPARISON(<)
STREAMKL_COMPARISON(<=)
STREAMKL_COMPARISON(>)
STREAMKL_COMPARISON(>=)
STREAMKL_COMPARISON(==)
STREAMKL_COMPARISON(!=)
#undef STREAMKL_OPERATOR
#undef STREAMKL_COMPARISON

template <typename T>
STREAMKL_INLINE Halves<T> operator-(const Halves<T>& a) {
  return {-a.low, -a.high};
}

template <typename M, typename T>
STREAMKL_INLINE Halves<T> select(const Halves<M>& mask, const Halves<T>& a, const Halves<T>& b) {
  return {mask.low ? a.low : b.low, mask.high ? a.high : b.high};
}
#endif

// a where the mask holds, b elsewhere.
template <typename M, typename V>
  requires(!kHalves<V>)
STREAMKL_INLINE V select(M mask, V a, V b) {
  return mask ? a : b;
}

template <typename To, typename From>
STREAMKL_INLINE To bits_of(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  if constexpr (kHalves<To> && kHalves<From>) {
    return {(typename To::Half)x.low, (typename To::Half)x.high};
  } else {
    To bits;
    std::memcpy(&bits, &x, sizeof(To));
    return bits;
  }
}

template <typename V = Lanes, typename T>
STREAMKL_INLINE V load(const T* from) {
  if constexpr (kHalves<V>) {
    using Half = typename V::Half;
    return {load<Half>(from), load<Half>(reinterpret_cast<const char*>(from) + sizeof(Half))};
  } else {
    V v;
    std::memcpy(&v, from, sizeof(V));
    return v;
  }
}

template <typename T, typename V>
STREAMKL_INLINE void store(T* to, const V& v) {
  if constexpr (kHalves<V>) {
    store(to, v.low);
    store(reinterpret_cast<char*>(to) + sizeof(v.low), v.high);
  } else {
    std::memcpy(to, &v, sizeof(V));
  }
}

STREAMKL_INLINE Lanes splat(float x) {
#ifdef __AVX512F__
  return (Lanes)_mm512_set1_ps(x);
#else
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
#endif
}
STREAMKL_INLINE Ints iota() {
#ifdef __AVX512F__
  return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return {Ints::Half{0, 1, 2, 3, 4, 5, 6, 7}, Ints::Half{8, 9, 10, 11, 12, 13, 14, 15}};
#endif
}

// The numbers of one vector in the type of another: of 16 or of 32 bits.
template <typename To, typename From>
STREAMKL_INLINE To converted(const From& x) {
#ifdef __AVX512F__
  return __builtin_convertvector(x, To);
#else
  if constexpr (kHalves<To> && kHalves<From>) {
    return {__builtin_convertvector(x.low, typename To::Half), __builtin_convertvector(x.high, typename To::Half)};
  } else if constexpr (kHalves<To>) {
    using Quarter = uint16_t __attribute__((vector_size(16)));
    const auto widened = [&](int n) {
      return __builtin_convertvector(load<Quarter>(reinterpret_cast<const char*>(&x) + n * sizeof(Quarter)), typename To::Half);
    };
    return {widened(0), widened(1)};
  } else {
    const auto halves = [](auto half) { return _mm256_and_si256((__m256i)half, _mm256_set1_epi32(0xffff)); };
    return (To)_mm256_permute4x64_epi64(_mm256_packus_epi32(halves(x.low), halves(x.high)), 0xd8);
  }
#endif
}

// a * b + c, rounded once.
STREAMKL_INLINE Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
#ifdef __AVX512F__
  return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
#endif
}

// The larger one; b where one of them is nan.
STREAMKL_INLINE Lanes max(const Lanes& a, const Lanes& b) {
#ifdef __AVX512F__
  return (Lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
#endif
}

// The smaller one; b where one of them is nan.
STREAMKL_INLINE Lanes min(const Lanes& a, const Lanes& b) {
#ifdef __AVX512F__
  return (Lanes)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
#endif
}

// The sum of all lanes, always in one order: halves onto halves.
STREAMKL_INLINE float sum(Lanes x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  x.low += x.high;
  for (int half = kLanes / 4; half > 0; half /= 2)
    for (int l = 0; l < half; l++) x.low[l] += x.low[l + half];
  return x.low[0];
#endif
}

STREAMKL_INLINE float largest(const Lanes& x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float top = x[0];
  for (int l = 1; l < kLanes; l++) top = x[l] > top ? x[l] : top;
  return top;
#endif
}

STREAMKL_INLINE bool any(const Ints& mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  const auto all = (__m256i)(mask.low | mask.high);
  return !_mm256_testz_si256(all, all);
#endif
}

// a0 b0 a1 b1 ...: the first half of it, and the second.
template <typename V>
struct Interleaved {
  V low, high;
};

template <typename V>
STREAMKL_INLINE Interleaved<V> interleaved(const V& a, const V& b) {
  if constexpr (kHalves<V>) {
    const auto low = interleaved(a.low, b.low), high = interleaved(a.high, b.high);
    return {{low.low, low.high}, {high.low, high.high}};
  } else if constexpr (sizeof(V) / sizeof(a[0]) == 32) {
    using Places = uint16_t __attribute__((vector_size(64)));
    constexpr Places low{0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return {__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, low + 16)};
  } else if constexpr (sizeof(V) == 64) {
    using Places = uint32_t __attribute__((vector_size(64)));
    constexpr Places low{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    return {__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, low + 8)};
  } else if constexpr (sizeof(a[0]) == 2) {
    constexpr Shorts low{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    return {__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, low + 8)};
  } else {
    using Places = uint32_t __attribute__((vector_size(32)));
    constexpr Places low{0, 8, 1, 9, 2, 10, 3, 11};
    return {__builtin_shuffle(a, b, low), __builtin_shuffle(a, b, low + 4)};
  }
}

// Sixteen vectors folded into one: lane i has what `fold` makes of the lanes of x[i], in one order.
template <typename Fold>
STREAMKL_INLINE Lanes folded(Lanes* x, const Fold& fold) {
#pragma GCC unroll 4
  for (int half = 8; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int r = 0; r < half; r++) {
      const auto both = interleaved(x[r], x[r + half]);
      x[r] = fold(both.low, both.high);
    }
  return x[0];
}

}  // namespace streamkl::cpu

// Sixteen float32 at once, for native.cpp: loads, products rounded once, sine and cosine.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Without it compilers call what should stay in registers.
#define NLR_ALWAYS __attribute__((always_inline))
#define NLR_INLINE inline NLR_ALWAYS

namespace {

// Sixteen numbers at once: a register of AVX-512, or as many as it takes.
constexpr int64_t kLanes = 16;
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using Integers = int32_t __attribute__((vector_size(4 * kLanes)));

NLR_INLINE Lanes all(float value) { return value - Lanes{}; }

// Lanes from the first n that are left at `from`, filled with zeros, and back.
NLR_INLINE Lanes load(const float* from, int64_t n) {
  Lanes found{};
  n < kLanes ? std::memcpy(&found, from, 4 * n) : std::memcpy(&found, from, 4 * kLanes);
  return found;
}

NLR_INLINE void store(const Lanes& value, float* to, int64_t n) {
  n < kLanes ? std::memcpy(to, &value, 4 * n) : std::memcpy(to, &value, 4 * kLanes);
}

// x y + z, rounded once.
NLR_INLINE Lanes fma(Lanes x, Lanes y, Lanes z) {
  for (int64_t i = 0; i < kLanes; ++i) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return z;
}

NLR_INLINE Lanes fma(Lanes x, Lanes y, float z) { return fma(x, y, all(z)); }

// Calls body(first, count) for n numbers, a register at a time; the count of whole ones is known when compiling.
template <class F>
NLR_INLINE void each_register(int64_t n, const F& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, kLanes);
  if (i < n) body(i, n - i);
}

NLR_INLINE Integers bits_of(Lanes x) {
  Integers found;
  std::memcpy(&found, &x, sizeof found);
  return found;
}

NLR_INLINE Lanes number_of(Integers bits) {
  Lanes found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

// Whether a lane is below zero. By halves: compilers take sixteen lanes out one by one.
NLR_INLINE bool any_negative(Integers given) {
  using Half = int32_t __attribute__((vector_size(2 * kLanes)));
  using Quarter = int64_t __attribute__((vector_size(kLanes)));
  Half halves[2];
  std::memcpy(halves, &given, sizeof halves);
  const Half half = halves[0] | halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof quarters);
  const Quarter quarter = quarters[0] | quarters[1];
  return (quarter[0] | quarter[1]) & 0x8000000080000000;
}

// Not negative while |x| <= 1e5, where the rounding to quarters below is exact.
NLR_INLINE Integers near(Lanes x) { return bits_of(all(1e5f)) - (bits_of(x) & INT32_MAX); }

// Sine and cosine by one reduction modulo pi / 2 in three parts, and minimax polynomials on [-pi / 4, pi / 4]: within
// 1.5 ulp of arguments that are near.
NLR_INLINE void sine_cosine(Lanes x, Lanes& sine, Lanes& cosine) {
  const Lanes shifted = fma(x, all(0.636619772f), 12582912.f);  // adding 1.5 * 2^23 rounds to an integer
  const Lanes quarters = shifted - 12582912.f;
  const Integers quarter = bits_of(shifted);
  Lanes r = fma(quarters, all(-1.57079637f), x);
  r = fma(quarters, all(4.37113883e-8f), r);
  r = fma(quarters, all(1.71512494e-15f), r);
  const Lanes s = r * r;
  Lanes odd = fma(s, all(2.71831149e-6f), -1.98393348e-4f);
  odd = fma(odd, s, 8.33332939e-3f);
  odd = fma(odd, s, -1.66666666e-1f);
  odd = fma(odd * s, r, r);
  Lanes even = fma(s, all(2.43904488e-5f), -1.38867638e-3f);
  even = fma(even, s, 4.16666233e-2f);
  even = fma(even, s, -0.499999997f);
  even = fma(even, s, 1.f);
  const Integers swapped = (quarter & 1) == 1;
  sine = number_of(bits_of(swapped ? even : odd) ^ ((quarter & 2) << 30));
  cosine = number_of(bits_of(swapped ? odd : even) ^ (((quarter + 1) & 2) << 30));
}

// Calls use(i, n, sine, cosine) for the n numbers from the i-th on. Those that are not near, infinities and NaN among
// them, are done in double precision.
template <class F>
NLR_INLINE void each_sine_cosine(const float* x, int64_t count, const F& use) {
  Integers all_near{};
  each_register(count, [&](int64_t i, int64_t n) NLR_ALWAYS { all_near |= near(load(x + i, n)); });
  if (__builtin_expect(any_negative(all_near), 0))
    each_register(count, [&](int64_t i, int64_t n) {
      Lanes sine, cosine;
      sine_cosine(load(x + i, n), sine, cosine);
      const Integers is_near = near(load(x + i, n));
      for (int64_t k = 0; k < n; ++k) {
        if (is_near[k] >= 0) continue;
        sine[k] = static_cast<float>(std::sin(static_cast<double>(x[i + k])));
        cosine[k] = static_cast<float>(std::cos(static_cast<double>(x[i + k])));
      }
      use(i, n, sine, cosine);
    });
  else
    each_register(count, [&](int64_t i, int64_t n) NLR_ALWAYS {
      Lanes sine, cosine;
      sine_cosine(load(x + i, n), sine, cosine);
      use(i, n, sine, cosine);
    });
}

}  // namespace

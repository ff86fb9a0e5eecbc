// The operators of rational activations.

#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "tensors.h"

namespace {

// methods/rational/op.py: numerators of 6 coefficients, denominators of B: 5 ("abs_of_sum") or the sizes of 4
// ("sum_of_abs"). Sixteen elements at a time, so that all of a group's coefficients and their sums stay in registers.

constexpr int kAbove = 6;

template <int kCount>
NLR_INLINE void horner(const Lanes* c, Lanes x, Lanes& value, Lanes& slope) {
  slope = c[kCount - 1], value = fma(slope, x, c[kCount - 2]);
#pragma GCC unroll 8
  for (int k = kCount - 3; k >= 0; --k) slope = fma(slope, x, value), value = fma(value, x, c[k]);
}

// R = p / q, and slopes by x. `variable` is what q's polynomial is in, `sign` dq / d(that polynomial).
template <int B>
struct Ratio {
  Lanes a[kAbove], b[B];

  struct At {
    Lanes p, q, p_slope, q_slope, variable, sign;
  };

  // `group` has that of each lane.
  Ratio(const Tensor& numerator, const Tensor& denominator, const Integers& group) {
    for (int i = 0; i < kLanes; ++i) {
      for (int k = 0; k < kAbove; ++k) a[k][i] = read(numerator)[group[i] * kAbove + k];
      for (int k = 0; k < B; ++k) b[k][i] = read(denominator)[group[i] * B + k];
    }
  }

  NLR_INLINE At at(Lanes x) const {
    At to;
    Lanes inner, slope;
    const Lanes one = all(1.f), side = x > 0.f ? one : x < 0.f ? -one : Lanes{};
    horner<kAbove>(a, x, to.p, to.p_slope);
    to.variable = B == 4 ? (x < 0.f ? -x : x) : x;
    horner<B>(b, to.variable, inner, slope);
    if constexpr (B == 4) {
      to.q = fma(inner, to.variable, one);
      to.q_slope = fma(slope, to.variable, inner) * side;
      to.sign = one;
    } else {
      to.q = 1.f + (inner < 0.f ? -inner : inner);
      to.sign = inner > 0.f ? one : inner < 0.f ? -one : Lanes{};
      to.q_slope = slope * to.sign;
    }
    return to;
  }
};

// Straight lines outside [low, high].
struct Tails {
  float low = -INFINITY, high = INFINITY, low_slope = 0, high_slope = 0;

  explicit Tails(const std::optional<std::vector<double>>& limits) {
    if (limits) low = (*limits)[0], high = (*limits)[1], low_slope = (*limits)[2], high_slope = (*limits)[3];
  }

  NLR_INLINE Lanes inside(Lanes x) const { return x < low ? all(low) : x > high ? all(high) : x; }

  NLR_INLINE Lanes added(Lanes x, Lanes y) const {
    if (low_slope != 0.f) y = x < low ? y + low_slope * (x - low) : y;
    if (high_slope != 0.f) y = x > high ? y + high_slope * (x - high) : y;
    return y;
  }
};

// Parts of a row whose lanes have the same coefficients each time: a group, or sixteen columns of narrower groups.
struct Parts {
  int64_t tokens, channels, groups, group_width, width, count;

  Parts(const Tensor& x, int64_t groups)
      : tokens(x.size(0)), channels(x.size(1)), groups(groups), group_width(channels / groups),
        width(std::max(group_width, kLanes)), count((channels + width - 1) / width) {}

  int64_t pieces() const { return (tokens + step(channels) - 1) / step(channels); }

  // Calls body(piece, row, part, first column, end) for every part of every row.
  template <class F>
  void each(const F& body) const {
    const int64_t rows = step(channels);
    parallel(pieces(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece)
        for (int64_t row = piece * rows; row < std::min(tokens, (piece + 1) * rows); ++row)
          for (int64_t part = 0; part < count; ++part)
            body(piece, row, part, part * width, std::min(channels, (part + 1) * width));
    });
  }

  template <int B>
  std::vector<Ratio<B>> ratios(const Tensor& numerator, const Tensor& denominator) const {
    std::vector<Ratio<B>> found;
    for (int64_t part = 0; part < count; ++part) {
      Integers group{};
      for (int i = 0; i < kLanes; ++i) group[i] = std::min(part * width + i, channels - 1) / group_width;
      found.emplace_back(numerator, denominator, group);
    }
    return found;
  }

  // Sums of each lane (pieces, parts, coefficients, lanes) -> of each group (groups, coefficients).
  Tensor of_groups(const Tensor& sums) const {
    if (width == group_width) return sums.sum(at::IntArrayRef({0, 3}), false, at::kDouble).to(at::kFloat);
    const Tensor columns = sums.sum(0, false, at::kDouble).transpose(1, 2).reshape({count * kLanes, -1});
    return columns.narrow(0, 0, channels).view({groups, group_width, -1}).sum(1).to(at::kFloat);
  }
};

// f is the value of the anchor's own function, with base coefficients a0, b0.
template <int B>
Tensor rational_values(
    const Tensor& x, const Optional& up, const Tensor& a, const Tensor& b, const Tails& tails, const Optional& f,
    const Optional& a0, const Optional& b0) {
  const Tensor y = at::empty(x.sizes(), x.options());
  const int64_t stride = x.stride(0), up_stride = up ? up->stride(0) : 0, f_stride = f ? f->stride(0) : 0;
  const Parts parts(x, a.size(0));
  const int64_t channels = parts.channels;
  const float *from = read(x), *ups = up ? read(*up) : nullptr, *own = f ? read(*f) : nullptr;
  float* to = written(y);
  const auto own_ratios = parts.ratios<B>(a, b), bases = parts.ratios<B>(f ? *a0 : a, f ? *b0 : b);
  parts.each([&](int64_t, int64_t row, int64_t part, int64_t first, int64_t end) {
    const Ratio<B> ratio = own_ratios[part], &base = bases[part];
    const Tails tail = tails;
    const float *const x_row = from + row * stride + first, *const f_row = own ? own + row * f_stride + first : nullptr;
    const float* const up_row = ups ? ups + row * up_stride + first : nullptr;
    float* const y_row = to + row * channels + first;
    each_register(end - first, [&](int64_t i, int64_t n) NLR_ALWAYS {
      const Lanes given = load(x_row + i, n), inside = tail.inside(given);
      const auto at = ratio.at(inside);
      Lanes value = at.p / at.q;
      if (f_row) {
        const auto before = base.at(inside);
        value = load(f_row + i, n) + (value - before.p / before.q);
      } else {
        value = tail.added(given, value);
      }
      if (up_row) value *= load(up_row + i, n);
      store(value, y_row + i, n);
    });
  });
  return y;
}

// Gradients of x (without f's), up, numerator and denominator (of its sizes where B is 4).
template <int B, bool kGated, bool kAnchored>
Tensors rational_gradients(
    const Tensor& dy, const Tensor& x, const Optional& up, const Tensor& a, const Tensor& b, const Tails& tails,
    const Optional& a0, const Optional& b0) {
  const Tensor dx = at::empty(x.sizes(), x.options()), dup = kGated ? at::empty(x.sizes(), x.options()) : Tensor();
  const Parts parts(x, a.size(0));
  const int64_t channels = parts.channels;
  const Tensor partial = at::zeros({parts.pieces(), parts.count, kAbove + B, kLanes}, x.options());
  const int64_t stride = x.stride(0), dy_stride = dy.stride(0), up_stride = kGated ? up->stride(0) : 0;
  const float *from = read(x), *slopes = read(dy), *ups = kGated ? read(*up) : nullptr;
  float *to = written(dx), *to_up = kGated ? written(dup) : nullptr, *totals = written(partial);
  const auto own_ratios = parts.ratios<B>(a, b), bases = parts.ratios<B>(kAnchored ? *a0 : a, kAnchored ? *b0 : b);
  parts.each([&](int64_t piece, int64_t row, int64_t part, int64_t first, int64_t end) {
    const Ratio<B> ratio = own_ratios[part], &base = bases[part];
    float* sums = totals + (piece * parts.count + part) * (kAbove + B) * kLanes;
    Lanes above[kAbove], below[B];
    std::memcpy(above, sums, sizeof above);
    std::memcpy(below, sums + kAbove * kLanes, sizeof below);
    const Tails tail = tails;
    const float *const x_row = from + row * stride + first, *const dy_row = slopes + row * dy_stride + first;
    const float* const up_row = kGated ? ups + row * up_stride + first : nullptr;
    float* const dx_row = to + row * channels + first;
    float* const dup_row = kGated ? to_up + row * channels + first : nullptr;
    each_register(end - first, [&](int64_t i, int64_t n) NLR_ALWAYS {
      // Sixteen lines ahead: a processor's own prefetch ends at a page. Forward, with one matrix, gains nothing by it.
      __builtin_prefetch(x_row + i + 256);
      __builtin_prefetch(dy_row + i + 256);
      const Lanes given = load(x_row + i, n), inside = tail.inside(given);
      Lanes slope = load(dy_row + i, n);
      const auto at = ratio.at(inside);
      const Lanes inverse = 1.f / at.q;
      if constexpr (kGated) {
        store(slope * tail.added(given, at.p * inverse), dup_row + i, n);
        slope *= load(up_row + i, n);
      }
      Lanes dp = slope * inverse, dq = -dp * at.p * inverse, result = fma(dp, at.p_slope, dq * at.q_slope);
      if constexpr (kAnchored) {
        const auto before = base.at(inside);
        const Lanes by_p = slope / before.q;
        result -= fma(by_p, before.p_slope, -by_p * before.p / before.q * before.q_slope);
      }
      result = given < tail.low ? slope * tail.low_slope : given > tail.high ? slope * tail.high_slope : result;
      store(result, dx_row + i, n);
      dq *= at.sign;
      if (B == 4) dq *= at.variable;  // whose first coefficient is that of the first power
      above[0] += dp, below[0] += dq;
      Lanes power = inside, size = at.variable;
#pragma GCC unroll 8
      for (int k = 1; k < kAbove; ++k, power *= inside, size *= at.variable) {
        above[k] = fma(dp, power, above[k]);
        if (k < B) below[k] = fma(dq, size, below[k]);
      }
    });
    std::memcpy(sums, above, sizeof above);
    std::memcpy(sums + kAbove * kLanes, below, sizeof below);
  });
  const Tensor total = parts.of_groups(partial);
  return {dx, dup, total.narrow(1, 0, kAbove).contiguous(), total.narrow(1, kAbove, B).contiguous()};
}

Tensor rational_forward(
    const Tensor& x, const Optional& up, const Tensor& a, const Tensor& b, std::optional<std::vector<double>> limits,
    const Optional& f, const Optional& a0, const Optional& b0) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto run = b.size(1) == 4 ? rational_values<4> : rational_values<5>;
  return run(x, up, a, b, Tails(limits), f, a0, b0);
}

Tensors rational_backward(
    const Tensor& dy, const Tensor& x, const Optional& up, const Tensor& a, const Tensor& b,
    std::optional<std::vector<double>> limits, const Optional& a0, const Optional& b0) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto run = [&](auto size) {
    const auto kind = up ? rational_gradients<size, true, false>
        : a0 ? rational_gradients<size, false, true> : rational_gradients<size, false, false>;
    return kind(dy, x, up, a, b, Tails(limits), a0, b0);
  };
  return b.size(1) == 4 ? run(std::integral_constant<int, 4>{}) : run(std::integral_constant<int, 5>{});
}

}  // namespace

// Operators for float32 on a CPU, built by native.py on first use. Each is the Python of the file named above it, with
// fewer passes over memory and fewer calls; that Python is what runs where this cannot be built, and what tests hold it
// to. Sums over tokens are taken in pieces of a fixed size, so that they do not depend on the number of threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "lanes.h"

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Optional = std::optional<Tensor>;
using Optionals = c10::List<Optional>;

namespace {

constexpr int64_t kPiece = 1 << 14;  // numbers that a thread takes at once

template <class F>
void parallel(int64_t count, int64_t grain, const F& body) {
  auto call = [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); };
  if (count <= grain) return body(0, count);
  TORCH_CHECK(torch_parallel_for(0, count, grain, call, const_cast<F*>(&body)) == 0);
}

const float* read(const Tensor& tensor) { return tensor.const_data_ptr<float>(); }
float* written(const Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }
int64_t step(int64_t width) { return std::max<int64_t>(1, kPiece / width); }
Tensor rows_of(const Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

// methods/noble/op.py

struct Branch {
  Tensor down, up;
  Tensors mixes, frequencies, phases;
};

std::vector<Branch> branches_of(const Optionals& tensors, int64_t n) {
  const int64_t size = tensors.size() / n, depth = (size - 1) / 3;
  std::vector<Branch> found(n);
  auto at = tensors.begin();
  for (auto& branch : found) {
    const Optional down = *at++;
    if (down.has_value()) branch.down = *down;
    const Optional up = *at++;
    branch.up = *up;
    for (auto [list, count] : {std::pair{&branch.mixes, depth - 1}, {&branch.frequencies, depth}, {&branch.phases, depth}})
      for (int64_t k = 0; k < count; ++k) list->push_back(**(std::optional<Optional>(*at++)));
  }
  return found;
}

// u = cos(f z + p), row by row; where a sine is wanted, that too.
void activate(const Tensor& z, const Tensor& frequency, const Tensor& phase, const Tensor& u, const Tensor* sine) {
  const int64_t tokens = z.size(0), r = z.size(1), stride = z.stride(0);
  const float *from = read(z), *f = read(frequency), *p = read(phase);
  float *to = written(u), *to_sine = sine ? written(*sine) : nullptr;
  parallel(tokens, step(r), [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
#pragma GCC ivdep
      for (int64_t i = 0; i < r; ++i) to[t * r + i] = __builtin_fmaf(from[t * stride + i], f[i], p[i]);
    float *const own = to + begin * r, *const own_sine = to_sine ? to_sine + begin * r : nullptr;
    each_sine_cosine(own, (end - begin) * r, [=](int64_t i, int64_t n, Lanes s, Lanes c) NLR_ALWAYS {
      store(c, own + i, n);
      if (own_sine) store(s, own_sine + i, n);
    });
  });
}

// du becomes dz; returns the gradients of frequency and phase.
std::pair<Tensor, Tensor> activate_backward(
    const Tensor& z, const Tensor& sine, const Tensor& frequency, const Tensor& du) {
  const int64_t tokens = z.size(0), r = z.size(1), stride = z.stride(0);
  const int64_t rows = step(r), pieces = (tokens + rows - 1) / rows;
  const Tensor partial = at::empty({pieces, 2, r}, z.options());
  const float *from = read(z), *s = read(sine), *f = read(frequency);
  float *d = written(du), *sums = written(partial);
  parallel(pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      float *df = sums + piece * 2 * r, *dp = df + r;
      std::fill(df, df + 2 * r, 0.f);
      for (int64_t t = piece * rows; t < std::min(tokens, (piece + 1) * rows); ++t) {
        const float *row = from + t * stride, *row_s = s + t * r;
        float* row_d = d + t * r;
#pragma GCC ivdep
        for (int64_t i = 0; i < r; ++i) {
          const float dargument = -row_s[i] * row_d[i];
          dp[i] += dargument;
          df[i] = __builtin_fmaf(dargument, row[i], df[i]);
          row_d[i] = dargument * f[i];
        }
      }
    }
  });
  const Tensor total = pieces == 1 ? partial[0] : partial.sum(0);
  return {total[0], total[1]};
}

Tensors parted(const Tensor& h, bool own, int64_t n) { return own && n > 1 ? h.chunk(n, 1) : Tensors(n, h); }

Tensor joined(const std::vector<Branch>& branches) {
  Tensors downs;
  for (const auto& branch : branches)
    if (branch.down.defined()) downs.push_back(branch.down);
  return downs.empty() ? Tensor() : downs.size() == 1 ? downs[0] : at::cat(downs);
}

Tensors noble_forward(
    const Tensor& x, const Optional& h, const Optionals& weights, const Optionals& biases, const Optionals& tensors) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int64_t n = weights.size();
  const auto branches = branches_of(tensors, n);
  const bool own = n > 1 && branches[1].down.defined();
  const Tensor x2 = rows_of(x), h2 = h.has_value() ? rows_of(*h) : at::mm(x2, joined(branches).t());
  const Tensors parts = parted(h2, own, n);
  auto shape = x.sizes().vec();
  Tensors outputs;
  for (int64_t i = 0; i < n; ++i) {
    const Branch& branch = branches[i];
    Tensor u = parts[i];
    for (size_t k = 0; k < branch.phases.size(); ++k) {
      if (k > 0) u = at::mm(u, branch.mixes[k - 1].t());
      const Tensor out = k > 0 ? u : at::empty(u.sizes(), u.options());
      activate(u, branch.frequencies[k], branch.phases[k], out, nullptr);
      u = out;
    }
    const Optional weight = weights.get(i), bias = biases.get(i);
    Tensor y = weight.has_value() ? at::linear(x2, *weight, bias).addmm_(u, branch.up.t()) : at::mm(u, branch.up.t());
    shape.back() = branch.up.size(0);
    outputs.push_back(x.dim() == 2 ? y : at::_unsafe_view(y, shape));
  }
  outputs.push_back(h.has_value() ? at::empty({0}, x.options()) : h2);
  return outputs;
}

Tensors noble_backward(
    const Tensors& dys, const Tensor& x, const Tensor& h, const Optionals& weights, const Optionals& tensors,
    const c10::List<bool>& wanted) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int64_t n = weights.size(), size = tensors.size() / n;
  const auto branches = branches_of(tensors, n);
  const bool own = n > 1 && branches[1].down.defined();
  const Tensor x2 = rows_of(x), h2 = rows_of(h);
  const Tensors parts = parted(h2, own, n);
  Tensors found(2 + 2 * n + n * size), dhs;
  Tensor dx;
  auto add_to_dx = [&](const Tensor& left, const Tensor& right) {
    dx = dx.defined() ? dx.addmm_(left, right) : at::mm(left, right);
  };
  for (int64_t i = 0; i < n; ++i) {
    const Branch& branch = branches[i];
    const int64_t depth = branch.phases.size();
    Tensor* const gradients = &found[2 + 2 * n + i * size];
    const Tensor dy = rows_of(dys[i]);
    Tensors inputs, sines, outputs;
    Tensor z = parts[i];
    for (int64_t k = 0; k < depth; ++k) {
      if (k > 0) z = at::mm(outputs.back(), branch.mixes[k - 1].t());
      inputs.push_back(z);
      outputs.push_back(at::empty(z.sizes(), z.options()));
      sines.push_back(at::empty(z.sizes(), z.options()));
      activate(z, branch.frequencies[k], branch.phases[k], outputs.back(), &sines.back());
    }
    Tensor du = at::mm(dy, branch.up);
    gradients[1] = at::mm(dy.t(), outputs.back());
    for (int64_t k = depth - 1; k >= 0; --k) {
      std::tie(gradients[1 + depth + k], gradients[1 + 2 * depth + k]) =
          activate_backward(inputs[k], sines[k], branch.frequencies[k], du);
      if (k > 0) {
        gradients[1 + k] = at::mm(du.t(), outputs[k - 1]);
        du = at::mm(du, branch.mixes[k - 1]);
      }
    }
    dhs.push_back(du);
    const Optional weight = weights.get(i);
    if (wanted.get(0) && weight.has_value()) add_to_dx(dy, *weight);
    if (wanted.get(2 + i)) found[2 + i] = at::mm(dy.t(), x2);
    if (wanted.get(2 + n + i)) found[2 + n + i] = dy.sum(0);
  }
  Tensor dh = own ? at::cat(dhs, 1) : dhs[0];
  for (int64_t i = 1; !own && i < n; ++i) dh.add_(dhs[i]);
  if (const Tensor down = joined(branches); down.defined()) {
    if (wanted.get(0)) add_to_dx(dh, down);
    const Tensor ddown = at::mm(dh.t(), x2);
    for (int64_t i = 0; i < (own ? n : 1); ++i)
      found[2 + 2 * n + i * size] = own ? ddown.chunk(n)[i].clone() : ddown;
  }
  if (dx.defined()) found[0] = dx.view(x.sizes());
  if (wanted.get(1)) found[1] = dh.reshape(h.sizes());
  return found;
}

// methods/noble/fused.py: what follows the product z = [dense outputs | branches' arguments] of n layers of one input.
// Frequencies are in the matrices; without `dense_bias` the dense part of the bias is zero. Mixes are (n, r, r) and ups
// (r, d_out), both transposed.

// to = cos(from + phase); phase may be absent.
void cosines(const float* from, const float* phase, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] + (phase ? phase[i] : 0.f);
  each_sine_cosine(to, n, [=](int64_t i, int64_t n, Lanes, Lanes c) NLR_ALWAYS { store(c, to + i, n); });
}

// Adds u (tokens, r) up (r, width) to y, kTokens rows and kWide registers at a time; strides are between rows.
template <int kTokens, int kWide>
NLR_INLINE void add_tile(
    const float* u, int64_t u_stride, const float* up, int64_t up_stride, float* y, int64_t y_stride, int64_t r,
    int64_t rest) {
  const int64_t n = kWide > 1 ? kLanes : rest;  // known where sums are to stay in registers
  Lanes sums[kTokens][kWide];
#pragma GCC unroll 4
  for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWide; ++j) sums[i][j] = load(y + i * y_stride + j * kLanes, n);
  for (int64_t k = 0; k < r; ++k)
#pragma GCC unroll 4
    for (int j = 0; j < kWide; ++j) {
      const Lanes row = load(up + k * up_stride + j * kLanes, n);
#pragma GCC unroll 4
      for (int i = 0; i < kTokens; ++i) sums[i][j] = fma(all(u[i * u_stride + k]), row, sums[i][j]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < kWide; ++j) store(sums[i][j], y + i * y_stride + j * kLanes, n);
}

template <int kWide>
void add_columns(
    const float* u, int64_t u_stride, const float* up, int64_t up_stride, float* y, int64_t y_stride, int64_t tokens,
    int64_t r, int64_t n) {
  int64_t t = 0;
  for (; t + 4 <= tokens; t += 4)
    add_tile<4, kWide>(u + t * u_stride, u_stride, up, up_stride, y + t * y_stride, y_stride, r, n);
  for (; t < tokens; ++t) add_tile<1, kWide>(u + t * u_stride, u_stride, up, up_stride, y + t * y_stride, y_stride, r, n);
}

void add_up(
    const float* u, int64_t u_stride, const float* up, float* y, int64_t y_stride, int64_t tokens, int64_t r,
    int64_t width) {
  constexpr int64_t kStep = 4 * kLanes, kRows = 8;
  for (int64_t k = 0; k < r; k += kRows, u += kRows, up += kRows * width) {
    const int64_t rows = std::min(kRows, r - k);
    int64_t column = 0;
    for (; column + kStep <= width; column += kStep)
      add_columns<4>(u, u_stride, up + column, width, y + column, y_stride, tokens, rows, 0);
    for (; column < width; column += kLanes)
      add_columns<1>(u, u_stride, up + column, width, y + column, y_stride, tokens, rows, width - column);
  }
}

constexpr int64_t kFew = 64;  // tokens, above which BLAS adds the up projection, on all threads

Tensors noble_decode(
    const Tensor& x, const Tensor& weight, const Optional& bias, bool dense_bias, const Tensors& mixes,
    const Tensors& phases, const Tensors& ups) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensor z = at::linear(x, weight, dense_bias ? bias : Optional()).contiguous();
  const int64_t total = z.size(-1), tokens = z.numel() / total, n = ups.size(), r = ups[0].size(0);
  const int64_t first = total - n * r;
  float* const data = written(z);
  Tensors outputs;
  std::vector<float> buffer(tokens * r);
  for (int64_t i = 0, start = 0; i < n; ++i) {
    const int64_t width = ups[i].size(1);
    const Tensor y = z.narrow(-1, start, width);
    float *const u = data + first + i * r, *const next = buffer.data();
    const float* const added = bias && !dense_bias ? read(*bias) + first + i * r : nullptr;
    for (int64_t t = 0; t < tokens; ++t) cosines(u + t * total, added, r, u + t * total);
    for (size_t layer = 0; layer < mixes.size(); ++layer) {
      for (int64_t t = 0; t < tokens; ++t) std::copy_n(read(phases[layer]) + i * r, r, next + t * r);
      add_up(u, total, read(mixes[layer]) + i * r * r, next, r, tokens, r, r);
      for (int64_t t = 0; t < tokens; ++t) cosines(next + t * r, nullptr, r, u + t * total);
    }
    if (tokens <= kFew)
      add_up(u, total, read(ups[i]), data + start, total, tokens, r, width);
    else
      rows_of(y).addmm_(rows_of(z.narrow(-1, first + i * r, r)), ups[i]);
    outputs.push_back(y);
    start += width;
  }
  return outputs;
}

// methods/rational/op.py: numerators of 6 coefficients, denominators of B: 5 ("abs_of_sum") or the sizes of 4
// ("sum_of_abs"). Sixteen elements at a time, so that all of a group's coefficients and their sums stay in registers.

constexpr int kAbove = 6;

template <int kCount>
NLR_INLINE void horner(const Lanes* c, Lanes x, Lanes& value, Lanes& slope) {
  value = c[kCount - 1], slope = Lanes{};
#pragma GCC unroll 8
  for (int k = kCount - 2; k >= 0; --k) slope = fma(slope, x, value), value = fma(value, x, c[k]);
}

// R = p / q, and slopes by x. `variable` is what q's polynomial is in, `sign` dq / d(that polynomial).
template <int B>
struct Ratio {
  Lanes a[kAbove], b[B];

  struct At {
    Lanes p, q, p_slope, q_slope, variable, sign;
  };

  Ratio(const Tensor& numerator, const Tensor& denominator, int64_t group) {
    for (int k = 0; k < kAbove; ++k) a[k] = all(read(numerator)[group * kAbove + k]);
    for (int k = 0; k < B; ++k) b[k] = all(read(denominator)[group * B + k]);
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

// Calls body(piece, row, group, first column) for a group's part of every row.
template <class F>
void each_part(const Tensor& x, int64_t groups, const F& body) {
  const int64_t tokens = x.size(0), width = x.size(1) / groups, rows = step(x.size(1));
  parallel((tokens + rows - 1) / rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece)
      for (int64_t row = piece * rows; row < std::min(tokens, (piece + 1) * rows); ++row)
        for (int64_t group = 0; group < groups; ++group) body(piece, row, group, group * width);
  });
}

template <int B>
std::vector<Ratio<B>> ratios(const Tensor& numerator, const Tensor& denominator) {
  std::vector<Ratio<B>> found;
  for (int64_t group = 0; group < numerator.size(0); ++group) found.emplace_back(numerator, denominator, group);
  return found;
}

// f is the value of the anchor's own function, with base coefficients a0, b0.
template <int B>
Tensor rational_values(
    const Tensor& x, const Optional& up, const Tensor& a, const Tensor& b, const Tails& tails, const Optional& f,
    const Optional& a0, const Optional& b0) {
  const Tensor y = at::empty(x.sizes(), x.options());
  const int64_t stride = x.stride(0), up_stride = up ? up->stride(0) : 0, f_stride = f ? f->stride(0) : 0;
  const int64_t channels = x.size(1), width = channels / a.size(0);
  const float *from = read(x), *ups = up ? read(*up) : nullptr, *own = f ? read(*f) : nullptr;
  float* to = written(y);
  const auto own_ratios = ratios<B>(a, b), bases = ratios<B>(f ? *a0 : a, f ? *b0 : b);
  each_part(x, a.size(0), [&](int64_t, int64_t row, int64_t group, int64_t first) {
    const Ratio<B> ratio = own_ratios[group], base = bases[group];
    for (int64_t column = first; column < first + width; column += kLanes) {
      const int64_t n = first + width - column;
      const Lanes given = load(from + row * stride + column, n), inside = tails.inside(given);
      const auto at = ratio.at(inside);
      Lanes value = at.p / at.q;
      if (own) {
        const auto before = base.at(inside);
        value = load(own + row * f_stride + column, n) + (value - before.p / before.q);
      } else {
        value = tails.added(given, value);
      }
      if (ups) value *= load(ups + row * up_stride + column, n);
      store(value, to + row * channels + column, n);
    }
  });
  return y;
}

// Gradients of x (without f's), up, numerator and denominator (of its sizes where B is 4).
template <int B>
Tensors rational_gradients(
    const Tensor& dy, const Tensor& x, const Optional& up, const Tensor& a, const Tensor& b, const Tails& tails,
    const Optional& a0, const Optional& b0) {
  const Tensor dx = at::empty(x.sizes(), x.options()), dup = up ? at::empty(x.sizes(), x.options()) : Tensor();
  const int64_t groups = a.size(0), channels = x.size(1), pieces = (x.size(0) + step(channels) - 1) / step(channels);
  const Tensor partial = at::zeros({pieces, groups, kAbove + B, kLanes}, x.options());
  const int64_t stride = x.stride(0), dy_stride = dy.stride(0), up_stride = up ? up->stride(0) : 0;
  const float *from = read(x), *slopes = read(dy), *ups = up ? read(*up) : nullptr;
  float *to = written(dx), *to_up = up ? written(dup) : nullptr, *totals = written(partial);
  const auto own_ratios = ratios<B>(a, b), bases = ratios<B>(a0 ? *a0 : a, b0 ? *b0 : b);
  const int64_t width = channels / groups;
  each_part(x, groups, [&](int64_t piece, int64_t row, int64_t group, int64_t first) {
    const Ratio<B> ratio = own_ratios[group], base = bases[group];
    float* sums = totals + (piece * groups + group) * (kAbove + B) * kLanes;
    Lanes above[kAbove], below[B];
    std::memcpy(above, sums, sizeof above);
    std::memcpy(below, sums + kAbove * kLanes, sizeof below);
    for (int64_t column = first; column < first + width; column += kLanes) {
      const int64_t n = first + width - column;
      const Lanes given = load(from + row * stride + column, n), inside = tails.inside(given);
      Lanes slope = load(slopes + row * dy_stride + column, n);
      const auto at = ratio.at(inside);
      const Lanes inverse = 1.f / at.q;
      if (ups) {
        store(slope * tails.added(given, at.p * inverse), to_up + row * channels + column, n);
        slope *= load(ups + row * up_stride + column, n);
      }
      Lanes dp = slope * inverse, dq = -dp * at.p * inverse, result = fma(dp, at.p_slope, dq * at.q_slope);
      if (a0) {
        const auto before = base.at(inside);
        const Lanes by_p = slope / before.q;
        result -= fma(by_p, before.p_slope, -by_p * before.p / before.q * before.q_slope);
      }
      result = given < tails.low ? slope * tails.low_slope : given > tails.high ? slope * tails.high_slope : result;
      store(result, to + row * channels + column, n);
      dq *= at.sign;
      if (B == 4) dq *= at.variable;  // whose first coefficient is that of the first power
      above[0] += dp, below[0] += dq;
      Lanes power = inside, size = at.variable;
#pragma GCC unroll 8
      for (int k = 1; k < kAbove; ++k, power *= inside, size *= at.variable) {
        above[k] = fma(dp, power, above[k]);
        if (k < B) below[k] = fma(dq, size, below[k]);
      }
    }
    std::memcpy(sums, above, sizeof above);
    std::memcpy(sums + kAbove * kLanes, below, sizeof below);
  });
  const Tensor total = partial.sum({0, 3}, false, at::kDouble).to(at::kFloat);
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
  const auto run = b.size(1) == 4 ? rational_gradients<4> : rational_gradients<5>;
  return run(dy, x, up, a, b, Tails(limits), a0, b0);
}

// ops/sine.py: sum = amplitude sin(left right) + base, slope = gradient cos(left right), of phases that are in memory a
// few rows at a time. Each phase is summed in the order of k, whatever the other rows and columns are.
void sine(
    const Tensor& left, const Tensor& right, double amplitude, const Optional& base, const Optional& gradient,
    const Optional& sum, const Optional& slope) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensor rows = left.contiguous(), columns = right.contiguous();
  const int64_t r = rows.size(1), width = columns.size(1), n = step(width);
  const float *u = read(rows), *up = read(columns), *plain = base ? read(*base) : nullptr;
  const float* slopes = gradient ? read(*gradient) : nullptr;
  float *to = sum ? written(*sum) : nullptr, *to_slope = slope ? written(*slope) : nullptr;
  const float factor = static_cast<float>(amplitude);
  parallel(rows.size(0), n, [=](int64_t begin, int64_t end) {
    std::vector<float> buffer(n * width);
    float* const phases = buffer.data();
    for (int64_t row = begin; row < end; row += n) {
      const int64_t tokens = std::min(n, end - row), first = row * width;
      std::fill_n(phases, tokens * width, 0.f);
      add_up(u + row * r, r, up, phases, width, tokens, r, width);
      each_sine_cosine(phases, tokens * width, [=](int64_t i, int64_t n, Lanes s, Lanes c) NLR_ALWAYS {
        if (to_slope) store(c * load(slopes + first + i, n), to_slope + first + i, n);
        if (!to) return;
        s *= factor;
        if (plain) s += load(plain + first + i, n);
        store(s, to + first + i, n);
      });
    }
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(nonlinear_lowrank_native, m) {
  m.def("noble_forward(Tensor x, Tensor? h, Tensor?[] weights, Tensor?[] biases, Tensor?[] tensors) -> Tensor[]");
  m.def("noble_backward(Tensor[] dys, Tensor x, Tensor h, Tensor?[] weights, Tensor?[] tensors, bool[] wanted)"
        " -> Tensor[]");
  m.def("noble_decode(Tensor x, Tensor weight, Tensor? bias, bool dense_bias, Tensor[] mixes,"
        " Tensor[] phases, Tensor[] ups) -> Tensor[]");
  m.def("rational_forward(Tensor x, Tensor? up, Tensor a, Tensor b, float[]? limits, Tensor? f,"
        " Tensor? a0, Tensor? b0) -> Tensor");
  m.def("rational_backward(Tensor dy, Tensor x, Tensor? up, Tensor a, Tensor b, float[]? limits,"
        " Tensor? a0, Tensor? b0) -> Tensor[]");
  m.def("sine(Tensor left, Tensor right, float amplitude, Tensor? base, Tensor? gradient, Tensor(a!)? sum,"
        " Tensor(b!)? slope) -> ()");
}

TORCH_LIBRARY_IMPL(nonlinear_lowrank_native, CPU, m) {
  m.impl("noble_forward", noble_forward);
  m.impl("noble_backward", noble_backward);
  m.impl("noble_decode", noble_decode);
  m.impl("rational_forward", rational_forward);
  m.impl("rational_backward", rational_backward);
  m.impl("sine", sine);
}

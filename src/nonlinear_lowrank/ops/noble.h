// NOBLE's operators.

#pragma once

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "tensors.h"

namespace {

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

}  // namespace

// NOBLE's operators. An undefined tensor is Python's None.

#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tensors.h"

namespace {

// methods/noble/op.py

struct Branch {
  Tensor down, up;
  Tensors mixes, frequencies, phases;
};

std::vector<Branch> branches_of(const Tensors& tensors, int64_t n) {
  const int64_t size = tensors.size() / n, depth = (size - 1) / 3;
  std::vector<Branch> found;
  for (auto at = tensors.begin(); at != tensors.end(); at += size) {
    const auto frequencies = at + 1 + depth, phases = frequencies + depth;
    found.push_back({at[0], at[1], {at + 2, frequencies}, {frequencies, phases}, {phases, at + size}});
  }
  return found;
}

Tensors plain(const Optionals& list) {
  Tensors found;
  for (const Optional each : list) found.push_back(each.value_or(Tensor()));
  return found;
}

// u = cos(f z + p), row by row; where a sine is wanted, that too.
void activate(const Tensor& z, const Tensor& frequency, const Tensor& phase, const Tensor& u, const Tensor* sine) {
  const int64_t tokens = z.size(0), r = z.size(1), stride = z.stride(0);
  const Tensor own_f = frequency.contiguous(), own_p = phase.contiguous();
  const float *from = read(z), *f = read(own_f), *p = read(own_p);
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
  const Tensor own_f = frequency.contiguous();
  const float *from = read(z), *s = read(sine), *f = read(own_f);
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

Tensors linears_forward(
    const Tensor& x, const Tensor& h, const Tensors& weights, const Tensors& biases, const Tensors& tensors) {
  at::AutoDispatchBelowADInplaceOrView below;
  const int64_t n = weights.size();
  const auto branches = branches_of(tensors, n);
  const bool own = n > 1 && branches[1].down.defined();
  const Tensor x2 = rows_of(x), h2 = h.defined() ? rows_of(h) : at::mm(x2, joined(branches).t());
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
    const Tensor& weight = weights[i];
    Tensor y = weight.defined() ? at::linear(x2, weight, biases[i]).addmm_(u, branch.up.t()) : at::mm(u, branch.up.t());
    shape.back() = branch.up.size(0);
    outputs.push_back(x.dim() == 2 ? y : at::_unsafe_view(y, shape));
  }
  outputs.push_back(h.defined() ? at::empty({0}, x.options()) : h2);
  return outputs;
}

Tensors linears_backward(
    const Tensors& dys, const Tensor& x, const Tensor& h, const Tensors& weights, const Tensors& tensors,
    const std::vector<bool>& wanted) {
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
    if (wanted[0] && weights[i].defined()) add_to_dx(dy, weights[i]);
    if (wanted[2 + i]) found[2 + i] = at::mm(dy.t(), x2);
    if (wanted[2 + n + i]) found[2 + n + i] = dy.sum(0);
  }
  Tensor dh = own ? at::cat(dhs, 1) : dhs[0];
  for (int64_t i = 1; !own && i < n; ++i) dh.add_(dhs[i]);
  if (const Tensor down = joined(branches); down.defined()) {
    if (wanted[0]) add_to_dx(dh, down);
    const Tensor ddown = at::mm(dh.t(), x2);
    for (int64_t i = 0; i < (own ? n : 1); ++i)
      found[2 + 2 * n + i * size] = own ? ddown.chunk(n)[i].clone() : ddown;
  }
  if (dx.defined()) found[0] = dx.view(x.sizes());
  if (wanted[1]) found[1] = dh.reshape(h.sizes());
  return found;
}

// The same of the plain formula, whose gradients can be differentiated and batched (ops/derivatives.py).
Tensors formula_backward(
    const Tensors& dys, const Tensor& x, const Tensor& h, const Tensors& weights, const Tensors& tensors,
    const std::vector<bool>& wanted) {
  const bool again = at::GradMode::is_enabled();
  const at::AutoGradMode differentiable(true);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t n = dys.size();
  Tensors inputs{x, tensors[0].defined() ? Tensor() : h};
  inputs.insert(inputs.end(), weights.begin(), weights.end());
  for (const auto& dy : dys) inputs.push_back(at::zeros(dy.size(-1), x.options()).requires_grad_());  // for any bias
  inputs.insert(inputs.end(), tensors.begin(), tensors.end());
  Tensors chosen, ys, found(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].defined()) inputs[i] = at::alias(inputs[i]);  // tied tensors have a gradient each
  for (size_t i = 0; i < inputs.size(); ++i)
    if (wanted[i]) chosen.push_back(inputs[i]);
  const auto branches = branches_of({inputs.begin() + 2 + 2 * n, inputs.end()}, n);
  for (int64_t i = 0; i < n; ++i) {
    const Branch& branch = branches[i];
    Tensor u = inputs[1];
    if (!u.defined()) u = at::linear(inputs[0], branch.down.defined() ? branch.down : branches[0].down);
    for (size_t k = 0; k < branch.phases.size(); ++k) {
      if (k > 0) u = at::linear(u, branch.mixes[k - 1]);
      u = at::cos(at::addcmul(branch.phases[k], u, branch.frequencies[k]));
    }
    const Tensor &weight = inputs[2 + i], y = at::linear(u, branch.up);
    ys.push_back(weight.defined() ? y.add(at::linear(inputs[0], weight, inputs[2 + n + i])) : y);
  }
  const Tensors gradients = torch::autograd::grad(ys, chosen, dys, again, again, /*allow_unused=*/true);
  for (size_t i = 0, next = 0; i < inputs.size(); ++i)
    if (wanted[i]) found[i] = gradients[next++];
  return found;
}

// The operator and its backward without a call of Python, which takes longer than a small layer's products. The list is
// x, h, weights, biases and tensors, of which one without a dimension stands for None: autograd takes none undefined.
struct Linears : torch::autograd::Function<Linears> {
  using Context = torch::autograd::AutogradContext;

  static Tensors forward(Context* context, int64_t n, at::TensorList list) {
    Tensors all;
    for (const auto& each : list) all.push_back(each.dim() > 0 ? each : Tensor());
    const auto biases = all.begin() + 2 + n, tensors = biases + n;
    Tensors outputs =
        linears_forward(all[0], all[1], {all.begin() + 2, biases}, {biases, tensors}, {tensors, all.end()});
    if (!all[1].defined()) all[1] = outputs.back();
    outputs.pop_back();
    all.erase(biases, tensors);
    context->save_for_backward(std::move(all));
    return outputs;
  }

  static Tensors backward(Context* context, const Tensors& dys) {
    const Tensors saved = context->get_saved_variables();
    const auto weights = saved.begin() + 2, tensors = weights + dys.size();
    std::vector<bool> wanted;
    for (size_t i = 0; i < saved.size() + dys.size(); ++i) wanted.push_back(context->needs_input_grad(i));
    bool once = !at::GradMode::is_enabled() &&
        !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    for (const auto& dy : dys) once &= !dy.key_set().has(c10::DispatchKey::Batched) && !dy._fw_grad(0).defined();
    const auto run = once ? linears_backward : formula_backward;
    Tensors found = run(dys, saved[0], saved[1], {weights, tensors}, {tensors, saved.end()}, wanted);
    found.insert(found.begin(), Tensor());  // of n
    return found;
  }
};

Tensors noble_linears(
    const Tensor& x, const Optional& h, const Optionals& weights, const Optionals& biases, const Optionals& tensors) {
  const Tensor none = at::empty({}, x.options());
  Tensors list{x, h.value_or(none)};
  for (const Optionals* each : {&weights, &biases, &tensors})
    for (const Optional tensor : *each) list.push_back(tensor.value_or(none));
  return Linears::apply(int64_t(weights.size()), at::TensorList(list));
}

Tensors noble_forward(
    const Tensor& x, const Optional& h, const Optionals& weights, const Optionals& biases, const Optionals& tensors) {
  return linears_forward(x, h.value_or(Tensor()), plain(weights), plain(biases), plain(tensors));
}

Tensors noble_backward(
    const Tensors& dys, const Tensor& x, const Tensor& h, const Optionals& weights, const Optionals& tensors,
    const c10::List<bool>& wanted) {
  return linears_backward(dys, x, h, plain(weights), plain(tensors), {wanted.begin(), wanted.end()});
}

// methods/noble/fused.py: y of n layers of one input, by its buffers in their order. z = [dense outputs | branches'
// arguments] is one product; without `dense_bias` the dense part of its bias is zero.

// to = cos(from + phase); phase may be absent.
void cosines(const float* from, const float* phase, int64_t n, float* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] + (phase ? phase[i] : 0.f);
  each_sine_cosine(to, n, [=](int64_t i, int64_t n, Lanes, Lanes c) NLR_ALWAYS { store(c, to + i, n); });
}

constexpr int64_t kFew = 64;  // tokens, above which BLAS adds the up projection, on all threads

Tensors noble_decode(const Tensor& x, const Optionals& buffers, int64_t n, bool dense_bias) {
  if (at::autocast::is_autocast_enabled(at::kCPU)) return {};  // asked here, where it takes no time
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensors own = plain(buffers);  // weight, bias; mix, phase of each further cosine; up and two more of each layer
  const Tensor& bias = own[1];
  const size_t ups = own.size() - 3 * n;
  const Tensor z = at::linear(x, own[0], dense_bias ? Optional(bias) : Optional()).contiguous();
  const int64_t total = z.size(-1), tokens = z.numel() / total, r = own[ups].size(0), first = total - n * r;
  float* const data = written(z);
  Tensors outputs;
  std::vector<float> buffer(tokens * r);
  for (int64_t i = 0, start = 0; i < n; ++i) {
    const Tensor& up = own[ups + 3 * i];
    const int64_t width = up.size(1);
    const Tensor y = z.narrow(-1, start, width);
    float *const u = data + first + i * r, *const next = buffer.data();
    const float* const added = bias.defined() && !dense_bias ? read(bias) + first + i * r : nullptr;
    for (int64_t t = 0; t < tokens; ++t) cosines(u + t * total, added, r, u + t * total);
    for (size_t mix = 2; mix < ups; mix += 2) {
      for (int64_t t = 0; t < tokens; ++t) std::copy_n(read(own[mix + 1]) + i * r, r, next + t * r);
      add_up(u, total, read(own[mix]) + i * r * r, next, r, tokens, r, r);
      for (int64_t t = 0; t < tokens; ++t) cosines(next + t * r, nullptr, r, u + t * total);
    }
    if (tokens <= kFew)
      add_up(u, total, read(up), data + start, total, tokens, r, width);
    else
      rows_of(y).addmm_(rows_of(z.narrow(-1, first + i * r, r)), up);
    outputs.push_back(y);
    start += width;
  }
  return outputs;
}

}  // namespace

// What the operators share: tensors as rows of numbers, threads, and the product of a few rows.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/library.h>

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
  for (; t < tokens; ++t)
    add_tile<1, kWide>(u + t * u_stride, u_stride, up, up_stride, y + t * y_stride, y_stride, r, n);
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

}  // namespace

// Operators for float32 on a CPU, built by native.py on first use. Each is the Python of the file named above it, with
// fewer passes over memory and fewer calls; that Python is what runs where this cannot be built, and what tests hold it
// to. Sums over tokens are taken in pieces of a fixed size, so that they do not depend on the number of threads.

#include "noble.h"
#include "rational.h"

namespace {

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
  m.def("noble_linears(Tensor x, Tensor? h, Tensor?[] weights, Tensor?[] biases, Tensor?[] tensors) -> Tensor[]",
        noble_linears);
  m.def("noble_backward(Tensor[] dys, Tensor x, Tensor h, Tensor?[] weights, Tensor?[] tensors, bool[] wanted)"
        " -> Tensor[]");
  m.def("noble_decode(Tensor x, Tensor?[] buffers, int n, bool dense_bias) -> Tensor[]");
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

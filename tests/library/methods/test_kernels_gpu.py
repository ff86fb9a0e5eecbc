"""The Triton kernels on a real GPU, in bfloat16 and float32, against float64; see also test_kernels_interpreted.py."""

import pytest
import torch

from kernel_helpers import compare, cosnet_leaves, cosnet_pair, rational_pair, with_gradients
from nonlinear_lowrank.methods.noble import op as noble_op
from nonlinear_lowrank.methods.rational.op import LinearTails, denominator_size, rational_gated
from nonlinear_lowrank.methods.sine.reference import sine_layer_reference
from nonlinear_lowrank.ops.kernels import kernels, use_kernels
from nonlinear_lowrank.ops.sine import SineFactors, sine_layer

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def leaves_of(dtype, *tensors):
    return [each.to("cuda", dtype).requires_grad_() for each in tensors]


@dtypes
@pytest.mark.parametrize("rank", [16, 33, 64, 128, 200, 256])
@pytest.mark.parametrize("fused", [False, True])
def test_noble(monkeypatch, dtype, rank, fused):
    leaves = leaves_of(dtype, *cosnet_leaves(1037, 300, 280, rank))
    assert kernels("noble", *leaves) is not None
    monkeypatch.setattr(noble_op, "FUSE_DOWN", fused)
    compare(*cosnet_pair(), leaves, torch.randn(1037, 280, device="cuda"))


@dtypes
@pytest.mark.parametrize("form", ["abs_of_sum", "sum_of_abs"])
@pytest.mark.parametrize(("groups", "channels"), [(8, 3072), (8, 344), (24, 96), (96, 96)])
@pytest.mark.parametrize("gated", [False, True])
def test_rational(dtype, form, groups, channels, gated):
    both = torch.randn(333, 2 * channels)
    tensors = [both[:, :channels], both[:, channels:]][: 1 + gated]
    coefficients = [0.3 * torch.randn(groups, 6), 0.3 * torch.randn(groups, denominator_size(4, form))]
    leaves = leaves_of(dtype, *tensors) + leaves_of(torch.float32, *coefficients)
    fast, plain = rational_pair(form, LinearTails(-2.0, 1.5, 0.25, -1.5), gated)
    compare(fast, plain, leaves, torch.randn(333, channels, device="cuda"))


@dtypes
@pytest.mark.parametrize("rank", [4, 16, 32, 60, 150])
@pytest.mark.parametrize("dora", [False, True])
def test_sine(dtype, rank, dora):
    d_in, d_out = 515, 380
    plain = leaves_of(dtype, torch.randn(77, d_in), torch.randn(d_out, d_in) / 22)
    factors = leaves_of(torch.float32, torch.randn(d_out, rank), torch.randn(rank, d_in))
    factors += leaves_of(torch.float32, 0.5 + torch.rand(d_out)) * dora

    def by(function):
        def run(x, weight, up, down, magnitude=None):
            delta = SineFactors(up, down, 10 / rank**0.5, d_in**0.5, 1.5, magnitude)
            return function(x, weight, None, [delta])

        return run

    compare(by(sine_layer), by(sine_layer_reference), plain + factors, torch.randn(77, d_out, device="cuda"))


def test_kernels_can_be_switched_off():
    x = torch.randn(3, device="cuda")
    assert kernels("noble", x) is not None
    with use_kernels(False):
        assert kernels("noble", x) is None


def test_compiled_is_eager_to_the_bit():
    torch.compiler.reset()
    leaves = leaves_of(torch.bfloat16, torch.randn(64, 256), torch.randn(64, 256))
    leaves += leaves_of(torch.float32, torch.randn(8, 6), torch.randn(8, 5))
    dy = torch.randn(64, 256, device="cuda")
    compiled = torch.compile(rational_gated, fullgraph=True)
    for one, other in zip(
        with_gradients(compiled, leaves, dy), with_gradients(rational_gated, leaves, dy), strict=True
    ):
        assert torch.equal(one, other)

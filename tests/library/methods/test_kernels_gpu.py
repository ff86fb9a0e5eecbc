"""The Triton kernels on a real GPU, in bfloat16 and float32, against float64; see also test_kernels_interpreted.py."""

import pytest
import torch

import op_helpers as ops
from nonlinear_lowrank.methods.noble import op as noble_op
from nonlinear_lowrank.methods.rational.op import LinearTails, rational_anchored
from nonlinear_lowrank.ops.kernels import kernels, use_kernels

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def assert_as_good_as_plain(make, *args, **sizes):
    with torch.device("cuda"):
        case = make(*args, **sizes)
        ops.compare(case, case.dys(), strided_input=True)


@dtypes
@pytest.mark.parametrize("rank", [16, 33, 64, 128, 200, 256])
@pytest.mark.parametrize("fused", [False, True])
def test_noble(monkeypatch, dtype, rank, fused):
    assert kernels("noble", torch.empty(1, dtype=dtype, device="cuda")) is not None
    monkeypatch.setattr(noble_op, "FUSE_DOWN", fused)
    assert_as_good_as_plain(ops.noble, form="no-bias", batch=(1037,), d_in=300, d_out=280, r=rank, dtype=dtype)


@dtypes
@pytest.mark.parametrize("form", ["abs_of_sum", "sum_of_abs"])
@pytest.mark.parametrize(("groups", "channels"), [(8, 3072), (8, 344), (24, 96), (96, 96)])
@pytest.mark.parametrize("kind", ["rational", "rational_gated", "rational_anchored"])
def test_rational(dtype, form, groups, channels, kind):
    sizes = {"batch": (333,), "groups": groups, "channels": channels, "scale": 0.3}
    assert_as_good_as_plain(ops.rational, kind, form, LinearTails(-2.0, 1.5, 0.25, -1.5), **sizes, dtype=dtype)


@dtypes
@pytest.mark.parametrize("tails", [LinearTails(-1.0, 1.0, 0.0, 0.0), None], ids=["tails", "no tails"])
def test_anchored_starts_bit_equal(dtype, tails):
    with torch.device("cuda"):
        x, a, b = 3 * torch.randn(333, 96, dtype=dtype), 0.3 * torch.randn(8, 6), 0.3 * torch.randn(8, 5)
    assert torch.equal(rational_anchored(x, a, b, a, b, "gelu", tails=tails), torch.nn.functional.gelu(x))


@dtypes
@pytest.mark.parametrize("rank", [4, 16, 32, 60, 64, 150])
@pytest.mark.parametrize("dora", [False, True])
def test_sine(dtype, rank, dora):
    sizes = {"batch": (77,), "d_in": 515, "d_out": 380, "r": rank, "rms": 10.0}
    assert_as_good_as_plain(ops.sine, (dora,), **sizes, dtype=dtype, factors=torch.float32)


def test_kernels_can_be_switched_off():
    x = torch.randn(3, device="cuda")
    assert kernels("noble", x) is not None
    with use_kernels(False):
        assert kernels("noble", x) is None


def test_compiled_is_eager_to_the_bit():
    torch.compiler.reset()
    with torch.device("cuda"):
        case = ops.rational("rational_gated", batch=(64,), channels=256, groups=8, dtype=torch.bfloat16)
        dys = case.dys()
    eager, found = (case.gradients(each, dys) for each in (case.fast, torch.compile(case.fast, fullgraph=True)))
    assert all(torch.equal(one, other) for one, other in zip(found, eager, strict=True))

"""The C++ operators beside the Python that they stand for, and what is done without them."""

import copy
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from nonlinear_lowrank import NobleConfig, NobleLinear, augment, optimize_for_inference
from nonlinear_lowrank.ops.kernels import use_kernels
from nonlinear_lowrank.ops.native import native
from nonlinear_lowrank.ops.sine import SineFactors, sine_delta, sine_layer
from op_helpers import ROWS, compare, noble, rational

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")
THEIRS = [name for name in ROWS if name.startswith(("noble-cosine", "sine-", "dora-", "rational"))]


def test_takes_plain_float32_on_a_cpu_alone():
    one = torch.ones(1)
    assert native(one, None) is not None
    for other in (one.double(), one.bfloat16(), one.to("meta"), torch.nn.Buffer(one).as_subclass(_Own)):
        assert native(one, other) is None
    with use_kernels(False):
        assert native(one) is None
    with FlopCounterMode(display=False):
        assert native(one) is None
    layer = NobleLinear(6, 5, config=NobleConfig(rank=2)).requires_grad_(False)
    with pytest.warns((DeprecationWarning, torch.jit.TracerWarning)):  # of sizes as constants
        traced = torch.jit.trace(layer, torch.randn(3, 6), check_trace=False)
    assert "nonlinear_lowrank_native" not in str(traced.inlined_graph)


class _Own(torch.Tensor):
    pass


@pytest.mark.parametrize("name", THEIRS)
def test_agrees_with_pytorch(name):
    case = ROWS[name](dtype=torch.float32)
    dys = case.dys()
    found = compare(case, dys)
    with use_kernels(False):
        plain = compare(case, dys)
    for one, other in zip(found, plain, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


@pytest.mark.parametrize("grad", [True, False])
def test_reads_frequencies_and_phases_with_strides(grad):
    layer = NobleLinear(6, 5, config=NobleConfig(rank=4))
    x = torch.randn(7, 6, requires_grad=grad)
    apart = {
        name: torch.stack([each.detach(), torch.full_like(each, 9.0)], 1)[:, 0].requires_grad_(grad)
        for name, each in layer.named_parameters()
        if each.ndim == 1 and name.startswith("noble_")
    }
    assert len(apart) == 4
    found = []
    for tensors in ({name: layer.get_parameter(name) for name in apart}, apart):
        with torch.set_grad_enabled(grad):
            y = functional_call(layer, tensors, x)
        found.append([y, *(torch.autograd.grad(y.square().sum(), [x, *tensors.values()]) if grad else ())])
    torch.testing.assert_close(*found)


def test_agrees_with_pytorch_over_many_pieces():
    for case in (
        noble(depth=3, form="group", batch=(700,), d_in=96, d_out=80, r=72, dtype=torch.float32),
        rational("rational_gated", batch=(700,), channels=120, groups=3, dtype=torch.float32),
        rational("rational_gated", batch=(700,), channels=120, groups=40, dtype=torch.float32),
    ):
        compare(case, case.dys())


@pytest.mark.parametrize("name", [name for name in THEIRS if name.startswith("noble")])
def test_a_backward_is_differentiated_and_batched_as_in_pytorch(name):
    case = ROWS[name](dtype=torch.float32)
    leaves, dys, tangents = case.leaves(), case.dys(), case.dys()
    pairs = [torch.stack([dy, 2 * dy.cos()]) for dy in dys]

    def gradients(ys, dys, **options):
        return torch.autograd.grad(ys, leaves, dys, retain_graph=True, **options)

    def derivatives():
        ys = case.run(case.fast)
        once = gradients(ys, dys, create_graph=True)
        twice = gradients(sum(each.square().sum() for each in once), None, materialize_grads=True)
        batched = gradients(ys, pairs, is_grads_batched=True)
        mapped = torch.func.vmap(lambda *each: gradients(ys, each))(*pairs)
        with forward_ad.dual_level():
            duals = gradients(ys, [forward_ad.make_dual(*each) for each in zip(dys, tangents, strict=True)])
            moved = [forward_ad.unpack_dual(each).tangent for each in duals]
        return [*once, *twice, *batched, *mapped, *moved]

    found = derivatives()
    with use_kernels(False):
        plain = derivatives()
    for one, other in zip(found, plain, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


class _Attention(torch.nn.Module):
    """Projections of one input; their widths are whole tiles of the decoding loops, and not."""

    def __init__(self, bias):
        super().__init__()
        for name, width in (("q_proj", 64), ("k_proj", 150), ("v_proj", 70)):
            setattr(self, name, torch.nn.Linear(40, width, bias=bias))

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


@pytest.mark.parametrize("tokens", [(), (0,), (1,), (3,), (2, 3), (4, 16), (5, 14)])  # to 4, and to 64, by other loops
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_decoding_agrees_with_pytorch(bias, depth, tokens):
    model = torch.nn.Sequential(_Attention(bias))
    augment(model, NobleConfig(rank=18, depth=depth, up_scale=1.0), verbose=False)
    for name, each in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(each)
    exact = copy.deepcopy(model).double()
    model, x = optimize_for_inference(model), torch.randn(*tokens, 40)
    with torch.no_grad():
        found = model(x)
        with use_kernels(False):
            plain = model(x)
        truth = exact(x.double())
    assert found.shape == plain.shape == (*tokens, 284)
    assert (found - truth).norm() <= 2 * (plain - truth).norm() + 1e-6 * truth.norm()


def test_rationals_do_not_depend_on_threads():
    case, threads = rational(batch=(700,), channels=120, groups=3, dtype=torch.float32), torch.get_num_threads()
    dys, found = case.dys(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(case.gradients(case.fast, dys))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_empty_batches_give_empty_outputs_and_zeros():
    for make in (noble, rational):
        case = make(batch=(0,), dtype=torch.float32)
        y, dx, *others = case.gradients(case.fast, case.dys())
        assert y.numel() == dx.numel() == 0
        assert not any(each.any() for each in others)


def _sine(phase, amplitude, base):
    found = torch.empty_like(phase)
    native(phase).sine(torch.ones(1, 1), phase, amplitude, base, None, found, None)
    return found


def test_sine_is_right_to_two_units_in_the_last_place():
    for spread in (1e-3, 1.0, 100.0, 9e4, 1e7, 1e30):
        phase = (spread * (2 * torch.rand(1, 100_003, dtype=torch.float64) - 1)).float()
        found = _sine(phase, 1.0, None)
        exact = phase.double().sin()
        unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-126))) - 23)
        # Beside a multiple of pi the reduction's own rounding is all there is.
        assert ((found.double() - exact).abs() <= 2 * unit + 2e-12 * max(1.0, min(spread, 1e5))).all()
    found = _sine(torch.tensor([[float("inf"), -float("inf"), float("nan"), 0.0, -0.0]]), 2.0, torch.ones(1, 5))
    assert found.isnan().tolist() == [[True, True, True, False, False]]
    assert found[0, 3:].tolist() == [1.0, 1.0]
    phase = torch.randn(1, 100)
    phase[0, 3] = 1e7
    assert torch.equal(_sine(phase, 1.0, None)[:, 4:], _sine(phase[:, 4:].contiguous(), 1.0, None))


def test_a_delta_has_the_same_bits_whatever_it_is_added_to():
    factors = SineFactors(torch.randn(70, 5), torch.randn(5, 90), 30.0, 9.0)
    weight = torch.randn(70, 90)
    merged = weight + sine_delta(weight, factors)
    x = torch.randn(3, 90)
    assert torch.equal(sine_layer(x, weight, None, [factors]), torch.nn.functional.linear(x, merged))


WITHOUT = """
import torch
from nonlinear_lowrank import NobleConfig, NobleLinear, augment, optimize_for_inference
from nonlinear_lowrank.ops.native import native
assert native(torch.ones(1)) is None
torch.manual_seed(0)
layer = NobleLinear(12, 10, config=NobleConfig(rank=4))
layer(torch.randn(3, 12)).sum().backward()
assert layer.noble_mix1.grad.abs().sum() > 0
"""


@pytest.mark.parametrize(
    ("setting", "warning"),
    [
        ({"NLR_NATIVE": "0"}, ""),
        ({"CXX": "no-such-compiler"}, ""),
        (
            {"CXX": "false"},
            "operators in C++ were not built, so PyTorch's run (NLR_NATIVE=0 chooses those): Command '['false',",
        ),
        ({"NLR_CACHE": "/proc/none"}, "(NLR_NATIVE=0 chooses those): ["),  # a folder that cannot be made
    ],
)
def test_done_without(setting, warning, tmp_path):
    environment = {**os.environ, "NLR_CACHE": str(tmp_path), **setting}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("UserWarning") == bool(warning)
    assert warning in done.stderr


def test_built_once_and_kept(tmp_path):
    assert native(torch.ones(1)) is not None
    (built,) = (each for each in torch.ops.loaded_libraries if "native-" in each)
    compiler, cache = tmp_path / "c++", tmp_path / "cache"
    compiler.write_text(f"#!/bin/sh\nwhile [ $1 != -o ]; do shift; done\ncp '{built}' \"$2\"\n")  # in a moment
    compiler.chmod(0o755)
    code = "import torch; from nonlinear_lowrank.ops.native import native; assert native(torch.ones(1)) is not None"
    environment = {**os.environ, "NLR_CACHE": str(cache), "CXX": str(compiler)}
    both = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]  # at the same time
    assert [each.wait() for each in both] == [0, 0]
    (built,) = cache.iterdir()
    before = built.stat()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert built.stat() == before
    os.truncate(built, before.st_size // 2)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert [file.stat().st_size for file in cache.iterdir()] == [before.st_size]

"""Every op of ours under torch.library.opcheck: shapes, types, layouts and subsets of wanted gradients at random.

The drawn cases are those that the public functions produce: their mixtures of types, empty batches, single vectors,
transposed, sliced and expanded tensors.
"""

import importlib
import random
from pathlib import Path
from typing import get_args

import pytest
import torch

import nonlinear_lowrank as nlr
from nonlinear_lowrank.methods.noble.config import Activation
from nonlinear_lowrank.methods.rational.op import FORMS, denominator_size

FLOATS = (torch.float32, torch.float64, torch.bfloat16)
ROOT = Path(nlr.__file__).parent
for file in ROOT.rglob("*.py"):
    if "= custom_op(" in file.read_text(encoding="utf-8"):
        importlib.import_module(".".join(("nonlinear_lowrank", *file.relative_to(ROOT).with_suffix("").parts)))

SAMPLE, ALL = 3, 36
"""Cases of each op in a run of the tests, and in a whole one: 36 of each op."""

REGISTERED = sorted(
    name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("nonlinear_lowrank::")
)


class Draw:
    """The random choices of one case.

    Args:
        index: of the case; its bits are the first gradients that are wanted, so that 2^n cases have every subset of n.
    """

    def __init__(self, index):
        self.index = index
        self.random = random.Random(torch.initial_seed() + index)

    def any(self, *choices):
        return self.random.choice(choices)

    def size(self, most=6):
        return self.random.randint(1, most)

    def maybe(self, value):
        return self.any(value, None)

    def batch(self):
        return self.any((), (0,), (1,), (5,), (2, 3), (2, 0), (0, 3), (1, 4), (2, 1, 3))

    def tensor(self, *shape, dtype):
        layout, gap = self.any("plain", "plain", "transposed", "sliced", "strided", "expanded"), 3
        if layout == "transposed" and len(shape) > 1:
            return torch.randn(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2)
        if layout == "sliced":  # of a wider one, as halves of a fused projection are
            return torch.randn(*shape[:-1], shape[-1] + gap).to(dtype)[..., gap:]
        if layout == "strided":
            return torch.randn(*shape[:-1], shape[-1] * 2).to(dtype)[..., ::2]
        if layout == "expanded":  # a bias, or the gradient of a sum
            which = self.random.randrange(len(shape))
            return torch.randn(*(1 if at == which else size for at, size in enumerate(shape))).to(dtype).expand(shape)
        return torch.randn(shape).to(dtype)

    def wanted(self, *possible):
        bits = self.index | self.random.getrandbits(len(possible)) << self.index.bit_length()
        return [bool(may and bits >> place & 1) for place, may in enumerate(possible)]


def noble(draw):
    """Return x, h, weights, biases, the branches' tensors and their activation."""
    batch, d_in, rank, dtype = draw.batch(), draw.size(), draw.size(), draw.any(*FLOATS)
    n, activation = draw.any(1, 1, 2, 3), draw.any("cosine", "cosine", *get_args(Activation))
    depth, cosine_dtype = draw.any(1, 2, 3), draw.any(dtype, torch.float32, torch.float64)
    downs = draw.any(n, 1, 0)  # each its own, one that all share, h instead
    d_outs = [draw.size() for _ in range(n)]
    weights = [draw.tensor(d_out, d_in, dtype=dtype) for d_out in d_outs]
    biases = [draw.maybe(draw.tensor(d_out, dtype=dtype)) for d_out in d_outs]
    if n == 1 and draw.any(True, False):
        weights, biases = [None], [None]
    # The last step of a bottleneck may have some of the rows alone.
    widths = [*[rank] * (depth - 1), draw.any(rank, draw.size(rank)) if depth > 1 else rank]
    tensors = []
    for place, d_out in enumerate(d_outs):
        tensors += [draw.tensor(rank, d_in, dtype=dtype) if place < downs else None]
        tensors += [draw.tensor(d_out, widths[-1], dtype=dtype)]
        tensors += [draw.tensor(width, rank, dtype=dtype) for width in widths[1:]]
        tensors += [draw.tensor(width, dtype=cosine_dtype) for width in widths * 2 if activation == "cosine"]
    h = None if downs else draw.tensor(*batch, rank, dtype=dtype)
    return draw.tensor(*batch, d_in, dtype=dtype), h, weights, biases, tensors, activation


def noble_forward(draw):
    return *noble(draw), draw.any(True, False)


def noble_backward(draw):
    x, h, weights, _, tensors, activation = noble(draw)
    size = len(tensors) // len(weights)
    downs, ups = ([each for each in tensors[start::size] if each is not None] for start in (0, 1))
    dense = [weight is not None for weight in weights] * 2
    wanted = draw.wanted(bool(downs) or weights[0] is not None, h is not None, *dense)
    if h is None:
        h = draw.tensor(x.shape[:-1].numel(), sum(map(len, downs)), dtype=x.dtype)
    dys = [draw.tensor(*x.shape[:-1], len(up), dtype=x.dtype) for up in ups]
    return dys, x, h, weights, tensors, activation, wanted


def factors(draw, d_out, d_in):
    flat, settings = [], []
    for _ in range(draw.any(1, 1, 2, 3)):
        rank, dtype = draw.size(3), draw.any(*FLOATS)
        flat += [draw.tensor(d_out, rank, dtype=dtype), draw.tensor(rank, d_in, dtype=dtype)]
        flat += [draw.maybe(draw.tensor(d_out, dtype=draw.any(*FLOATS)).abs())]
        settings += [draw.any(1.0, 30.0), draw.any(0.25, 1.0)]
    return flat, settings


def sine(draw):
    """x, weight, bias, the deltas, how, and the output's shape."""
    batch, d_in, d_out, dtype = draw.batch(), draw.size(), draw.size(), draw.any(*FLOATS)
    deltas = factors(draw, d_out, d_in)
    kind = draw.any("linear", "linear", "transposed", "convolution")
    shape = {"linear": (d_out, d_in), "transposed": (d_in, d_out), "convolution": (d_out, d_in, 1, 1)}[kind]
    weight, base = draw.tensor(*shape, dtype=draw.any(dtype, *FLOATS)), draw.any(True, False)
    if not base and not any(each is not None for each in deltas[0][2::3]):
        weight = None
    how = [int(base), int(kind == "transposed")]
    if kind == "convolution":
        images, stride = draw.any(0, 1, 3), (draw.any(1, 2), draw.any(1, 2))
        how += stride
        high, wide = draw.size(), draw.size()
        x = draw.tensor(images, d_in, high, wide, dtype=dtype)
        if draw.any(True, False):
            x = x.to(memory_format=torch.channels_last)
        out = (images, d_out, -(-high // stride[0]), -(-wide // stride[1]))
    else:
        x, out = draw.tensor(*batch, d_in, dtype=dtype), (*batch, d_out)
    return x, weight, draw.maybe(draw.tensor(d_out, dtype=dtype)), deltas, how, out


def sine_forward(draw):
    x, weight, bias, deltas, how, _ = sine(draw)
    return x, weight, bias, *deltas, how


def sine_backward(draw):
    x, weight, bias, deltas, how, out = sine(draw)
    wanted = draw.wanted(True, weight is not None, bias is not None, *(each is not None for each in deltas[0]))
    return draw.tensor(*out, dtype=x.dtype), x, weight, *deltas, how, wanted


def sine_rows(draw):
    tokens, width = draw.size(), draw.size()
    indices = torch.randint(tokens, draw.batch(), dtype=draw.any(torch.int64, torch.int32))
    if indices.ndim > 1 and draw.any(True, False):
        indices = indices.transpose(0, 1)
    return indices, draw.tensor(tokens, width, dtype=draw.any(*FLOATS)), factors(draw, tokens, width)


def sine_rows_forward(draw):
    indices, weight, deltas = sine_rows(draw)
    return indices, weight, *deltas, draw.any(True, False)


def sine_rows_backward(draw):
    indices, weight, deltas = sine_rows(draw)
    dy = draw.tensor(*indices.shape, weight.shape[1], dtype=weight.dtype)
    wanted = draw.wanted(True, *(each is not None for each in deltas[0]))
    return dy, indices, weight, *deltas, draw.maybe(0), draw.any(True, False), wanted


def rational(draw, inputs):
    """Tensors (..., C) of one type, then coefficients, form and limits."""
    groups, dtype, form = draw.size(3), draw.any(*FLOATS), draw.any(*FORMS)
    shape, degrees = (*draw.batch(), groups * draw.size(4)), (draw.any(0, 1, 5), draw.any(1, 4))
    numerator = draw.tensor(groups, degrees[0] + 1, dtype=draw.any(*FLOATS))
    denominator = draw.tensor(groups, denominator_size(degrees[1], form), dtype=draw.any(numerator.dtype, *FLOATS))
    limits = draw.any(None, [-2.0, 2.0, 0.0, 1.0], [-1.0, 3.0, 0.5, 0.0])
    return [draw.tensor(*shape, dtype=dtype) for _ in range(inputs)], (numerator, denominator, form, limits)


def rational_forward(draw):
    (x, up), settings = rational(draw, 2)
    return x, draw.maybe(up), *settings


def rational_backward(draw):
    (dy, x, up), settings = rational(draw, 3)
    up = draw.maybe(up)
    return dy, x, up, *settings, draw.wanted(True, up is not None, True, True)


def lowrank_forward(draw):
    d_in, d_out, rank, dtype = draw.size(), draw.size(), draw.size(3), draw.any(*FLOATS)
    x, bias = draw.tensor(*draw.batch(), d_in, dtype=dtype), draw.maybe(draw.tensor(d_out, dtype=dtype))
    held = draw.any(*FLOATS)
    up, down = draw.tensor(d_out, rank, dtype=held), draw.tensor(rank, d_in, dtype=held)
    return x, up, down, bias, draw.any("sine", "sigmoid", "relu"), draw.any(1.0, 30.0), draw.any(1.0, 4.0)


def wide_product(draw):
    m, k, n = draw.size(), draw.size(), draw.size()
    left, right = draw.tensor(m, k, dtype=draw.any(*FLOATS)), draw.tensor(k, n, dtype=draw.any(*FLOATS))
    return left, right, draw.any(1.0, 30.0), draw.maybe(draw.tensor(m, n, dtype=draw.any(*FLOATS)))


GENERATORS = {name: globals().get(name) for name in REGISTERED}


def check(name, indices):
    op = getattr(torch.ops.nonlinear_lowrank, name).default
    for index in indices:
        arguments = GENERATORS[name](Draw(index))
        print(f"{name}, case {index}: {arguments}")
        torch.library.opcheck(op, arguments)


def test_every_registered_op_has_a_generator():
    assert all(GENERATORS.values())


@pytest.mark.parametrize("name", GENERATORS)
def test_sampled_cases_pass_opcheck(name):
    check(name, random.Random(torch.initial_seed()).sample(range(ALL), SAMPLE))


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATORS)
def test_all_cases_pass_opcheck(name):
    check(name, range(ALL))

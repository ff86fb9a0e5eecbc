"""Saved activations: what the counter sees, and those of a NOBLE branch."""

import pytest
import torch
from torch import Tensor, nn

from nonlinear_lowrank.analysis.saved import saved_bytes, saved_storages
from nonlinear_lowrank.methods.noble import NobleConfig, NobleLinear
from nonlinear_lowrank.methods.noble import layer as noble_layer
from nonlinear_lowrank.methods.noble.op import noble_linear_reference
from nonlinear_lowrank.methods.rational import RationalActivation, RationalConfig

TOKENS, D_IN, D_OUT, RANK = 96, 64, 80, 16

BOTTLENECKS = [("cosine", 1), ("cosine", 2), ("cosine", 3)] + [
    (name, depth) for name in ("tanh", "leaky_relu", "gelu", "silu") for depth in (1, 2)
]


def _kept(layer: nn.Module, *, bf16: bool, backend: str | None) -> int:
    torch._dynamo.reset()
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return run(x)

    x = torch.randn(2, TOKENS // 2, D_IN, requires_grad=True)
    return saved_bytes(forward, x, parameters=list(layer.parameters()))


def _branch_over_its_h(activation: str, depth: int, *, bf16: bool, backend: str | None) -> float:
    """Bytes that the branch adds to a plain linear's, over tokens x rank x element size."""
    layer = NobleLinear(D_IN, D_OUT, config=NobleConfig(rank=RANK, activation=activation, depth=depth))
    plain, whole = (_kept(each, bf16=bf16, backend=backend) for each in (nn.Linear(D_IN, D_OUT), layer))
    assert plain == TOKENS * D_IN * (2 if bf16 else 4)  # its input, in the type of the product
    return (whole - plain) / (TOKENS * RANK * (2 if bf16 else 4))


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(("activation", "depth"), BOTTLENECKS)
def test_eager_branch_saves_h_alone(activation, depth, bf16):
    assert _branch_over_its_h(activation, depth, bf16=bf16, backend=None) == 1.0


@pytest.mark.parametrize(
    ("activation", "depth", "bf16"),
    # Compiling takes seconds: every bottleneck once, the default in both types.
    [("cosine", 2, True)] + [(*bottleneck, bool(index % 2)) for index, bottleneck in enumerate(BOTTLENECKS, 1)],
)
def test_compiled_branch_saves_h_alone(activation, depth, bf16):
    """aot_eager runs the same partitioner as inductor, which decides what is saved."""
    assert _branch_over_its_h(activation, depth, bf16=bf16, backend="aot_eager") == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # inductor imports torch.jit
@pytest.mark.parametrize("bf16", [False, True])
def test_inductor_branch_saves_h_alone(bf16):
    assert _branch_over_its_h("cosine", 2, bf16=bf16, backend="inductor") == 1.0


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_plain_formula_saves_far_more(monkeypatch, backend):
    """The counter must be able to say no."""
    monkeypatch.setattr(noble_layer, "noble_linear", noble_linear_reference)
    assert _branch_over_its_h("cosine", 2, bf16=False, backend=backend) >= 2


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("anchor", ["none", "exact"])
def test_rational_activation_saves_its_input_alone(anchor, backend):
    layer = RationalActivation(RationalConfig(activation="silu", groups=4, anchor=anchor))
    torch._dynamo.reset()
    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(7, 16, requires_grad=True)
    assert saved_bytes(lambda x: run(x), x, parameters=[*layer.parameters(), *layer.buffers()]) == x.nbytes


def test_storages_count_once_and_whole():
    x = torch.randn(8, 6, requires_grad=True)
    wide = torch.randn(100)

    def forward(x: Tensor) -> Tensor:
        # x as itself and as a view of it; a view of 6 numbers holds the whole of wide
        return (x * x.view(6, 8).t() * wide[:6]).sum()

    storages = saved_storages(forward, x)
    assert sorted(storage.nbytes for storage in storages) == [x.nbytes, wide.nbytes]
    assert sum(len(storage.shapes) for storage in storages) == 3


def test_tensors_dropped_before_the_end_do_not_count():
    x = torch.randn(10, 10, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        x.exp().sin().cos()  # its graph dies here
        return x.exp()

    assert saved_bytes(forward, x) == x.nbytes


def test_parameters_buffers_and_their_casts_are_skipped():
    model = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30, affine=False), nn.Linear(30, 40)).eval()
    x = torch.randn(7, 20, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        storages = saved_storages(model, x)
    assert not [storage for storage in storages if any(set(shape) in ({20, 30}, {30, 40}) for shape in storage.shapes)]
    # the same without the parameters' names: now their copies count
    with torch.autocast("cpu", torch.bfloat16):
        everything = saved_bytes(lambda x: model(x), x)
    assert everything >= sum(storage.nbytes for storage in storages) + 2 * (20 * 30 + 30 * 40)


def test_storages_are_told_apart_on_meta():
    """Every data pointer is 0 there."""
    real = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8), nn.Tanh())
    x = torch.randn(5, 16, requires_grad=True)
    expected = x.nbytes + 5 * 32 * 4 + 5 * 8 * 4
    assert saved_bytes(real, x) == expected
    assert saved_bytes(real.to("meta"), x.to("meta")) == expected


def test_labels_name_the_first_saver():
    x = torch.randn(3, requires_grad=True)
    names = iter(["first", "second", "third"])
    storages = saved_storages(lambda x: x.sin() + x.cos() + x.exp(), x, label=lambda: next(names))
    assert [(storage.label, len(storage.shapes)) for storage in storages] == [("first", 2), ("third", 1)]

"""Saved activations: what the counter sees, of functions and of a NOBLE layer (of operators see test_ops.py)."""

import pytest
import torch
from torch import Tensor, nn

from nonlinear_lowrank.analysis.saved import saved_bytes, saved_storages
from nonlinear_lowrank.methods.noble import NobleConfig, NobleLinear
from nonlinear_lowrank.methods.noble import layer as noble_layer
from nonlinear_lowrank.methods.noble.op import noble_linear_reference


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_layer_saves_its_input_and_h_alone_and_the_plain_formula_far_more(monkeypatch, backend, bf16):
    x, size = torch.randn(2, 48, 64, requires_grad=True), 96 * (2 if bf16 else 4)
    layer = NobleLinear(64, 80, config=NobleConfig(rank=16))

    def found():
        torch.compiler.reset()
        run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return saved_bytes(run, x, parameters=list(layer.parameters()))

    assert found() == size * (64 + 16)
    monkeypatch.setattr(noble_layer, "noble_linear", noble_linear_reference)
    assert found() >= size * (64 + 2 * 16)


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

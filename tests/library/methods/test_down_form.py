"""Where NOBLE's down projection goes into the bottleneck's kernel; the kernel's numbers are in test_kernels_*.py."""

import pytest
import torch

from nonlinear_lowrank import NobleConfig, NobleLinear, UserError
from nonlinear_lowrank.methods.noble import down_form
from nonlinear_lowrank.methods.noble.down_form import chosen_down_form, use_down_form

CUDA = torch.device("cuda", 0)


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(down_form, "processors", lambda device: 132)


def chosen(tokens=16_384, d_in=1024, rank=64, device=CUDA, dtype=torch.bfloat16):
    return chosen_down_form(tokens, d_in, rank, device=device, dtype=dtype)


@pytest.mark.usefixtures("h200")
def test_it_is_fused_where_every_processor_has_a_tile():
    assert chosen() == chosen(rank=128) == chosen(dtype=torch.float16) == "fused"
    assert chosen(tokens=131 * 64 + 1) == "fused"
    assert chosen(tokens=131 * 64) == chosen(tokens=1) == "separate"


@pytest.mark.usefixtures("h200")
def test_what_stays_a_product():
    assert chosen(rank=129) == "separate"
    assert chosen(dtype=torch.float32) == "separate"
    assert chosen(d_in=1023) == "separate"  # rows unaligned
    assert chosen(device=torch.device("cpu")) == "separate"


@pytest.mark.usefixtures("h200")
def test_a_measurement_or_the_caller_decides(monkeypatch):
    monkeypatch.setitem(down_form.MEASURED, (16_384, 1024, 64), "separate")
    assert chosen() == "separate"
    with use_down_form("fused"):
        assert chosen() == chosen(tokens=1) == "fused"
        assert chosen(rank=129) == "separate"
        with use_down_form(None):
            assert chosen() == "separate"
    with pytest.raises(UserError, match="separate or fused"), use_down_form("fastest"):
        pass


def test_without_kernels_the_form_changes_nothing():
    layer = NobleLinear(12, 40, config=NobleConfig(rank=4, up_scale=1.0))
    x = torch.randn(5, 12)
    with use_down_form("fused"):
        fused = layer(x)
    assert torch.equal(fused, layer(x))

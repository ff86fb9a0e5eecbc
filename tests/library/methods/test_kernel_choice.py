"""Choice between kernels and PyTorch, with stand-ins for a GPU and for the kernels."""

import subprocess
import sys
from contextlib import ExitStack

import pytest
import torch

from nonlinear_lowrank.ops import kernels as choice
from nonlinear_lowrank.ops.kernels import kernels, use_kernels


@pytest.fixture
def on_gpu(monkeypatch):
    """Take every tensor for one on a GPU, and a method's name for its kernels."""
    for name, found in {"_fits": True, "_usable": True}.items():
        monkeypatch.setattr(choice, name, lambda given, found=found: found)
    monkeypatch.setattr(choice, "load", lambda name: name)


def used():
    return kernels("noble", torch.zeros(1)) is not None


def test_the_innermost_block_decides(on_gpu):
    assert used()
    with use_kernels(False):
        with use_kernels(True):
            assert used()
        assert not used()
    assert used()
    with pytest.raises(KeyError), use_kernels(False):
        raise KeyError
    assert used()


def test_blocks_that_overlap_end_in_any_order(on_gpu):
    """As those of two threads do."""
    first, second = ExitStack(), ExitStack()
    first.enter_context(use_kernels(False))
    second.enter_context(use_kernels(False))
    first.close()
    assert not used()
    second.close()
    assert used()


class Sharded(torch.Tensor):
    """A tensor that wraps another, as DTensor does, on a GPU that is not there."""

    def __tensor_flatten__(self):
        return [], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def test_wrapped_tensors_are_named_once():
    x = torch.Tensor._make_wrapper_subclass(Sharded, (3,), device="cuda:0")
    with pytest.warns(UserWarning, match=r"noble: .* do not read Sharded; give them local tensors"):
        assert kernels("noble", torch.zeros(1), x) is None
    assert kernels("noble", x) is None  # a second warning would be an error
    with use_kernels(False):
        assert kernels("rational", x) is None


DEVICE_THREAD = """
import os, threading
import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from nonlinear_lowrank.ops import kernels as choice

_setup_privateuseone_for_python_backend("standin")
choice._fits = choice._usable = lambda given: True
choice.load = lambda name: name
threads, found = [], []


class OnDevice(torch.Tensor):
    @staticmethod
    def __new__(cls, raw):
        made = torch.Tensor._make_wrapper_subclass(cls, raw.shape, dtype=raw.dtype, device="standin:0")
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raw = lambda each: each.raw if isinstance(each, cls) else each
        result = func(*tree_map(raw, args), **tree_map(raw, kwargs or {}))
        return tree_map(lambda each: cls(each) if isinstance(each, torch.Tensor) else each, result)


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        threads.append(threading.get_ident())
        found.append(choice.kernels("noble", dy))
        return 2 * dy


y = Asking.apply(OnDevice(torch.ones(3)).requires_grad_())
for enabled in (True, False):
    with choice.use_kernels(enabled):
        y.backward(torch.ones_like(y), retain_graph=True)
print(found, threading.get_ident() in threads, flush=True)
os._exit(0)  # the device's thread has no end
"""


def test_backward_in_the_thread_of_a_device_sees_it():
    """A device made in Python, in a process of its own; autograd starts a thread for it, as for a GPU."""
    done = subprocess.run([sys.executable, "-c", DEVICE_THREAD], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "['noble', None] False", done.stderr[-2000:]

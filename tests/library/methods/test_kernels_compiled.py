"""Every Triton kernel compiled for sm_90, with no GPU: no spills, no stack, products on the tensor cores."""

from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode

from nlr_lab.bench import kernels as bench
from nlr_lab.bench.kernels import compiled, compiling_for, launches, problems, report

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1 compiles nothing", allow_module_level=True)
pytestmark = pytest.mark.kernels

# Compiling takes seconds each: in every run the kernels of the default settings, in slow ones every block shape.
QUICK = {
    "cosnet": {
        ("cosnet forward", 64),
        ("cosnet with down", 64),
        *(("cosnet backward, " + each, 64) for each in ("outer", "inner")),
    },
    "rational": {("rational forward", 384), ("rational backward", 384), ("rational backward", 1)},
    "sine": {("sine weight", 16), ("sine factors", 16)},
}


def key(name, variant):
    return variant.name, variant.constants["WIDTH" if name == "rational" else "R"]


def cases():
    for name, quick in QUICK.items():
        missing = set(quick)
        for launch in launches(name):
            variant = launch.variant
            chosen = key(name, variant) in missing and variant.constants.get("FAST", True)
            missing -= {key(name, variant)} if chosen else set()
            shape = "-".join(str(value) for value in variant.constants.values())
            yield pytest.param(launch, id=f"{variant.name}-{shape}", marks=[] if chosen else [pytest.mark.slow])
        assert not missing


@pytest.mark.parametrize("launch", list(cases()))
def test_no_spills_and_tensor_cores(launch):
    figures = report(launch).figures
    assert problems(figures) == []
    assert 0 < figures["registers"] <= 255
    assert figures["shared"] <= 227 * 1024


@pytest.mark.parametrize(
    ("name", "kernel", "rank"), [("sine", "sine factors", 64), ("cosnet", "cosnet with down", 128)]
)
def test_shared_memory_suffices_on_small_gpus(name, kernel, rank):
    found = [launch for launch in launches(name) if key(name, launch.variant) == (kernel, rank)]
    assert found
    assert all(report(launch, capability=89).figures["shared"] <= 99 * 1024 for launch in found)


def one(name, kernel):
    return next(launch for launch in launches(name) if launch.variant.name == kernel)


def test_a_kernel_that_spills_is_said_to():
    launch = one("rational", "rational backward")
    wide = launch.variant.constants | {"BT": 64}
    row = report(launch._replace(variant=launch.variant._replace(constants=wide)))
    assert any("spill" in problem for problem in problems(row.figures))


@pytest.mark.parametrize("name", ["cosnet", "rational", "sine"])
def test_what_is_compiled_is_what_is_launched(monkeypatch, name):
    """Operators launch on tensors that hold numbers; triton's hook has the key of what it would compile for them."""
    keys: list[str] = []

    def asked(launch, ask):
        launch.variant.kernel.device_caches.clear()
        ask(launch)
        return keys[-1]

    def specialised(*, key, **others):
        keys.append(key)
        return True  # compiles nothing, launches nothing

    found = []
    with compiling_for(90), mock.patch.object(triton.knobs.runtime, "jit_cache_hook", specialised):
        for size in (96, 61):
            monkeypatch.setattr(bench, "TOKENS", size)
            monkeypatch.setattr(bench, "WIDTH", size)
            run = [asked(each, lambda each: each.variant.launch(each.grid, *each.arguments))
                   for each in launches(name, "cpu")]  # fmt: skip
            assert run == [asked(each, lambda each: compiled(each, 90)) for each in launches(name)]
            found.append(run)
    assert all(aligned != odd for aligned, odd in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["cosnet", "rational", "sine"])
def test_a_launch_is_on_the_gpu_of_its_tensors(monkeypatch, name):
    """Triton compiles for the current GPU, and runs there."""
    current, found = [0], []

    def exchange(index):
        before, current[0] = current[0], index if index >= 0 else current[0]
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    with FakeTensorMode():
        there = torch.empty(1, device="cuda:1")
    for variant, grid, arguments in launches(name):
        kernel = {grid: lambda *arguments, **constants: found.append(current[0])}
        variant._replace(kernel=kernel).launch(grid, there, *arguments[1:])
        assert current == [0]
    assert set(found) == {1}

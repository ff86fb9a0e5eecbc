"""`nlr bench kernels`: compiled code of every Triton kernel in every block shape that is launched; no GPU."""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from nlr_lab.runtime.environment import versions
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble.op import FUSED_DOWN_RANK, Branch
from nonlinear_lowrank.ops.kernels import load
from nonlinear_lowrank.ops.sine import SineFactors

from .result import BenchResult, Progress, Row
from .settings import KernelBenchConfig

TOKENS, WIDTH = 16384, 1024
"""Sizes of the inputs; triton compiles other code where a size or a stride is 1 or divides by 16."""


class Launch(NamedTuple):
    """A kernel's launch by an operator, and what it was given."""

    variant: Any
    """`ops.triton.Variant`"""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


def bench_kernels(config: KernelBenchConfig, *, progress: Progress = lambda line: None) -> BenchResult:
    """Compile and count; some seconds a kernel, the second time none (triton keeps what it compiled).

    Raises:
        UserError: triton is not installed, or was told to interpret (TRITON_INTERPRET=1).
    """
    try:
        import triton
    except ImportError as error:
        raise UserError("triton is not installed; it comes with torch's CUDA builds, or: pip install triton") from error
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET=1 compiles nothing; unset it")
    rows = []
    for name in config.operators:
        for launch in launches(name):
            rows.append(report(launch, config.capability))
            progress(rows[-1].arm)
    found = {**versions(), "triton": triton.__version__, "ptxas": triton.knobs.nvidia.ptxas.version}
    return summary(config, rows, found)


def summary(config: KernelBenchConfig, rows: list[Row], versions: dict[str, str]) -> BenchResult:
    """Return the result; the code depends on these versions and not on the machine."""
    wrong = [f"{row.arm}: {problem}" for row in rows for problem in problems(row.figures)]
    verdict = ["must not be:", *wrong] if wrong else ["no spills, no stack; every product on the tensor cores"]
    compiler = f"bytes; triton {versions['triton']}, ptxas {versions['ptxas']}"
    return BenchResult(config=config, rows=rows, about="\n".join([compiler, *verdict]), machine=versions)


def problems(figures: dict[str, int]) -> list[str]:
    """Return what a launched kernel must not have: spills, a stack, and products off the tensor cores."""
    memory = ("spill_stores", "spill_loads", "stack")
    found = [f"{figures[name]} bytes of {name.replace('_', ' ')}" for name in memory if figures[name]]
    if figures["wgmma"] + figures["mma"] < figures["products"]:
        found.append(f"{figures['products']} products without matrix instructions")
    return found


def launches(operator: str, device: str = "meta") -> list[Launch]:
    """Return what "cosnet", "rational" or "sine" launches in training, in every block shape; nothing is computed."""
    from nonlinear_lowrank.ops.triton import Variant

    found: list[Launch] = []

    def launch(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
        found.append(Launch(variant, grid, arguments))

    with mock.patch.object(Variant, "launch", launch), torch.device(device):
        {"cosnet": _cosnet, "rational": _rational, "sine": _sine}[operator]()
    return found


def _cosnet() -> None:
    kernel = load("noble")
    ranks = {torch.bfloat16: (16, 32, 64, 96, 128, 256), torch.float32: (64, 256)}
    for dtype, rank in ((dtype, rank) for dtype, some in ranks.items() for rank in some):
        x, h = (torch.empty(TOKENS, size, dtype=dtype) for size in (WIDTH, rank))
        down, mix = (torch.empty(rank, size, dtype=dtype) for size in (WIDTH, rank))
        branch = Branch(down, down.t(), [mix], [torch.empty(rank)] * 2, [torch.empty(rank)] * 2)
        kernel.forward(h, branch)
        kernel.backward(h, torch.empty_like(h), branch)
        if rank <= FUSED_DOWN_RANK and dtype != torch.float32:
            kernel.down_forward(x, branch)


def _rational() -> None:
    kernel, limits = load("rational"), (-3.0, 3.0, 0.0, 1.0)
    for (form, terms), width, second in itertools.product(
        {"abs_of_sum": (6, 5), "sum_of_abs": (6, 4)}.items(), (384, 1), ("", "gated", "anchored")
    ):
        x = torch.empty(TOKENS, 8 * 384, dtype=torch.bfloat16)
        up = torch.empty_like(x) if second else None
        a, b = (torch.empty(x.shape[1] // width, count) for count in terms)
        base = (a, b) if second == "anchored" else None
        kernel.forward(x, up, a, b, form, limits, base)
        kernel.backward(torch.empty_like(x), x, up, a, b, form, limits, base)


def _sine() -> None:
    kernel = load("sine")
    for rank, dora in itertools.product((4, 16, 32, 64), (False, True)):
        weight = torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16)
        up, down, magnitude = torch.empty(WIDTH, rank), torch.empty(rank, WIDTH), torch.empty(WIDTH)
        factors = SineFactors(up, down, 200.0, 10.0, magnitude=magnitude if dora else None)
        ratios = kernel.form(weight, factors, base=True, out=torch.empty_like(weight))
        kernel.factor_gradients(torch.empty_like(weight), weight, factors, ratios)


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Let triton's own launches compile for an absent GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    gpu = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: f"sm_{capability}",  # triton keeps what it compiled for each
        get_current_stream=lambda device: 0,
    )
    with mock.patch.object(triton.runtime.driver, "_active", gpu):
        yield


def compiled(launch: Launch, capability: int) -> Any:
    """Return triton's compiled kernel, specialised to the launch's arguments as when it runs."""
    variant = launch.variant
    with compiling_for(capability):
        given = {**variant.constants, **variant.options}
        return variant.kernel.warmup(*launch.arguments, grid=launch.grid, **given)


def report(launch: Launch, capability: int = 90) -> Row:
    """Compile a launch for a GPU of a compute capability times 10, specialised to its arguments.

    Registers are those of a thread (at most 255), stack and spills bytes of a thread, shared bytes of a block; products
    are the tl.dot calls in the source, wgmma and mma the matrix instructions in the code.
    """
    import triton

    variant, code = launch.variant, compiled(launch, capability)
    ptx = code.asm["ptx"]
    figures = {
        "warps": variant.warps,
        **_assemble(ptx, triton.knobs.nvidia.ptxas.path),
        "shared": code.metadata.shared,
        "products": variant.products,
        "wgmma": len(re.findall(r"\bwgmma\.mma_async\b", ptx)),
        "mma": len(re.findall(r"\bmma\.sync\b", ptx)),
    }
    # Sizes, the names of what is on, and kinds.
    sizes = [f"{name}={value}" for name, value in variant.constants.items() if type(value) is int]
    on = [name.lower() for name, value in variant.constants.items() if value is True]
    kinds = dict.fromkeys(value for value in variant.constants.values() if isinstance(value, str))
    title = f"{variant.name}: {' '.join([*sizes, *on, *kinds])}"
    return Row(panel=f"sm_{capability}", arm=title, figures=figures)


def _assemble(ptx: str, assembler: str) -> dict[str, int]:
    """Return the numbers of `ptxas -v`, which triton brings with it."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="ascii")
        command = [assembler, "-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/kernel"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    patterns = {
        "registers": r"Used (\d+) registers",
        "stack": r"(\d+) bytes stack frame",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
    }
    said = done.stderr + done.stdout
    return {name: int(re.findall(pattern, said)[0]) for name, pattern in patterns.items()}

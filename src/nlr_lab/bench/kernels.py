"""`nlr bench kernels`: compiled code of every Triton kernel in every block shape that is launched; no GPU."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from nlr_lab.runtime.environment import versions
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.kernels import load

from .result import BenchResult, Progress, Row
from .settings import KernelBenchConfig

OPERATORS = {"cosnet": "noble", "rational": "rational", "sine": "sine"}
"""Kernels -> the method whose folder has them."""


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
        for variant in load(OPERATORS[name]).variants():
            rows.append(report(variant, config.capability))
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
    """Return what none that is launched may have: spills, a stack, and products off the tensor cores."""
    memory = ("spill_stores", "spill_loads", "stack")
    found = [f"{figures[name]} bytes of {name.replace('_', ' ')}" for name in memory if figures[name]]
    if figures["wgmma"] + figures["mma"] < figures["products"]:
        found.append(f"{figures['products']} products without matrix instructions")
    return found


def report(variant: Any, capability: int = 90) -> Row:
    """Compile a variant (`ops.triton.Variant`) for a GPU of a compute capability times 10.

    Pointers are taken to be aligned to 16 bytes, as torch's are. Registers are those of a thread (at most 255), stack
    and spills bytes of a thread, shared bytes of a block; products are the tl.dot calls in the source, wgmma and mma
    the matrix instructions in the code.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)
    ptx = compiled.asm["ptx"]
    figures = {
        "warps": variant.warps,
        **_assemble(ptx, triton.knobs.nvidia.ptxas.path),
        "shared": compiled.metadata.shared,
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

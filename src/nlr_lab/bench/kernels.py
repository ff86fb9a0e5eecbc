"""`nlr bench kernels`: compiled code of every Triton kernel in every block shape that is launched; no GPU."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.kernels import load

from .result import BenchResult
from .settings import OPERATORS, KernelBenchConfig


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel in one block shape, as ptxas reports it."""

    name: str
    shape: dict[str, Any]
    """Its compile-time arguments."""
    warps: int
    registers: int
    """Registers of a thread, at most 255."""
    stack: int
    """Bytes of a thread's stack frame."""
    spill_stores: int
    """Bytes."""
    spill_loads: int
    """Bytes."""
    shared: int
    """Bytes of shared memory of a block."""
    matrix_instructions: dict[str, int]
    """Instruction -> how often it stands in the code."""
    products: int
    """tl.dot calls in the source."""
    problems: list[str] = field(default_factory=list, init=False)
    """Spills, stack, and products off the tensor cores: none may be launched."""

    def __post_init__(self) -> None:
        memory = {"spill stores": self.spill_stores, "spill loads": self.spill_loads, "stack": self.stack}
        self.problems.extend(f"{value} bytes of {what}" for what, value in memory.items() if value)
        if self.products and sum(self.matrix_instructions.values()) < self.products:
            self.problems.append(f"{self.products} products without matrix instructions")

    @property
    def title(self) -> str:
        """Name, sizes, and the names of what is on."""
        sizes = [f"{name}={value}" for name, value in self.shape.items() if type(value) is int]
        on = [name.lower() for name, value in self.shape.items() if value is True]
        kinds = dict.fromkeys(value for value in self.shape.values() if isinstance(value, str))
        return f"{self.name}: {' '.join([*sizes, *on, *kinds])}"

    def cells(self) -> dict[str, str]:
        """Return the texts by column."""
        instructions = " ".join(f"{count} {name}" for name, count in sorted(self.matrix_instructions.items()))
        return {
            "kernel in its shape": self.title,
            "warps": str(self.warps),
            "registers": str(self.registers),
            "spilled": str(self.spill_stores + self.spill_loads),
            "stack": str(self.stack),
            "shared": f"{self.shared:,}",
            "matrix instructions": instructions or "none",
        }


def bench_kernels(config: KernelBenchConfig, *, progress: Callable[[str], object] = lambda line: None) -> BenchResult:
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
            progress(rows[-1].title)
    versions = {
        "triton": triton.__version__,
        "torch": torch.__version__,
        "package": version("nonlinear-lowrank"),
        "ptxas": triton.knobs.nvidia.ptxas.version,
    }
    return summary(config, rows, versions)


def summary(config: KernelBenchConfig, rows: list[KernelReport], versions: dict[str, Any]) -> BenchResult:
    """Return the result; the code depends on these versions and not on the machine."""
    wrong = [f"{row.title}: {problem}" for row in rows for problem in row.problems]
    verdict = ["must not be:", *wrong] if wrong else ["no spills, no stack; every product on the tensor cores"]
    compiler = f"bytes; sm_{config.capability}, triton {versions['triton']}, ptxas {versions['ptxas']}"
    return BenchResult(config=config, rows=rows, about="\n".join([compiler, *verdict]), machine=versions)


def report(variant: Any, capability: int = 90) -> KernelReport:
    """Compile a variant (`ops.triton.Variant`) for a GPU of a compute capability times 10.

    Pointers are taken to be aligned to 16 bytes, as torch's are.
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
    return KernelReport(
        name=variant.name,
        shape=dict(variant.constants),
        warps=variant.warps,
        shared=compiled.metadata.shared,
        matrix_instructions=dict(Counter(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\b", ptx))),
        products=variant.products,
        **_assemble(ptx, triton.knobs.nvidia.ptxas.path),
    )


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
    found = {name: re.search(pattern, done.stderr + done.stdout) for name, pattern in patterns.items()}
    if None in found.values():
        raise RuntimeError(f"ptxas does not say all of {', '.join(patterns)}: {done.stderr}{done.stdout}")
    return {name: int(match[1]) for name, match in found.items() if match is not None}

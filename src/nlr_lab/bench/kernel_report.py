"""What the compiler made of a Triton kernel: registers, spills, shared memory, matrix instructions; needs no GPU."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonlinear_lowrank.errors import UserError

REGISTERS = 65536
"""Of a multiprocessor, sm_80 to sm_90."""


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel in one block shape, as ptxas reports it."""

    name: str
    shape: dict[str, Any]
    """Its compile-time arguments."""
    warps: int
    registers: int
    """Of a thread; at most 255."""
    stack: int
    """Bytes of a thread's stack frame."""
    spill_stores: int
    """Bytes."""
    spill_loads: int
    """Bytes."""
    shared: int
    """Bytes of a block."""
    matrix_instructions: dict[str, int]
    """Instruction -> how often it stands in the code."""
    products: int
    """tl.dot calls in the source."""

    @property
    def problems(self) -> list[str]:
        """What must not be in a configuration that is launched."""
        found = [f"{value} bytes of {what}" for what, value in self._memory() if value]
        if self.products and sum(self.matrix_instructions.values()) < self.products:
            found.append(f"{self.products} products without matrix instructions")
        return found

    def _memory(self) -> list[tuple[str, int]]:
        return [("spill stores", self.spill_stores), ("spill loads", self.spill_loads), ("stack", self.stack)]


def check_triton() -> None:
    """Raises UserError where triton cannot be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError("triton is not installed; it comes with torch's CUDA builds, or: pip install triton") from error


def report(variant: Any, capability: int = 90) -> KernelReport:
    """Compiles a variant (`ops.triton.common.Variant`) for a GPU of a compute capability times 10.

    Pointers are taken to be aligned to 16 bytes, as torch's are.

    Raises:
        UserError: triton is not installed.
    """
    check_triton()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)
    ptx = compiled.asm["ptx"]
    found = _assemble(ptx)
    return KernelReport(
        name=variant.name,
        shape=dict(variant.constants),
        warps=variant.warps,
        shared=compiled.metadata.shared,
        matrix_instructions=dict(Counter(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\b", ptx))),
        products=variant.products,
        **found,
    )


def reports(variants: Iterable[Any], capability: int = 90) -> list[KernelReport]:
    """`report` of each."""
    return [report(variant, capability) for variant in variants]


def _assemble(ptx: str) -> dict[str, int]:
    """Numbers of `ptxas -v`, which triton brings with it."""
    import triton

    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="ascii")
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1]}", source, "-o", f"{folder}/kernel"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stderr + done.stdout

    def number(pattern: str) -> int:
        match = re.search(pattern, said)
        if match is None:
            raise RuntimeError(f"ptxas says nothing of {pattern!r}: {said}")
        return int(match[1])

    return {
        "registers": number(r"Used (\d+) registers"),
        "stack": number(r"(\d+) bytes stack frame"),
        "spill_stores": number(r"(\d+) bytes spill stores"),
        "spill_loads": number(r"(\d+) bytes spill loads"),
    }

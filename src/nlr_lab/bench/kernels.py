"""`nlr bench kernels`: what the compiler made of every Triton kernel, in every block shape that is launched; no GPU."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from nlr_lab.plan.inspect import render_table
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.ops.kernels import load

from .kernel_report import KernelReport, check_triton, report
from .model import table_with

OPERATORS = ("cosnet", "rational", "sine")


@dataclass(frozen=True, kw_only=True)
class KernelBenchConfig:
    """Which kernels are compiled, and what for.

    Raises:
        UserError: an unknown operator or architecture.
    """

    operators: tuple[str, ...] = OPERATORS
    """Of cosnet, rational and sine."""
    capability: int = 90
    """Compute capability times 10: 80 (A100), 86, 89 or 90 (H100, H200)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", tuple(self.operators))
        for name in self.operators:
            if name not in OPERATORS:
                raise UserError(f"unknown operator {name!r}; choose of {', '.join(OPERATORS)}")
        if not self.operators:
            raise UserError(f"name at least one operator of {', '.join(OPERATORS)}")
        if self.capability not in (80, 86, 89, 90):
            raise UserError(f"capability must be 80, 86, 89 or 90, got {self.capability!r}")


@dataclass(frozen=True, kw_only=True)
class KernelBench:
    """Result of `bench_kernels`; `print(result)` gives the table."""

    config: KernelBenchConfig
    rows: list[KernelReport]
    machine: dict[str, Any] = field(default_factory=dict)
    """Versions: the code depends on the compiler and not on the machine."""

    def __str__(self) -> str:
        table = table_with(
            "kernel in its shape", "warps", "registers", "spilled", "stack", "shared", "matrix instructions"
        )
        for row in self.rows:
            table.add_row(
                f"{row.name}: {_shape(row)}",
                str(row.warps),
                str(row.registers),
                str(row.spill_stores + row.spill_loads),
                str(row.stack),
                f"{row.shared:,}",
                " ".join(f"{count} {name}" for name, count in sorted(row.matrix_instructions.items())) or "none",
            )
        wrong = [f"{row.name} ({_shape(row)}): {problem}" for row in self.rows for problem in row.problems]
        said = (
            "\n".join(["must not be:", *wrong]) if wrong else "no spills, no stack; every product on the tensor cores"
        )
        compiler = f"sm_{self.config.capability}, triton {self.machine['triton']}, ptxas {self.machine['ptxas']}"
        return f"{render_table(table, 160)}\nbytes; {compiler}\n{said}"

    def to_json(self) -> str:
        """Everything, as text."""
        rows = [asdict(row) | {"problems": row.problems} for row in self.rows]
        return json.dumps({"config": asdict(self.config), "rows": rows, "machine": self.machine}, indent=2)


def bench_kernels(config: KernelBenchConfig, *, progress: Callable[[str], object] | None = None) -> KernelBench:
    """Compiles and counts; some seconds a kernel, the second time none (triton keeps what it compiled).

    Args:
        config: see `KernelBenchConfig`.
        progress: called with a line for each kernel, e.g. `print`.

    Raises:
        UserError: triton is not installed, or was told to interpret (TRITON_INTERPRET=1).
    """
    check_triton()
    import torch
    import triton

    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET=1 compiles nothing; unset it")
    rows = []
    for name in config.operators:
        for variant in load(name).variants():
            rows.append(report(variant, config.capability))
            if progress is not None:
                progress(f"{rows[-1].name}: {_shape(rows[-1])}")
    versions = {"triton": triton.__version__, "torch": torch.__version__, "package": version("nonlinear-lowrank")}
    return KernelBench(config=config, rows=rows, machine=versions | {"ptxas": triton.knobs.nvidia.ptxas.version})


def _shape(row: KernelReport) -> str:
    """Sizes by name, and the names of what is on."""
    sizes = [f"{name}={value}" for name, value in row.shape.items() if type(value) is int]
    on = [name.lower() for name, value in row.shape.items() if value is True]
    kind = [value for value in row.shape.values() if isinstance(value, str)]
    return " ".join([*sizes, *on, *dict.fromkeys(kind)])

"""`nlr bench WHAT`: measures one thing on this machine."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import UserError
from .checkpoint import choose_device
from .options import parse

BENCHES = {
    "step": "Step time of NOBLE over its baseline, interleaved, beside the ratio of FLOPs.",
    "decode": "Time of generating one token with NOBLE over its baseline, interleaved.",
    "kernels": "Registers, spills, shared memory and matrix instructions of every Triton kernel; needs no GPU.",
}


def run(arguments: list[str]) -> None:
    """Measures and prints the table."""
    if not arguments or arguments[0] not in (*BENCHES, "-h", "--help"):
        said = f"unknown benchmark {arguments[0]!r}" if arguments else "name a benchmark"
        raise UserError(f"{said}; there are {', '.join(BENCHES)}: nlr bench step")
    if arguments[0] not in BENCHES:
        lines = [f"  nlr bench {name:<10} {summary}" for name, summary in BENCHES.items()]
        print("\n".join(["usage: nlr bench WHAT ...", "", *lines, "", "nlr bench WHAT --help for its options"]))
        return
    what, *rest = arguments
    config_class, measure = _bench(what)

    @dataclass(frozen=True, kw_only=True)
    class Options(config_class):  # type: ignore[misc, valid-type]
        """Options of a benchmark: what is measured, and where to."""

        output: str | None = None
        """Write every measured step to this JSON file too."""

        def __post_init__(self) -> None:
            if hasattr(self, "device"):
                choose_device(self.device)
            super().__post_init__()

    default: Any = Options()
    options = parse(Options, rest, command=f"bench {what}", description=BENCHES[what], default=default)
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise UserError(f"no such folder: {Path(options.output).parent} (--output)")
    config = config_class(**{field.name: getattr(options, field.name) for field in fields(config_class)})
    result = measure(config, progress=print)
    print(result)
    if options.output is not None:
        Path(options.output).write_text(result.to_json() + "\n", encoding="utf-8")


def _bench(what: str) -> tuple[type, Callable[..., Any]]:
    """Settings and measurement of a benchmark; torch is imported here."""
    if what == "step":
        from ..analysis.bench_step import StepBenchConfig, bench_step

        return StepBenchConfig, bench_step
    if what == "kernels":
        from ..analysis.bench_kernels import KernelBenchConfig, bench_kernels

        return KernelBenchConfig, bench_kernels
    from ..analysis.bench_decode import DecodeBenchConfig, bench_decode

    return DecodeBenchConfig, bench_decode

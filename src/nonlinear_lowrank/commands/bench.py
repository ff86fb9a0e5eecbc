"""`nlr bench step`: measures one thing on this machine."""

from dataclasses import dataclass, fields
from pathlib import Path

from ..analysis.bench_step import StepBenchConfig, bench_step
from ..errors import UserError
from .checkpoint import choose_device
from .options import parse

BENCHES = ("step",)


@dataclass(frozen=True, kw_only=True)
class BenchStepOptions(StepBenchConfig):
    """Options of `nlr bench step`: what is measured, and where to."""

    output: str | None = None
    """Write every measured step to this JSON file too."""

    def __post_init__(self) -> None:
        choose_device(self.device)
        super().__post_init__()


def run(arguments: list[str]) -> None:
    """Measures and prints the table."""
    if not arguments or arguments[0] not in (*BENCHES, "-h", "--help"):
        said = f"unknown benchmark {arguments[0]!r}" if arguments else "name a benchmark"
        raise UserError(f"{said}; there is {', '.join(BENCHES)}: nlr bench step")
    options = parse(
        BenchStepOptions,
        arguments[1:] if arguments[0] in BENCHES else arguments,
        command="bench step",
        description="Step time of NOBLE over its baseline, interleaved, beside the ratio of FLOPs.",
        default=BenchStepOptions(),
    )
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise UserError(f"no such folder: {Path(options.output).parent} (--output)")
    config = StepBenchConfig(**{field.name: getattr(options, field.name) for field in fields(StepBenchConfig)})
    result = bench_step(config, progress=print)
    print(result)
    if options.output is not None:
        Path(options.output).write_text(result.to_json() + "\n", encoding="utf-8")

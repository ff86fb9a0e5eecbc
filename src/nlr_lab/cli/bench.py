"""`nlr bench WHAT`: measure one thing on this machine."""

import importlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nlr_lab.bench import settings
from nonlinear_lowrank.errors import UserError

from .checkpoint import check_parent, write_out
from .options import parse

BENCHES = {
    "all": "What docs/performance.md states: each time beside the least it could be, in some minutes.",
    "step": "Step time of a method over its baseline, interleaved, beside the ratio of FLOPs.",
    "memory": "Bytes saved for backward and peak memory of a training step, beside the baseline's.",
    "op": "Time and memory of single operators against their plain formulas, LoRA, DoRA, PEANuT, GELU, SwiGLU and KAT.",
    "decode": "Time of generating one token with a method over the plain model, interleaved.",
    "kernels": "Registers, spills, shared memory and matrix instructions of every Triton kernel; needs no GPU.",
    "traffic": "Bytes and FLOPs that NOBLE adds to a step on a GPU, and times that follow, on paper.",
}
_TRAINING = ("step", "memory")
_LISTS = {"all": "parts", "op": "operators", "kernels": "operators"}


def run_bench(arguments: list[str]) -> None:
    """Measure and print the table."""
    if not arguments or arguments[0] not in (*BENCHES, "-h", "--help"):
        reason = f"unknown benchmark {arguments[0]!r}" if arguments else "name a benchmark"
        raise UserError(f"{reason}; choose from {', '.join(BENCHES)}, as in nlr bench step")
    if arguments[0] not in BENCHES:
        lines = [f"  nlr bench {name:<10} {summary}" for name, summary in BENCHES.items()]
        print("\n".join(["usage: nlr bench WHAT ...", "", *lines, "", "nlr bench WHAT --help for its options"]))
        return
    what, *rest = arguments
    if what in _LISTS and rest and not rest[0].startswith("-"):
        raise UserError(f"unrecognized argument {rest[0]}; write nlr bench {what} --{_LISTS[what]} {rest[0]}")
    kind = "train" if what in _TRAINING else what.removesuffix("s")
    config_class: Any = getattr(settings, f"{kind.capitalize()}BenchConfig")

    @dataclass(frozen=True, kw_only=True)
    class Options(config_class):  # type: ignore[misc, valid-type]
        """A benchmark's settings, and the files of its result."""

        out: str | None = None
        """Write every measured step to this JSON file too."""
        picture: str | None = None
        """Draw the result as a PNG too."""

    options = parse(Options, rest, command=f"bench {what}", description=BENCHES[what])
    for name in ("out", "picture"):
        check_parent(getattr(options, name), f"--{name}")
    if options.picture is not None and what in ("kernels", "traffic"):
        raise UserError(f"nlr bench {what} draws no picture; omit --picture")
    for name in ("clock", "rounds", "warmup") if what == "memory" else ():
        if getattr(options, name) != getattr(Options, name):
            raise UserError(f"nlr bench memory times nothing; omit --{name}")
    config = config_class(**{field.name: getattr(options, field.name) for field in fields(config_class)})
    module = importlib.import_module(f"nlr_lab.bench.{'training' if what in _TRAINING else what}")
    result = getattr(module, f"bench_{what}")(config, progress=print)
    print(result)
    if options.out is not None:
        write_out(options.out, result.to_json() + "\n")
    if options.picture is not None:
        result.draw(Path(options.picture))

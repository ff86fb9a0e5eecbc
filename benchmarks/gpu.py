"""Is the GPU path right, and how fast is it: the answer in six minutes of an H200 or H100.

    python benchmarks/gpu.py --output gpu.json              # bfloat16, the papers' widths
    python benchmarks/gpu.py --device cpu --tiny            # the same in toy sizes: a rehearsal

The file is written after each part, since such machines are lent by the minute. First `kernels`: every kernel, forward
and gradients, against its plain formula in float64, twice. If one is wrong the file names it under "wrong", nothing is
measured and the exit status is 2. Every other part has a limit of seconds; what ran out of them is under "out_of_time"
(and the file has what was finished), what failed under "failed" (exit status 1), what --minutes left no room for under
"skipped".

    kernels          largest relative error of each case; all of a float32 and a bfloat16 kind
    forms            `FORMS` of `methods.noble.op`, each way, at the base model's shapes
    op, op-sine      rational over GELU, gated rational over SwiGLU; sine-LoRA over LoRA
    step-eager, step-compiled, step-graphs
                     blocks of the paper's base model: step over the baseline, its share of the GPU's rate, launches
    adapters, adapters-compiled
                     blocks of Llama-3-8B: step of sine-LoRA, sine-DoRA and DoRA over LoRA
    losses           the first steps of each arm on real text (sources of the running Python): finite and falling
    memory, peak     saved for backward and peak: NOBLE on the base model, sine on all of Llama-3-8B's shape
    decode, decode-graphs
                     one generated token at batch 1 and 32

Single operators are replayed as CUDA graphs. Compiling takes the longest, so fill the caches first, all parts at once:
benchmarks/NEXT_GPU_RUN.md.
"""

import argparse
import gc
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nlr_lab.bench.arms import bench_arms
from nlr_lab.bench.decode import bench_decode
from nlr_lab.bench.op import bench_op, forward_and_backward, op_arms
from nlr_lab.bench.settings import DecodeBenchConfig, Mode, OpBenchConfig, TrainBenchConfig
from nlr_lab.bench.timing import captured, interleaved_step_times, paired_ratio
from nlr_lab.bench.training import Stepper, bench_memory, bench_step
from nlr_lab.plan.presets import device_rate
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import op as noble_op
from nonlinear_lowrank.methods.rational.op import LinearTails

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
import op_helpers as ops

Sizes = dict[str, Any]
Record = dict[str, Any]

ANY_THREADS: Sizes = {"threads": None}
BASE: Sizes = ANY_THREADS | {
    "width": 1024, "layers": 6, "heads": 8, "hidden": 2752, "vocab_size": 50257, "sequence_length": 1024,
    "batch_size": 16, "ranks": (64, 256), "bf16": True, "methods": ("noble", "noble-official"),
}  # fmt: skip
LLAMA: Sizes = ANY_THREADS | {
    "family": "llama", "width": 4096, "layers": 4, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab_size": 128_256,
    "sequence_length": 2048, "batch_size": 1, "methods": ("sine-lora", "sine-dora", "dora"), "ranks": (32,),
    "bf16": True, "frozen_dtype": "bfloat16",
}  # fmt: skip
OP: Sizes = ANY_THREADS | {
    "width": 4096, "hidden": 8192, "tokens": 16_384, "ranks": (64,), "dtype": "bfloat16", "modes": ("eager",),
}  # fmt: skip
DECODE: Sizes = ANY_THREADS | {
    "width": 2048, "layers": 4, "heads": 16, "hidden": 5504, "vocab_size": 50257, "ranks": (64,), "context": 512,
    "dtype": "bfloat16", "batch_sizes": (1, 32),
}  # fmt: skip
FULL = {"step": BASE, "adapters": LLAMA, "op": OP, "decode": DECODE}
TOY: Sizes = {"width": 64, "heads": 2, "layers": 2, "hidden": 96, "vocab_size": 256, "threads": 1}
TOY_STEP: Sizes = TOY | {"sequence_length": 32, "batch_size": 4}
TINY = {
    "step": BASE | TOY_STEP | {"ranks": (8, 16)},
    "adapters": LLAMA | TOY_STEP | {"kv_heads": 1, "ranks": (8,)},
    "op": OP | {"width": 64, "hidden": 96, "tokens": 64, "ranks": (8,), "threads": 1},
    "decode": DECODE | TOY | {"ranks": (8,), "context": 16, "dtype": "float32"},
}
FORMS = ("JOIN_UP", "JOIN_DOWN", "FUSE_DOWN")
SHAPES = ((1024, 1024), (1024, 5504), (2752, 1024))  # (d_in, d_out)


class OutOfTime(BaseException):
    """A part's seconds are over; no Exception, so that nothing on the way takes it for one of its own."""


def main() -> int:
    """Measure and print JSON; return 2 if a kernel is wrong, 1 if a measurement failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: a rehearsal")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each arm")
    parser.add_argument("--steps", type=int, default=60, help="steps of the loss curves")
    parser.add_argument("--layers", type=int, help="blocks of the base model, which has 12")
    parser.add_argument("--minutes", type=float, default=6.0, help="all parts end within so many")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--output", type=Path, help="write the JSON here, after every part")
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    timed = {"rounds": options.rounds, "warmup": 3 if cuda else 1, "device": options.device}
    timed["clock"] = "cuda" if cuda else "wall"
    sizes = {name: each | timed for name, each in (TINY if options.tiny else FULL).items()}
    sizes["step"] |= {} if options.layers is None else {"layers": options.layers}
    try:
        TrainBenchConfig(**sizes["step"])
    except UserError as error:
        parser.error(str(error))
    torch.set_float32_matmul_precision("high")
    results: Record = {
        "versions": {name: version(name.replace("_", "-")) for name in ("torch", "transformers", "nonlinear_lowrank")},
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "sizes": sizes,
        "wrong": {}, "failed": {}, "out_of_time": {}, "skipped": [], "seconds": {},
    }  # fmt: skip
    end = time.perf_counter() + 60 * options.minutes
    for name in options.only:
        limit, measure = PARTS[name]
        start = time.perf_counter()
        if start >= end or results["wrong"]:
            results["skipped"].append(name)
            _write(results, options.output)
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            with _seconds(min(limit, end - start)):
                measure(sizes, options, results.setdefault(name, {}))
            if name == "kernels":
                results["wrong"] = {case: each["wrong"] for case, each in results[name].items() if "wrong" in each}
        except OutOfTime:
            results["out_of_time"][name] = round(time.perf_counter() - start, 1)
        except Exception as error:  # the machine's minutes are few: go on with what can still be measured
            results["failed"][name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        results["seconds"][name] = round(time.perf_counter() - start, 1)
        _release()
        _write(results, options.output)
    print(json.dumps(results))
    if results["wrong"] or "kernels" in {*results["failed"], *results["out_of_time"]}:
        return 2  # what was not shown to be right counts as wrong
    return 1 if results["failed"] else 0


def _write(results: Record, output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _seconds(limit: float) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds."""

    def stop(*_: Any) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cases(tiny: bool) -> Iterator[tuple[str, Callable[[], Any], dict[str, bool]]]:
    """Yield name, maker and constants of `methods.noble.op`; every kernel is among them, in few shapes."""
    tokens = 37 if tiny else 1037
    noble = {"form": "no-bias", "batch": (tokens,), "d_in": 304, "d_out": 280}
    tails = LinearTails(-2.0, 1.5, 0.25, -1.5)
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        for rank in (33, 64, 128, 256):
            for constants in (dict.fromkeys(FORMS, False), *({name: True} for name in FORMS)):
                how = ", ".join(name for name, value in constants.items() if value) or "apart"
                yield f"noble r={rank} {how} {kind}", partial(ops.noble, **noble, r=rank, dtype=dtype), constants
        yield f"noble group {kind}", partial(ops.noble, **noble | {"form": "group"}, r=64, dtype=dtype), {}
        for form in ("abs_of_sum", "sum_of_abs"):
            for groups, channels in ((8, 344), (96, 96)):
                size = {"batch": (tokens // 3,), "groups": groups, "channels": channels, "scale": 0.3}
                for name in ("rational", "rational_gated", "rational_anchored"):
                    make = partial(ops.rational, name, form, tails, **size, dtype=dtype)
                    yield f"{name} {form} {groups}x{channels} {kind}", make, {}
        for rank in (16, 60, 64):
            for dora in (False, True):
                size = {"batch": (77,), "d_in": 515, "d_out": 380, "r": rank, "rms": 10.0}
                make = partial(ops.sine, (dora,), **size, dtype=dtype, factors=torch.float32)
                yield f"sine{'-dora' * dora} r={rank} {kind}", make, {}


def kernels(sizes: dict[str, Sizes], options: argparse.Namespace, found: Record) -> None:
    """Compare every case with its plain formula, and with itself; {case: {} or {"wrong": why}}."""
    for name, make, constants in cases(options.tiny):
        torch.manual_seed(0)
        try:
            with torch.device(options.device), _constants(constants):
                case = make()
                ops.compare(case, case.dys(), strided_input=True)
            found[name] = {}
        except AssertionError as error:
            found[name] = {"wrong": str(error) or "two runs differ"}
        except Exception as error:  # a kernel that does not run is wrong, and the next may be right
            found[name] = {"wrong": f"{type(error).__name__}: {error}"}
        if "wrong" in found[name]:
            print(f"  {name}: {found[name]['wrong']}", file=sys.stderr, flush=True)


def _measure(measure: Callable[..., Any], config: Any) -> Record:
    """Run a benchmark of `nlr bench`, print its table on standard error, and return its record."""
    result = measure(config, progress=lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    print(result, file=sys.stderr, flush=True)
    return json.loads(result.to_json())


def _modes(mode: Mode, options: argparse.Namespace) -> tuple[Mode, ...]:
    return ("eager",) if options.tiny else (mode,)


def _fewer(mode: Mode, sizes: Sizes, **fewer: Any) -> Sizes:
    return sizes if mode == "eager" else sizes | fewer


def step(mode: Mode, sizes: dict[str, Sizes], options: argparse.Namespace, found: Record) -> None:
    """NOBLE on the base model, and the share of the GPU's rate that the baseline reaches."""
    own = _fewer(mode, sizes["step"], ranks=sizes["step"]["ranks"][:1])
    config = TrainBenchConfig(**own | {"modes": _modes(mode, options)})
    found |= _measure(bench_step, config)
    rate = device_rate(torch.cuda.get_device_name(), bf16=True) if torch.cuda.is_available() else None
    rate = rate or found["machine"]["product_flops_per_second"]  # of a device that has no data sheet here
    found["baseline_utilization"] = found["flops"]["baseline"] / found["rows"][0]["over_seconds"] / rate
    print(f"  baseline at {found['baseline_utilization']:.1%} of {rate / 1e12:,.3g} TFLOP/s", file=sys.stderr)


def memory(sizes: dict[str, Sizes], options: argparse.Namespace, found: Record) -> None:
    """NOBLE on the base model."""
    found |= _measure(bench_memory, TrainBenchConfig(**sizes["step"] | {"modes": ("eager",)}))


def adapters(mode: Mode, sizes: dict[str, Sizes], options: argparse.Namespace, found: Record) -> None:
    """Step times over LoRA: as many blocks as let every arm be there at once."""
    own = _fewer(mode, sizes["adapters"], layers=1)
    found |= _measure(bench_step, TrainBenchConfig(**own | {"modes": _modes(mode, options)}))


def peak(sizes: dict[str, Sizes], options: argparse.Namespace, found: Record) -> None:
    """All 32 blocks, one arm at a time."""
    layers = sizes["adapters"]["layers"] if options.tiny else 32
    found |= _measure(bench_memory, TrainBenchConfig(**sizes["adapters"] | {"layers": layers, "modes": ("eager",)}))


def forms(sizes: dict[str, Sizes], options: argparse.Namespace, found: Record) -> None:
    """{"d_in d_out": {"constant=value": ratio of a layer's forward and backward to the linear's}}."""
    for d_in, d_out in ((32, 96),) if options.tiny else SHAPES:
        config = OpBenchConfig(**sizes["op"] | {"width": d_in, "hidden": d_out})
        linear, noble, *_ = op_arms("noble", config)
        steps = {"linear": _replay(forward_and_backward(linear, partial(linear.function, *linear.inputs)), {}, options)}
        whole = forward_and_backward(noble, partial(noble.function, *noble.inputs))
        for constant in FORMS:
            for value in (False, True):
                steps[f"{constant}={value}"] = _replay(whole, {constant: value}, options)
        times = interleaved_step_times(steps, config.rounds, config.warmup, config.clock)
        ratios = {name: paired_ratio(each, times["linear"]) for name, each in times.items() if name != "linear"}
        found[f"{d_in} {d_out}"] = {name: asdict(ratio) for name, ratio in ratios.items()}
        for name, ratio in ratios.items():
            print(f"  {d_in} -> {d_out} {name}: {ratio}", file=sys.stderr, flush=True)


def _replay(
    step: Callable[[], object], constants: dict[str, bool], options: argparse.Namespace
) -> Callable[[], object]:
    """Return the step with constants of `methods.noble.op`, on a GPU as a CUDA graph."""

    def own() -> object:
        with _constants(constants):
            return step()

    return captured(own) if options.device.startswith("cuda") else own


@contextmanager
def _constants(values: dict[str, bool]) -> Iterator[None]:
    """Set constants of `methods.noble.op` in the block; their rules decide outside."""
    for name, value in values.items():
        setattr(noble_op, name, value)
    try:
        yield
    finally:
        for name in values:
            setattr(noble_op, name, None)


def op(
    operators: tuple[str, ...], tokens: int, sizes: dict[str, Sizes], options: argparse.Namespace, found: Record
) -> None:
    """Single operators, on so many tokens at most."""
    own = {"operators": operators, "tokens": min(tokens, sizes["op"]["tokens"])}
    found |= _measure(bench_op, OpBenchConfig(**sizes["op"] | own))


def decode(mode: Mode, sizes: dict[str, Sizes], options: argparse.Namespace, found: Record) -> None:
    """One token."""
    found |= _measure(bench_decode, DecodeBenchConfig(**sizes["decode"] | {"modes": _modes(mode, options)}))


def losses(sizes: dict[str, Sizes], options: argparse.Namespace, found: Record) -> None:
    """arm -> losses of the first steps."""
    config = TrainBenchConfig(**sizes["step"] | {"methods": ("noble",)})
    text = _text(options.steps * config.batch_size * config.sequence_length)
    batches = text.view(options.steps, config.batch_size, config.sequence_length).to(config.device)
    for arm in bench_arms(config.methods, config.ranks):
        position = iter(range(options.steps))
        stepper = Stepper(config, "eager", arm, batch=lambda p=position: batches[next(p)], lr=1e-3)
        peak_lrs = [group["lr"] for group in stepper.optimizer.param_groups]
        values = []
        for index in range(options.steps):
            for group, peak_lr in zip(stepper.optimizer.param_groups, peak_lrs, strict=True):
                group["lr"] = peak_lr * min(1.0, (index + 1) / 20)
            values.append(stepper.step())
        found[arm.name] = torch.stack(values).tolist()
        print(f"  {arm.name}: {found[arm.name][0]:.3f} -> {found[arm.name][-1]:.3f}", file=sys.stderr, flush=True)
        del stepper
        _release()


def _text(tokens: int) -> torch.Tensor:
    """Bytes of the standard library's sources, in the order of their names, repeated if they do not suffice."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"\n".join(path.read_bytes() for path in sources)
    data = (data * (tokens // len(data) + 1))[:tokens]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def _release() -> None:
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# name -> seconds at most, what measures it
PARTS: dict[str, tuple[float, Callable[[dict[str, Sizes], argparse.Namespace, Record], None]]] = {
    "kernels": (110, kernels),
    "step-compiled": (60, partial(step, "compiled")),
    "step-graphs": (60, partial(step, "graphs")),
    "adapters-compiled": (70, partial(adapters, "compiled")),
    "decode-graphs": (60, partial(decode, "graphs")),
    "forms": (40, forms),
    "op-sine": (25, partial(op, ("sine",), 16_384)),
    "op": (25, partial(op, ("rational", "gated"), 4096)),  # KAT's atomic additions take the longest of all
    "step-eager": (45, partial(step, "eager")),
    "adapters": (40, partial(adapters, "eager")),
    "losses": (30, losses),
    "memory": (20, memory),
    "decode": (25, partial(decode, "eager")),
    "peak": (40, peak),
}

if __name__ == "__main__":
    sys.exit(main())

"""Everything that is to be measured on a GPU, within ten minutes of an H200.

    python benchmarks/gpu.py --output gpu.json              # the sizes of the papers, bfloat16
    python benchmarks/gpu.py --device cpu --tiny            # the same in toy sizes: a rehearsal

The parts, each written to the output as soon as it is there, since such machines are lent by the minute (what failed
says so under "failed", what no longer fitted into --minutes under "skipped"):

    operator    largest error of noble_linear and its gradients against the float64 formula, beside that of the plain
                formula in the same type (at most twice it is asked for)
    step        the paper's base model: step time of NOBLE over the baseline at r = 64, 128, 256
    fused       the same with fuse_shared_inputs: query, key and value together
    memory      the same model: bytes saved for backward and peak of a step
    forms       NOBLE over the plain linear at each shape of `SHAPES`, with its up projection accumulated into y or
                joined with the main product, and its down projection a product of its own or in the bottleneck's
                kernel: what `JOIN_UP` and `FUSE_DOWN` of `methods.noble.op` are to be set by
    adapters    Llama-3-8B's blocks: step time of sine-LoRA, sine-DoRA and DoRA over LoRA
    peak        the whole of Llama-3-8B's shape: saved bytes and peak of LoRA and sine-LoRA, sine-DoRA, DoRA
    op          single operators against their plain formulas and GELU, SwiGLU, LoRA, DoRA, PEANuT, KAT
    decode      time of one generated token
    losses      the first steps of each arm of `step` on real text (bytes of the running Python's own sources, the same
                batches in all arms): finite, falling, no spike
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nlr_lab.bench.arms import bench_arms
from nlr_lab.bench.decode import bench_decode
from nlr_lab.bench.op import bench_op
from nlr_lab.bench.settings import Clock, DecodeBenchConfig, OpBenchConfig, TrainBenchConfig
from nlr_lab.bench.training import Stepper, bench_memory, bench_step
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import NobleConfig, NobleLinear
from nonlinear_lowrank.methods.noble import op as noble_op
from nonlinear_lowrank.methods.noble.op import Branch, noble_linear, noble_linear_reference

Sizes = dict[str, Any]

BASE: Sizes = {
    "width": 1024,
    "layers": 12,
    "heads": 8,
    "hidden": 2752,
    "vocab_size": 50257,
    "sequence_length": 1024,
    "batch_size": 16,
    "ranks": (64, 128, 256),
    "modes": ("compiled", "eager"),
    "threads": None,
    "bf16": True,
}
LLAMA: Sizes = {
    "family": "llama",
    "width": 4096,
    "layers": 8,
    "heads": 32,
    "kv_heads": 8,
    "hidden": 14336,
    "vocab_size": 128_256,
    "sequence_length": 2048,
    "batch_size": 1,
    "methods": ("sine-lora", "sine-dora", "dora"),
    "ranks": (32,),
    "modes": ("compiled",),
    "threads": None,
    "bf16": True,
    "frozen_dtype": "bfloat16",
}
OP: Sizes = {
    "width": 4096,
    "hidden": 8192,
    "tokens": 16_384,
    "ranks": (64,),
    "dtype": "bfloat16",
    "modes": ("compiled", "eager"),
    "threads": None,
}
DECODE: Sizes = {
    "width": 2048,
    "layers": 16,
    "heads": 16,
    "hidden": 5504,
    "vocab_size": 50257,
    "ranks": (64,),
    "modes": ("eager", "graphs"),
    "dtype": "bfloat16",
    "context": 512,
    "threads": None,
}
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "full": ((1024, 1024), (1024, 5504), (2752, 1024), (2048, 10_944), (4096, 28_672)),  # (d_in, d_out)
    "tiny": ((32, 96),),
}
TOY: Sizes = {"width": 64, "heads": 2, "layers": 2, "hidden": 96, "vocab_size": 256, "threads": 1}
TOY_STEP: Sizes = TOY | {"sequence_length": 32, "batch_size": 4, "modes": ("eager",)}
TINY: dict[str, Sizes] = {
    "step": BASE | TOY_STEP | {"ranks": (8, 16)},
    "adapters": LLAMA | TOY_STEP | {"kv_heads": 1, "ranks": (8,)},
    "op": OP | {"width": 64, "hidden": 96, "tokens": 64, "ranks": (8,), "modes": ("eager",), "threads": 1},
    "decode": DECODE | TOY | {"ranks": (8,), "modes": ("eager",), "context": 16, "dtype": "float32"},
}
FULL: dict[str, Sizes] = {"step": BASE, "adapters": LLAMA, "op": OP, "decode": DECODE}


def main() -> int:
    """Measure and print JSON; return 1 if a measurement failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: a rehearsal")
    parser.add_argument("--batch-size", type=int, help="sequences of a step of the base model")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each arm")
    parser.add_argument("--steps", type=int, default=100, help="steps of the loss curves")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the loss curves, after 20 steps of warm-up")
    parser.add_argument("--minutes", type=float, default=10.0, help="no part begins after so many")
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--output", type=Path, help="write the JSON here, after every measurement")
    options = parser.parse_args()
    sizes = TINY if options.tiny else FULL
    if options.batch_size is not None:
        sizes = sizes | {"step": sizes["step"] | {"batch_size": options.batch_size}}
    cuda = options.device.startswith("cuda")
    clock: Clock = "cuda" if cuda else "wall"
    timed = {"rounds": options.rounds, "warmup": 5 if cuda else 1, "clock": clock, "device": options.device}
    sizes = {name: each | timed for name, each in sizes.items()}
    try:
        config = TrainBenchConfig(**sizes["step"])
    except UserError as error:
        parser.error(str(error))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {
        "versions": {name: version(name.replace("_", "-")) for name in ("torch", "transformers", "nonlinear_lowrank")},
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "sizes": sizes,
        "linears": 6 * config.layers,
        "loss_steps": options.steps,
        "failed": {},
        "skipped": [],
    }
    began = time.perf_counter()
    for name in options.only:
        start = time.perf_counter()
        if start - began > 60 * options.minutes:
            results["skipped"].append(name)
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            try:
                results[name] = MEASUREMENTS[name](sizes, options)
            except Exception as error:  # the machine's minutes are few: go on with what can still be measured
                results["failed"][name] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            results.setdefault("seconds", {})[name] = round(time.perf_counter() - start, 1)
            _release()
        if options.output is not None:
            options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results))
    return 1 if results["failed"] else 0


def _measure(measure: Callable[..., Any], config: Any) -> dict[str, Any]:
    """Run a benchmark of `nlr bench`, print its table on standard error, and return its record."""
    result = measure(config, progress=lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    print(result, file=sys.stderr, flush=True)
    return json.loads(result.to_json())


def operator(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """Errors relative to the largest entry, of the output and of every gradient."""
    config = TrainBenchConfig(**sizes["step"])
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    errors: dict[str, Any] = {}
    for rank in config.ranks:
        torch.manual_seed(rank)
        layer = NobleLinear(config.width, 2 * config.hidden, False, config=NobleConfig(rank=rank, up_scale=1.0))
        x = torch.randn(config.batch_size * config.sequence_length, config.width)
        dy = torch.randn(x.shape[0], 2 * config.hidden)

        def run(function: Callable[..., Any], dtype: torch.dtype, layer=layer, x=x, dy=dy) -> list[torch.Tensor]:
            def leaf(tensor: torch.Tensor) -> torch.Tensor:
                # All start from the rounded numbers, so that only the arithmetic differs.
                rounded = tensor.detach().to(config.device, torch.bfloat16 if config.bf16 else torch.float32)
                return rounded.to(dtype).requires_grad_()

            leaves = [leaf(tensor) for tensor in (x, layer.weight, *layer.branch().flat())]
            y = function(leaves[0], leaves[1], None, Branch.of_flat(leaves[2:], "cosine"))
            y.backward(leaf(dy).detach())
            return [y.detach(), *(tensor.grad for tensor in leaves)]

        exact = run(noble_linear_reference, torch.float64)
        names = ["y", "x", "weight", "down", "up", "mix", "frequency1", "frequency2", "phase1", "phase2"]
        errors[f"r={rank}"] = {
            kind: {
                name: float((got.double() - want).abs().max() / want.abs().max())
                for name, got, want in zip(names, run(function, dtype), exact, strict=True)
            }
            for kind, function in (("noble_linear", noble_linear), ("plain formula", noble_linear_reference))
        }
    return errors


def step(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """NOBLE on the base model."""
    return _measure(bench_step, TrainBenchConfig(**sizes["step"]))


def fused(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """The same with layers of one input together, compiled alone."""
    one_mode = {"fuse_shared_inputs": True, "modes": sizes["step"]["modes"][:1]}
    return _measure(bench_step, TrainBenchConfig(**sizes["step"] | one_mode))


def memory(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """Memory of the same model."""
    return _measure(bench_memory, TrainBenchConfig(**sizes["step"]))


def adapters(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """Step times over LoRA: as many blocks as let every arm be there at once."""
    return _measure(bench_step, TrainBenchConfig(**sizes["adapters"]))


def peak(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """All 32 blocks, one arm at a time."""
    layers = sizes["adapters"]["layers"] if options.tiny else 32
    return _measure(bench_memory, TrainBenchConfig(**sizes["adapters"] | {"layers": layers}))


def forms(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """{"tokens d_in d_out": {"constant=value": record}}, at the batch of OP and a sixteenth of it."""
    found: dict[str, Any] = {}
    for d_in, d_out in SHAPES["tiny" if options.tiny else "full"]:
        for tokens in (sizes["op"]["tokens"], sizes["op"]["tokens"] // 16):
            shape = {"operators": ("noble",), "width": d_in, "hidden": d_out, "tokens": tokens, "modes": ("eager",)}
            records = found[f"{tokens} {d_in} {d_out}"] = {}
            for constant in ("JOIN_UP", "FUSE_DOWN"):
                for value in (False, True):
                    setattr(noble_op, constant, value)
                    try:
                        records[f"{constant}={value}"] = _measure(bench_op, OpBenchConfig(**sizes["op"] | shape))
                    finally:
                        setattr(noble_op, constant, None)
    return found


def op(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """Single operators."""
    return _measure(bench_op, OpBenchConfig(**sizes["op"]))


def decode(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, Any]:
    """One token."""
    return _measure(bench_decode, DecodeBenchConfig(**sizes["decode"]))


def losses(sizes: dict[str, Sizes], options: argparse.Namespace) -> dict[str, list[float]]:
    """arm -> losses of the first steps."""
    config = TrainBenchConfig(**sizes["step"])
    text = _text(options.steps * config.batch_size * (config.sequence_length))
    batches = text.view(options.steps, config.batch_size, config.sequence_length).to(config.device)
    curves = {}
    for arm in bench_arms(config.methods, config.ranks):
        position = iter(range(options.steps))
        # The mode of the first timed arm; the batch is looked up inside the step.
        stepper = Stepper(config, config.modes[0], arm, batch=lambda p=position: batches[next(p)], lr=options.lr)
        peak_lrs = [group["lr"] for group in stepper.optimizer.param_groups]
        values = []
        for index in range(options.steps):
            for group, peak_lr in zip(stepper.optimizer.param_groups, peak_lrs, strict=True):
                group["lr"] = peak_lr * min(1.0, (index + 1) / 20)
            values.append(stepper.step())
        curves[arm.name] = torch.stack(values).tolist()
        print(f"  {arm.name}: {curves[arm.name][0]:.3f} -> {curves[arm.name][-1]:.3f}", file=sys.stderr, flush=True)
        del stepper
        _release()
    return curves


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


MEASUREMENTS: dict[str, Callable[[dict[str, Sizes], argparse.Namespace], dict[str, Any]]] = {
    "operator": operator,
    "step": step,
    "fused": fused,
    "forms": forms,
    "adapters": adapters,
    "peak": peak,
    "op": op,
    "memory": memory,
    "decode": decode,
    "losses": losses,
}

if __name__ == "__main__":
    sys.exit(main())

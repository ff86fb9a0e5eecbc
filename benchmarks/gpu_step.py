"""What to measure first when a GPU is at hand: the paper's base model with and without NOBLE branches.

    python benchmarks/gpu_step.py --output gpu_step.json           # llm-base, bfloat16, torch.compile
    python benchmarks/gpu_step.py --device cpu --tiny              # the same in toy sizes, seconds

Four measurements, each written to the output as soon as it is there, since such machines are lent by the
minute (what failed says so under "failed", and the rest still runs):

    operator    largest error of noble_linear and its gradients against the float64 formula, beside that of
                the plain formula in the same type (DESIGN: at most twice it)
    step        step time over the baseline, arms interleaved, beside the FLOP ratio
    losses      the first steps of each arm on real text (bytes of the running Python's own sources, the same
                batches in all arms): finite, falling, no spike
    kept_bytes  kept for backward and peak memory of each arm, eager and compiled
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
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nonlinear_lowrank.analysis.bench_model import BASELINE
from nonlinear_lowrank.analysis.bench_step import StepBenchConfig, bench_step, make_stepper
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.analysis.timing import Clock
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.layers import NobleConfig, NobleLinear
from nonlinear_lowrank.ops.cosnet import noble_linear, noble_linear_reference

BASE: dict[str, Any] = {
    "width": 1024,
    "layers": 12,
    "heads": 8,
    "hidden": 2752,
    "vocab_size": 50257,
    "sequence_length": 1024,
    "batch_size": 16,
    "ranks": (64, 128, 256),
    "modes": ("compiled", "eager"),
    "rounds": 30,
    "warmup": 5,
    "threads": None,
    "bf16": True,
}
TINY = BASE | {
    "width": 64,
    "layers": 2,
    "heads": 2,
    "hidden": 96,
    "vocab_size": 256,
    "sequence_length": 32,
    "batch_size": 4,
    "ranks": (8, 16),
    "modes": ("eager",),
    "rounds": 3,
    "warmup": 1,
    "threads": 1,
}


def main() -> int:
    """Measures, prints JSON, returns 1 if a measurement failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes: a rehearsal")
    parser.add_argument("--batch-size", type=int, help="sequences of a step")
    parser.add_argument("--rounds", type=int, help="timed steps of each arm")
    parser.add_argument("--steps", type=int, default=100, help="steps of the loss curves")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the loss curves, after 20 steps of warm-up")
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--output", type=Path, help="write the JSON here, after every measurement")
    options = parser.parse_args()
    chosen = (TINY if options.tiny else BASE) | {
        name: value
        for name, value in (("batch_size", options.batch_size), ("rounds", options.rounds))
        if value is not None
    }
    clock: Clock = "cuda" if options.device.startswith("cuda") else "wall"
    try:
        config = StepBenchConfig(**chosen, device=options.device, clock=clock)
    except UserError as error:
        parser.error(str(error))
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high")
    results: dict[str, Any] = {
        "versions": {name: version(name.replace("_", "-")) for name in ("torch", "transformers", "nonlinear_lowrank")},
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "config": asdict(config),
        "ranks": list(config.ranks),
        "tokens": config.batch_size * config.sequence_length,
        "element_size": 2 if config.bf16 else 4,
        "linears": 6 * config.layers,
        "loss_steps": options.steps,
        "failed": {},
    }
    for name in options.only:
        start = time.perf_counter()
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            results[name] = MEASUREMENTS[name](config, options)
        except Exception as error:  # the machine's minutes are few: go on with what can still be measured
            results["failed"][name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        results.setdefault("seconds", {})[name] = round(time.perf_counter() - start, 1)
        _release()
        if options.output is not None:
            options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results))
    return 1 if results["failed"] else 0


def operator(config: StepBenchConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Errors relative to the largest entry, of the output and of every gradient."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    errors: dict[str, Any] = {}
    for rank in config.ranks:
        torch.manual_seed(rank)
        layer = NobleLinear(config.width, 2 * config.hidden, False, config=NobleConfig(rank=rank, up_scale=1.0))
        x = torch.randn(config.batch_size * config.sequence_length, config.width)
        dy = torch.randn(x.shape[0], 2 * config.hidden)

        def run(function: Callable[..., Any], dtype: torch.dtype, layer=layer, x=x, dy=dy) -> list[torch.Tensor]:
            lists = [[layer.noble_mix1], [layer.noble_frequency1, layer.noble_frequency2]]
            lists.append([layer.noble_phase1, layer.noble_phase2])

            def leaf(tensor: torch.Tensor) -> torch.Tensor:
                # All start from the rounded numbers, so that only the arithmetic differs.
                rounded = tensor.detach().to(config.device, torch.bfloat16 if config.bf16 else torch.float32)
                return rounded.to(dtype).requires_grad_()

            leaves = [leaf(tensor) for tensor in (x, layer.weight, layer.noble_down, layer.noble_up)]
            branch = [[leaf(tensor) for tensor in tensors] for tensors in lists]
            y = function(leaves[0], leaves[1], None, leaves[2], leaves[3], *branch, "cosine")
            y.backward(leaf(dy).detach())
            return [y.detach(), *(tensor.grad for tensor in [*leaves, *branch[0], *branch[1], *branch[2]])]

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


def step(config: StepBenchConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Step times, ratios and the table."""
    result = bench_step(config, progress=lambda line: print(f"  {line}", file=sys.stderr, flush=True))
    print(result, file=sys.stderr)
    return json.loads(result.to_json())


def losses(config: StepBenchConfig, options: argparse.Namespace) -> dict[str, list[float]]:
    """arm -> losses of the first steps."""
    text = _text(options.steps * config.batch_size * (config.sequence_length))
    batches = text.view(options.steps, config.batch_size, config.sequence_length).to(config.device)
    curves = {}
    for arm, rank in _arms(config):
        position = iter(range(options.steps))
        # The mode of the first timed arm; the batch is looked up inside the step.
        stepper = make_stepper(config, config.modes[0], rank, batch=lambda p=position: batches[next(p)], lr=options.lr)
        rates = [group["lr"] for group in stepper.optimizer.param_groups]
        values = []
        for index in range(options.steps):
            for group, rate in zip(stepper.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, (index + 1) / 20)
            values.append(stepper.step())
        curves[arm] = torch.stack(values).tolist()
        print(f"  {arm}: {curves[arm][0]:.3f} -> {curves[arm][-1]:.3f}", file=sys.stderr, flush=True)
        del stepper
        _release()
    return curves


def kept_bytes(config: StepBenchConfig, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """arm -> mode -> bytes kept for backward by one forward pass with its loss, and peak memory of a step."""
    result: dict[str, dict[str, int]] = {}
    cuda = torch.device(config.device).type == "cuda"
    ids = torch.randint(0, config.vocab_size, (config.batch_size, config.sequence_length)).to(config.device)
    for arm, rank in _arms(config):
        result[arm] = {}
        for mode in ("eager", "compiled"):
            model = make_stepper(config, "eager", rank).model
            run = torch.compile(model) if mode == "compiled" else model

            def forward(run=run) -> torch.Tensor:
                with torch.autocast(torch.device(config.device).type, torch.bfloat16, enabled=config.bf16):
                    return run(input_ids=ids, labels=ids).loss

            forward().backward()  # compiles, and leaves gradients where a step has them
            if cuda:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                forward().backward()
                result[arm][f"{mode} peak"] = torch.cuda.max_memory_allocated() - before
            result[arm][mode] = saved_bytes(forward, parameters=[*model.parameters(), *model.buffers()])
            del model, run, forward
            _release()
    return result


def _arms(config: StepBenchConfig) -> list[tuple[str, int | None]]:
    return [(BASELINE, None), *((f"r={rank}", rank) for rank in config.ranks)]


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


MEASUREMENTS = {"operator": operator, "step": step, "losses": losses, "kept_bytes": kept_bytes}

if __name__ == "__main__":
    sys.exit(main())

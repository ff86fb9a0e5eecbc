"""`nlr bench step`: what a NOBLE branch adds to the time of a training step, beside what it adds in FLOPs.

The model is the paper's backbone (GLM) in small, with a vocabulary so small that the linears inside the
blocks are what is measured. A step is forward, loss, backward, AdamW and zero_grad. Baseline and NOBLE take
turns step by step (timing.py); the ratio of a round is NOBLE's time over the baseline's.
"""

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from rich.table import Table
from torch import nn
from transformers import GlmConfig, GlmForCausalLM

from ..augmentation import augment
from ..errors import UserError
from ..layers import NobleConfig
from ..optim import param_groups
from .cost import ModelCost, model_cost
from .inspect import render_table
from .timing import Clock, Ratio, interleaved_step_times, paired_ratio

Mode = Literal["eager", "compiled"]

BASELINE = "baseline"


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig:
    """What `nlr bench step` measures.

    Raises:
        UserError: a value is out of range.
    """

    width: int = 512
    """d, the model width."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 8
    """Attention heads."""
    hidden: int = 1376
    """Width of the GeGLU."""
    vocab_size: int = 256
    """Small, so that the head hardly counts."""
    sequence_length: int = 128
    """Tokens of a sequence."""
    batch_size: int = 8
    """Sequences of a step."""
    ranks: tuple[int, ...] = (32, 64)
    """NOBLE's r, each an arm of its own."""
    activation: str = "cosine"
    """NOBLE's bottleneck."""
    depth: int = 2
    """Activations in the bottleneck."""
    modes: tuple[Mode, ...] = ("compiled", "eager")
    """With torch.compile (its default backend), or without."""
    rounds: int = 30
    """Timed steps of each arm."""
    warmup: int = 4
    """Untimed steps of each arm; the first compiles."""
    clock: Clock = "process"
    """process: CPU seconds. wall: seconds passed. cuda: CUDA events."""
    threads: int | None = 1
    """CPU threads; None leaves torch's number."""
    device: str = "cpu"
    """Where the model lives."""
    bf16: bool = False
    """Train under bfloat16 autocast."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "modes", tuple(self.modes))
        for name in (
            *("width", "layers", "heads", "hidden", "vocab_size", "sequence_length", "batch_size"),
            *("rounds", "warmup"),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.width % (2 * self.heads):
            raise UserError(f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads})")
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise UserError(f"ranks must be different whole numbers, at least one, not {self.ranks!r}")
        for rank in self.ranks:
            NobleConfig(rank=rank, activation=self.activation, depth=self.depth)  # type: ignore[arg-type]
            if rank >= min(self.width, self.hidden):
                raise UserError(f"rank {rank} is not low; choose a rank below {min(self.width, self.hidden)}")
        for name, known in (("modes", get_args(Mode)), ("clock", get_args(Clock))):
            given = getattr(self, name)
            for value in (given,) if isinstance(given, str) else given:
                if value not in known:
                    raise UserError(f"unknown {name} {value!r}; choose {' or '.join(known)}")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads must be at least 1, not {self.threads!r}")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise UserError(f"device {self.device!r} is not there; use --device cpu")


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """NOBLE at one rank over the baseline, in one mode."""

    mode: str
    rank: int
    parameter_ratio: float
    flop_ratio: float
    """Of forward FLOPs: linears, attention scores and values, head."""
    step: Ratio
    """Of step times."""
    step_over_flops: float
    """step.median / flop_ratio: 1 means that a branch costs just what its FLOPs do."""
    baseline_seconds: float
    """Median step of the baseline."""


@dataclass(frozen=True, kw_only=True)
class StepBench:
    """Result of `bench_step`; `print(result)` gives the table."""

    config: StepBenchConfig
    rows: list[StepRow]
    times: dict[str, dict[str, list[float]]]
    """mode -> arm -> seconds of its steps."""
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Everything, as text."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("mode")
        for column in (
            "r",
            "parameters x",
            "FLOPs x",
            "step time x [95 %]",
            "quartiles",
            "step / FLOPs",
            "baseline ms",
        ):
            table.add_column(column, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(
                row.mode,
                str(row.rank),
                f"{row.parameter_ratio:.4f}",
                f"{row.flop_ratio:.4f}",
                str(row.step),
                f"{row.step.lower_quartile:.3f} to {row.step.upper_quartile:.3f}",
                f"{row.step_over_flops:.3f}",
                f"{1000 * row.baseline_seconds:.1f}",
            )
        config = self.config
        threads = self.machine.get("threads")
        about = (
            f"GLM blocks: d {config.width}, {config.layers} layers, {config.batch_size} x {config.sequence_length} "
            f"tokens a step, {'bfloat16 autocast' if config.bf16 else 'float32'}, {config.device}, "
            f"{threads} thread{'s' if threads != 1 else ''}, fused AdamW included\n"
            f"median of {config.rounds} paired ratios, arms interleaved, clock: {config.clock}"
        )
        return f"{render_table(table, 120)}\n{about}"


def bench_step(config: StepBenchConfig, *, progress: Callable[[str], object] | None = None) -> StepBench:
    """Measures it.

    Args:
        config: see `StepBenchConfig`.
        progress: called with a line now and then, e.g. `print`.

    Raises:
        UserError: the clock does not fit the machine.
    """
    say = progress or (lambda line: None)
    before = torch.get_num_threads()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        rows: list[StepRow] = []
        times: dict[str, dict[str, list[float]]] = {}
        for mode in config.modes:
            torch._dynamo.reset()  # compiled arms are equal classes: their code must not share a cache limit
            arms = {BASELINE: make_stepper(config, mode, None)}
            arms |= {f"r={rank}": make_stepper(config, mode, rank) for rank in config.ranks}
            say(f"{mode}: {len(arms)} arms, {config.warmup} warm-up and {config.rounds} timed steps each")
            times[mode] = interleaved_step_times(
                {name: stepper.step for name, stepper in arms.items()}, config.rounds, config.warmup, config.clock
            )
            base = times[mode][BASELINE]
            for rank in config.ranks:
                cost, step = arms[f"r={rank}"].cost, paired_ratio(times[mode][f"r={rank}"], base)
                rows.append(
                    StepRow(
                        mode=mode,
                        rank=rank,
                        parameter_ratio=cost.parameter_ratio,
                        flop_ratio=cost.flop_ratio,
                        step=step,
                        step_over_flops=step.median / cost.flop_ratio,
                        baseline_seconds=sorted(base)[len(base) // 2],
                    )
                )
        machine = {
            "torch": torch.__version__,
            "processor": platform.processor() or platform.machine(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "threads": torch.get_num_threads(),
        }
    finally:
        torch.set_num_threads(before)
    return StepBench(config=config, rows=rows, times=times, machine=machine)


@dataclass(frozen=True, kw_only=True)
class Stepper:
    """One arm, ready to take steps."""

    model: nn.Module
    cost: ModelCost
    optimizer: torch.optim.Optimizer
    step: Callable[[], torch.Tensor]
    """Trains on one batch and returns the loss (a tensor: reading it would wait for the device)."""


def make_stepper(
    config: StepBenchConfig,
    mode: Mode,
    rank: int | None,
    *,
    batch: Callable[[], torch.Tensor] | None = None,
    lr: float = 1e-6,
) -> Stepper:
    """The arm of a rank (None: the baseline), equal batches and equal seed in all arms.

    Args:
        config: sizes, device and type.
        mode: "eager" or "compiled".
        rank: NOBLE's r.
        batch: gives the token ids (batch_size, sequence_length) of each step; None: the same random ids.
        lr: of AdamW. On one batch again and again, a rate that trains would end in subnormal numbers, whose
            arithmetic is slow.
    """
    torch.manual_seed(0)
    model: nn.Module = GlmForCausalLM(glm_config(config))
    model.to(config.device)
    if rank is not None:
        noble = NobleConfig(rank=rank, activation=config.activation, depth=config.depth)  # type: ignore[arg-type]
        augment(model, noble, verbose=False)
    model.train()
    groups = param_groups(model, lr, weight_decay=0.01, verbose=False)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)
    forward: Callable[..., Any] = torch.compile(model) if mode == "compiled" else model
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch_size, config.sequence_length)
    ids = torch.randint(0, config.vocab_size, shape, generator=generator).to(config.device)
    kind = torch.device(config.device).type

    def step() -> torch.Tensor:
        tokens = ids if batch is None else batch()
        with torch.autocast(kind, torch.bfloat16, enabled=config.bf16):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    cost = model_cost(model, config.sequence_length)
    return Stepper(model=model, cost=cost, optimizer=optimizer, step=step)


def glm_config(config: StepBenchConfig) -> GlmConfig:
    """The backbone: separate q, k, v, o, one fused gate-up projection, no biases."""
    return GlmConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.width // config.heads,
        hidden_act="gelu",
        attention_bias=False,
        max_position_embeddings=config.sequence_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=0,  # GLM's own three lie far outside this vocabulary
        use_cache=False,
    )

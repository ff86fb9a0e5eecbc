"""What the benchmarks of `nlr bench` share: the model they measure, and the settings of a measurement.

The model is the paper's backbone (GLM), or a Llama, in small, with a vocabulary so small that the linears inside the
blocks are what is measured.
"""

import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any, Literal, Self, get_args

import torch
from rich.table import Table
from torch import nn
from transformers import GlmConfig, GlmForCausalLM, LlamaConfig, LlamaForCausalLM

from nlr_lab.plan.inspect import render_table
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import NobleConfig
from nonlinear_lowrank.validation import check_integer

from .machine_rates import MachineRates
from .methods import BenchArm, bench_arms
from .timing import Clock, Ratio

Mode = Literal["eager", "compiled", "graphs"]
Family = Literal["glm", "llama"]


_OF_NOBLE = {"activation", "depth", "fusion", "share_down", "fuse_shared_inputs"}


@dataclass(frozen=True, kw_only=True)
class ModelBenchConfig:
    """The model that a benchmark measures, and how often.

    Raises:
        UserError: a value is out of range.
    """

    width: int = 512
    """d, the model width."""
    layers: int = 2
    """Transformer blocks."""
    heads: int = 8
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as of queries."""
    hidden: int = 1376
    """Width of the gated feed-forward."""
    vocab_size: int = 256
    """Small, so that the head hardly counts."""
    family: Family = "glm"
    """glm: gate and up projection in one linear, GELU. llama: two linears, SiLU."""
    methods: tuple[str, ...] = ("noble",)
    """What is put on it: noble, sine-lowrank, nonlinear-query, lora (over the plain model, all of it trained), dora,
    sine-lora, sine-dora, peanut, noble-adapter, nora, nora++ (over LoRA)."""
    ranks: tuple[int, ...] = (32, 64)
    """r, each an arm of its own."""
    activation: str = "cosine"
    """NOBLE's bottleneck."""
    depth: int = 2
    """Activations in the bottleneck."""
    fusion: Literal["add", "gated"] = "add"
    """How the branch joins the linear."""
    share_down: Literal["none", "qkv"] = "none"
    """Whether query, key and value share one down projection."""
    fuse_shared_inputs: bool = False
    """Whether NOBLE layers that read one input are computed together."""
    modes: tuple[Mode, ...] = ("compiled", "eager")
    """eager, compiled (torch.compile) or graphs (torch.compile with CUDA graphs, "reduce-overhead")."""
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "modes", tuple(self.modes))
        object.__setattr__(self, "methods", tuple(self.methods))
        for name in ("width", "layers", "heads", "hidden", "vocab_size", "rounds", "warmup"):
            check_integer(name, getattr(self, name), minimum=1)
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise UserError(f"kv_heads must divide the {self.heads} heads, not {self.kv_heads!r}")
        if self.width % (2 * self.heads):
            raise UserError(f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads})")
        check_different("ranks", self.ranks)
        for rank in self.ranks:
            self.noble(rank)
            if rank >= min(self.width, self.hidden):
                raise UserError(f"rank {rank} is not low; choose a rank below {min(self.width, self.hidden)}")
        bench_arms(self.methods, self.ranks)
        if "noble" not in self.methods:
            for each in fields(ModelBenchConfig):
                if each.name in _OF_NOBLE and getattr(self, each.name) != each.default:
                    raise UserError(f"{each.name} is NOBLE's; leave it out, or add noble to the methods")
        if self.family not in get_args(Family):
            raise UserError(f"unknown family {self.family!r}; choose {' or '.join(get_args(Family))}")
        check_timing(self)

    def noble(self, rank: int) -> NobleConfig:
        """The branches of an arm."""
        return NobleConfig(
            rank=rank,
            activation=self.activation,  # type: ignore[arg-type]
            depth=self.depth,
            fusion=self.fusion,
            share_down=self.share_down,
            fuse_shared_inputs=self.fuse_shared_inputs,
        )


def check_different(name: str, values: Sequence[Any]) -> None:
    """Raises UserError: nothing to measure, or something twice under one label."""
    if not values or len(set(values)) < len(values):
        raise UserError(f"{name} must be different, and at least one, got {' '.join(map(str, values)) or 'none'}")


def check_timing(config: Any) -> None:
    """Raises UserError: modes, clock, threads or device of a benchmark cannot be."""
    for name, given, known in (("modes", config.modes, get_args(Mode)), ("clock", (config.clock,), get_args(Clock))):
        for value in given:
            if value not in known:
                raise UserError(f"unknown {name} {value!r}; choose {' or '.join(known)}")
    check_different("modes", config.modes)
    if config.threads is not None and config.threads < 1:
        raise UserError(f"threads must be at least 1, got {config.threads!r}")
    if torch.device(config.device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {config.device!r} is not there; use --device cpu")


def in_mode(function: Callable[..., Any], mode: Mode, *, dynamic: bool | None = None) -> Callable[..., Any]:
    """The function as it is, or compiled."""
    if mode == "eager":
        return function
    return torch.compile(function, mode="reduce-overhead" if mode == "graphs" else None, dynamic=dynamic)


def make_model(
    config: ModelBenchConfig,
    arm: BenchArm,
    positions: int,
    *,
    cache: bool = False,
    frozen_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The model with an arm's method on it; the plain weights are the same numbers in all arms.

    Args:
        config: sizes and device.
        arm: one of `bench_arms`.
        positions: tokens of the longest sequence.
        cache: keep keys and values.
        frozen_dtype: type of the weights that the method does not train.
    """
    torch.manual_seed(0)
    with torch.device(config.device):
        model = _plain_model(config, positions, cache)
    if arm.method is None:
        return model
    if arm.method.frozen:
        model.to(frozen_dtype)
    return arm.method.apply(model, arm.rank or 0, config.noble)


def _plain_model(config: ModelBenchConfig, positions: int, cache: bool) -> nn.Module:
    """Separate q, k, v, o, no biases."""
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.width // config.heads,
        "attention_bias": False,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 0,  # GLM's own three lie far outside this vocabulary
        "use_cache": cache,
    }
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if config.family == "llama":
        return LlamaForCausalLM(LlamaConfig(hidden_act="silu", rope_parameters=rope, **common))
    rope |= {"partial_rotary_factor": 1.0}
    return GlmForCausalLM(GlmConfig(hidden_act="gelu", rope_parameters=rope, **common))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One mark of a picture, with its interval where there is one."""

    panel: str
    label: str
    value: float
    low: float
    high: float

    @classmethod
    def of_ratio(cls, panel: str, label: str, ratio: Ratio) -> Self:
        """The median with its interval."""
        return cls(panel=panel, label=label, value=ratio.median, low=ratio.low, high=ratio.high)


@dataclass(frozen=True, kw_only=True)
class BenchResult(ABC):
    """What every benchmark hands back; `print(result)` gives its table."""

    config: Any
    rows: list[Any]
    times: dict[str, dict[str, list[float]]]
    """what was measured -> arm -> seconds of its steps."""
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Everything, as text."""
        return json.dumps(asdict(self), indent=2)

    @abstractmethod
    def points(self) -> tuple[str, list[Point]]:
        """What a picture shows: the name of its axis, and the points."""


def describe_machine(config: Any) -> dict[str, Any]:
    """What a time must be read with: versions, and how fast this machine copies and multiplies in the same minute.

    Args:
        config: with a `device`; `bf16` says in which type products are measured.
    """
    dtype = torch.bfloat16 if getattr(config, "bf16", False) else torch.float32
    return {
        "torch": torch.__version__,
        "package": version("nonlinear-lowrank"),
        "processor": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "control": asdict(MachineRates.measure(config.device, dtype)),
    }


def table_with(*columns: str) -> Table:
    """An empty table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0)
    return table


def describe(config: ModelBenchConfig, table: Table, what: str, machine: dict[str, Any], *, timed: bool = True) -> str:
    """The table, with what was measured under it."""
    names = {"glm": "GLM", "llama": "Llama"}
    model = f"{names[config.family]} blocks: d {config.width}, {config.layers} layers, {what}"
    return f"{render_table(table, 140)}\n{model}, {where(config, machine, timed=timed)}"


def where(config: Any, machine: dict[str, Any], *, timed: bool = True) -> str:
    """Device and threads, and, for times, how they were taken and how fast the machine was meanwhile."""
    threads = machine["threads"]
    place = f"{config.device}, {threads} thread{'s' if threads != 1 else ''}"
    if not timed:
        return place
    how = f"median of {config.rounds} paired ratios, arms interleaved, clock: {config.clock}"
    return f"{place}\n{how}; {MachineRates(**machine['control'])}"

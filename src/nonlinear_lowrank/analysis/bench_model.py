"""What the benchmarks of `nlr bench` share: the model they measure, and the settings of a measurement."""

import json
import platform
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import torch
from rich.table import Table
from torch import nn
from transformers import GlmConfig, GlmForCausalLM

from ..augmentation import augment
from ..errors import UserError
from ..layers import NobleConfig
from .inspect import render_table
from .timing import Clock

Mode = Literal["eager", "compiled"]

BASELINE = "baseline"


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
    hidden: int = 1376
    """Width of the GeGLU."""
    vocab_size: int = 256
    """Small, so that the head hardly counts."""
    ranks: tuple[int, ...] = (32, 64)
    """NOBLE's r, each an arm of its own."""
    activation: str = "cosine"
    """NOBLE's bottleneck."""
    depth: int = 2
    """Activations in the bottleneck."""
    fusion: Literal["add", "gated"] = "add"
    """How the branch joins the linear."""
    share_down: Literal["none", "qkv"] = "none"
    """Whether query, key and value share one down projection."""
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "modes", tuple(self.modes))
        for name in ("width", "layers", "heads", "hidden", "vocab_size", "rounds", "warmup"):
            check_at_least_1(name, getattr(self, name))
        if self.width % (2 * self.heads):
            raise UserError(f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads})")
        if not self.ranks or len(set(self.ranks)) < len(self.ranks):
            raise UserError(f"ranks must be different whole numbers, at least one, not {self.ranks!r}")
        for rank in self.ranks:
            self.noble(rank)
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

    def noble(self, rank: int) -> NobleConfig:
        """The branches of an arm."""
        return NobleConfig(
            rank=rank,
            activation=self.activation,  # type: ignore[arg-type]
            depth=self.depth,
            fusion=self.fusion,
            share_down=self.share_down,
        )


def check_at_least_1(name: str, value: Any) -> None:
    """Raises UserError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} must be a whole number of at least 1, not {value!r}")


def make_model(config: ModelBenchConfig, rank: int | None, positions: int, *, cache: bool = False) -> nn.Module:
    """The backbone of the paper (GLM), the same numbers in all arms, with branches of a rank (None: the baseline).

    Args:
        config: sizes and device.
        rank: NOBLE's r.
        positions: tokens of the longest sequence.
        cache: keep keys and values.
    """
    torch.manual_seed(0)
    model: nn.Module = GlmForCausalLM(glm_config(config, positions, cache))
    model.to(config.device)
    if rank is not None:
        augment(model, config.noble(rank), verbose=False)
    return model


def glm_config(config: ModelBenchConfig, positions: int, cache: bool) -> GlmConfig:
    """Separate q, k, v, o, one fused gate-up projection, no biases."""
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
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=0,  # GLM's own three lie far outside this vocabulary
        use_cache=cache,
    )


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What every benchmark hands back; `print(result)` gives its table."""

    config: Any
    rows: list[Any]
    times: dict[str, dict[str, list[float]]]
    """what was measured -> arm -> seconds of its steps."""
    machine: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Everything, as text."""
        return json.dumps(asdict(self), indent=2)


def describe_machine() -> dict[str, Any]:
    """What a time must be read with."""
    return {
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def table_with(*columns: str) -> Table:
    """An empty table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0)
    return table


def describe(config: ModelBenchConfig, table: Table, what: str, machine: dict[str, Any]) -> str:
    """The table, with what was measured under it."""
    threads = machine.get("threads")
    return (
        f"{render_table(table, 120)}\n"
        f"GLM blocks: d {config.width}, {config.layers} layers, {what}, {config.device}, "
        f"{threads} thread{'s' if threads != 1 else ''}\n"
        f"median of {config.rounds} paired ratios, arms interleaved, clock: {config.clock}"
    )

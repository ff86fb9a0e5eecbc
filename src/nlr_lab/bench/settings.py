"""Settings of the benchmarks and their checks, without torch: `nlr bench step --help` reads them too."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

if TYPE_CHECKING:
    from nonlinear_lowrank.methods.noble import NobleConfig

Clock = Literal["process", "wall", "cuda"]
"""process: CPU seconds of all threads of this process, blind to the machine's other work. wall: seconds passed.
cuda: seconds between two events on the current CUDA stream."""

Mode = Literal["eager", "compiled", "graphs"]
Operator = Literal["noble", "sine", "rational", "gated"]
OPERATORS = {"cosnet": "noble", "rational": "rational", "sine": "sine"}
"""Kernels -> the method whose folder has them."""
CAPABILITIES = (80, 86, 89, 90)
_OF_NOBLE = ("activation", "depth", "fusion", "share_down", "fuse_shared_inputs")


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Settings of every timed benchmark. Integers must be positive, and values of a tuple different, at least one.

    Raises:
        UserError: a value is out of range.
    """

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
    """cpu, cuda, or empty for the GPU if there is one."""

    def __post_init__(self) -> None:
        from nlr_lab.runtime.environment import choose_device

        for name, hint in get_type_hints(type(self)).items():
            _check(name, hint, getattr(self, name))
        object.__setattr__(self, "device", str(choose_device(self.device)))


def _check(name: str, kind: Any, value: Any) -> None:
    """Check a field by its type."""
    values = (value,)
    if get_origin(kind) is tuple:
        kind, values = get_args(kind)[0], value
        if not values or len(set(values)) < len(values):
            given = " ".join(map(str, values)) or "none"
            raise UserError(f"{name} must be different, and at least one, got {given}")
    for each in values:
        if get_origin(kind) is Literal and each not in get_args(kind):
            raise UserError(f"unknown {name} {each!r}; choose {' or '.join(map(str, get_args(kind)))}")
        if kind is int or (kind == int | None and each is not None):
            check_integer(name, each, minimum=1)


def check_low(ranks: tuple[int, ...], limit: int) -> None:
    """Raise UserError unless the ranks are below the smaller side of what they are put on."""
    for rank in ranks:
        if rank >= limit:
            raise UserError(f"rank {rank} is not low; choose a rank below {limit}")


@dataclass(frozen=True, kw_only=True)
class ModelBenchConfig(BenchConfig):
    """Settings of a benchmark of a model.

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
    family: Literal["glm", "llama"] = "glm"
    """glm: gate and up projection in one linear, GELU. llama: two linears, SiLU."""
    methods: tuple[str, ...] = ("noble",)
    """Over the plain model, all of it trained: noble, sine-lowrank, nonlinear-query, qk-norm, rational, lora. Over
    LoRA: dora, sine-lora, sine-dora, peanut, noble-adapter, nora, nora++."""
    ranks: tuple[int, ...] = (32, 64)
    """r, each an arm of its own."""
    activation: Literal["cosine", "tanh", "leaky_relu", "gelu", "silu"] = "cosine"
    """NOBLE's bottleneck."""
    depth: int = 2
    """Activations in the bottleneck."""
    fusion: Literal["add", "gated"] = "add"
    """add: the sum of linear and branch; gated: a learned mixture."""
    share_down: Literal["none", "qkv"] = "none"
    """qkv: query, key and value share one down projection."""
    fuse_shared_inputs: bool = False
    """Compute NOBLE layers that read one input together."""

    def __post_init__(self) -> None:
        from .arms import bench_arms

        super().__post_init__()
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UserError(f"kv_heads must divide the {self.heads} heads, got {self.kv_heads!r}")
        if self.width % (2 * self.heads):
            raise UserError(f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads})")
        check_low(self.ranks, min(self.width, self.hidden))
        self.noble(self.ranks[0])
        bench_arms(self.methods, self.ranks)
        for each in fields(self):
            if "noble" not in self.methods and each.name in _OF_NOBLE and getattr(self, each.name) != each.default:
                raise UserError(f"{each.name} is NOBLE's; omit it, or add noble to the methods")

    def noble(self, rank: int) -> "NobleConfig":
        """Return the settings of branches of a rank."""
        from nonlinear_lowrank.methods.noble import NobleConfig

        return NobleConfig(rank=rank, **{name: getattr(self, name) for name in _OF_NOBLE})


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig(ModelBenchConfig):
    """Settings of `nlr bench step` and `nlr bench memory`.

    Raises:
        UserError: a value is out of range.
    """

    sequence_length: int = 128
    """Tokens of a sequence."""
    batch_size: int = 8
    """Sequences of a step."""
    bf16: bool = False
    """Train under bfloat16 autocast."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that an adapter does not train."""

    @property
    def setting(self) -> str:
        """Tokens and types of a step, as printed."""
        kind = "bfloat16 autocast" if self.bf16 else "float32"
        frozen = f", frozen weights {self.frozen_dtype}" if self.frozen_dtype != "float32" else ""
        return f"{self.batch_size} x {self.sequence_length} tokens a step, {kind}{frozen}"


@dataclass(frozen=True, kw_only=True)
class DecodeBenchConfig(ModelBenchConfig):
    """Settings of `nlr bench decode`.

    Raises:
        UserError: a value is out of range.
    """

    modes: tuple[Mode, ...] = ("eager",)
    """eager, compiled (torch.compile) or graphs (torch.compile with CUDA graphs, "reduce-overhead")."""
    context: int = 256
    """Tokens of each sequence that are in the cache."""
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    """Sequences that are generated at once; each is measured."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    optimized: bool = True
    """Also measure each arm after `nlr.optimize_for_inference`, where that can make it faster."""
    rounds: int = 50
    """Timed steps of each arm."""


@dataclass(frozen=True, kw_only=True)
class OpBenchConfig(BenchConfig):
    """Settings of `nlr bench op`.

    Raises:
        UserError: a value is out of range.
    """

    operators: tuple[Operator, ...] = get_args(Operator)
    """noble, sine, rational, gated."""
    width: int = 512
    """Inputs of the linear."""
    hidden: int = 2048
    """Outputs of the linear, and channels of the activations."""
    tokens: int = 1024
    """Rows of the input."""
    ranks: tuple[int, ...] = (32,)
    """r of noble and sine, each an arm of its own."""
    groups: int = 8
    """Groups of channels of the rational activations."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of inputs and weights; factors and coefficients of sine and rational are float32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_low(self.ranks, min(self.width, self.hidden))
        if self.hidden % self.groups:
            raise UserError(f"{self.groups} groups do not divide {self.hidden} channels; choose groups that do")


@dataclass(frozen=True, kw_only=True)
class KernelBenchConfig:
    """Settings of `nlr bench kernels`.

    Raises:
        UserError: an unknown operator or architecture.
    """

    operators: tuple[str, ...] = tuple(OPERATORS)
    """cosnet, rational, sine."""
    capability: int = 90
    """Compute capability times 10: 80 (A100), 86, 89 or 90 (H100, H200)."""

    def __post_init__(self) -> None:
        for name in self.operators:
            if name not in OPERATORS:
                raise UserError(f"unknown operator {name!r}; choose of {', '.join(OPERATORS)}")
        if not self.operators:
            raise UserError(f"name at least one operator of {', '.join(OPERATORS)}")
        if self.capability not in CAPABILITIES:
            raise UserError(f"capability must be 80, 86, 89 or 90, got {self.capability!r}")

"""Settings of the benchmarks and their checks, without torch: `nlr bench step --help` reads them too."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

Clock = Literal["process", "wall", "cuda"]
"""process: CPU seconds of all threads of this process, blind to the machine's other work. wall: seconds passed.
cuda: seconds between two events on the current CUDA stream."""

Mode = Literal["eager", "compiled", "graphs"]
Operator = Literal["noble", "sine", "rational", "gated"]
Kernels = Literal["cosnet", "rational", "sine"]
Parts = Literal["decode-512", "step-512", "step-256", "step-128", "call-64", "call-256", "rational", "adapters-512"]
RIVALS = ("noble-formula", "noble-official", "noble-visible")
"""NOBLE computed otherwise, see `rivals`."""
_OF_NOBLE = ("activation", "depth", "fusion", "share_down", "fuse_shared_inputs")


@dataclass(frozen=True, kw_only=True)
class KernelBenchConfig:
    """Settings of `nlr bench kernels`."""

    operators: tuple[Kernels, ...] = get_args(Kernels)
    """cosnet, rational, sine."""
    capability: Literal[80, 86, 89, 90] = 90
    """Compute capability times 10: 80 (A100), 86, 89 or 90 (H100, H200)."""

    def __post_init__(self) -> None:
        _check(self)


@dataclass(frozen=True, kw_only=True)
class TrafficBenchConfig:
    """Settings of `nlr bench traffic`: the paper's base model by default."""

    width: int = 1024
    """d."""
    hidden: int = 2752
    """Width of the gated feed-forward."""
    layers: int = 12
    """Transformer blocks."""
    vocab_size: int = 50_257
    """Outputs of the head."""
    sequence_length: int = 1024
    """Tokens of a sequence."""
    batch_size: int = 16
    """Sequences that a GPU takes at once."""
    ranks: tuple[int, ...] = (64, 128, 256)
    """r."""
    hardware: str = "h200"
    """a100, h100, h200, b200 or rtx4090."""
    utilization: float = 0.45
    """Share of the data sheet's rate that the plain model's step reaches."""
    product_share: float = 0.7
    """Share of the rate that single products reach."""
    bandwidth_share: float = 0.8
    """Share of the data sheet's bandwidth that kernels reach."""

    def __post_init__(self) -> None:
        from nlr_lab.plan.presets import find_hardware

        _check(self)
        find_hardware(self.hardware)
        for name in ("utilization", "product_share", "bandwidth_share"):
            if not 0 < getattr(self, name) <= 1:
                raise UserError(f"{name} must be above 0 and at most 1, got {getattr(self, name)!r}")
        if max(self.ranks) >= min(self.width, self.hidden):
            raise UserError(f"rank {max(self.ranks)} is too high; choose ranks below {min(self.width, self.hidden)}")

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.sequence_length


def _check(config: Any) -> None:
    """Raise UserError unless integers are positive, and values of a tuple different and at least one."""
    for field in fields(config):
        value = getattr(config, field.name)
        values = value if isinstance(value, tuple) else (value,)
        if not values or len(set(values)) < len(values):
            given = " ".join(map(str, values)) or "none"
            raise UserError(f"{field.name} needs one or more different values, got {given}")
        for each in values:
            if type(each) is int:
                check_integer(field.name, each, minimum=1)


@dataclass(frozen=True, kw_only=True)
class TimedConfig:
    """Settings of every timed benchmark. Integers must be positive, and values of a tuple different, at least one.

    Raises:
        UserError: a value is out of range, there is no such device, or the clock is not the device's.
    """

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

        _check(self)
        object.__setattr__(self, "device", str(choose_device(self.device)))
        if self.clock == "cuda" and not self.device.startswith("cuda"):
            raise UserError(f"the clock 'cuda' is for --device cuda; use 'process' or 'wall' on {self.device}")


@dataclass(frozen=True, kw_only=True)
class AllBenchConfig(TimedConfig):
    """Settings of `nlr bench all`."""

    parts: tuple[Parts, ...] = get_args(Parts)
    """Parts that are measured, see `nlr_lab.bench.all`."""
    tiny: bool = False
    """Toy sizes, whose times say nothing."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig(TimedConfig):
    """Settings of a benchmark of one size."""

    modes: tuple[Mode, ...] = ("compiled", "eager")
    """eager, compiled (torch.compile) or graphs (torch.compile with CUDA graphs, "reduce-overhead")."""
    width: int = 512
    """d, the model width; of a single operator the inputs of the linear."""
    hidden: int = 1376
    """Width of the gated feed-forward; of a single operator the outputs of the linear, and channels."""
    ranks: tuple[int, ...] = (32, 64)
    """r, each an arm of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.ranks) >= min(self.width, self.hidden):
            raise UserError(f"rank {max(self.ranks)} is too high; choose ranks below {min(self.width, self.hidden)}")


@dataclass(frozen=True, kw_only=True)
class OpBenchConfig(BenchConfig):
    """Settings of `nlr bench op`."""

    operators: tuple[Operator, ...] = get_args(Operator)
    """noble, sine, rational, gated."""
    hidden: int = 2048
    tokens: int = 1024
    """Rows of the input."""
    ranks: tuple[int, ...] = (32,)
    groups: int = 8
    """Groups of channels of the rational activations."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of inputs and weights; factors and coefficients of sine and rational are float32."""
    calls: int = 1
    """Calls in a row that one time is the mean of: many where a call takes microseconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % self.groups:
            raise UserError(f"{self.groups} groups do not divide {self.hidden} channels; choose groups that do")


@dataclass(frozen=True, kw_only=True)
class ModelBenchConfig(BenchConfig):
    """Settings of a benchmark of a model."""

    layers: int = 2
    """Transformer blocks."""
    heads: int = 8
    """Attention heads."""
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as of queries."""
    vocab_size: int = 256
    """Small, so that the head hardly counts."""
    family: Literal["glm", "llama"] = "glm"
    """glm: gate and up projection in one linear, GELU. llama: two linears, SiLU."""
    methods: tuple[str, ...] = ("noble",)
    """Over the plain model, all of it trained: noble, sine-lowrank, nonlinear-query, qk-norm, rational, lora, and
    NOBLE by its plain formula (noble-formula), as the authors' layer computes it (noble-official), and recomputed in
    the compiler's sight (noble-visible). Over LoRA: dora, sine-lora, sine-dora, peanut, noble-adapter, nora, nora++."""
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
        from nonlinear_lowrank.methods.noble import NobleConfig

        from .arms import bench_arms

        super().__post_init__()
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UserError(f"kv_heads must divide the {self.heads} heads, got {self.kv_heads!r}")
        if self.width % (2 * self.heads):
            raise UserError(f"width {self.width} must be a multiple of 2 x heads ({2 * self.heads})")
        for each in fields(self):
            if each.name not in _OF_NOBLE or getattr(self, each.name) == each.default:
                continue
            if "noble" not in self.methods:
                raise UserError(f"{each.name} is NOBLE's; omit it, or add noble to the methods")
            for rival in set(RIVALS) & set(self.methods):
                raise UserError(f"{rival} is NOBLE as in the paper; omit it or {each.name}")
        bench_arms(self.methods, self.ranks)
        NobleConfig(rank=self.ranks[0], **self.noble)

    @property
    def noble(self) -> dict[str, Any]:
        """Fields of `NobleConfig` beside the rank."""
        return {name: getattr(self, name) for name in _OF_NOBLE}


@dataclass(frozen=True, kw_only=True)
class TrainBenchConfig(ModelBenchConfig):
    """Settings of `nlr bench step` and `nlr bench memory`."""

    sequence_length: int = 128
    """Tokens of a sequence."""
    batch_size: int = 8
    """Sequences of a step."""
    bf16: bool = False
    """Train under bfloat16 autocast."""
    frozen_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights that an adapter does not train."""


@dataclass(frozen=True, kw_only=True)
class DecodeBenchConfig(ModelBenchConfig):
    """Settings of `nlr bench decode`."""

    modes: tuple[Mode, ...] = ("eager",)
    context: int = 256
    """Tokens of each sequence that are in the cache."""
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    """Sequences that are generated at once; each is measured."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    optimized: bool = True
    """Also measure each arm after `nlr.optimize_for_inference`, where that can make it faster."""
    rounds: int = 50

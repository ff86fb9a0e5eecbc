"""`nlr bench op`: one operator, forward and backward, against its plain formula and against what it stands beside.

| operator | over               | arms                                                                             |
|----------|--------------------|----------------------------------------------------------------------------------|
| noble    | the dense linear   | NOBLE and its plain formula, at each rank                                        |
| forms    | up accumulated     | NOBLE with its up projection joined with the main product (`ops.up_form`)        |
| down     | down separate      | NOBLE with its down projection in the bottleneck's kernel (`ops.down_form`)      |
| sine     | LoRA of the rank   | sine-LoRA and its plain formula, sine-DoRA, DoRA, PEANuT                         |
| rational | GELU               | rational, anchored rational, the plain formula, KAT's way (kat_rational.py)      |
| gated    | SwiGLU             | gated rational and its plain formula                                             |

A linear is width -> hidden; activations are of tokens x hidden. A step is one forward and one backward pass with a
given gradient of the output, for the gradients of the input and of everything that is trained. The arms of an operator
take turns; kept bytes (saved.py) and the peak of a step (peak.py) do not depend on the clock.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nlr_lab.plan.inspect import readable_bytes, render_table
from nlr_lab.runtime.environment import cpu_threads, many_compiled
from nonlinear_lowrank.analysis.saved import saved_bytes
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import NobleConfig, NobleLinear
from nonlinear_lowrank.methods.rational import RationalConfig
from nonlinear_lowrank.methods.noble.down_form import RANK, use_down_form
from nonlinear_lowrank.methods.noble.op import noble_linear_reference
from nonlinear_lowrank.methods.noble.up_form import use_up_form
from nonlinear_lowrank.methods.rational.gated import rational_gated, rational_gated_reference
from nonlinear_lowrank.methods.rational.op import rational, rational_anchored, rational_reference
from nonlinear_lowrank.methods.sine.delta import SineFactors
from nonlinear_lowrank.methods.sine.op import sine_layer_reference
from nonlinear_lowrank.validation import check_integer

from .kat_rational import kat_rational
from .methods import OMEGA, adapted
from .model import BenchResult, Mode, Point, check_different, check_timing, describe_machine, in_mode, table_with, where
from .peak import peak_bytes
from .timing import Clock, Ratio, interleaved_step_times, paired_ratio

Operator = Literal["noble", "forms", "down", "sine", "rational", "gated"]
Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class OpBenchConfig:
    """What `nlr bench op` measures.

    Raises:
        UserError: a value is out of range.
    """

    operators: tuple[Operator, ...] = get_args(Operator)
    """noble, forms, down, sine, rational, gated."""
    width: int = 512
    """Inputs of the linear."""
    hidden: int = 2048
    """Outputs of the linear, and channels of the activations."""
    tokens: int = 1024
    """Rows of the input."""
    ranks: tuple[int, ...] = (32,)
    """Of noble, forms, down (up to 128) and sine."""
    groups: int = 8
    """Of the rational activations."""
    dtype: Dtype = "float32"
    """Of inputs and weights; factors and coefficients of sine and rational are float32."""
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
    """Where it runs."""

    def __post_init__(self) -> None:
        for name in ("operators", "ranks", "modes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("width", "hidden", "tokens", "groups", "rounds", "warmup"):
            check_integer(name, getattr(self, name), minimum=1)
        check_different("operators", self.operators)
        check_different("ranks", self.ranks)
        for rank in self.ranks:
            check_integer("ranks", rank, minimum=1)
            if rank >= min(self.width, self.hidden):
                raise UserError(f"rank {rank} is not low; choose a rank below {min(self.width, self.hidden)}")
        if self.operators == ("down",) and min(self.ranks) > RANK:
            raise UserError(f"the down projection is in the bottleneck's kernel up to rank {RANK}; choose such a rank")
        if self.hidden % self.groups:
            raise UserError(f"{self.groups} groups do not divide {self.hidden} channels; choose groups that do")
        for name, known in (("operators", get_args(Operator)), ("dtype", get_args(Dtype))):
            given = getattr(self, name)
            for value in (given,) if isinstance(given, str) else given:
                if value not in known:
                    raise UserError(f"unknown {name} {value!r}; choose {' or '.join(known)}")
        check_timing(self)

    @property
    def bf16(self) -> bool:
        """In which type the control multiplies."""
        return self.dtype == "bfloat16"


@dataclass(frozen=True, kw_only=True)
class OpRow:
    """One arm over the one it stands beside, in one mode."""

    operator: str
    mode: str
    arm: str
    over: str
    time: Ratio
    """Of forward and backward."""
    over_seconds: float
    """Median of the arm it stands beside."""
    kept: int
    """Bytes kept for backward, the input included."""
    kept_over: int
    """The same of the arm it stands beside."""
    peak: int
    """Bytes at the highest moment of a step, beyond inputs and weights."""
    peak_over: int
    """The same of the arm it stands beside."""


@dataclass(frozen=True, kw_only=True)
class OpBench(BenchResult):
    """Result of `bench_op`; `print(result)` gives the table."""

    config: OpBenchConfig
    rows: list[OpRow]

    def __str__(self) -> str:
        table = table_with(
            "operator", "mode", "arm", "over", "time x [95 %]", "over, ms", "kept", "over's", "peak", "over's"
        )
        for row in self.rows:
            table.add_row(
                row.operator,
                row.mode,
                row.arm,
                row.over,
                str(row.time),
                f"{1000 * row.over_seconds:.2f}",
                *(readable_bytes(nbytes) for nbytes in (row.kept, row.kept_over, row.peak, row.peak_over)),
            )
        config = self.config
        sizes = f"{config.tokens} tokens, {config.width} -> {config.hidden}, {config.groups} groups, {config.dtype}"
        return f"{render_table(table, 160)}\n{sizes}, {where(config, self.machine)}"

    def points(self) -> tuple[str, list[Point]]:
        """Time ratios by operator and mode."""
        marks = [
            Point.of_ratio(f"{row.operator}, {row.mode}", f"{row.arm} / {row.over}", row.time) for row in self.rows
        ]
        return "forward and backward, time ratio", marks


@dataclass(frozen=True)
class OpArm:
    """A function and what it reads."""

    name: str
    over: str | None
    """None: others stand beside it."""
    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    """Those whose gradients are formed require them."""
    parameters: tuple[Tensor, ...] = ()
    """What a model has anyhow: weights and factors, also where they are among the inputs."""
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around each forward."""


def bench_op(config: OpBenchConfig, *, progress: Callable[[str], object] | None = None) -> OpBench:
    """Measures it.

    Args:
        config: see `OpBenchConfig`.
        progress: called with a line now and then, e.g. `print`.

    Raises:
        UserError: the clock does not fit the machine.
    """
    rows: list[OpRow] = []
    times: dict[str, dict[str, list[float]]] = {}
    with cpu_threads(config.threads), many_compiled():
        for operator in config.operators:
            arms = {arm.name: arm for arm in op_arms(operator, config)}
            for mode in config.modes if arms else ():
                if progress is not None:
                    progress(f"{operator}, {mode}: {len(arms)} arms, {config.rounds} timed steps each")
                torch._dynamo.reset()
                forwards = {name: _forward(arm, mode) for name, arm in arms.items()}
                steps = {name: _step(arm, forwards[name]) for name, arm in arms.items()}
                found = interleaved_step_times(steps, config.rounds, config.warmup, config.clock)
                times[f"{operator}, {mode}"] = found
                kept = {name: saved_bytes(forwards[name], parameters=arm.parameters) for name, arm in arms.items()}
                peak = {name: peak_bytes(step, config.device) for name, step in steps.items()}
                for name, arm in arms.items():
                    if arm.over is None:
                        continue
                    over = found[arm.over]
                    rows.append(
                        OpRow(
                            operator=operator,
                            mode=mode,
                            arm=name,
                            over=arm.over,
                            time=paired_ratio(found[name], over),
                            over_seconds=sorted(over)[len(over) // 2],
                            kept=kept[name],
                            kept_over=kept[arm.over],
                            peak=peak[name],
                            peak_over=peak[arm.over],
                        )
                    )
        machine = describe_machine(config)
    return OpBench(config=config, rows=rows, times=times, machine=machine)


def _forward(arm: OpArm, mode: Mode) -> Callable[[], Tensor]:
    # Without this torch.compile takes what a first call has seen for the general case from the second one on.
    function = in_mode(arm.function, mode, dynamic=False)

    def forward() -> Tensor:
        with arm.context():
            return function(*arm.inputs)

    return forward


def _step(arm: OpArm, forward: Callable[[], Tensor]) -> Callable[[], object]:
    leaves = [each for each in (*arm.inputs, *arm.parameters) if each.requires_grad]
    unique = list({id(each): each for each in leaves}.values())
    with torch.no_grad():
        dy = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), unique, dy)


def op_arms(operator: str, config: OpBenchConfig) -> list[OpArm]:
    """The arms of an operator; those that others stand beside come first."""
    torch.manual_seed(0)
    with torch.device(config.device):
        arms = {"noble": _noble, "forms": _forms, "down": _down, "sine": _sine, "rational": _rational, "gated": _gated}
        return arms[operator](config)


def _input(config: OpBenchConfig, channels: int) -> Tensor:
    return torch.randn(config.tokens, channels).to(getattr(torch, config.dtype)).requires_grad_()


def _noble(config: OpBenchConfig) -> list[OpArm]:
    dtype = getattr(torch, config.dtype)
    x = _input(config, config.width)
    linear = nn.Linear(config.width, config.hidden, bias=False, dtype=dtype)
    arms = [OpArm("linear", None, linear, (x,), tuple(linear.parameters()))]
    for rank in config.ranks:
        layer = NobleLinear(config.width, config.hidden, False, config=NobleConfig(rank=rank), dtype=dtype)
        down = layer.noble_down
        branch = (
            [layer.get_parameter("noble_mix1")],
            [layer.get_parameter(f"noble_frequency{k}") for k in (1, 2)],
            [layer.get_parameter(f"noble_phase{k}") for k in (1, 2)],
        )

        def plain(x: Tensor, layer: NobleLinear = layer, down: Any = down, branch: Any = branch) -> Tensor:
            return noble_linear_reference(x, layer.weight, None, down, layer.noble_up, *branch)

        own = tuple(layer.parameters())
        arms += [
            OpArm(f"NOBLE r={rank}", "linear", layer, (x,), own),
            OpArm(f"plain formula r={rank}", "linear", plain, (x,), own),
        ]
    return arms


def _forms(config: OpBenchConfig) -> list[OpArm]:
    return _by_form(config, config.ranks, ("accumulated", "joined"), use_up_form)


def _down(config: OpBenchConfig) -> list[OpArm]:
    ranks = [rank for rank in config.ranks if rank <= RANK]
    return _by_form(config, ranks, ("separate", "fused"), use_down_form)


def _by_form(
    config: OpBenchConfig, ranks: Sequence[int], forms: tuple[str, str], use: Callable[..., Any]
) -> list[OpArm]:
    """One layer at each rank in two forms, the second over the first."""
    x = _input(config, config.width)
    arms = []
    for rank in ranks:
        noble = NobleConfig(rank=rank, up_scale=1.0)
        layer = NobleLinear(config.width, config.hidden, False, config=noble, dtype=x.dtype)
        own, first, second = tuple(layer.parameters()), *(f"{form} r={rank}" for form in forms)
        arms += [
            OpArm(first, None, layer, (x,), own, partial(use, forms[0])),
            OpArm(second, first, layer, (x,), own, partial(use, forms[1])),
        ]
    return arms


def _sine(config: OpBenchConfig) -> list[OpArm]:
    names = {"lora": "LoRA", "sine-lora": "sine-LoRA", "sine-dora": "sine-DoRA", "dora": "DoRA", "peanut": "PEANuT"}
    x = _input(config, config.width)
    arms = []
    for rank in config.ranks:
        for name, shown in names.items():
            torch.manual_seed(0)
            holder = nn.Sequential(nn.Linear(config.width, config.hidden, bias=False).to(x.dtype))
            layer = adapted(holder, name, rank, ["0"]).get_submodule("base_model.model.0")
            own = tuple(layer.parameters())
            arms.append(OpArm(f"{shown} r={rank}", None if name == "lora" else f"LoRA r={rank}", layer, (x,), own))
        weight = torch.randn(config.hidden, config.width).to(x.dtype)
        up = torch.zeros(config.hidden, rank).requires_grad_()
        down = torch.randn(rank, config.width).mul_(config.width**-0.5).requires_grad_()
        factors = [SineFactors(up, down, OMEGA, config.width**0.5)]

        def plain(x: Tensor, weight: Tensor = weight, factors: Sequence[SineFactors] = factors) -> Tensor:
            return sine_layer_reference(x, weight, None, factors)

        arms.append(OpArm(f"plain formula r={rank}", f"LoRA r={rank}", plain, (x,), (weight, up, down)))
    return arms


def _coefficients(config: OpBenchConfig, form: Any) -> tuple[RationalConfig, Tensor, Tensor]:
    """A rational activation's settings and GELU's fit, one row a group."""
    rational_config = RationalConfig(activation="gelu", groups=config.groups, form=form)
    fit = rational_config.fit()
    a, b = (
        torch.tensor(values, dtype=torch.float32).repeat(config.groups, 1).requires_grad_()
        for values in (fit.numerator, fit.denominator)
    )
    return rational_config, a, b


def _rational(config: OpBenchConfig) -> list[OpArm]:
    x = _input(config, config.hidden)
    settings, a, b = _coefficients(config, "abs_of_sum")
    tails, base = settings.straight_tails(), (a.detach()[:1].clone(), b.detach()[:1].clone())
    _, kat_a, kat_b = _coefficients(config, "sum_of_abs")
    ours = (x, a, b)
    return [
        OpArm("GELU", None, F.gelu, (x,)),
        OpArm("rational", "GELU", lambda x, a, b: rational(x, a, b, "abs_of_sum", tails), ours, (a, b)),
        OpArm(
            "anchored",
            "GELU",
            lambda x, a, b: rational_anchored(x, a, b, *base, "gelu", "abs_of_sum", tails),
            ours,
            (a, b, *base),
        ),
        OpArm("plain formula", "GELU", lambda x, a, b: rational_reference(x, a, b, "abs_of_sum", tails), ours, (a, b)),
        OpArm("KAT's way", "GELU", kat_rational, (x, kat_a, kat_b), (kat_a, kat_b)),
    ]


def _gated(config: OpBenchConfig) -> list[OpArm]:
    gate, up = _input(config, config.hidden), _input(config, config.hidden)
    settings, a, b = _coefficients(config, "abs_of_sum")
    tails = settings.straight_tails()

    def ours(gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return rational_gated(gate, up, a, b, "abs_of_sum", tails)

    def plain(gate: Tensor, up: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return rational_gated_reference(gate, up, a, b, "abs_of_sum", tails)

    given = (gate, up, a, b)
    return [
        OpArm("SwiGLU", None, lambda gate, up: F.silu(gate) * up, (gate, up)),
        OpArm("gated rational", "SwiGLU", ours, given, (a, b)),
        OpArm("plain formula", "SwiGLU", plain, given, (a, b)),
    ]

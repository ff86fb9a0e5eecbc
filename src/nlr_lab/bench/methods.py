"""What `nlr bench` puts on its model: our methods, and those that they are measured against.

| name            | what                                        | trained          | over     |
|-----------------|---------------------------------------------|------------------|----------|
| noble           | NOBLE branches on every linear              | everything       | baseline |
| sine-lowrank    | sine low-rank weights in the feed-forwards  | everything       | baseline |
| nonlinear-query | nonlinear queries; takes no rank            | everything       | baseline |
| rational        | rational activations, 8 groups; no rank     | everything       | baseline |
| lora            | peft's, on every linear but the head        | the adapters     | baseline |
| dora            | peft's                                      | the adapters     | lora     |
| peanut          | peft's own nonlinear adapter                | the adapters     | lora     |
| sine-lora       | sine-LoRA at omega 200                      | the adapters     | lora     |
| sine-dora       | sine-DoRA at omega 200                      | the adapters     | lora     |
| noble-adapter   | NOBLE branches on the frozen model          | the adapters     | lora     |
| nora            | NoRA of that rank, 8 groups                 | the coefficients | lora     |
| nora++          | NoRA of rank 2, and LoRA of that rank       | the adapters     | lora     |

`over` is the arm that a method's ratios are over: the plain model, all of whose weights are trained, or LoRA of the
same rank.
"""

import contextlib
import importlib
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.noble import NobleConfig
from nonlinear_lowrank.methods.query import NonlinearQueryConfig
from nonlinear_lowrank.methods.rational import RationalConfig
from nonlinear_lowrank.methods.sine import SineLowRankConfig
from nonlinear_lowrank.surgery.augment import augment

Branches = Callable[[int], NobleConfig]

BASELINE, LORA = "baseline", "lora"
OMEGA = 200.0
GROUPS = 8


@dataclass(frozen=True, kw_only=True)
class BenchMethod:
    """One row of this file's table."""

    name: str
    over: str = BASELINE
    """The arm that its ratios are over: BASELINE, or LORA of the same rank."""
    ranked: bool = True
    """Whether it takes a rank."""
    frozen: bool = False
    """Whether the model's own weights are frozen."""
    apply: Callable[[nn.Module, int, Branches], nn.Module]
    """(plain model, rank, NOBLE's settings by rank) -> the model with the method on it."""


@dataclass(frozen=True, kw_only=True)
class BenchArm:
    """A method at a rank; neither: the plain model."""

    method: BenchMethod | None = None
    rank: int | None = None

    @property
    def name(self) -> str:
        """`noble r=64`."""
        if self.method is None:
            return BASELINE
        return _named(self.method.name, self.rank)

    @property
    def over(self) -> str:
        """The arm that its ratios are over."""
        assert self.method is not None
        return BASELINE if self.method.over == BASELINE else _named(self.method.over, self.rank)


def _named(name: str, rank: int | None) -> str:
    return name if rank is None else f"{name} r={rank}"


def adapted(model: nn.Module, name: str, rank: int, targets: Any = "all-linear") -> nn.Module:
    """The model with an adapter of peft or of ours on it.

    Args:
        model: plain.
        name: a method of `ADAPTERS`.
        rank: r.
        targets: as peft's target_modules.
    """
    from peft import get_peft_model

    module, kind, fields = ADAPTERS[name]
    given: dict[str, Any] = {"r": rank, "target_modules": targets}
    if name == "nora":
        given = {"r": rank}
    if name == "nora++":
        given = {"r": 2, "lora_r": rank, "lora_target_modules": targets}
    config = getattr(importlib.import_module(module), kind)(**given, **fields)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # NoRA says what it found
        # Of transformers, about a name that peft uses.
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)
        return get_peft_model(model, config)  # type: ignore[arg-type]


ADAPTERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("peft", "LoraConfig", {}),
    "dora": ("peft", "LoraConfig", {"use_dora": True}),
    "peanut": ("peft", "PeanutConfig", {}),
    "sine-lora": ("nonlinear_lowrank", "SineLoraConfig", {"omega": OMEGA}),
    "sine-dora": ("nonlinear_lowrank", "SineLoraConfig", {"omega": OMEGA, "use_dora": True}),
    "noble-adapter": ("nonlinear_lowrank", "NobleAdapterConfig", {}),
    "nora": ("nonlinear_lowrank", "NoraConfig", {"groups": GROUPS}),
    "nora++": ("nonlinear_lowrank", "NoraConfig", {"groups": GROUPS}),
}
"""Fine-tuning methods: module and class of the config, and its fields beside rank and targets."""


def _adapter(name: str) -> Callable[[nn.Module, int, Branches], nn.Module]:
    return lambda model, rank, _branches: adapted(model, name, rank)


def _noble(model: nn.Module, rank: int, branches: Branches) -> nn.Module:
    augment(model, branches(rank), verbose=False)
    return model


def _sine_lowrank(model: nn.Module, rank: int, _branches: Branches) -> nn.Module:
    augment(model, SineLowRankConfig(rank=rank), include=r".*\.mlp\..*", verbose=False)
    return model


def _nonlinear_query(model: nn.Module, _rank: int, _branches: Branches) -> nn.Module:
    augment(model, NonlinearQueryConfig(), verbose=False)
    return model


def _rational(model: nn.Module, _rank: int, _branches: Branches) -> nn.Module:
    augment(model, RationalConfig(groups=GROUPS), verbose=False)
    return model


METHODS = {
    "noble": BenchMethod(name="noble", apply=_noble),
    "sine-lowrank": BenchMethod(name="sine-lowrank", apply=_sine_lowrank),
    "nonlinear-query": BenchMethod(name="nonlinear-query", ranked=False, apply=_nonlinear_query),
    "rational": BenchMethod(name="rational", ranked=False, apply=_rational),
    **{
        name: BenchMethod(name=name, over=BASELINE if name == LORA else LORA, frozen=True, apply=_adapter(name))
        for name in ADAPTERS
    },
}


def bench_arms(methods: Sequence[str], ranks: Sequence[int]) -> list[BenchArm]:
    """Every arm that is measured, those that others are over first: the plain model, LoRA of each rank.

    Raises:
        UserError: an unknown method, none, or one twice.
    """
    for name in methods:
        if name not in METHODS:
            raise UserError(f"unknown method {name!r}; choose of {', '.join(METHODS)}")
    if not methods or len(set(methods)) < len(methods):
        raise UserError(f"methods must be different names, at least one, got {tuple(methods)!r}")
    wanted = [METHODS[name] for name in methods]
    arms = [BenchArm()] if any(method.over == BASELINE for method in wanted) else []
    if any(method.over == LORA for method in wanted) and LORA not in methods:
        wanted.insert(0, METHODS[LORA])
    wanted.sort(key=lambda method: method.name != LORA)
    return arms + [
        BenchArm(method=method, rank=rank) for method in wanted for rank in (ranks if method.ranked else (None,))
    ]

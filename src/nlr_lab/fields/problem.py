"""Problems that are fitted (`Problem`), and the linears that fit them (`FieldMethod`, `FieldArm`).

A problem is pure: whatever is random in it comes from the generators it is handed, so that a fit resumes bit-exactly.
Its settings, as a user gives them, are a frozen dataclass whose `prepare()` reads and checks the data (`settings`).
"""

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.sine.layer import SineLowRankConfig, SineLowRankLinear
from nonlinear_lowrank.validation import check_choice, check_number

Kind = Literal["dense", "low-rank", "sine"]
Init = Literal["kaiming_sqrt5", "kaiming_zero"]

_INITS: tuple[Init, ...] = get_args(Init)
_SLOPES = {"kaiming_sqrt5": 5**0.5, "kaiming_zero": 0.0}


@dataclass(frozen=True, kw_only=True)
class FieldMethod:
    """The linears that a field is made of (sine_lowrank.txt, equations (2) and (3)).

    Raises:
        UserError: a value is out of range, or has no meaning for this kind; the message names it.
    """

    kind: Kind = "dense"
    """Dense weights W; low-rank U V; sine low-rank sin(omega U V) / g."""
    rank: int | None = None
    """k of the factored kinds."""
    omega: float | str | None = None
    """Frequency of the sine: a number, or a published table (`methods.sine.layer.OMEGA_BY_RANK`). None: the problem's
    own table."""
    gain: float | None = None
    """g of the sine. None: sqrt(d_in)."""
    init: Init = "kaiming_sqrt5"
    """Kaiming uniform with a = sqrt(5) or a = 0, of dense weights and of factors. Biases are nn.Linear's in either."""

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_choice("init", self.init, _INITS)
        meant = {"dense": (), "low-rank": ("rank",), "sine": ("rank", "omega", "gain")}[self.kind]
        for name in ("rank", "omega", "gain"):
            if name not in meant and getattr(self, name) is not None:
                raise UserError(f"{name} has no meaning for {self.kind} linears; omit it")
        if self.kind != "dense":
            if self.rank is None:
                raise UserError(f"{self.kind} linears need a rank, as in {self.kind}:rank=5")
            self.factors_config()

    @classmethod
    def parse(cls, text: str) -> "FieldMethod":
        """Read the short form: `dense`, `low-rank:rank=5`, `sine:rank=5,omega=50,init=kaiming_zero`."""
        return cls(**_read(text, ("rank", "omega", "gain", "init")))

    def __str__(self) -> str:
        """The short form; `parse` reads it back."""
        init = None if self.init == "kaiming_sqrt5" else self.init
        settings = {"rank": self.rank, "omega": self.omega, "gain": self.gain, "init": init}
        options = [f"{key}={str(value).removesuffix('.0')}" for key, value in settings.items() if value is not None]
        return ":".join(filter(None, (self.kind, ",".join(options))))

    def resolved(self, table: str) -> "FieldMethod":
        """Return the method with omega as a number, where it was left open taken from a published table."""
        if self.kind != "sine":
            return self
        return replace(self, omega=replace(self, omega=self.omega or table).factors_config().omega)

    def factors(self, d_in: int, d_out: int) -> bool:
        """Return whether a linear of these sizes is factored: where it gets smaller."""
        return self.rank is not None and self.factors_config().check_rank(d_in, d_out) is None

    def factors_config(self) -> SineLowRankConfig:
        """The settings of a factored linear."""
        assert self.rank is not None
        phi: Literal["sine", "identity"] = "sine" if self.kind == "sine" else "identity"
        return SineLowRankConfig(rank=self.rank, omega=self.omega, gain=self.gain, activation=phi, init=self.init)

    def linear(self, d_in: int, d_out: int, *, generator: torch.Generator) -> nn.Module:
        """A linear (..., d_in) -> (..., d_out), drawn from the generator; dense where factors are no smaller."""
        layer: Any
        if self.factors(d_in, d_out):
            layer = SineLowRankLinear(d_in, d_out, config=self.factors_config())
            weights = [layer.sine_up, layer.sine_down]
        else:
            layer = nn.Linear(d_in, d_out)
            weights = [layer.weight]
        for weight in weights:
            nn.init.kaiming_uniform_(weight, a=_SLOPES[self.init], generator=generator)
        nn.init.uniform_(layer.bias, -(d_in**-0.5), d_in**-0.5, generator=generator)
        return layer


def _read(text: str, known: tuple[str, ...]) -> dict[str, Any]:
    """The kind and the settings of a short form; numbers where they are such, an integer for the rank."""
    kind, _, rest = text.strip().partition(":")
    settings: dict[str, Any] = {"kind": kind}
    for option in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in option.partition("="))
        if not value or key not in known or key in settings:
            raise UserError(f"cannot read {option!r} in {text!r}; settings, each once, are {'=, '.join(known)}=")
        settings[key] = value
        if key != "name":
            with contextlib.suppress(ValueError):
                settings[key] = int(value) if key == "rank" else float(value)
    return settings


@dataclass(frozen=True, kw_only=True)
class FieldArm:
    """One method of a comparison, with what is tuned of it; raises UserError as `FieldMethod` does."""

    method: FieldMethod
    """The method, with its first init."""
    inits: tuple[Init, ...] = _INITS
    """Inits of which the arm takes its best."""
    lr: float | None = None
    """The arm's learning rate; None: tuned, or the recipe's."""
    name: str = ""
    """Name in tables, pictures and folders; empty: made from the method."""

    def __post_init__(self) -> None:
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        if not self.inits or len(set(self.inits)) < len(self.inits) or not set(self.inits) <= set(_INITS):
            raise UserError(f"inits must be one or more of {', '.join(_INITS)}, got {self.inits!r}")
        if not self.name:
            text = str(replace(self.method, init="kaiming_sqrt5"))
            for long, short in (("rank=", "k"), ("omega=", "w"), ("e+", "e")):
                text = text.replace(long, short)
            chosen = "" if len(self.inits) > 1 else f"-{self.inits[0]}"
            object.__setattr__(self, "name", re.sub(r"[^A-Za-z0-9._-]+", "-", text) + chosen)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise UserError(f"the arm's name {self.name!r} must be made of letters, digits, '.', '_' and '-'")

    @classmethod
    def parse(cls, text: str) -> "FieldArm":
        """Read `FieldMethod`'s short form with `lr=` and `name=` beside it; without `init=` both inits are tried."""
        settings = _read(text, ("rank", "omega", "gain", "init", "lr", "name"))
        own = {key: settings.pop(key) for key in ("lr", "name") if key in settings}
        inits = (settings["init"],) if "init" in settings else _INITS
        return cls(method=FieldMethod(**{"init": inits[0], **settings}), inits=inits, **own)


class Problem(Protocol):
    """Something to be fitted, its data loaded and checked.

    Models are float32 modules on the CPU when they are built; `loss` may get the compiled model. `evaluate`, `picture`
    and `write` get the plain one, on any device, under no_grad, and do in pieces what would not fit memory whole.
    """

    name: str
    """Name of what is fitted, e.g. "kodim05": for titles and files."""
    score: str
    """The number of `evaluate` by which fits are compared; higher is better."""
    fingerprint: str
    """Hash of the data and of what a model's numbers depend on; a fit resumes only with the same one."""

    def build(self, method: FieldMethod, generator: torch.Generator) -> nn.Module:
        """The network for this problem, drawn from the generator."""

    def batch(self, step: int, generator: torch.Generator) -> Any:
        """Draw what a training step (from 0) sees: a tensor or a tuple, list or dict of such, on the CPU.

        The generator is seeded by the fit's seed and the step: no state is carried from step to step.
        """

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return what is minimised: a scalar."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Numbers by name, e.g. {"psnr": 31.2, "ssim": 0.93}."""

    def picture(self, model: nn.Module | None) -> np.ndarray:
        """Return what a comparison shows, (height, width, 3) uint8, one size for all; None: the ground truth."""

    def write(self, model: nn.Module, folder: Path) -> list[Path]:
        """Write pictures, meshes, frames into an existing folder; return their paths, the most telling first."""

"""Low-rank pretraining by others, as arms to compare with: CoLA and SLTrain.

Both take every linear of the blocks, not the output head, and keep the model's own activations. Saved weights have the
names of these layers: they are loaded into a model with the same arm, not by `from_pretrained` alone.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nlr_lab.tasks.text.language_model import DenseInit
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.surgery.targets import output_head_names
from nonlinear_lowrank.validation import check_number, check_share

from .methods import ArmKind, Settings, Setup


class LowRank(ArmKind):
    """Every linear of the blocks becomes one of low rank, `rank_ratio` times its smaller side."""

    redraws = True
    defaults: ClassVar[dict[str, float]] = {"rank_ratio": 0.25}

    def read(self, settings: Settings) -> dict[str, Any]:
        self.check_known(settings, self.defaults)
        for key, value in settings.items():
            check_number(key, value, above=0)
            if key != "scale":
                check_share(key, value)
        return dict(settings)

    @torch.no_grad()
    def apply(self, model: nn.Module, settings: Settings, setup: Setup, init: DenseInit, verbose: bool) -> nn.Module:
        chosen = {**self.defaults, **settings}
        heads = output_head_names(model)
        linears = [
            (name, each) for name, each in model.named_modules() if type(each) is nn.Linear and name not in heads
        ]
        if not linears:
            raise UserError(f"{self.name} takes plain linears, and {type(model).__name__} has none left")
        for name, old in linears:
            parent, _, last = name.rpartition(".")
            rank = max(1, int(min(old.in_features, old.out_features) * chosen["rank_ratio"]))
            new = self.build(old, rank, chosen).to(old.weight.dtype).train(old.training)
            setattr(model.get_submodule(parent), last, new)
        if verbose:
            print(f"{self.name}: {len(linears)} linears")
        return model

    def build(self, old: nn.Linear, rank: int, settings: Settings) -> nn.Module:
        """Return the layer that takes a linear's place, on its device."""
        raise NotImplementedError


class Cola(LowRank):
    """`y = B silu(A x)`, CoLA (arXiv 2502.10940): an auto-encoder in place of each linear, r = d / 4.

    A (r, d_in) and B (d_out, r) are normal, with the standard deviation at which an entry of B A has the variance
    1 / (d_in + d_out), as the authors release it; a bias of the linear is kept.
    """

    name = "cola"

    def build(self, old: nn.Linear, rank: int, settings: Settings) -> nn.Module:
        like: dict[str, Any] = {"device": old.weight.device}
        down = nn.Linear(old.in_features, rank, bias=False, **like)
        up = nn.Linear(rank, old.out_features, bias=old.bias is not None, **like)
        std = (old.in_features + old.out_features) ** -0.25 * rank**-0.25
        for each in (down, up):
            nn.init.normal_(each.weight, 0.0, std)
        if old.bias is not None:
            up.bias.copy_(old.bias)
        return nn.Sequential(down, nn.SiLU(), up)


class Sltrain(LowRank):
    """`W = scale B A + S`, SLTrain (arXiv 2406.02214): S has a share `density` of entries, at fixed random places.

    r = d / 4, scale = alpha / r = 1 / 4 and density 0.03 are those of the authors' smallest model.
    """

    name = "sltrain"
    defaults: ClassVar = {"rank_ratio": 0.25, "density": 0.03, "scale": 0.25}

    def build(self, old: nn.Linear, rank: int, settings: Settings) -> nn.Module:
        return SparseLowRankLinear(old, rank, settings["density"], settings["scale"])


class SparseLowRankLinear(nn.Linear):
    """A linear whose weight is low-rank and sparse parts together, formed in each forward pass.

    | tensor              | init                                   |
    |---------------------|----------------------------------------|
    | factor_A (r, d_in)  | Kaiming uniform, a = sqrt 5            |
    | factor_B (d_out, r) | 0                                      |
    | values (k,)         | U(+-1 / sqrt(d_in)), at places drawn once |
    """

    places: Tensor

    def __init__(self, old: nn.Linear, rank: int, density: float, scale: float) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight
        d_out, d_in = self.out_features, self.in_features = old.weight.shape
        like: dict[str, Any] = {"device": old.weight.device}
        count = max(1, round(density * d_out * d_in))
        self.scale, self.bias = scale, old.bias
        self.factor_A = nn.Parameter(torch.empty(rank, d_in, **like))
        self.factor_B = nn.Parameter(torch.zeros(d_out, rank, **like))
        self.values = nn.Parameter(torch.empty(count, **like))
        nn.init.kaiming_uniform_(self.factor_A, a=math.sqrt(5))
        nn.init.uniform_(self.values, -(d_in**-0.5), d_in**-0.5)
        self.register_buffer("places", torch.randperm(d_out * d_in, **like)[:count])

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The formed weight (d_out, d_in)."""
        low = self.scale * (self.factor_B @ self.factor_A)
        return low.flatten().index_add(0, self.places, self.values.to(low.dtype)).view_as(low)

"""NOBLE as a fine-tuning method: the nonlinear low-rank branch beside frozen linears (noble.txt, section 3).

    y = W x + b + up bottleneck(down x)           W, b frozen, also quantized

Init and learning rates are the table of `layer`, but nlr_noble_up (d_out, r) starts at zero so that the outputs start
unchanged, and the tensors of all depths are stacked: nlr_noble_mix (depth - 1, r, r), from depth 2, and with the cosine
nlr_noble_frequency and nlr_noble_phase (depth, r). The branch is not linear in x, so no weight can absorb it: a NOBLE
adapter cannot be merged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from nonlinear_lowrank.adapters.config import AdapterConfig
from nonlinear_lowrank.adapters.tuner import AdapterModel, register_adapter
from nonlinear_lowrank.adapters.weights import WeightLayer, is_plain
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Role
from nonlinear_lowrank.methods.matrix import matrix_of
from nonlinear_lowrank.methods.noble import NobleConfig
from nonlinear_lowrank.validation import check_share

from .config import Activation
from .op import Branch, noble_branch, noble_linear


@dataclass
class NobleAdapterConfig(AdapterConfig):
    """Settings of NOBLE adapters, for `peft.get_peft_model`; see also `AdapterConfig`."""

    type_name: ClassVar[str] = "NLR_NOBLE"
    mergeable: ClassVar[bool] = False
    patterns: ClassVar[Mapping[str, str]] = {"r": "rank_pattern"}

    r: int = 16
    """Width of the bottleneck; must stay below min(d_in, d_out) of every adapted module."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """{module name or regular expression: r} where it differs."""
    activation: Activation = "cosine"
    """The bottleneck's nonlinearity; "cosine" at depth 2 is CosNet."""
    depth: int = 2
    """Number of activations: 1 (no mixing matrix), 2, or 3 (cosine only)."""
    dropout: float = 0.0
    """Dropout of the branch's input in training."""
    frequency_range: tuple[float, float] = (0.8, 1.2)
    """Range of the uniform initial frequencies."""
    phase_std: float = 0.1
    """Phases start with this standard deviation."""
    up_lr_power: float = 0.6
    """Learning-rate multiplier of the up projection: (min(d_in, d_out) / r) ** up_lr_power."""
    mix_lr_power: float = 0.45
    """The same for the mixing matrices."""
    frequency_lr: float = 3.0
    """Learning-rate multiplier of the frequencies."""
    phase_lr: float = 5.0
    """Learning-rate multiplier of the phases."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("dropout", self.dropout)
        # The layer's config has the same fields and checks.
        names = {each.name for each in fields(NobleConfig)} & set(vars(self)) - {"dropout"}
        checked = NobleConfig(**{name: getattr(self, name) for name in names})
        self.frequency_range = checked.frequency_range  # JSON has lists only


class MergeError(UserError, NotImplementedError):
    """Error for an impossible merge; of the class that peft's own methods raise."""

    def __init__(self) -> None:
        super().__init__(
            "a NOBLE adapter cannot be merged: its branch is not linear in the input, so no weight can absorb it; "
            "keep it as an adapter (PeftModel.from_pretrained), or drop it with unload()"
        )


class NobleAdapterLinear(WeightLayer):
    """A frozen linear (nn.Linear, Conv1D, quantized ones) with NOBLE branches: (..., d_in) -> (..., d_out)."""

    adapter_layer_names = ("nlr_noble_down", "nlr_noble_up", "nlr_noble_mix", "nlr_noble_frequency", "nlr_noble_phase")

    def add_parameters(self, name: str, config: NobleAdapterConfig) -> None:
        r, depth = config.r, config.depth
        self.nlr_noble_down[name] = self.parameter(r, self.d_in)
        self.nlr_noble_up[name] = self.parameter(self.d_out, r)
        if depth > 1:
            self.nlr_noble_mix[name] = self.parameter(depth - 1, r, r)
        if config.activation == "cosine":
            self.nlr_noble_frequency[name] = self.parameter(depth, r)
            self.nlr_noble_phase[name] = self.parameter(depth, r)

    def reset_adapter(self, name: str) -> None:
        """Draw as `layer` does, up zero; with init_weights=False the up projection too, N(0, 1 / r)."""
        config: NobleAdapterConfig = self.configs[name]
        nn.init.normal_(self.nlr_noble_down[name].weight, std=self.d_in**-0.5)
        if config.init_weights:
            nn.init.zeros_(self.nlr_noble_up[name].weight)
        else:
            nn.init.normal_(self.nlr_noble_up[name].weight, std=config.r**-0.5)
        if config.depth > 1:
            for mix in self.nlr_noble_mix[name].weight:
                nn.init.xavier_uniform_(mix)
        if config.activation == "cosine":
            nn.init.uniform_(self.nlr_noble_frequency[name].weight, *config.frequency_range)
            nn.init.normal_(self.nlr_noble_phase[name].weight, std=config.phase_std)

    def adapted(self, x: Tensor, names: Sequence[str]) -> Tensor:
        """(..., d_in) -> (..., d_out); the first branch in one operator with the base where that is plain."""
        y = None
        for name in names:
            branch, dropout = self._branch(name, x), self.configs[name].dropout if self.training else 0.0
            if y is None and not dropout and is_plain(self.base_layer):
                y = noble_linear(x, self.matrix.of(self.base_layer.weight), self.base_layer.bias, branch)
            else:
                y = (self.base_layer(x) if y is None else y) + noble_branch(F.dropout(x, dropout), branch)
        assert y is not None
        return y

    def _branch(self, name: str, x: Tensor) -> Branch:
        """Return the operators' argument. Matrices are in the type of x; frequencies and phases keep theirs."""
        config: NobleAdapterConfig = self.configs[name]
        mixes = self.nlr_noble_mix[name]().to(x.dtype).unbind() if config.depth > 1 else ()
        cosine = config.activation == "cosine"
        return Branch(
            self.nlr_noble_down[name]().to(x.dtype),
            self.nlr_noble_up[name]().to(x.dtype),
            mixes,
            self.nlr_noble_frequency[name]().unbind() if cosine else (),
            self.nlr_noble_phase[name]().unbind() if cosine else (),
            config.activation,
        )

    def roles(self, name: str) -> Mapping[str, Role]:
        config: NobleAdapterConfig = self.configs[name]
        ratio = min(self.d_in, self.d_out) / config.r
        roles = {"nlr_noble_down": Role("noble.down"), "nlr_noble_up": Role("noble.up", lr=ratio**config.up_lr_power)}
        if config.depth > 1:
            roles["nlr_noble_mix"] = Role("noble.mix", lr=ratio**config.mix_lr_power)
        if config.activation == "cosine":
            roles["nlr_noble_frequency"] = Role("noble.frequency", lr=config.frequency_lr, decay=False)
            roles["nlr_noble_phase"] = Role("noble.phase", lr=config.phase_lr, decay=False)
        return roles

    def merging(self, names: Sequence[str], keep: bool) -> Any:
        """Raise MergeError."""
        raise MergeError


class NobleAdapterConv2d(NobleAdapterLinear):
    """The same around a 1x1 convolution: (B, d_in, H, W) -> (B, d_out, H', W'), strides as the convolution's."""

    def adapted(self, x: Tensor, names: Sequence[str]) -> Tensor:
        """(..., d_in, H, W) -> (..., d_out, H', W')."""
        y, (down, right) = self.base_layer(x), self.get_base_layer().stride
        pixels = x[..., ::down, ::right].movedim(-3, -1)
        for name in names:
            dropout = self.configs[name].dropout if self.training else 0.0
            y = y + noble_branch(F.dropout(pixels, dropout), self._branch(name, x)).movedim(-1, -3)
        return y


@register_adapter(NobleAdapterConfig)
class NobleAdapterModel(AdapterModel):
    """peft's tuner for NOBLE adapters."""

    prefix = "nlr_noble_"
    layer_classes: ClassVar[Mapping[str, type[nn.Module]]] = {
        "linear": NobleAdapterLinear,
        "conv1d": NobleAdapterLinear,
        "conv2d": NobleAdapterConv2d,
    }

    def check_target(self, name: str, base: nn.Module, config: NobleAdapterConfig) -> None:
        super().check_target(name, base, config)
        matrix: Any = matrix_of(base)
        d_in, d_out = matrix.d_in, matrix.d_out
        if config.r >= min(d_in, d_out):
            raise UserError(
                f"r={config.r} is too high for {name} ({d_in} -> {d_out}); choose an r below {min(d_in, d_out)}, or "
                "leave the module out with exclude_modules"
            )

    def _check_merge_allowed(self) -> None:
        raise MergeError

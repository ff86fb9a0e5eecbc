"""NOBLE: a permanent nonlinear low-rank branch beside a dense linear (noble.txt, section 3).

Init and learning-rate table; every entry is a field of `NobleConfig`, the defaults are the paper's
(section 3.3, appendix A). s = min(d_in, d_out) / r.

| tensor            | shape         | init                              | lr x     | decay |
|-------------------|---------------|-----------------------------------|----------|-------|
| weight            | (d_out, d_in) | N(0, (0.5 / sqrt(d_in))^2)        | 1        | yes   |
| bias              | (d_out)       | 0                                 | 1        | no    |
| noble_down        | (r, d_in)     | N(0, 1 / d_in)                    | 1        | yes   |
| noble_up          | (d_out, r)    | N(0, (0.01 / sqrt(r))^2)          | s ^ 0.6  | yes   |
| noble_mix{k}      | (r, r)        | Xavier uniform                    | s ^ 0.45 | yes   |
| noble_frequency{k}| (r)           | U(0.8, 1.2)                       | 3        | no    |
| noble_phase{k}    | (r)           | N(0, 0.1^2)                       | 5        | no    |
| noble_up_bias     | (d_out)       | 0                                 | 1        | no    |
| noble_fusion      | (1)           | 0                                 | 1        | no    |

The last two exist with up_bias and with fusion="gated" only. On a pretrained model the weight and bias stay as they
are and noble_up starts at zero.

With fusion="gated" (noble_notes_zh.md, section 7.1) the output is a mixture instead of the paper's sum:

    output_scale * (w * (x weight^T + bias) + (1 - w) * (branch + noble_up_bias)),    w = sigmoid(noble_fusion)

It keeps both terms, d_out wide, for backward, where the sum keeps neither.

The dense part is an ordinary linear, the child `dense`, so that what converts linears (torchao's float8 and QAT,
bitsandbytes, peft's LoRA) takes it and leaves the branch alone. In files its tensors have the plain layer's names:
`q_proj.weight`, not `q_proj.dense.weight`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import initialization as init  # skips tensors that were loaded from a checkpoint
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Method, Role
from nonlinear_lowrank.methods.learning_rates import MultiplierLayer
from nonlinear_lowrank.methods.matrix import is_plain_linear
from nonlinear_lowrank.validation import check_integer

from .group import NobleGroup, group
from .op import ACTIVATIONS, bottleneck, noble_branch, noble_linear
from .sharing import SharedDown, checked_groups, share

_PLAIN_FORWARDS = (nn.Linear.forward, Conv1D.forward)
_HIGHEST_POWER = 10  # of d / r in a learning rate, which stays finite up to it
Activation = Literal["cosine", "tanh", "leaky_relu", "gelu", "silu"]


@dataclass(frozen=True, kw_only=True)
class NobleConfig:
    """Settings of NOBLE branches.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    method: ClassVar[str] = "noble"

    rank: int = 64
    """r, the width of the bottleneck; must stay below min(d_in, d_out) of every target."""
    rank_ratio: float | None = None
    """r is this share of min(d_in, d_out), rounded down, in place of `rank`. (The notes take a share of d_out, by
    which 0.25 gives the widening linear of a feed-forward a full rank.)"""
    activation: Activation = "cosine"
    """The bottleneck's nonlinearity; "cosine" at depth 2 is CosNet."""
    depth: int = 2
    """Number of activations: 1 (no mixing matrix), 2, or 3 (cosine only)."""
    init: Literal["auto", "scratch", "pretrained"] = "auto"
    """"scratch": the paper's init, which draws the dense weights anew, in place: what several modules hold stays
    shared, and is new in all of them. "pretrained": dense weights stay and noble_up is zero, so the model's outputs do
    not change. "auto": pretrained when the model was loaded by from_pretrained, else scratch."""
    dense_scale: float = 0.5
    """Dense weights have standard deviation dense_scale / sqrt(d_in)."""
    up_scale: float = 0.01
    """noble_up has standard deviation up_scale / sqrt(r)."""
    frequency_range: tuple[float, float] = (0.8, 1.2)
    """Frequencies are uniform in it."""
    phase_std: float = 0.1
    """Standard deviation of the phases."""
    up_lr_power: float = 0.6
    """Learning-rate multiplier of noble_up: (min(d_in, d_out) / r) ** up_lr_power."""
    mix_lr_power: float = 0.45
    """The same for the mixing matrices."""
    frequency_lr: float = 3.0
    """Learning-rate multiplier of the frequencies."""
    phase_lr: float = 5.0
    """Learning-rate multiplier of the phases."""
    fusion: Literal["add", "gated"] = "add"
    """"add": the paper's sum. "gated": the notes' mixture, with a learned gate that starts at one half."""
    up_bias: bool = False
    """A bias after the up projection."""
    dropout: float = 0.0
    """Share of the bottleneck's outputs that are zeroed in training. Above 0 the branch keeps some r-wide tensors
    more for backward."""
    share_down: Literal["none", "qkv"] = "none"
    """"qkv": query, key and value of an attention, which read the same input, share one noble_down (`noble_sharing`).
    With rank_ratio a group has the smallest of its ranks. (Not of the paper.)"""
    fuse_shared_inputs: bool = False
    """Query, key and value projections, and gate and up projections, are computed together (`noble_group`): x is read
    less often, and its gradients are added up in place. Needs fusion="add" and no dropout."""
    output_scale: float | None = None
    """Multiplies the layer's output. None: 1; and 2 with fusion="gated" on a pretrained model, which undoes the gate's
    one half exactly, so that the outputs do not change."""

    def __post_init__(self) -> None:
        if isinstance(self.frequency_range, list):  # JSON turns tuples into lists
            object.__setattr__(self, "frequency_range", tuple(self.frequency_range))
        check_integer("rank", self.rank, minimum=1)
        if self.activation not in ACTIVATIONS:
            raise UserError(f"unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        whole = isinstance(self.depth, int) and not isinstance(self.depth, bool)
        if not whole or self.depth not in (1, 2, 3) or (self.depth == 3 and self.activation != "cosine"):
            raise UserError(
                f"depth {self.depth!r} with activation {self.activation!r} is not defined; "
                "depth is 1 or 2, or 3 with the cosine"
            )
        if self.init not in ("auto", "scratch", "pretrained"):
            raise UserError(f"init must be 'auto', 'scratch' or 'pretrained', got {self.init!r}")
        limits = self.frequency_range
        pair = isinstance(limits, tuple) and len(limits) == 2 and all(map(_is_number, limits))
        if not pair or limits[0] > limits[1]:
            raise UserError(f"frequency_range must be two finite numbers, (low, high), got {limits!r}")
        if self.rank_ratio is not None and not (_is_number(self.rank_ratio) and 0 < self.rank_ratio < 1):
            raise UserError(f"rank_ratio must be a number above 0 and below 1, got {self.rank_ratio!r}")
        if not (_is_number(self.dropout) and 0 <= self.dropout < 1):
            raise UserError(f"dropout must be a number of at least 0 and below 1, got {self.dropout!r}")
        for name in ("up_bias", "fuse_shared_inputs"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.fusion not in ("add", "gated"):
            raise UserError(f"fusion must be 'add' or 'gated', got {self.fusion!r}")
        if self.share_down not in ("none", "qkv"):
            raise UserError(f"share_down must be 'none' or 'qkv', got {self.share_down!r}")
        if self.fuse_shared_inputs and (self.fusion != "add" or self.dropout):
            raise UserError("fuse_shared_inputs needs fusion='add' and dropout=0")
        for name in ("dense_scale", "up_scale", "phase_std"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise UserError(f"{name} must be a finite number of at least 0, got {value!r}")
        for name in ("frequency_lr", "phase_lr", "output_scale"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0) and not (name == "output_scale" and value is None):
                raise UserError(f"{name} must be a finite number above 0, got {value!r}")
        for name in ("up_lr_power", "mix_lr_power"):
            value = getattr(self, name)
            if not (_is_number(value) and abs(value) <= _HIGHEST_POWER):
                raise UserError(f"{name} must be a number from -{_HIGHEST_POWER} to {_HIGHEST_POWER}, got {value!r}")

    def rank_of(self, d_in: int, d_out: int) -> int:
        """r of a layer d_in -> d_out."""
        return self.rank if self.rank_ratio is None else max(1, int(min(d_in, d_out) * self.rank_ratio))

    @property
    def scale(self) -> float:
        """What the layer's output is multiplied by."""
        if self.output_scale is not None:
            return self.output_scale
        return 2.0 if self.fusion == "gated" and self.init == "pretrained" else 1.0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


class _NobleBranch(MultiplierLayer, nn.Module):
    """The branch's parameters, flat in the layer so that plain checkpoints keep their names."""

    noble_down: nn.Parameter | None
    noble_up: nn.Parameter
    noble_up_bias: nn.Parameter | None
    noble_fusion: nn.Parameter | None
    dense: nn.Module
    plain_names: bool
    """Whether `state_dict()` has the dense part's tensors under the plain layer's names; where transformers saves the
    model, it renames them itself (`hub.names`)."""

    @property
    def weight(self) -> Any:
        """The dense part's, in its own shape."""
        return self.dense.weight

    @property
    def bias(self) -> Any:
        """The dense part's (d_out), or None."""
        return self.dense.bias

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Takes the dense part's tensors under either name."""
        for name in ("weight", "bias"):
            if (plain := prefix + name) in state_dict:
                state_dict[f"{prefix}dense.{name}"] = state_dict.pop(plain)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _add_branch(self, d_in: int, d_out: int, config: NobleConfig, device: Any, dtype: Any) -> None:
        self.noble_config = config
        self.noble_shape = (d_in, d_out)
        self.plain_names = True
        self.dense.reset_parameters = _drawn_by_the_layer  # type: ignore[assignment]
        self.register_state_dict_post_hook(_with_plain_names)
        self.branch_enabled = True
        self.noble_shared: SharedDown | None = None
        self.noble_place = 0
        self.noble_group: NobleGroup | None = None
        self.noble_group_place = 0
        self.noble_reduce: Callable[[Tensor], Tensor] | None = (
            None  # h's parts over devices that each have some of d_in
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.noble_rank = r = config.rank_of(d_in, d_out)
        self.noble_down = parameter(r, d_in)
        self.noble_up = parameter(d_out, r)
        for k in range(1, config.depth):
            self.register_parameter(f"noble_mix{k}", parameter(r, r))
        if config.activation == "cosine":
            for k in range(1, config.depth + 1):
                self.register_parameter(f"noble_frequency{k}", parameter(r))
                self.register_parameter(f"noble_phase{k}", parameter(r))
        self.register_parameter("noble_up_bias", parameter(d_out) if config.up_bias else None)
        self.register_parameter("noble_fusion", parameter(1) if config.fusion == "gated" else None)

    def _branch_lists(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        depth, cosine = self.noble_config.depth, self.noble_config.activation == "cosine"
        mixes = [getattr(self, f"noble_mix{k}") for k in range(1, depth)]
        layers = range(1, depth + 1) if cosine else ()
        frequencies = [getattr(self, f"noble_frequency{k}") for k in layers]
        phases = [getattr(self, f"noble_phase{k}") for k in layers]
        return mixes, frequencies, phases

    def reset_parameters(self) -> None:
        """Draws every tensor of the table in this file's docstring; the dense ones only from scratch."""
        if self.noble_config.init != "pretrained":
            init.normal_(self.weight, std=self.noble_config.dense_scale / self.noble_shape[0] ** 0.5)
            if self.bias is not None:
                init.zeros_(self.bias)
        self.reset_branch_parameters()

    def reset_branch_parameters(self) -> None:
        """Draws the branch's tensors only."""
        config = self.noble_config
        if self.noble_down is not None:
            init.normal_(self.noble_down, std=self.noble_shape[0] ** -0.5)
        if config.init == "pretrained":
            init.zeros_(self.noble_up)
        else:
            init.normal_(self.noble_up, std=config.up_scale / self.noble_rank**0.5)
        mixes, frequencies, phases = self._branch_lists()
        for mix in mixes:
            init.xavier_uniform_(mix)
        for frequency, phase in zip(frequencies, phases, strict=True):
            init.uniform_(frequency, *config.frequency_range)
            init.normal_(phase, std=config.phase_std)
        for zero in (self.noble_up_bias, self.noble_fusion):
            if zero is not None:
                init.zeros_(zero)

    def _replicate_for_data_parallel(self) -> Any:
        """Called by nn.DataParallel, whose copies could not find their own owner."""
        if self.noble_shared is not None or self.noble_group is not None:
            raise UserError(
                "layers that share an input do not work with nn.DataParallel; start the processes with torchrun"
            )
        return super()._replicate_for_data_parallel()  # type: ignore[misc]

    def plain_dense(self) -> bool:
        """Return whether the dense part is a plain product: nothing was converted or hooked to it."""
        dense = self.dense
        own = dense.__dict__  # attributes of modules are slow to read
        return (
            type(dense).forward in _PLAIN_FORWARDS
            and not is_traceable_wrapper_subclass(dense.weight)
            and not (own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"])
            and not (own["_backward_pre_hooks"] or "forward" in own)
        )

    def dense_weight(self) -> Tensor:
        """(d_out, d_in)."""
        dense: Any = self.dense
        return dense.weight.t() if isinstance(dense, Conv1D) else dense.weight

    def whole_bias(self) -> Tensor | None:
        """The bias, with the branch's own in it."""
        bias, up_bias = self.bias, self.noble_up_bias
        if bias is None or up_bias is None:
            return up_bias if bias is None else bias
        return bias + up_bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        if not self.branch_enabled:
            return self.dense(x)
        if self.noble_group is not None and (y := self.noble_group.output(x, self.noble_group_place)) is not None:
            return y
        config, lists = self.noble_config, self._branch_lists()
        down: Tensor | None = self.noble_down
        h: Tensor | None = None
        given = x
        if self.noble_shared is not None:
            down = None
            x, h = self.noble_shared.product(x, self.noble_place)
        elif self.noble_reduce is not None:
            assert down is not None
            h, down = self.noble_reduce(F.linear(x, down)), None
        dropped = config.dropout > 0 and self.training
        plain = self.plain_dense()
        if config.fusion == "add" and not dropped and plain:
            y = noble_linear(
                x, self.dense_weight(), self.whole_bias(), down, self.noble_up, *lists, config.activation, h
            )
            return y if config.scale == 1 else y * config.scale
        if dropped:
            assert down is not None or h is not None
            u = bottleneck(F.linear(x, down) if down is not None else h, *lists, config.activation)  # type: ignore[arg-type]
            branch = F.linear(F.dropout(u, config.dropout), self.noble_up)
        else:
            branch = noble_branch(x, down, self.noble_up, *lists, config.activation, h)
        if self.noble_up_bias is not None:
            branch = branch + self.noble_up_bias.to(branch.dtype)
        y = F.linear(x, self.dense_weight(), self.bias) if plain else self.dense(given)
        branch = branch.to(y.dtype)
        if self.noble_fusion is None:
            y = y + branch
        else:
            gate = torch.sigmoid(self.noble_fusion).to(y.dtype)
            y = gate * y + (1 - gate) * branch
        return y if config.scale == 1 else y * config.scale

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        d_in, d_out = self.noble_shape
        config = self.noble_config
        return (
            f"in_features={d_in}, out_features={d_out}, bias={self.bias is not None}, "
            f"rank={self.noble_rank}, activation={config.activation}, depth={config.depth}"
            + (", fusion=gated" if config.fusion == "gated" else "")
            + (", down projection shared" if self.noble_shared is not None else "")
            + (", computed with its neighbours" if self.noble_group is not None else "")
        )


class NobleLinear(_NobleBranch):
    """A linear with a NOBLE branch: (..., in_features) -> (..., out_features).

    The dense part is the child `dense`, an `nn.Linear`; `weight` (out_features, in_features) and `bias` read its
    tensors, and files have them under these names, so plain checkpoints load into it. Constructing it draws the init
    of this file's table; on the meta device nothing is drawn.

    Args:
        in_features: d_in.
        out_features: d_out.
        bias: whether there is a bias beside the weight; the branch's is config.up_bias.
        config: settings of the branch.
        device: as in nn.Linear.
        dtype: as in nn.Linear.

    Raises:
        UserError: the rank is not below min(in_features, out_features).

    Source: noble.txt, section 3.1, equation (1).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        config: NobleConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_rank("this layer", in_features, out_features, config)
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        where = torch.get_default_device() if device is None else device
        self.dense = nn.utils.skip_init(nn.Linear, in_features, out_features, bias, device=where, dtype=dtype)
        self._add_branch(in_features, out_features, config, device, dtype)
        self.reset_parameters()


class NobleConv1D(_NobleBranch):
    """The same for transformers' `Conv1D` (GPT-2), whose `weight` is (d_in, d_out)."""

    def __init__(
        self,
        nf: int,
        nx: int,
        *,
        config: NobleConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_rank("this layer", nx, nf, config)
        super().__init__()
        self.nf, self.nx = nf, nx
        with torch.device("meta"):  # its constructor takes no device, and draws
            dense = Conv1D(nf, nx)
        self.dense = dense.to(dtype=dtype).to_empty(device=torch.get_default_device() if device is None else device)
        self._add_branch(nx, nf, config, device, dtype)
        self.reset_parameters()


def _drawn_by_the_layer() -> None:
    """Stands for `dense.reset_parameters`: a loop over all modules would undo the table's init of the dense part."""


def _with_plain_names(layer: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Renames the dense part's tensors in what `state_dict()` returns."""
    assert isinstance(layer, _NobleBranch)
    if layer.plain_names:
        for name in ("weight", "bias"):
            if (inside := f"{prefix}dense.{name}") in state_dict:
                state_dict[prefix + name] = state_dict.pop(inside)


def _too_high(d_in: int, d_out: int, config: NobleConfig) -> str | None:
    """Why a linear of these sizes has no branch of this rank, or None."""
    rank = config.rank_of(d_in, d_out)
    return None if rank < min(d_in, d_out) else f"rank {rank} is not low for {d_in} -> {d_out}"


def _check_rank(name: str, d_in: int, d_out: int, config: NobleConfig) -> None:
    if _too_high(d_in, d_out, config) is not None:
        raise UserError(
            f"rank {config.rank_of(d_in, d_out)} is not low for {name} ({d_in} -> {d_out}); "
            f"choose a rank below {min(d_in, d_out)} or leave it out with exclude="
        )


def _shape(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, Conv1D):
        return module.nx, module.nf
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features


def _build(module: nn.Module, config: NobleConfig) -> nn.Module:
    """A layer on the meta device that is then given real, still undrawn, branch tensors."""
    d_in, d_out = _shape(module)
    assert isinstance(module, nn.Linear | Conv1D)
    weight: Tensor = module.weight
    layer: NobleLinear | NobleConv1D
    if isinstance(module, Conv1D):
        layer = NobleConv1D(d_out, d_in, config=config, device="meta", dtype=weight.dtype)
    else:
        has_bias = module.bias is not None
        layer = NobleLinear(d_in, d_out, has_bias, config=config, device="meta", dtype=weight.dtype)
    layer.to_empty(device=weight.device)
    # From scratch too they are the module's own, drawn anew in place, so that whatever else holds them stays tied.
    layer.dense.weight, layer.dense.bias = module.weight, module.bias
    if config.init != "pretrained":
        for tensor in (layer.weight, layer.bias):
            if tensor is not None:
                vars(tensor).pop("_is_hf_initialized", None)  # transformers' mark of what is not to be drawn
    return layer.train(module.training)


def _settled(modules: Mapping[str, nn.Module], config: NobleConfig) -> tuple[dict[str, NobleConfig], list[Any]]:
    """The config of each layer, with the rank of its group, and the groups that share."""
    configs = dict.fromkeys(modules, config)
    if config.share_down == "none":
        return configs, []
    shapes = {name: _shape(module) for name, module in modules.items()}
    groups = checked_groups(shapes)
    for names in groups:
        rank = min(config.rank_of(*shapes[name]) for name in names)
        configs |= dict.fromkeys(names, replace(config, rank=rank, rank_ratio=None))
    return configs, groups


def _build_all(modules: Mapping[str, nn.Module], config: NobleConfig) -> dict[str, nn.Module]:
    configs, groups = _settled(modules, config)
    layers = {name: _build(module, configs[name]) for name, module in modules.items()}
    for names in groups:
        share([layers[name] for name in names])
    if config.fuse_shared_inputs:
        group(layers)
    return layers


def _roles(module: nn.Module) -> Mapping[str, Role]:
    assert isinstance(module, _NobleBranch)
    config, ratio = module.noble_config, min(module.noble_shape) / module.noble_rank
    roles = {"noble_up": Role("noble.up", lr=ratio**config.up_lr_power)}
    if module.noble_down is not None:
        roles["noble_down"] = Role("noble.down")
    for k in range(1, config.depth):
        roles[f"noble_mix{k}"] = Role("noble.mix", lr=ratio**config.mix_lr_power)
    if config.activation == "cosine":
        for k in range(1, config.depth + 1):
            roles[f"noble_frequency{k}"] = Role("noble.frequency", lr=config.frequency_lr, decay=False)
            roles[f"noble_phase{k}"] = Role("noble.phase", lr=config.phase_lr, decay=False)
    if config.up_bias:
        roles["noble_up_bias"] = Role("noble.up_bias", decay=False)
    if config.fusion == "gated":
        roles["noble_fusion"] = Role("noble.fusion", decay=False)
    return roles


def _products(d_in: int, d_out: int, config: NobleConfig, has_down: bool) -> int:
    """Elements of the branch's matrices: a multiply-add each, for every token."""
    r = config.rank_of(d_in, d_out)
    return r * (has_down * d_in + d_out) + r * r * (config.depth - 1)


def _flops(module: nn.Module) -> int:
    assert isinstance(module, _NobleBranch)
    return 2 * _products(*module.noble_shape, module.noble_config, module.noble_down is not None)


def _added(modules: Mapping[str, nn.Module], config: NobleConfig) -> tuple[int, int]:
    configs, groups = _settled(modules, config)
    without = {name for group in groups for name in group[1:]}
    parameters = flops = 0
    for name, module in modules.items():
        (d_in, d_out), own = _shape(module), configs[name]
        products = _products(d_in, d_out, own, name not in without)
        vectors = 2 * own.depth * own.rank_of(d_in, d_out) if own.activation == "cosine" else 0
        parameters += products + vectors + own.up_bias * d_out + (own.fusion == "gated")
        flops += 2 * products
    return parameters, flops


METHOD = Method(
    name=NobleConfig.method,
    config_class=NobleConfig,
    layer_types=(NobleLinear, NobleConv1D),
    is_target=is_plain_linear,
    check=lambda name, module, config: _check_rank(name, *_shape(module), config),
    leave=lambda module, config: _too_high(*_shape(module), config),
    build=lambda name, module, config: _build(module, config),
    build_all=_build_all,
    roles=_roles,
    flops=_flops,
    added=_added,
    dense="dense",
)

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
| noble_bias{k}     | (r)           | 0; U(-1, 1) / sqrt(r) from k = 2  | 1        | no    |
| noble_up_bias     | (d_out)       | 0                                 | 1        | no    |
| noble_fusion      | (1)           | 0                                 | 1        | no    |

The last three exist with bottleneck_bias, up_bias and fusion="gated" only. With mix_scale the mixing matrices are
N(0, (mix_scale / sqrt(r))^2). On a pretrained model the weight and bias stay as they
are and noble_up starts at zero.

With fusion="gated" (noble_notes_zh.md, section 7.1) the output is a mixture instead of the paper's sum:

    output_scale * (w * (x weight^T + bias) + (1 - w) * (branch + noble_up_bias)),    w = sigmoid(noble_fusion)

It saves both terms, d_out wide, for backward, where the sum saves neither.

The dense part is an ordinary linear, the child `dense`, so that what converts linears (torchao's float8 and QAT,
bitsandbytes, peft's LoRA) takes it and leaves the branch alone. In the files of transformers' and torchtitan's models
its tensors have the plain layer's names, `q_proj.weight`, not `q_proj.dense.weight`, and either names load.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel
from transformers import initialization as init  # skips tensors that were loaded from a checkpoint
from transformers.pytorch_utils import Conv1D

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import AdapterArm, BranchLayer, Method, MultiplierLayer, Role, register
from nonlinear_lowrank.methods.experts import active_experts, linear_shapes, projections
from nonlinear_lowrank.methods.matrix import linear_shape
from nonlinear_lowrank.ops.plain import wide
from nonlinear_lowrank.surgery.targets import is_within, outermost_models

from .branch import draw_branch, draw_up, has_own_init, joined
from .config import NobleConfig
from .experts import NobleExperts, branch_shapes
from .inits import own_inits, zero_weights
from .op import Branch, bottleneck, noble_branch, noble_linear

if TYPE_CHECKING:
    from .inputs import NobleGroup, SharedDown

_PLAIN_FORWARDS = (nn.Linear.forward, Conv1D.forward)


class _NobleBranch(MultiplierLayer, BranchLayer):
    """The branch's parameters, flat in the layer so that plain checkpoints keep their names."""

    noble_down: nn.Parameter | None
    noble_up: nn.Parameter
    noble_up_bias: nn.Parameter | None
    noble_fusion: nn.Parameter | None

    def __init__(
        self, dense: nn.Module, d_in: int, d_out: int, config: NobleConfig, device: Any = None, dtype: Any = None
    ) -> None:
        """Take a linear that is on the meta device."""
        if (why := config.check_rank(d_in, d_out)) is not None:
            raise UserError(f"{why}; choose a rank below {min(d_in, d_out)}")
        super().__init__()
        self.put_beside(dense.to_empty(device=torch.get_default_device() if device is None else device))
        self.noble_config, self.noble_shape = config, (d_in, d_out)
        self.noble_shared: SharedDown | None = None
        self.noble_group: NobleGroup | None = None
        self.noble_place = 0  # in either
        self.noble_own_init = frozenset[str]()  # of "weight" and "bias", those that the model's own init draws
        # Sums h over devices that each have a part of d_in.
        self.noble_reduce: Callable[[Tensor], Tensor] | None = None
        self.noble_rank = config.rank_of(d_in, d_out)
        shapes = config.shapes(d_in, d_out)
        for name in dict.fromkeys((*shapes, "up_bias", "fusion")):
            made = nn.Parameter(torch.empty(shapes[name], device=device, dtype=dtype)) if name in shapes else None
            self.register_parameter(f"noble_{name}", made)
        kinds = ("mix", "frequency", "phase")
        self._branch_names = [[f"noble_{name}" for name in shapes if name.startswith(kind)] for kind in kinds]
        self.reset_parameters()

    def branch(self) -> Branch:
        """Return the branch's tensors; `down` is None where another layer has it."""
        parameters = self._parameters

        def read(name: str) -> Any:  # attributes of modules are slow; some wrappers keep parameters as such
            return getattr(self, name) if (found := parameters.get(name)) is None else found

        config = self.noble_config
        mixes, frequencies, phases = ([read(name) for name in names] for names in self._branch_names)
        if config.bottleneck_bias:  # f (z + b) + p = f z + (p + f b): the operators know phases alone
            biases = (read(f"noble_bias{k}") for k in range(1, len(phases) + 1))
            biased = zip(phases, frequencies, biases, strict=True)
            phases = [wide(phase) + wide(frequency) * wide(bias) for phase, frequency, bias in biased]
        return Branch(read("noble_down"), read("noble_up"), mixes, frequencies, phases, config.activation)

    def reset_parameters(self) -> None:
        """Draw every tensor of the table in this file's docstring; the dense ones only from scratch."""
        if self.noble_up.is_meta:  # where torch takes 0.4 ms to draw nothing
            return
        if self.noble_config.init != "pretrained":
            if "weight" not in self.noble_own_init:
                init.normal_(self.weight, std=self.noble_config.dense_scale / self.noble_shape[0] ** 0.5)
            if self.bias is not None and "bias" not in self.noble_own_init:
                init.zeros_(self.bias)
        tensors = {name: getattr(self, f"noble_{name}") for name in self.noble_config.shapes(*self.noble_shape)}
        draw_branch(tensors, self.noble_config, self.noble_shape[0])

    def _replicate_for_data_parallel(self) -> Any:
        if self.noble_shared is not None or self.noble_group is not None:  # the copies would find the originals
            raise UserError("layers of one input do not work with nn.DataParallel; start the processes with torchrun")
        return super()._replicate_for_data_parallel()

    def plain_weight(self) -> Tensor | None:
        """Return the dense weight as (d_out, d_in); None where the dense part is converted or hooked."""
        dense: Any = self._modules["dense"]  # attributes of modules are slow to read
        hooked = dense._forward_hooks or dense._forward_pre_hooks or dense._backward_hooks or dense._backward_pre_hooks
        if hooked or "forward" in dense.__dict__ or type(dense).forward not in _PLAIN_FORWARDS:
            return None
        weight = dense.weight
        if type(weight) is not nn.Parameter and is_traceable_wrapper_subclass(weight):
            return None
        return weight.t() if isinstance(dense, Conv1D) else weight

    def whole_bias(self) -> Tensor | None:
        """Return the bias with the branch's own in it."""
        if not self.noble_config.up_bias:
            return self.bias
        return self.noble_up_bias if self.bias is None else self.bias + self.noble_up_bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_in) -> (..., d_out)."""
        if not self.branch_enabled:
            return self.dense(x)
        if self.noble_group is not None and (y := self.noble_group.output(x, self.noble_place)) is not None:
            return y
        config, branch, given, h = self.noble_config, self.branch(), x, None
        if self.noble_shared is not None:
            x, h = self.noble_shared.product(x, self.noble_place)
        elif self.noble_reduce is not None:
            h = self.noble_reduce(F.linear(x, branch.down))  # type: ignore[arg-type]
        dropped = config.dropout > 0 and self.training
        weight = self.plain_weight()
        if config.fusion == "add" and not dropped and weight is not None:
            y = noble_linear(x, weight, self.whole_bias(), branch, h)
            return y if config.scale == 1 else y * config.scale
        if dropped:
            u = bottleneck(F.linear(x, branch.down) if h is None else h, branch)  # type: ignore[arg-type]
            added = F.linear(F.dropout(u, config.dropout), self.noble_up)
        else:
            added = noble_branch(x, branch, h)
        if self.noble_up_bias is not None:
            added = added + self.noble_up_bias.to(added.dtype)
        y = self.dense(given) if weight is None else F.linear(x, weight, self.bias)
        gate = None if self.noble_fusion is None else torch.sigmoid(self.noble_fusion)
        return joined(y, added, gate, config.scale)

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        (d_in, d_out), config = self.noble_shape, self.noble_config
        return (
            f"in_features={d_in}, out_features={d_out}, bias={self.bias is not None}, "
            f"rank={self.noble_rank}, activation={config.activation}, depth={config.depth}"
            + (", fusion=gated" if config.fusion == "gated" else "")
            + (", down projection shared" if self.noble_shared is not None else "")
            + (", computed with its neighbours" if self.noble_group is not None else "")
        )


class NobleLinear(_NobleBranch):
    """A linear with a NOBLE branch: (..., in_features) -> (..., out_features).

    The dense part is the child `dense`, an `nn.Linear`, whose arguments these are. Constructing it draws the init of
    this file's table; on the meta device nothing is drawn.

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
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dense = nn.Linear(in_features, out_features, bias, device="meta", dtype=dtype)
        super().__init__(dense, in_features, out_features, config, device, dtype)
        self.in_features, self.out_features = in_features, out_features


class NobleConv1D(_NobleBranch):
    """The same for transformers' `Conv1D` (GPT-2), whose `weight` is (d_in, d_out)."""

    def __init__(self, nf: int, nx: int, *, config: NobleConfig, device: Any = None, dtype: Any = None) -> None:
        with torch.device("meta"):  # its constructor takes no device, and draws
            dense = Conv1D(nf, nx).to(dtype=dtype)
        super().__init__(dense, nx, nf, config, device, dtype)
        self.nf, self.nx = nf, nx


@register
class NobleMethod(Method):
    """NOBLE branches."""

    name = NobleConfig.method
    config_class = NobleConfig
    layer_types = (NobleLinear, NobleConv1D, NobleExperts)
    optimizable = draws_up = budgeted = tensor_parallel = True
    dense = "dense"
    adapter = "nonlinear_lowrank.methods.noble.adapter"
    _shown = ("r", "activation", "depth", "target_modules", "plus")
    adapter_arms: ClassVar = {"noble-adapter": AdapterArm(config=(adapter, "NobleAdapterConfig"), shown=_shown)}

    def is_target(self, module: nn.Module) -> bool:
        return super().is_target(module) or bool(projections(module))

    def converted(self, config: Any) -> Any:
        return replace(config, init="pretrained")

    @torch.no_grad()
    def draw_up(self, layer: Any) -> None:
        for name, tensor in layer.named_parameters(recurse=False):
            if name.startswith("noble_") and name.endswith("_up"):  # of experts two
                draw_up(tensor, layer.noble_config)

    def initial(self, config: Any, *, pretrained: bool) -> Any:
        if pretrained:  # trained weights do not tell how they were drawn
            config = replace(config, own_init=config.own_init or ())
        return config if config.init != "auto" else replace(config, init="pretrained" if pretrained else "scratch")

    def complete(self, model: nn.Module, config: Any, names: list[str]) -> Any:
        for each in config.own_init or ():
            if not any(has_own_init(name, tensor, [each]) for name in names for tensor in ("weight", "bias")):
                raise UserError(f"own_init has {each!r}, which is not the weight or bias of a swapped linear")
        if config.own_init is not None or config.init != "scratch":
            return config
        found: tuple[str, ...] = ()
        for start, part in outermost_models(model).items():
            if isinstance(part, PreTrainedModel):
                found += own_inits(model, [name for name in names if is_within(name, start)])
                names = [name for name in names if not is_within(name, start)]
        return replace(config, own_init=found + zero_weights(model, names))

    def settings(self, config: Any, layers: Collection[nn.Module]) -> list[str]:
        found = [f"init: {config.init}" + f", except {', '.join(config.own_init or ())}" * bool(config.own_init)]
        if config.share_down != "none":
            found.append(f"one down projection for each {config.share_down}")
        if config.fuse_shared_inputs:
            found.append("layers of one input together")
        return found

    def build(self, name: str, module: nn.Module, config: Any) -> nn.Module:
        layer = _layer(module, config)
        if config.own_init and not isinstance(layer, NobleExperts):
            own = (tensor for tensor in ("weight", "bias") if has_own_init(name, tensor, config.own_init))
            layer.noble_own_init = frozenset(own)  # type: ignore[assignment]
        return layer

    def build_all(self, modules: Mapping[str, nn.Module], config: Any) -> Mapping[str, nn.Module]:
        configs, groups = _resolved(modules, config)
        layers = {name: self.build(name, module, configs[name]) for name, module in modules.items()}
        if groups or config.fuse_shared_inputs:
            from .inputs import SharedDown, group

            for names in groups:
                SharedDown([layers[name] for name in names])
            if config.fuse_shared_inputs:
                group({name: layer for name, layer in layers.items() if not isinstance(layer, NobleExperts)})
        return layers

    def roles(self, layer: Any) -> Mapping[str, Role]:
        if isinstance(layer, NobleExperts):
            shapes = {f"noble_{end}_": (each.d_in, each.d_out) for end, each in layer.ends()}
        else:
            shapes = {"noble_": layer.noble_shape}
        roles = {prefix + name: role for prefix, shape in shapes.items() for name, role in _roles(layer, shape)}
        # One that is pruned or parametrized is no parameter, and its parts have its role.
        return {name: role for name, role in roles.items() if layer._parameters.get(name, name) is not None}

    def flops(self, layer: Any) -> int:
        if isinstance(layer, NobleExperts):
            return _expert_flops(layer, layer.noble_config)
        d_in, d_out = layer.noble_shape
        return 2 * _products(d_in, d_out, layer.noble_config, layer.noble_down is not None)

    def added(self, modules: Mapping[str, nn.Module], config: Any) -> tuple[int, int]:
        configs, groups = _resolved(modules, config)
        without = {name for group in groups for name in group[1:]}
        parameters = flops = 0
        for name, module in modules.items():
            if projections(module):
                parameters += sum(map(math.prod, branch_shapes(module, config).values()))
                flops += _expert_flops(module, config)
                continue
            (d_in, d_out), own = linear_shape(module), configs[name]
            tensors = own.shapes(d_in, d_out)
            parameters += sum(math.prod(tensors[each]) for each in tensors if each != "down" or name not in without)
            flops += 2 * _products(d_in, d_out, own, name not in without)
        return parameters, flops

    def optimize(self, model: nn.Module, *, shared_inputs: bool, quantized: bool) -> bool:
        """Make one product of dense output and branch; layers stay where their dense part is quantized."""
        if quantized:
            return False
        from .fused import fuse

        return fuse(model, shared_inputs=shared_inputs)


def _layer(module: Any, config: NobleConfig) -> nn.Module:
    """Return a layer made on the meta device, then given real, still undrawn, branch tensors."""
    layer: Any
    if experts := projections(module):
        layer = NobleExperts.beside(module, config)
        kept = [attrgetter(name)(layer) for each in experts for name in each.parameters]
        kept += [getattr(layer, f"{each.name}_bias", None) for each in experts]
    else:
        (d_in, d_out), weight = linear_shape(module), module.weight
        if isinstance(module, Conv1D):
            layer = NobleConv1D(d_out, d_in, config=config, device="meta", dtype=weight.dtype)
        else:
            has_bias = module.bias is not None
            layer = NobleLinear(d_in, d_out, has_bias, config=config, device="meta", dtype=weight.dtype)
        layer.to_empty(device=weight.device)
        # From scratch too they are the module's own, redrawn in place, so that whatever else holds them stays tied.
        layer.dense.weight, layer.dense.bias = kept = [module.weight, module.bias]
    if config.init != "pretrained":
        for tensor in kept:
            if tensor is not None:
                vars(tensor).pop("_is_hf_initialized", None)  # transformers' mark of what is not to be drawn
    return layer.train(module.training)


def _resolved(modules: Mapping[str, nn.Module], config: NobleConfig) -> tuple[dict[str, NobleConfig], list[Any]]:
    """Return the config of each layer, with the rank of its group, and the groups that share."""
    configs = dict.fromkeys(modules, config)
    if config.share_down == "none":
        return configs, []
    from .inputs import shared_groups

    shapes = {name: linear_shape(module) for name, module in modules.items() if not projections(module)}
    groups = shared_groups(shapes)
    for names in groups:
        rank = min(config.rank_of(*shapes[name]) for name in names)
        configs |= dict.fromkeys(names, replace(config, rank=rank, rank_ratio=None))
    return configs, groups


def _roles(layer: Any, shape: tuple[int, int]) -> Iterator[tuple[str, Role]]:
    """Yield the roles of a branch beside d_in -> d_out, by the ends of names."""
    config: NobleConfig = layer.noble_config
    ratio = min(shape) / config.rank_of(*shape)
    yield "down", Role("noble.down")
    yield "up", Role("noble.up", lr=ratio**config.up_lr_power)
    yield "up_bias", Role("noble.up_bias", decay=False)
    yield "fusion", Role("noble.fusion", decay=False)
    for k in range(1, config.depth + 1):
        yield f"mix{k}", Role("noble.mix", lr=ratio**config.mix_lr_power)
        yield f"frequency{k}", Role("noble.frequency", lr=config.frequency_lr, decay=False)
        yield f"phase{k}", Role("noble.phase", lr=config.phase_lr, decay=False)
        yield f"bias{k}", Role("noble.bias", decay=False)


def _expert_flops(experts: nn.Module, config: NobleConfig) -> int:
    """Return the forward FLOPs per token of branches beside the experts that a token goes through."""
    products = sum(_products(*shape, config, True) for shape in linear_shapes(experts))
    return round(2 * (active_experts(experts) or 0) * products)


def _products(d_in: int, d_out: int, config: NobleConfig, has_down: bool) -> int:
    """Return the elements of the branch's matrices: a multiply-add each, for every token."""
    r = config.rank_of(d_in, d_out)
    return r * (has_down * d_in + d_out) + r * r * (config.depth - 1)

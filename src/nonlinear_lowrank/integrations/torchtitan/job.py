"""A method's layers in a training job of torchtitan: as its modules, in its configs, and in its optimizer groups."""

import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.components.optimizer import ParamGroupConfig
from torchtitan.components.quantization import Float8Linear
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from torchtitan.tools.logging import logger

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Method, method_of_config
from nonlinear_lowrank.methods.noble import NobleLinear
from nonlinear_lowrank.methods.sine import SineLowRankLinear
from nonlinear_lowrank.optim import parameter_roles
from nonlinear_lowrank.surgery.report import AugmentReport, measure_plain
from nonlinear_lowrank.surgery.targets import Patterns, choose_linears


class Layer(Module):
    """A mixin that makes one of our layers a module of torchtitan."""

    plain_names = True
    by_rows: tuple[str, ...] = ()  # own tensors whose rows are the layer's outputs, as those of a weight are

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features), the shape of the weight that it has or stands for."""
        return self.config.out_features, self.config.in_features

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """A linear's config and the method's. Not a `Linear.Config`, which later converters would take as plain."""

        in_features: int
        out_features: int
        bias: bool = False
        method: Any

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features); torchtitan's shardings know the argument by its name."""
        return super().forward(input)

    def _init_self_parameters(self) -> None:
        """Draw tensors by the method's init, and dense ones that it keeps by torchtitan's; called by `init_states`."""
        self.reset_parameters()
        if getattr(self.config.method, "init", "scratch") == "pretrained":
            for name in ("weight", "bias"):
                if (parameter := getattr(self, name)) is not None:
                    self._init_param(name, parameter)

    _sharding_config: Any

    def parallelize(self, parallel_dims: Any) -> None:
        """Parallelize as torchtitan does; tensors that a plain linear does not have are replicated."""
        if parallel_dims.tp_enabled:
            raise UserError("layers with branches need --parallelism.tensor_parallel_degree 1; shard them by FSDP")
        if (sharding := self._sharding_config) is not None:
            states = sharding.state_shardings
            whole = {name: dense_param_placement(tp=spmd.R) for name, _ in self.named_parameters(recurse=False)}
            own = {name: states.get(name, whole[name]) for name in whole}
            self._sharding_config = replace(sharding, state_shardings=own)
            for child in self.children():  # NOBLE's dense part
                child._sharding_config = ShardingConfig(state_shardings=states)
        super().parallelize(parallel_dims)


class TitanNobleLinear(Layer, NobleLinear):
    """`NobleLinear` as a module of torchtitan; its config's `method` is a `NobleConfig`."""

    by_rows = ("noble_up", "noble_up_bias")

    @dataclass(kw_only=True, slots=True)
    class Config(Layer.Config):
        """Builds this class."""

        dense: Any
        """The dense part's `Linear.Config`, which the float8 converter finds and swaps."""

    def __init__(self, config: Any) -> None:
        if type(config.dense) not in _DENSE:
            kind = type(config.dense).__qualname__.removesuffix(".Config")
            raise UserError(
                f"a converter after AugmentConverter has made a NOBLE layer's dense part a {kind}, not a Linear or "
                "Float8Linear; omit that converter"
            )
        sizes: dict[str, Any] = {name: getattr(config, name) for name in ("in_features", "out_features", "bias")}
        NobleLinear.__init__(self, **sizes, config=config.method)
        dense = config.dense.build()  # a module of torchtitan too
        dense.reset_parameters, self.dense, self.config = self.dense.reset_parameters, dense, config


class TitanSineLowRankLinear(Layer, SineLowRankLinear):
    """`SineLowRankLinear` as a module of torchtitan; its config's `method` is a `SineLowRankConfig`."""

    by_rows = ("sine_up",)

    @dataclass(kw_only=True, slots=True)
    class Config(Layer.Config):
        """Builds this class."""

    def __init__(self, config: Any) -> None:
        sizes = config.in_features, config.out_features, config.bias
        SineLowRankLinear.__init__(self, *sizes, config=config.method, dtype=torch.get_default_dtype())
        self.config = config


# torchtitan's Float8Linear is None without torchao.
_DENSE: tuple[Any, ...] = (Linear.Config, *([] if Float8Linear is None else [Float8Linear.Config]))
_CLASSES: dict[str, type[Layer]] = {"noble": TitanNobleLinear, "sine-lowrank": TitanSineLowRankLinear}


def built(model_config: Any) -> Any:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return model_config.build()


class AugmentConverter(ModelConfigConverter):
    """Swaps the configs of linears for a method's, for the `converters` of torchtitan's model registries."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        """Arguments as in `nonlinear_lowrank.augment`."""

        method: Any
        """`NobleConfig(rank=64)` or `SineLowRankConfig(...)`. init="auto" is "scratch" here; with "pretrained" dense
        tensors have torchtitan's own init, and the up projections start at zero."""
        include: Patterns = None
        """Regular expression(s) that a linear's whole name must match, e.g. r"layers\\.\\d+\\.attention\\..*"."""
        exclude: Patterns = None
        """Regular expression(s) of names to skip."""
        split_fused: bool = True
        """Fused projections with a branch become three linears; there is no alternative here."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Change the config in place, and log which linears were swapped and which were skipped.

        Raises:
            UserError: as `nonlinear_lowrank.augment`, or torchtitan cannot have this method, option or place; the
                config is then as it was.
        """
        config = self.config.method
        method = method_of_config(config)
        if method is None or method.name not in _CLASSES:
            named = type(config).__name__ if method is None else method.name
            raise UserError(f"{named} is not for torchtitan; use NobleConfig or SineLowRankConfig")
        if getattr(config, "share_down", "none") != "none" or getattr(config, "fuse_shared_inputs", False):
            raise UserError("share_down and fuse_shared_inputs are not for torchtitan: omit them")
        if not self.config.split_fused:
            raise UserError("a branch beside a whole fused projection is not for torchtitan: omit split_fused=False")
        if method.keeps_weights_by and not method.discards(config):
            given = " and ".join(f"{name}={value!r}" for name, value in method.keeps_weights_by.items())
            raise UserError(f"{given} keeps trained weights, and torchtitan's are drawn later; omit it")
        config = method.initial(config, pretrained=False)
        spread = copy.deepcopy(model_config)
        _unfuse(spread, lambda fqn: True)
        places = {name: place for place in _places(spread) for name in place.names}
        for place in places.values():
            if type(place.config) in _DENSE[1:]:
                place.put(_plain(place.config))
        plain = built(spread)
        names, skipped = choose_linears(plain, method, config, self.config.include, self.config.exclude)
        for name in names:
            _check_place(name, places.get(name), set(names), method)
            method.check(name, plain.get_submodule(name), config)
        _unfuse(model_config, lambda fqn: any(f"{fqn}.{own}" in names for own in ("wq", "wk", "wv")))
        for place in list(_places(model_config)):
            if place.names[0] in names:
                same = ("in_features", "out_features", "bias", "param_init", "sharding_config")
                kept = {own: getattr(place.config, own) for own in same}
                if method.dense:
                    kept["dense"] = replace(place.config, param_init=None, sharding_config=None)
                place.put(_CLASSES[method.name].Config(**kept, method=config))
        model = built(model_config)
        report = AugmentReport(method=method.name, config=config, swapped=names, skipped=skipped)
        measure_plain(report, plain, names)
        report.parameters_added = sum(each.numel() for each in model.parameters()) - report.parameters_before
        report.flops_added = sum(method.flops(model.get_submodule(name)) for name in names)
        logger.info(str(report))
        return model_config


class _Place(NamedTuple):
    """The place of a config of one linear, or of two."""

    names: tuple[str, ...]  # of the modules that are built from it
    config: Any
    parent: Any
    attribute: Any

    def put(self, config: Any) -> None:
        """Put another config there."""
        if isinstance(self.parent, list):
            self.parent[self.attribute] = config
        else:
            setattr(self.parent, self.attribute, config)


def _plain(config: Any) -> Any:
    """Return the plain linear's config of a float8 one."""
    return Linear.Config(**{each.name: getattr(config, each.name) for each in fields(Linear.Config)})


def _places(model_config: Any) -> Iterator[_Place]:
    for kind in (Linear.Config, Layer.Config):
        for fqn, config, parent, attribute in model_config.traverse(kind):
            shared = isinstance(parent, QKVLinear.Config) and attribute == "wkv"
            names = tuple(fqn.removesuffix("wkv") + own for own in ("wk", "wv")) if shared else (fqn,)
            yield _Place(names, config, parent, attribute)


def _check_place(name: str, place: _Place | None, chosen: set[str], method: Method) -> None:
    if place is None or place.parent is None:
        raise UserError(f"the model's config has no linear at {name}; leave it out with exclude=")
    if isinstance(place.config, Layer.Config):
        raise UserError(f"{name} is augmented already; leave it out with exclude=")
    # Subclasses compute in ways of their own, and modules of "dist_gemm" read weights past their linears.
    owner = type(place.parent).__qualname__.removesuffix(".Config")
    kind = type(place.config).__qualname__.removesuffix(".Config")
    if type(place.config) not in _DENSE or owner.startswith("AllGather"):
        raise UserError(f"{name} is a {kind} in {owner}, where a branch cannot be; leave it out with exclude=")
    if type(place.config) in _DENSE[1:] and not method.dense:
        raise UserError(
            f"{name} is a {kind}, and {method.name} has no dense part to keep in float8; put AugmentConverter before "
            "Float8LinearConverter, which then takes the other linears"
        )
    if not chosen.issuperset(place.names):
        raise UserError(f"{' and '.join(place.names)} share one config in torchtitan; choose both or neither")


def _unfuse(model_config: Any, wanted: Callable[[str], bool]) -> None:
    """Make three linears of fused query, key and value projections, by the name of the module around them."""
    for fqn, fused, parent, attribute in list(model_config.traverse(FusedQKVLinear.Config)):
        if type(fused) is not FusedQKVLinear.Config or type(fused.wqkv) not in _DENSE or not wanted(fqn):
            continue
        linears = {}
        for own, count in (("wq", fused.n_heads), ("wkv", fused.n_kv_heads)):
            draws = (fused.wqkv.param_init or {}).items()
            of_rows = {name: functools.partial(_draw_rows, draw, own, fused) for name, draw in draws}
            part = replace(fused.wqkv, out_features=count * fused.head_dim, param_init=of_rows or None)
            linears[own] = part if module_filter_fn(part, own, []) else _plain(part)
        setattr(parent, attribute, QKVLinear.Config(head_dim=fused.head_dim, **linears))


def _draw_rows(draw: Callable[[Tensor], Any], own: str, fused: Any, tensor: Tensor) -> None:
    """Draw a fused projection, and keep the rows of the queries or of the keys."""
    width, groups, each = fused.head_dim, fused.n_kv_heads, fused.n_heads // fused.n_kv_heads
    drawn = tensor.new_empty((fused.n_heads + 2 * groups) * width, *tensor.shape[1:])
    draw(drawn)
    blocks = drawn.view(groups, each + 2, width, *tensor.shape[1:])
    rows = blocks[:, :each] if own == "wq" else blocks[:, each : each + 1]
    with torch.no_grad():
        tensor.copy_(rows.reshape(-1, *tensor.shape[1:]))


def augment(
    trainer_config: Any, method: Any, *, include: Patterns = None, exclude: Patterns = None, split_fused: bool = True
) -> Any:
    """Put a method's layers into a training job: model, optimizer and Hugging Face export.

    torchtitan's `Trainer.Config`, with a model and an optimizer, is changed in place, and returned. The other arguments
    are those of `AugmentConverter.Config`.

    Raises:
        UserError: as `AugmentConverter` and `optimizer_config`; the config is then as it was.
    """
    from .hugging_face import BranchAdapter, state_dict_adapter

    if (spec := trainer_config.model_spec) is None:
        raise UserError("the trainer config has no model_spec; set one, e.g. model_registry('debugmodel')")
    if spec.state_dict_adapter and issubclass(spec.state_dict_adapter, BranchAdapter):
        raise UserError("the job is augmented already; put a second method in by AugmentConverter, before augment")
    which: dict[str, Any] = {"include": include, "exclude": exclude, "split_fused": split_fused}
    converter = AugmentConverter.Config(method=method, **which).build()
    model = converter.convert(copy.deepcopy(spec.model))
    trainer_config.optimizer = optimizer_config(trainer_config.optimizer, model)
    adapter = spec.state_dict_adapter and state_dict_adapter(spec.state_dict_adapter)
    trainer_config.model_spec = replace(spec, model=model, state_dict_adapter=adapter)
    return trainer_config


def optimizer_config(optimizer: Any, model_config: Any) -> Any:
    """Return the optimizer's config with every group split by the multipliers of `nonlinear_lowrank.param_groups`.

    A learning rate is the group's times the role's multiplier; weight decay is the group's, or 0 for roles that have
    none (frequencies, phases, and as in `param_groups` all vectors: norms and biases).

    The patterns of the new config each match the parameters of one group and of one multiplier. `optimizer` is an
    `OptimizersContainer.Config`, `model_config` that of the augmented model.

    Raises:
        UserError: a parameter has no group, a pattern matches nothing, a group names no learning rate, or Muon
            would get a branch's tensor.
    """
    groups = optimizer.param_groups
    kinds: dict[tuple[int, float, bool], list[str]] = {}
    for name, role in parameter_roles(built(model_config)).items():
        # torchtitan gives a parameter to the first group that matches.
        place = next((at for at, group in enumerate(groups) if re.search(group.pattern, name)), None)
        if place is None:
            raise UserError(f"the optimizer has no group for {name}; end its param_groups with the pattern '.*'")
        if groups[place].optimizer_name == "DistMuon" and "." in role.name and not role.muon:
            raise UserError(
                f"{name} would go to Muon, which diverges at the multipliers of {role.name}; put an AdamW group with "
                f"the pattern {name.rpartition('.')[2]!r} before {groups[place].pattern!r}"
            )
        kinds.setdefault((place, role.lr, role.decay), []).append(name)
    for place, group in enumerate(groups):
        if all(place != kind[0] for kind in kinds):
            raise UserError(f"the optimizer's pattern {group.pattern!r} matches no parameter of this model by itself")
        if "lr" not in group.optimizer_kwargs:
            raise UserError(f"the optimizer's group {group.pattern!r} has no lr; add it to its optimizer_kwargs")
    split = []
    patterns = dict(zip(kinds, _patterns(list(kinds.values())), strict=True))
    for (place, lr, decay), pattern in sorted(patterns.items(), key=lambda each: each[0][0]):
        group = groups[place]
        own = {**group.optimizer_kwargs, "lr": group.optimizer_kwargs["lr"] * lr}
        own |= {} if decay else {"weight_decay": 0.0}
        split.append(ParamGroupConfig(pattern=pattern, optimizer_name=group.optimizer_name, optimizer_kwargs=own))
    return replace(optimizer, param_groups=split)


def _patterns(classes: list[list[str]]) -> list[str]:
    """Return a regular expression that matches each class of names alone; it names layer numbers only if it must."""
    between = r"\.(?:_\w+\.)*"  # wrappers (activation checkpointing, ...) put parts like `_checkpoint_wrapped_module`

    def kind(name: str, any_number: bool = True) -> str:
        parts = name.split(".")
        return between.join(r"\d+" if any_number and part.isdigit() else re.escape(part) for part in parts)

    users: dict[str, set[int]] = {}
    for number, names in enumerate(classes):
        for name in names:
            users.setdefault(kind(name), set()).add(number)
    found = [dict.fromkeys(kind(name, len(users[kind(name)]) == 1) for name in names) for names in classes]
    return [rf"^(?:_\w+\.)*(?:{'|'.join(patterns)})$" for patterns in found]

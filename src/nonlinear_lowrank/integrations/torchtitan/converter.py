"""Swaps the configs of linears in a model's config, before the model is built."""

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchtitan.models.common.attention import FusedQKVLinear, QKVLinear
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model import ModelConfigConverter
from torchtitan.tools.logging import logger

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.base import Method, method_of_config
from nonlinear_lowrank.surgery.report import AugmentReport, measure_plain
from nonlinear_lowrank.surgery.targets import Patterns, choose_linears

from .layers import CLASSES, Layer, built


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

    def __init__(self, config: Any) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Change the config in place, and log which linears were swapped and which were skipped.

        Raises:
            UserError: as `nonlinear_lowrank.augment`, or torchtitan cannot have this method, option or place; the
                config is then as it was.
        """
        method, config = _method(self.config.method)
        spread = copy.deepcopy(model_config)
        _unfuse(spread, lambda fqn: True)
        plain = built(spread)
        names, skipped = choose_linears(plain, method, config, self.config.include, self.config.exclude)
        places = {name: place for place in _places(spread) for name in place.names}
        for name in names:
            _check_place(name, places.get(name), set(names))
            method.check(name, plain.get_submodule(name), config)
        _unfuse(model_config, lambda fqn: any(f"{fqn}.{own}" in names for own in ("wq", "wk", "wv")))
        for place in _places(model_config):
            if place.names[0] in names:
                fields = {own: getattr(place.config, own) for own in ("in_features", "out_features", "bias")}
                kept = {"param_init": place.config.param_init, "sharding_config": place.config.sharding_config}
                place.put(CLASSES[method.name].Config(**fields, **kept, method=config))
        logger.info(str(_report(method, config, names, skipped, plain, built(model_config))))
        return model_config


class _Place(NamedTuple):
    """The place of a config of one linear, or of two."""

    names: tuple[str, ...]  # of the modules that are built from it
    config: Any
    parent: Any
    attribute: Any

    def put(self, config: Any) -> None:
        if isinstance(self.parent, list):
            self.parent[self.attribute] = config
        else:
            setattr(self.parent, self.attribute, config)


def _places(model_config: Any) -> Iterator[_Place]:
    for kind in (Linear.Config, Layer.Config):
        for fqn, config, parent, attribute in model_config.traverse(kind):
            shared = isinstance(parent, QKVLinear.Config) and attribute == "wkv"
            names = tuple(fqn.removesuffix("wkv") + own for own in ("wk", "wv")) if shared else (fqn,)
            yield _Place(names, config, parent, attribute)


def _check_place(name: str, place: _Place | None, chosen: set[str]) -> None:
    if place is None or place.parent is None:
        raise UserError(f"the model's config has no linear at {name}; leave it out with exclude=")
    if isinstance(place.config, Layer.Config):
        raise UserError(f"{name} is augmented already; leave it out with exclude=")
    # Subclasses compute in ways of their own, and modules of "dist_gemm" read weights past their linears.
    owner = type(place.parent).__qualname__.removesuffix(".Config")
    if type(place.config) is not Linear.Config or owner.startswith("AllGather"):
        kind = type(place.config).__qualname__.removesuffix(".Config")
        raise UserError(f"{name} is a {kind} in {owner}, where a branch cannot be; leave it out with exclude=")
    if not chosen.issuperset(place.names):
        raise UserError(f"{' and '.join(place.names)} have one config in torchtitan; choose both or neither")


def _method(config: Any) -> tuple[Method, Any]:
    """Return a config's method, and the config with its init resolved."""
    method = method_of_config(config)
    if method is None or method.name not in CLASSES:
        named = type(config).__name__ if method is None else method.name
        raise UserError(f"{named} is not for torchtitan; use NobleConfig or SineLowRankConfig")
    if getattr(config, "share_down", "none") != "none" or getattr(config, "fuse_shared_inputs", False):
        raise UserError("share_down and fuse_shared_inputs join layers, which are separate in torchtitan; omit them")
    return method, method.initial(config, pretrained=False)


def _unfuse(model_config: Any, wanted: Callable[[str], bool]) -> None:
    """Make three linears of fused query, key and value projections, by the name of the module around them."""
    for fqn, fused, parent, attribute in list(model_config.traverse(FusedQKVLinear.Config)):
        if type(fused) is not FusedQKVLinear.Config or type(fused.wqkv) is not Linear.Config or not wanted(fqn):
            continue
        heads, width = (fused.n_heads, fused.n_kv_heads), fused.head_dim
        linears = {}
        for own, count in (("wq", fused.n_heads), ("wkv", fused.n_kv_heads)):
            of_rows = {
                name: functools.partial(_draw_rows, draw, own, heads, width)
                for name, draw in (fused.wqkv.param_init or {}).items()
            }
            linears[own] = replace(fused.wqkv, out_features=count * width, param_init=of_rows or None)
        setattr(parent, attribute, QKVLinear.Config(head_dim=width, **linears))


def _draw_rows(draw: Callable[[Tensor], Any], own: str, heads: tuple[int, int], width: int, tensor: Tensor) -> None:
    """Draw a fused projection, and keep the rows of the queries or of the keys."""
    queries, groups = heads
    each = queries // groups
    fused = tensor.new_empty((queries + 2 * groups) * width, *tensor.shape[1:])
    draw(fused)
    blocks = fused.view(groups, each + 2, width, *tensor.shape[1:])
    rows = blocks[:, :each] if own == "wq" else blocks[:, each : each + 1]
    with torch.no_grad():
        tensor.copy_(rows.reshape(-1, *tensor.shape[1:]))


def _report(method: Method, config: Any, names: list[str], skipped: dict[str, str], plain: Any, model: Any) -> Any:
    report = AugmentReport(method=method.name, config=config, swapped=names, skipped=skipped)
    measure_plain(report, plain, names)
    report.parameters_added = sum(each.numel() for each in model.parameters()) - report.parameters_before
    report.flops_added = sum(method.flops(model.get_submodule(name)) for name in names)
    return report

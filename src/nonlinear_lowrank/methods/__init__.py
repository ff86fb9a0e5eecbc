"""Modules, one method a file. A new method is one file here and one row of `METHODS`."""

from nonlinear_lowrank.methods.noble.layer import NobleConfig, NobleConv1D, NobleLinear
from nonlinear_lowrank.methods.qk_norm.layer import QKNormConfig, QKNormProjection
from nonlinear_lowrank.methods.query.layer import NonlinearQKV, NonlinearQuery, NonlinearQueryConfig
from nonlinear_lowrank.methods.rational.layer import RationalActivation, RationalConfig
from nonlinear_lowrank.methods.sine.layer import SineLowRankConfig, SineLowRankLinear

from .base import Findings, Method, PlainCost, Role, Target, config_from_dict, config_to_dict
from .noble import layer as noble
from .qk_norm import layer as qk_norm
from .query import layer as query
from .rational import layer as rational
from .sine import layer as sine

METHODS: dict[str, Method] = {
    method.name: method for method in (noble.METHOD, sine.METHOD, query.METHOD, qk_norm.METHOD, rational.METHOD)
}
"""Every method that `augment` puts into a model, by its name."""


def method_of_config(config: object) -> Method | None:
    """The method that a config object belongs to, or None."""
    return next((method for method in METHODS.values() if isinstance(config, method.config_class)), None)


def method_of_layer(module: object) -> Method | None:
    """The method that put this module in place, or None for a plain module."""
    return next((method for method in METHODS.values() if isinstance(module, method.layer_types)), None)


__all__ = [
    "METHODS",
    "Findings",
    "Method",
    "NobleConfig",
    "NobleConv1D",
    "NobleLinear",
    "NonlinearQKV",
    "NonlinearQuery",
    "NonlinearQueryConfig",
    "PlainCost",
    "QKNormConfig",
    "QKNormProjection",
    "RationalActivation",
    "RationalConfig",
    "Role",
    "SineLowRankConfig",
    "SineLowRankLinear",
    "Target",
    "config_from_dict",
    "config_to_dict",
    "method_of_config",
    "method_of_layer",
]

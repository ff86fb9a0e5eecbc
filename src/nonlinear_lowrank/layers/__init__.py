"""Modules, one method a file. A new method is one file here and one row of `METHODS`."""

from . import noble, qk_norm, query, rational, sine
from .method import Findings, Method, PlainCost, Role, Target, config_from_dict, config_to_dict
from .noble import NobleConfig, NobleConv1D, NobleLinear
from .qk_norm import QKNormConfig, QKNormProjection
from .query import NonlinearQKV, NonlinearQuery, NonlinearQueryConfig
from .rational import RationalActivation, RationalConfig
from .sine import SineLowRankConfig, SineLowRankLinear

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

"""Places of the queries among the rows of a projection: by its name, shape and config, or as its attention says."""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.methods.attention import QUERY_BESIDE, attention_heads, query_is_beside, row_groups
from nonlinear_lowrank.methods.matrix import linear_shape
from nonlinear_lowrank.methods.names import HOLDING, SEPARATE, SINGLE

from .config import NonlinearQueryConfig
from .formula import QueryLayout

_GIVE = "give NonlinearQueryConfig(query_width=..., query_groups=...), or leave it out with exclude="


def stated_layout(name: str, module: nn.Module, config: NonlinearQueryConfig) -> QueryLayout:
    """Return the layout by name, shape and config, which is all that a saved model has; UserError where none fits."""
    d_in, d_out = linear_shape(module)
    own = name.rpartition(".")[2]
    twice = config.query_width is not None and d_out == 2 * config.query_width
    if (own in SINGLE and not twice) or (d_out <= d_in and config.query_width is None and own not in HOLDING):
        return QueryLayout(d_out)
    return _fitting(name, d_in, d_out, config.query_width or d_in, config.query_groups or 1)


def found_layout(name: str, module: nn.Module, parent: nn.Module, config: NonlinearQueryConfig) -> QueryLayout:
    """Return the layout that the attention around a projection says; UserError where it does not, or there is none."""
    d_in, d_out = linear_shape(module)
    own = name.rpartition(".")[2]
    given = config.query_width is not None or config.query_groups is not None
    if query_is_beside(name, module, parent) and (not given or getattr(parent, "is_cross_attention", False)):
        raise UserError(f"{name} {QUERY_BESIDE}")
    heads, head = attention_heads(parent)
    twice = own in SEPARATE and heads and head and d_out == 2 * heads * head and not hasattr(parent, "qk_head_dim")
    groups = row_groups(name, parent)
    if twice and groups == 1 and not given:
        raise UserError(
            f"{name} is twice as wide as {heads} heads of {head}, and {type(parent).__name__} does not say what else "
            f"it holds: {_GIVE}"
        )
    if given or (own in SINGLE and not twice) or (d_out == d_in and own not in HOLDING):
        return stated_layout(name, module, config)
    if groups is None:
        raise UserError(f"{name} mixes rows of q, k and v, and {type(parent).__name__} does not say how: {_GIVE}")
    if heads is None or head is None:
        if d_out != 3 * d_in:
            raise UserError(
                f"{name} is {d_in} -> {d_out}, and {type(parent).__name__} does not say how many of it are queries; a "
                f"fused projection must then be {d_in} -> {3 * d_in}: {_GIVE}"
            )
        return _fitting(name, d_in, d_out, d_in, groups)
    return _fitting(name, d_in, d_out, heads * head, groups)


def _fitting(name: str, d_in: int, d_out: int, queries: int, groups: int) -> QueryLayout:
    others = d_out - queries
    if others == 0 and groups == 1 and name.rpartition(".")[2] not in HOLDING:
        return QueryLayout(queries)
    if others <= 0 or others % (2 * groups) or queries % groups:
        raise UserError(
            f"{name} is {d_in} -> {d_out}, which is not queries of width {queries}, then as many keys as values, in "
            f"{groups} equal {'groups' if groups > 1 else 'group'}: {_GIVE}"
        )
    return QueryLayout(queries, others, groups)


def complete_layout(
    modules: Mapping[str, tuple[nn.Module, nn.Module]], config: NonlinearQueryConfig
) -> NonlinearQueryConfig:
    """Return the config with what these projections (each beside its attention) need beyond names and shapes.

    UserError where they need different values, or the config's do nothing.
    """
    found = {name: found_layout(name, module, parent, config) for name, (module, parent) in modules.items()}
    plain = {name for name, layout in found.items() if name.rpartition(".")[2] in SINGLE and not layout.others}
    for field in ("query_width", "query_groups"):
        if (value := getattr(config, field)) is not None and plain == set(modules):
            raise UserError(f"{field}={value} is for projections that hold keys and values too; omit it")
    # Names of what a saved model would get wrong without the two fields.
    unsaid = [name for name in found if name not in plain and not _says(name, modules[name][0], config, found[name])]
    if not unsaid:
        return config
    first = found[unsaid[0]]
    config = replace(config, query_width=first.queries, query_groups=first.groups)
    for name, layout in found.items():
        if not _says(name, modules[name][0], config, layout):
            raise UserError(
                f"{unsaid[0]} and {name} hold their queries in different places; augment one after the other, with "
                "include="
            )
    return config


def _says(name: str, module: nn.Module, config: NonlinearQueryConfig, layout: QueryLayout) -> bool:
    try:
        return stated_layout(name, module, config) == layout
    except UserError:
        return False

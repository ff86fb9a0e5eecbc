"""Names of attention's projections; in modeling files too, and so it imports nothing."""

from collections.abc import Collection

SEPARATE = ("q_proj", "query", "query_proj", "q_lin", "q_linear", "linear_q", "to_q", "wq", "q", "q_attn")
"""Names of query projections."""
KEYS = ("k_proj", "key", "key_proj", "k_lin", "k_linear", "linear_k", "to_k", "wk", "k")
"""Names of key projections."""
VALUES = ("v_proj", "value", "value_proj", "v_lin", "v_linear", "linear_v", "to_v", "wv", "v")
"""Names of value projections."""
LATENT = ("q_b_proj",)
"""Names of projections from a latent, narrower than the model, to queries (DeepSeek's latent attention)."""
FUSED = ("c_attn", "qkv", "qkv_proj", "qkv_linear", "Wqkv")
"""Names of projections whose rows are q, k and v, one after another."""
BY_HEAD = "query_key_value"
"""A fused projection whose rows are q, k and v of one head after another."""
SINGLE = (*SEPARATE, *LATENT, *KEYS, *VALUES)
"""Names of projections of one kind, all of whose rows are replaced."""
HOLDING = (*FUSED, BY_HEAD)
"""Names of projections that hold keys and values too."""


def qkv_groups(names: Collection[str]) -> list[tuple[str, ...]]:
    """Return groups of query, key and value projections, in this order, that stand in one attention: at least two."""
    groups = []
    for parent in parents(names):
        for query in SEPARATE:
            word, *others = ("query", "key", "value") if "query" in query else ("q", "k", "v")
            found = known(parent, (query, *(query.replace(word, other) for other in others)), names)
            if len(found) > 1:
                groups.append(found)
    return groups


def parents(names: Collection[str]) -> list[str]:
    """Return the names of the modules around these, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def known(parent: str, children: tuple[str, ...], names: Collection[str]) -> tuple[str, ...]:
    """Return which children of a module are among these names, by whole name."""
    whole = (f"{parent}.{child}" if parent else child for child in children)
    return tuple(name for name in whole if name in names)

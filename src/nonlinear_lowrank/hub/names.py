"""Names of tensors in files and in memory, where layers hold the plain linears that they go beside.

A file has `q_proj.weight`, as the plain model does; in memory it is `q_proj.dense.weight`. transformers renames as it
loads and saves, by rules that are registered for a class: here they are made for each model, whose layers they name.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, WeightTransform

from nonlinear_lowrank.methods.base import method_of_layer


class DenseNames(WeightRenaming):
    """Renames what belongs to the dense part of the layers of one model.

    Args:
        layers: by whole name: the child that is the dense part, and the names of the layer's own tensors.
        prefix: of the backbone within a model with a head, which a file may have or lack.
        saving: from memory to files.
    """

    __slots__ = ("layers", "prefix", "saving")

    def __init__(self, layers: dict[str, tuple[str, frozenset[str]]], prefix: str, *, saving: bool = False) -> None:
        super().__init__("weight", "weight")  # patterns of its own: see rename_source_key
        self.layers, self.prefix, self.saving = layers, f"{prefix}.", saving

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the new name, and the pattern that matched; None where none did."""
        parts = source_key.split(".")
        for end in range(1, len(parts)):
            name, rest = ".".join(parts[:end]), parts[end:]
            found = next((self.layers[each] for each in self._spellings(name) if each in self.layers), None)
            if found is None:
                continue
            dense, own = found
            if self.saving and rest[0] == dense:
                return ".".join([name, *rest[1:]]), "weight"
            if not self.saving and rest[0] != dense and rest[0] not in own:
                return ".".join([name, dense, *rest]), "weight"
        return source_key, None

    def _spellings(self, name: str) -> tuple[str, str, str]:
        return name, name.removeprefix(self.prefix), self.prefix + name

    def reverse_transform(self) -> "DenseNames":
        """Return the renaming from memory to files."""
        return DenseNames(self.layers, self.prefix.removesuffix("."), saving=not self.saving)


class PlainNames:
    """A mixin for models of transformers that hold such layers, in front of the plain class."""

    @property
    def _weight_conversions(self) -> list[Any] | None:
        """Conversions that transformers reverts on saving: the plain class's, and ours last."""
        known = vars(self).get("_weight_conversions")
        ours = dense_names(self)
        if ours is None:
            return known
        if known is None:
            plain = get_model_conversion_mapping(self, add_legacy=False)  # type: ignore[arg-type]
            known = [each for each in plain if not isinstance(each, PrefixChange)]  # as transformers does
        return [*_on_dense(self, ours, [each for each in known if not isinstance(each, DenseNames)]), ours]

    @_weight_conversions.setter
    def _weight_conversions(self, value: list[Any] | None) -> None:
        vars(self)["_weight_conversions"] = value

    @staticmethod
    def _load_pretrained_model(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any) -> Any:
        """Load as transformers does, with the renamings of this model."""
        if (ours := dense_names(model)) is not None:
            plain_mapping = load_config.weight_mapping or []
            load_config = replace(load_config, weight_mapping=[*_on_dense(model, ours, plain_mapping), ours])
        plain: Any = super(PlainNames, type(model))
        return plain._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args)


def _on_dense(model: Any, ours: DenseNames, conversions: list[WeightTransform]) -> list[WeightTransform]:
    """Return conversions whose converters, which split a file's tensor over linears, name the dense parts of these.

    transformers converts after it renames on loading, and before on saving. A converter that would have to name dense
    parts in some layers only is dropped: the linears then have tensors of their own in files too.
    """
    found: list[WeightTransform] = []
    for each in conversions:
        if not isinstance(each, WeightConverter):
            found.append(each)
            continue
        names = [f".{name}" for name, _ in model.named_modules()]
        held = [[name[1:] in ours.layers for name in names if name.endswith(f".{end}")] for end in each.target_patterns]
        if not any(map(any, held)):
            found.append(each)
        elif all(len(set(of_target)) == 1 for of_target in held):
            both = zip(each.target_patterns, held, strict=True)
            targets = [f"{target}.dense" if of_target[0] else target for target, of_target in both]
            for tensor in ("weight", "bias"):
                sources = [f"{source}.{tensor}" for source in each.source_patterns]
                found.append(
                    each.copy(sources, [f"{target}.{tensor}" for target in targets], operations=each.operations)
                )
    return found


def in_files(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model by the names that files have, of those in memory."""
    return _renamed(dense_names(model), tensors, saving=True)


def in_memory(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Reverse `in_files`."""
    return _renamed(dense_names(model), tensors, saving=False)


def _renamed(names: DenseNames | None, tensors: Mapping[str, Any], *, saving: bool) -> dict[str, Any]:
    if names is None:
        return dict(tensors)
    names = names.reverse_transform() if saving else names
    return {names.rename_source_key(name)[0]: tensor for name, tensor in tensors.items()}


def rename_by_transformers(model: Any) -> None:
    """Leave the names in files to transformers: `state_dict()` then has those that are in memory, as it needs."""
    for module in model.modules():
        if hasattr(module, "plain_names"):
            module.plain_names = False


def dense_names(model: Any) -> DenseNames | None:
    """Return the renaming of a model's layers that hold a plain linear; None where there are none."""
    layers = {}
    for name, module in model.named_modules():
        method = method_of_layer(module)
        if method is not None and method.dense is not None:
            layers[name] = (method.dense, frozenset(own for own, _ in module.named_parameters(recurse=False)))
    return DenseNames(layers, getattr(model, "base_model_prefix", "")) if layers else None

"""Makes transformers and peft know our types, without importing them, or torch, before anybody else does.

Each is told at the moment it is imported, or at once where it already is:

- transformers' table of configs gets to answer for our model types, whose classes are built when asked for;
- peft's `PeftType`, a closed enum, gains a member for each of our methods, and `peft.utils.register_peft_method` the
  config and the tuner. A saved adapter names its type in adapter_config.json: a process without this package
  fails there with `KeyError: 'NLR_...'`;
- our own `augmentation` brings `hub`, which makes what was augmented saveable.

This file knows all of them by name only.
"""

import importlib
import importlib.util
from typing import Any, NamedTuple

import wrapt


class _Entry(NamedTuple):
    file: str
    """The module of both."""
    config: str
    tuner: str


METHODS = {
    "nlr_sine_lora": _Entry("nonlinear_lowrank.methods.sine.adapter", "SineLoraConfig", "SineLoraModel"),
    "nlr_nora": _Entry("nonlinear_lowrank.methods.rational.adapter", "NoraConfig", "NoraModel"),
    "nlr_noble": _Entry("nonlinear_lowrank.methods.noble.adapter", "NobleAdapterConfig", "NobleAdapterModel"),
}
"""The fine-tuning methods, by peft's name: the type in lower case, the prefix of parameters without its "_"."""

CONFIG_CLASSES = {entry.config: entry for entry in METHODS.values()}

TYPE_PREFIX = "nonlinear_lowrank_"
"""An augmented config's model_type is this and the base's model_type."""
OWN_TYPES = {"nlr_mean_pooled": "MeanPooledConfig", "nlr_image_tokens": "ImageTokensConfig"}
"""The model types of backbones of our own, and their config classes in `hub`."""


def _load(entry: _Entry) -> Any:
    return importlib.import_module(entry.file)


def _add_types(types: Any) -> None:
    """Members of a closed enum, as `enum` itself would make them."""
    for name in map(str.upper, METHODS):
        if name in types.__members__:
            continue
        member = str.__new__(types, name)
        member._name_ = member._value_ = name
        member.__objclass__ = types
        member._sort_order_ = len(types._member_names_)
        types._member_names_.append(name)
        types._member_map_[name] = types._value2member_map_[name] = member
        type.__setattr__(types, name, member)


def _on_peft(peft: Any) -> None:
    """Called once peft has been imported."""
    _add_types(peft.PeftType)
    for name, entry in METHODS.items():
        if importlib.util.find_spec(entry.file) is None:
            continue
        module = _load(entry)
        peft.utils.register_peft_method(
            name=name,
            config_cls=getattr(module, entry.config),
            model_cls=getattr(module, entry.tuner),
            prefix=f"{name}_",
        )


class _ConfigsOnDemand(dict[str, Any]):
    """transformers' table of added config classes, with ours built when a model_type asks for them."""

    def __init__(self, known: Any) -> None:
        super().__init__(known._extra_content)
        self._known = known

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in OWN_TYPES or self._base_type(key) is not None

    def __missing__(self, key: str) -> Any:
        hub = importlib.import_module("nonlinear_lowrank.hub")
        if key in OWN_TYPES:
            return getattr(hub, OWN_TYPES[key])
        base_type = self._base_type(key)
        if base_type is None:
            raise KeyError(key)
        return hub.register(self._known[base_type])

    def _base_type(self, key: object) -> str | None:
        if not isinstance(key, str) or not key.startswith(TYPE_PREFIX):
            return None
        base_type = key.removeprefix(TYPE_PREFIX)
        return base_type if base_type in self._known else None


def _on_transformers(configuration_auto: Any) -> None:
    """Called once transformers' table of configs has been imported."""
    known = configuration_auto.CONFIG_MAPPING
    known._extra_content = _ConfigsOnDemand(known)


def _on_augmentation(augmentation: Any) -> None:
    """Called once our `augmentation` has been imported, be it by its own name."""
    importlib.import_module("nonlinear_lowrank.hub")


wrapt.register_post_import_hook(_on_peft, "peft")
wrapt.register_post_import_hook(_on_transformers, "transformers.models.auto.configuration_auto")
wrapt.register_post_import_hook(_on_augmentation, "nonlinear_lowrank.surgery.augment")

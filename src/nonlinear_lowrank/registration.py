"""Makes peft know our methods, without importing peft before anybody else does.

peft's `PeftType` is a closed enum and its tables of methods are filled at import. Here the enum gains a
member for each of our methods, and `peft.utils.register_peft_method` the config and the tuner, at the moment peft
is imported, or at once where it already is. A saved adapter names its type in adapter_config.json: a process
without this package fails there with `KeyError: 'NLR_...'`.

This file knows the methods by name only; `adapters/` is imported with peft.
"""

import importlib
import importlib.util
from typing import Any, NamedTuple

import wrapt


class _Entry(NamedTuple):
    file: str
    """In adapters/."""
    config: str
    tuner: str


METHODS = {
    "nlr_sine_lora": _Entry("sine", "SineLoraConfig", "SineLoraModel"),
    "nlr_nora": _Entry("nora", "NoraConfig", "NoraModel"),
    "nlr_noble": _Entry("noble", "NobleAdapterConfig", "NobleAdapterModel"),
}
"""The fine-tuning methods, by peft's name: the type in lower case, the prefix of parameters without its "_"."""

CONFIG_CLASSES = {entry.config: entry for entry in METHODS.values()}


def config_class(name: str) -> Any:
    """A method's config class, one of `CONFIG_CLASSES`, by its name; imports peft."""
    return getattr(_load(CONFIG_CLASSES[name]), name)


def _load(entry: _Entry) -> Any:
    return importlib.import_module(f"{__package__}.adapters.{entry.file}")


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
        if importlib.util.find_spec(f"{__package__}.adapters.{entry.file}") is None:
            continue
        module = _load(entry)
        peft.utils.register_peft_method(
            name=name,
            config_cls=getattr(module, entry.config),
            model_cls=getattr(module, entry.tuner),
            prefix=f"{name}_",
        )


wrapt.register_post_import_hook(_on_peft, "peft")

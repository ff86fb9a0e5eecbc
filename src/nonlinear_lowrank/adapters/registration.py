"""Makes peft know our methods, without importing peft before anybody else does.

peft's `PeftType` is a closed enum and its tables of methods are filled at import. Here the enum gains a
member for each of our methods, and `peft.utils.register_peft_method` the config and the tuner, at the moment peft
is imported, or at once where it already is. A saved adapter names its type in adapter_config.json: a process
without this package fails there with `KeyError: 'NLR_...'`.

A method joins with one line in `METHODS`, and with `register(...)` as the last statement of its file.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from peft import PeftConfig
    from peft.tuners.tuners_utils import BaseTuner

METHODS = {
    "nlr_sine_lora": ("sine", "SineLoraConfig"),
    "nlr_nora": ("nora", "NoraConfig"),
    "nlr_noble": ("noble", "NobleAdapterConfig"),
}
"""peft's name of a method (its type in lower case) -> (file in this folder, config class)."""


def config_class(name: str) -> Any:
    """A method's config class by its name, for the package's lazy attributes; imports peft.

    Raises:
        AttributeError: no method has a config class of this name.
    """
    for file, each in METHODS.values():
        if each == name:
            return getattr(importlib.import_module(f"{__package__}.{file}"), name)
    raise AttributeError(name)


def config_class_names() -> list[str]:
    """Names of the config classes that `config_class` knows."""
    return [name for _, name in METHODS.values()]


def register(config: "type[PeftConfig]", tuner: "type[BaseTuner]") -> None:
    """Enters a method into peft's tables; a method's file calls it last. Doing it twice does nothing."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils import PeftType, register_peft_method

    name = tuner.prefix.removesuffix("_")
    assert name in METHODS, f"{name} is not in METHODS"
    if PeftType(name.upper()) not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=name, config_cls=config, model_cls=tuner, prefix=tuner.prefix)


def _add_types(peft: Any) -> None:
    """Members of the closed enum, as `enum` itself would make them."""
    types = peft.PeftType
    for name in METHODS:
        member_name = name.upper()
        if member_name in types.__members__:
            continue
        member = str.__new__(types, member_name)
        member._name_ = member._value_ = member_name
        member.__objclass__ = types
        member._sort_order_ = len(types._member_names_)
        types._member_names_.append(member_name)
        types._member_map_[member_name] = member
        types._value2member_map_[member_name] = member
        type.__setattr__(types, member_name, member)


def _on_peft(peft: Any) -> None:
    """Runs when peft has been imported.

    Where one of our files is what imported peft, that file is only half loaded here: it registers itself at
    its end.
    """
    _add_types(peft)
    for file, _ in METHODS.values():
        if importlib.util.find_spec(f"{__package__}.{file}") is not None:
            importlib.import_module(f"{__package__}.{file}")


wrapt.register_post_import_hook(_on_peft, "peft")

"""Fields that every fine-tuning method's config has, and their checks."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from peft import PeftConfig, PeftType
from peft.utils.other import get_pattern_key

from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

BASE_ROWS = "__base__"
"""Name, in `adapter_names`, for rows that no adapter touches."""


class NamedConfig:
    """Fields and methods of our configs beside peft's: its own `PeftType`, and a README that says how to load it."""

    type_name: ClassVar[str]
    """Name of the method's `PeftType` member."""
    patterns: ClassVar[Mapping[str, str]] = {}
    """Fields whose value may differ by module -> the field with {name or regular expression: value}."""

    def check_fields(self) -> None:
        """Check the fields that every method's config has, and what `patterns` names; name lists become sets."""
        config: Any = self
        config.peft_type = PeftType(self.type_name)
        for name in ("target_modules", "exclude_modules"):
            value = getattr(config, name)
            listed = isinstance(value, list | tuple | set)
            if not (all(isinstance(each, str) for each in value) if listed else isinstance(value, str | None)):
                raise UserError(f"{name} must be names or one regular expression, got {value!r}")
            if listed:
                setattr(config, name, set(value))
        # peft itself calls the last "<type>_only".
        if config.bias not in ("none", "all", "adapter_only", "lora_only", f"{self.type_name.lower()}_only"):
            raise UserError(f"bias must be 'none', 'all' or 'adapter_only', got {config.bias!r}")
        if isinstance(config.target_modules, str) and config.layers_to_transform is not None:
            raise UserError("layers_to_transform needs target_modules as a list of names, not a regular expression")
        if config.layers_pattern and config.layers_to_transform is None:
            raise UserError("layers_pattern does nothing without layers_to_transform; give both")
        for name, pattern in self.patterns.items():
            if not isinstance(values := getattr(config, pattern), dict):
                raise UserError(f"{pattern} must be names with values, got {values!r}")
            self.check_value(name, getattr(config, name), name)
            for key, value in values.items():
                self.check_value(name, value, f"{pattern}[{key!r}]")

    def check_value(self, name: str, value: Any, where: str) -> None:
        """Raise UserError if a field of `patterns` cannot have the value; `where` is its name in the message."""
        check_integer(where, value, minimum=1)

    def resolve(self, module_name: str) -> Self:
        """Return this config with the values that its patterns give a module, by its dotted name."""
        resolved = copy.copy(self)
        for name, pattern in self.patterns.items():
            entries = getattr(self, pattern)
            setattr(resolved, name, entries.get(get_pattern_key(entries.keys(), module_name), getattr(self, name)))
        return resolved

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, tuples as lists."""
        values = super().to_dict()  # type: ignore[misc]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Save as peft does, and add the import line that a reader of the folder needs to its README."""
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
        readme = Path(save_directory) / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.exists() else ""
        why = f"registers {self.type_name} with peft; without it loading fails with KeyError: '{self.type_name}'"
        block = f"## Loading\n\n```python\nimport nonlinear_lowrank  # {why}\n```\n"
        if why not in text:
            readme.write_text(f"{text.rstrip()}\n\n{block}".lstrip(), encoding="utf-8")


@dataclass
class AdapterConfig(NamedConfig, PeftConfig):
    """Fields with peft's names and meanings, so that a user changes one class and no argument.

    Raises:
        UserError: a value is out of range; the message names the field and what it may be.
    """

    target_modules: list[str] | str | None = None
    """Names of the modules to adapt (ends of dotted names), a regular expression for whole names, or "all-linear"
    for every linear but the output head. None is peft's choice for the model's type."""
    exclude_modules: list[str] | str | None = None
    """Names, or a regular expression, of modules to skip."""
    layers_to_transform: list[int] | int | None = None
    """Numbers of the layers to adapt; needs target_modules as a list."""
    layers_pattern: list[str] | str | None = None
    """Name of the ModuleList that layers_to_transform counts in, where it is not the first one."""
    bias: str = "none"
    """Biases of the base that are trained and saved: "none", "all", or "adapter_only", those of the adapted
    modules ("lora_only" is a synonym)."""
    modules_to_save: list[str] | None = None
    """Modules to train whole and to save with the adapter, such as a new classification head."""
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    """Tokens whose embedding rows are trained too, as in LoRA; trl fills it in for tokens that a chat template
    adds."""
    ensure_weight_tying: bool = False
    """Keep modules tied that the base model ties, where one of them is in modules_to_save, as in LoRA."""
    init_weights: bool = True
    """False draws the adapter so that it changes the outputs from the start (for tests)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.modules_to_tie: Any = None  # peft fills it in
        self.check_fields()

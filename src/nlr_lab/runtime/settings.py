"""Settings as they are written down and compared: flat, by dotted names."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dataclasses and mappings as one dict; tuples as lists, which is what JSON makes of them."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if not isinstance(value, Mapping):
        return {prefix: list(value) if isinstance(value, tuple) else value}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    return flat

"""Checks of single settings, and settings as text: what arms, recipes and training settings share."""

from typing import Any, Literal

from nonlinear_lowrank.errors import UserError

Optimizer = Literal["adamw", "muon"]


def read_number(name: str, value: str, where: str) -> float:
    """A number written by a user."""
    try:
        return float(value)
    except ValueError as error:
        raise UserError(f"{name} must be a number, got {value!r}, in the arm {where!r}") from error


def read_value(text: str) -> Any:
    """A setting's value: integer, number, true/false, slash-separated numbers (a list), or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    if "/" in text:
        parts = [read_value(part) for part in text.split("/")]
        if all(isinstance(part, int | float) for part in parts):
            return parts  # a list, as JSON would give it
    return text


def as_text(value: Any) -> str:
    """The reverse of `read_value`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(as_text, value)) if isinstance(value, list | tuple) else str(value)

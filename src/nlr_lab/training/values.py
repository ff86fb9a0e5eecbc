"""Checks of single settings, and settings as text: what arms, recipes and training settings share."""

import math
from typing import Any

from nonlinear_lowrank.errors import UserError


def check_whole(name: str, value: object, *, least: int) -> None:
    """Raises UserError unless the value is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")


def check_number(name: str, value: object, *, above: float | None = None, least: float | None = None) -> None:
    """Raises UserError unless the value is a finite number above or of at least a bound."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if fits and above is not None:
        fits = value > above  # type: ignore[operator]
    if fits and least is not None:
        fits = value >= least  # type: ignore[operator]
    if not fits:
        bound = f"above {above:g}" if above is not None else f"of at least {least:g}"
        raise UserError(f"{name} must be a finite number {bound}, not {value!r}")


def read_number(name: str, value: str, where: str) -> float:
    """A number written by a user."""
    try:
        return float(value)
    except ValueError as error:
        raise UserError(f"{name} must be a number, not {value!r}, in the arm {where!r}") from error


def read_value(text: str) -> Any:
    """A setting's value: whole number, number, true/false, slash-separated numbers (a list), or text."""
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


def one_line(error: BaseException) -> str:
    """An exception's message without line breaks; its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__

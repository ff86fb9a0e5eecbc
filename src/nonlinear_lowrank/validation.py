"""Checks of single values, whose errors read the same everywhere."""

import importlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import Distribution
from typing import Any
from urllib.parse import unquote, urlsplit

from .errors import UserError


def check_integer(name: str, value: Any, *, minimum: int) -> None:
    """Raise UserError unless the value is an integer of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        wanted = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
        raise UserError(f"{name} must be {wanted}, got {value!r}")


def check_number(name: str, value: Any, *, above: float | None = None, minimum: float | None = None) -> None:
    """Raise UserError unless the value is a finite number above `above`, or of at least `minimum`."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if above is not None and not (fits and value > above):
        raise UserError(f"{name} must be a finite number above {above:g}, got {value!r}")
    if minimum is not None and not (fits and value >= minimum):
        raise UserError(f"{name} must be a finite number of at least {minimum:g}, got {value!r}")


def check_share(name: str, value: Any, *, below: float = 1) -> None:
    """Raise UserError unless the value is at least 0 and below a bound."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < below:
        raise UserError(f"{name} must be at least 0 and below {below:g}, got {value!r}")


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise UserError unless the value is one of the choices."""
    if value not in (known := tuple(choices)):
        raise UserError(f"unknown {name} {value!r}; choose one of {', '.join(known)}")


def check_head_dim(head_dim: int) -> None:
    """Raise UserError unless a head's dimension fits 2-D rotary positions."""
    if head_dim % 4:
        why = f"2-D rotary positions need a head dimension divisible by 4, got {head_dim}"
        raise UserError(f"{why}; choose width = heads x a multiple of 4")


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an exception's message without line breaks, or its class where it has none."""
    return printable(" ".join(str(error).split()))[:most] or type(error).__name__


def printable(text: str) -> str:
    """Return a text that may hold names from a stranger's file, without characters that steer a terminal."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def require(extra: str, module: str) -> Any:
    """Return a module of an optional extra; raise UserError that names the extra where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{module} is needed here: {install_hint(extra)} ({one_line(error)})") from error


def install_hint(extra: str) -> str:
    """Return the command that installs an extra, from the folder that this package was installed from if any."""
    source = "nonlinear-lowrank"
    for installed in Distribution.discover(name=source):
        origin = json.loads(installed.read_text("direct_url.json") or "{}")  # PEP 610
        if "dir_info" in origin:
            source = unquote(urlsplit(origin["url"]).path)
    return f"pip install {shlex.quote(f'{source}[{extra}]')}"


def check_shapes(what: str, wanted: Mapping[str, Sequence[int]], given: Mapping[str, Any]) -> None:
    """Raise UserError, which begins with `what`, for a tensor that is missing, unknown or of another shape.

    Args:
        what: the fault, as "the state dict is not of this model".
        wanted: shapes by name.
        given: tensors by name.
    """
    for name in sorted(wanted.keys() | given.keys()):
        found = tuple(given[name].shape) if name in given else "missing"
        expected = tuple(wanted[name]) if name in wanted else "unknown"
        if found != expected:
            raise UserError(f"{what}: {name} is {found}, not {expected}")

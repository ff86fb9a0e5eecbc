"""Regular expressions that tell classes of parameters apart by their names."""

import functools
import re
from collections.abc import Iterable

_BETWEEN = r"\.(?:_\w+\.)*"
"""Between two parts of a name: wrappers (activation checkpointing, ...) put parts like `_checkpoint_wrapped_module`."""


def name_patterns(classes: list[list[str]]) -> list[str]:
    """Return a pattern for each class of names, which matches its names and no other of all the classes.

    Names are told apart by as few of their last parts as will do, and by numbers only where nothing else does.
    """
    of_name = {name: number for number, names in enumerate(classes) for name in names}
    users: dict[str, set[int]] = {}
    for name, number in of_name.items():
        for tail in _tails(name):
            users.setdefault(tail, set()).add(number)
    tails: list[dict[str, None]] = [{} for _ in classes]
    exact: list[dict[str, None]] = [{} for _ in classes]
    for name, number in of_name.items():
        own = next((tail for tail in _tails(name) if users[tail] == {number}), None)
        if own is not None:
            tails[number][own] = None
        else:
            exact[number][_BETWEEN.join(map(re.escape, name.split(".")))] = None
    return [_joined(*both) for both in zip(tails, exact, strict=True)]


def _joined(tails: Iterable[str], exact: Iterable[str]) -> str:
    starts = {r"(?:^|\.)": "|".join(tails), r"^(?:_\w+\.)*": "|".join(exact)}
    found = [f"{start}(?:{names})$" for start, names in starts.items() if names]
    return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"


@functools.lru_cache(maxsize=100_000)
def _tails(name: str) -> list[str]:
    parts = [r"\d+" if part.isdigit() else re.escape(part) for part in name.split(".")]
    return [_BETWEEN.join(parts[-count:]) if count > 1 else parts[-1] for count in range(1, len(parts) + 1)]

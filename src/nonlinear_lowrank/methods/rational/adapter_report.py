"""What a NoRA adapter did to a model, in words."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NoraReport:
    """`print(report)` gives the readable form."""

    adapter: str
    activations: Mapping[str, str]
    """Modules that became rational functions, and which; the error of the fit is in it."""
    linears: Sequence[str]
    """Modules with LoRA."""
    skipped: Mapping[str, str]
    """Activations that stay as they are, and why."""
    functional: Mapping[str, str]
    """Modules that call an activation as a function, where nothing can be swapped; "" is the model itself."""
    trainable: int
    """Trained numbers, without modules_to_save and biases."""

    def __str__(self) -> str:
        name = "NoRA++" if self.linears else "NoRA"
        lines = [
            f"{name} {self.adapter!r}: {len(self.activations)} activations became rational functions"
            + (f", {len(self.linears)} linears have LoRA" if self.linears else "")
            + f"; {self.trainable:,} trained parameters"
        ]
        lines += [f"  rational   {row}" for row in _folded(self.activations)]
        lines += [f"  LoRA       {row}" for row in _folded(dict.fromkeys(self.linears, ""))]
        lines += [f"  skipped    {row}" for row in _folded(self.skipped)]
        named = {name or "the model": f"{why}; it cannot be swapped" for name, why in self.functional.items()}
        lines += [f"  functional {row}" for row in _folded(named)]
        return "\n".join(lines)


def _folded(rows: Mapping[str, str]) -> list[str]:
    """ "name x 12: why", the layers' numbers folded to ranges."""
    groups: dict[tuple[str, str], list[list[int]]] = {}
    for name, why in rows.items():
        key = _NUMBER.sub(".{}", name), why
        groups.setdefault(key, []).append([int(number) for number in _NUMBER.findall(name)])
    return [
        name.format(*(_ranges(sorted(set(numbers))) for numbers in zip(*found, strict=True)))
        + (f" x {len(found)}" if len(found) > 1 else "")
        + (f": {why}" if why else "")
        for (name, why), found in groups.items()
    ]


_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


def _ranges(numbers: Sequence[int]) -> str:
    """ "0-3,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)

"""Result of every benchmark: rows, which print as a table, are saved as JSON and drawn as marks."""

import json
import statistics
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from nlr_lab.runtime.tables import number_table, render_table

from .timing import Ratio, paired_ratio


@dataclass(frozen=True, kw_only=True)
class Point:
    """One mark of a picture, with its interval where there is one."""

    panel: str
    label: str
    value: float
    low: float
    high: float


class Row(ABC):
    """One line of a table."""

    @abstractmethod
    def cells(self) -> dict[str, str]:
        """Return the texts by column."""

    def point(self) -> Point:
        """Return the mark that a picture shows."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TimedRow(Row):
    """One arm over another, in one mode."""

    mode: str
    arm: str
    over: str
    """The arm that it is measured against."""
    step: Ratio
    """Ratio of step times."""
    over_seconds: float
    """Median step of `over`."""

    @classmethod
    def measured(cls, times: Mapping[str, Sequence[float]], mode: str, arm: str, over: str, **own: Any) -> Self:
        """Return the row of an arm from the interleaved step times of all."""
        seconds = statistics.median_high(times[over])
        step = paired_ratio(times[arm], times[over])
        return cls(mode=mode, arm=arm, over=over, step=step, over_seconds=seconds, **own)

    @property
    def panel(self) -> str:
        """Panel of a picture."""
        return self.mode

    def own_cells(self) -> dict[str, str]:
        """Return the columns beside those of times."""
        return {}

    def cells(self) -> dict[str, str]:
        """Return the texts by column."""
        return {
            "mode": self.mode,
            "arm": self.arm,
            "over": self.over,
            "time x [95 %]": str(self.step),
            "quartiles": f"{self.step.lower_quartile:.3f} to {self.step.upper_quartile:.3f}",
            "over, ms": f"{1000 * self.over_seconds:.4g}",
            **self.own_cells(),
        }

    def point(self) -> Point:
        """Return the median with its interval."""
        label, step = f"{self.arm} / {self.over}", self.step
        return Point(panel=self.panel, label=label, value=step.median, low=step.low, high=step.high)


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Rows and conditions of a benchmark; `print(result)` gives its table."""

    config: Any
    rows: Sequence[Any]
    """Each a `Row`."""
    about: str
    """Sizes and conditions, shown below the table."""
    axis: str = ""
    """Name of the axis of a picture."""
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Mode, operator or batch size -> arm -> seconds of its steps."""
    flops: dict[str, int] = field(default_factory=dict)
    """Arm -> FLOPs of the matrix products of one forward and backward pass."""
    machine: dict[str, Any]

    def __str__(self) -> str:
        lines = [row.cells() for row in self.rows]
        table = number_table(*lines[0])
        for cells in lines:
            table.add_row(*cells.values())
        return f"{render_table(table, 160)}\n{self.about}"

    def to_json(self) -> str:
        """Return everything as text."""
        return json.dumps(asdict(self), indent=2)

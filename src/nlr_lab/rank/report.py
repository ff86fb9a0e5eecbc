"""`nlr inspect --rank`: ranks of every matrix of a checkpoint, and a first guess of omega."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nlr_lab.runtime.tables import fold_numbers, number_table, render_table
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .measures import EXACT, Spectrum, check_tolerance, curve_places
from .omega import guess_omega
from .weights import Weight, checkpoint_weights

TOLERANCES = (0.1, 0.01)
_LARGEST_GUESS = 2**26  # entries: beyond, a bisection would take minutes a shape


@dataclass(frozen=True, kw_only=True)
class LayerRank:
    """One matrix; its shape is (m, n)."""

    name: str
    kind: str
    """See `weights.Weight`."""
    shape: tuple[int, int]
    rank: int | None
    """k of a factored weight."""
    omega: float | None
    """Frequency of a factored weight that has one."""
    norm: float
    """The largest singular value."""
    stable_rank: float
    ranks: dict[str, int]
    """By tolerance. Of a sketch a lower bound."""
    exact: bool
    """False: a sketch of the leading singular values."""
    spectrum: list[tuple[int, float]]
    """(i, s_i / s_1) at up to 64 places i from 1."""
    omega_guess: dict[str, Any] | None = None
    """Result of `omega.guess_omega` for the layer's group."""

    @property
    def group(self) -> tuple[Any, ...]:
        """The same for layers that differ by their number alone."""
        return fold_numbers(self.name), self.kind, self.shape, self.rank, self.omega

    @property
    def title(self) -> str:
        """Kind, rank and frequency."""
        rank = "" if self.rank is None else f" k={self.rank}"
        return self.kind + rank + ("" if self.omega is None or self.kind == "low-rank" else f" omega={self.omega:g}")


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """All matrices of a checkpoint."""

    checkpoint: str
    for_rank: int
    """k of the suggested omegas."""
    init: str
    tolerances: tuple[float, ...]
    layers: list[LayerRank] = field(default_factory=list)

    def to_json(self) -> str:
        """Return strict JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)


def rank_report(
    checkpoint: Path,
    *,
    for_rank: int = 8,
    init: str = "kaiming_sqrt5",
    tolerances: Sequence[float] = TOLERANCES,
    include: str | None = None,
    omega: float | None = None,
    exact_up_to: int = EXACT,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda line: None,
) -> RankReport:
    """Measure every matrix of a checkpoint; memory for one of them at a time.

    Args:
        checkpoint: as in `checkpoint_weights`, and so is `omega`.
        for_rank: k for which an omega is suggested for each dense matrix.
        init: of the layer that would take its place.
        tolerances: for the ranks, in the order they are shown.
        include: a regular expression that the names of matrices must match somewhere.
        omega: of sine factors.
        exact_up_to: as in `measures.spectrum`.
        device: for the spectra.
        progress: called with a line for each matrix.

    Raises:
        UserError: a setting is out of range, no matrix is found or matches, or a weight is not finite.
    """
    check_integer("for_rank", for_rank, minimum=1)
    for tolerance in tolerances:
        check_tolerance(tolerance)
    weights = checkpoint_weights(checkpoint, omega=omega)
    if include is not None:
        try:
            weights = [weight for weight in weights if re.search(include, weight.name)]
        except re.error as error:
            raise UserError(f"--include {include!r} is no regular expression: {error}") from error
        if not weights:
            raise UserError(f"no matrix of {checkpoint} has a name that matches {include!r}")
    layers = []
    for index, weight in enumerate(weights, 1):
        progress(f"{index}/{len(weights)} {weight.name} {weight.shape[0]} x {weight.shape[1]}")
        layers.append(_measured(weight, weight.spectrum(device=device, exact_up_to=exact_up_to), tolerances))
    guesses = _guesses(layers, for_rank, init, progress)
    return RankReport(
        checkpoint=str(checkpoint),
        for_rank=for_rank,
        init=init,
        tolerances=tuple(tolerances),
        layers=[replace(layer, omega_guess=guesses.get(layer.group)) for layer in layers],
    )


def format_ranks(report: RankReport, *, every_layer: bool = False, width: int = 120) -> str:
    """Return a table as text: one row a matrix, or one with medians for those that differ by layer number alone."""
    groups: dict[Any, list[LayerRank]] = {}
    for layer in report.layers:
        groups.setdefault(layer.name if every_layer else layer.group, []).append(layer)
    guess = f"omega, k={report.for_rank}"
    tolerances = [f"rank({tolerance:g})" for tolerance in report.tolerances]
    table = number_table("matrix", "n", "shape", "kind", "stable rank", *tolerances, guess)
    for members in groups.values():
        first = members[0]
        stable = [layer.stable_rank for layer in members]
        ranks = [median([layer.ranks[f"{each:g}"] for layer in members]) for each in report.tolerances]
        more = "" if all(layer.exact for layer in members) else ">="
        table.add_row(
            first.name if len(members) == 1 else fold_numbers(first.name),
            str(len(members)),
            f"{first.shape[0]} x {first.shape[1]}",
            first.title,
            f"{median(stable):.1f}" + (f" ({min(stable):.1f} to {max(stable):.1f})" if len(members) > 1 else ""),
            *(f"{more}{rank:.0f}" for rank in ranks),
            _guess_text(first.omega_guess),
        )
    lines = [render_table(table, width)]
    lines.append("stable rank: |W|_F^2 / |W|_op^2; rank(t): singular values above t times the largest; median (range)")
    guessed = [layer.omega_guess for layer in report.layers if layer.omega_guess]
    if guessed:
        lines.append(
            f"{guess}: sin(omega U V), drawn by {report.init}, has the matrix's stable rank; where to begin a sweep"
        )
    if any(each["omega"] is None for each in guessed):
        lines.append("U V: plain low rank has that stable rank without a sine")
    if any(each["saturated"] for each in guessed):
        lines.append(">: the matrix has as much as independent entries; the omega is where the sine nearly has, too")
    if any(not layer.exact for layer in report.layers):
        lines.append(">=: of the leading singular values, by a randomised sketch")
    return "\n".join(lines)


def _measured(weight: Weight, spectrum: Spectrum, tolerances: Sequence[float]) -> LayerRank:
    zero = spectrum.norm == 0  # an adapter's delta at its start
    places = curve_places(len(spectrum.values))
    normalised = [] if zero else spectrum.normalised[torch.tensor(places) - 1].tolist()
    return LayerRank(
        name=weight.name,
        kind=weight.kind,
        shape=weight.shape,
        rank=weight.rank,
        omega=weight.omega,
        norm=spectrum.norm,
        stable_rank=0.0 if zero else spectrum.stable_rank,
        ranks={f"{tolerance:g}": spectrum.rank(tolerance) for tolerance in tolerances},
        exact=spectrum.exact,
        spectrum=list(zip(places, normalised, strict=False)),
    )


def _guesses(
    layers: Sequence[LayerRank], rank: int, init: str, progress: Callable[[str], None]
) -> dict[Any, dict[str, Any]]:
    """Return one for each group of dense matrices that would get smaller at that rank."""
    groups: dict[Any, list[LayerRank]] = {}
    for layer in layers:
        m, n = layer.shape
        if layer.kind == "dense" and rank * (m + n) < m * n <= _LARGEST_GUESS and layer.norm:
            groups.setdefault(layer.group, []).append(layer)
    guesses = {}
    for index, (group, members) in enumerate(groups.items(), 1):
        progress(f"omega {index}/{len(groups)} {group[0]}")
        target = median([layer.stable_rank for layer in members])
        guesses[group] = asdict(guess_omega(members[0].shape, rank, target, init=init))
    return guesses


def _guess_text(guess: dict[str, Any] | None) -> str:
    if guess is None:
        return "-"
    return "U V" if guess["omega"] is None else f"{'> ' if guess['saturated'] else ''}{guess['omega']:.3g}"

"""What `nlr inspect --rank` shows: how much rank every matrix of a checkpoint has, and where to begin with omega."""

import json
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from nlr_lab.runtime.tables import render_table
from nonlinear_lowrank.errors import UserError

from .measures import EXACT, Spectrum, check_tolerance, curve_places
from .omega import OmegaGuess, guess_omega
from .weights import Weight, checkpoint_weights

TOLERANCES = (0.1, 0.01)
_LARGEST_GUESS = 2**26  # entries: beyond, a bisection would take minutes a shape


@dataclass(frozen=True, kw_only=True)
class LayerRank:
    """One matrix; its shape is (m, n)."""

    name: str
    kind: str
    """See `checkpoint_weights.Weight`."""
    shape: tuple[int, int]
    rank: int | None
    """k of a factored weight."""
    omega: float | None
    """Of a factored weight with a frequency."""
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
    """Of `omega.guess_omega` for the layer's group: layers that differ by number alone, and in shape not at all."""


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
        """The record, strict JSON."""
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
    progress: Callable[[str], None] | None = None,
) -> RankReport:
    """Measures every matrix of a checkpoint; memory for one of them at a time.

    Args:
        checkpoint: as in `checkpoint_weights`.
        for_rank: k for which an omega is suggested for each dense matrix.
        init: of the layer that would take its place.
        tolerances: for the ranks, in the order they are shown.
        include: a regular expression that the names of matrices must match somewhere.
        omega: as in `checkpoint_weights`.
        exact_up_to: as in `rank.spectrum`.
        device: for the spectra.
        progress: told of each matrix before it is measured.

    Raises:
        UserError: a setting is out of range, no matrix is found or matches, or a weight is not finite.
    """
    if for_rank < 1:
        raise UserError(f"the rank to suggest an omega for must be at least 1, got {for_rank}")
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
        if progress is not None:
            progress(f"{index}/{len(weights)} {weight.name} {weight.shape[0]} x {weight.shape[1]}")
        layers.append(_measured(weight, weight.spectrum(device=device, exact_up_to=exact_up_to), tolerances))
    guesses = _guesses(layers, for_rank, init, progress)
    layers = [
        LayerRank(**{**vars(layer), "omega_guess": asdict(guess) if (guess := guesses.get(_group(layer))) else None})
        for layer in layers
    ]
    return RankReport(
        checkpoint=str(checkpoint), for_rank=for_rank, init=init, tolerances=tuple(tolerances), layers=layers
    )


def format_ranks(report: RankReport, *, every_layer: bool = False, width: int = 120) -> str:
    """A table as text.

    Args:
        report: of `rank_report`.
        every_layer: one row a matrix; else those that differ by layer number alone share one, with medians.
        width: columns of the terminal.
    """
    groups: dict[Any, list[LayerRank]] = {}
    for layer in report.layers:
        groups.setdefault(layer.name if every_layer else _group(layer), []).append(layer)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("matrix", overflow="fold")
    guess = f"omega, k={report.for_rank}"
    tolerances = [f"rank({tolerance:g})" for tolerance in report.tolerances]
    for column in ("n", "shape", "kind", "stable rank", *tolerances, guess):
        table.add_column(column, justify="right", no_wrap=True)
    for members in groups.values():
        first = members[0]
        name = first.name if len(members) == 1 else _folded(first.name)
        stable = [layer.stable_rank for layer in members]
        spread = f"{_median(stable):.1f}"
        if len(members) > 1:
            spread += f" ({min(stable):.1f} to {max(stable):.1f})"
        ranks = [_median([layer.ranks[f"{each:g}"] for layer in members]) for each in report.tolerances]
        more = "" if all(layer.exact for layer in members) else ">="
        table.add_row(
            name,
            str(len(members)),
            f"{first.shape[0]} x {first.shape[1]}",
            _kind(first),
            spread,
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
    zero = spectrum.norm == 0
    places = curve_places(len(spectrum.values))
    normalised = [] if zero else spectrum.normalised[torch.tensor(places) - 1].tolist()
    return LayerRank(
        name=weight.name,
        kind=weight.kind,
        shape=weight.shape,
        rank=weight.rank,
        omega=weight.omega,
        norm=spectrum.norm,
        stable_rank=0.0 if zero else spectrum.stable_rank,  # an adapter's delta at its start
        ranks={f"{tolerance:g}": spectrum.rank(tolerance) for tolerance in tolerances},
        exact=spectrum.exact,
        spectrum=list(zip(places, normalised, strict=False)),
    )


def _guesses(
    layers: Sequence[LayerRank], rank: int, init: str, progress: Callable[[str], None] | None
) -> dict[Any, OmegaGuess]:
    """One for each group of dense matrices that would get smaller at that rank."""
    groups: dict[Any, list[LayerRank]] = {}
    for layer in layers:
        m, n = layer.shape
        if layer.kind == "dense" and rank * (m + n) < m * n <= _LARGEST_GUESS and layer.norm:
            groups.setdefault(_group(layer), []).append(layer)
    guesses = {}
    for index, (group, members) in enumerate(groups.items(), 1):
        if progress is not None:
            progress(f"omega {index}/{len(groups)} {_folded(members[0].name)}")
        target = _median([layer.stable_rank for layer in members])
        guesses[group] = guess_omega(members[0].shape, rank, target, init=init)
    return guesses


def _group(layer: LayerRank) -> tuple[Any, ...]:
    return _folded(layer.name), layer.kind, layer.shape, layer.rank, layer.omega


def _folded(name: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def _kind(layer: LayerRank) -> str:
    parts = [layer.kind]
    parts += [f"k={layer.rank}"] if layer.rank is not None else []
    parts += [f"omega={layer.omega:g}"] if layer.omega is not None and layer.kind != "low-rank" else []
    return " ".join(parts)


def _guess_text(guess: dict[str, Any] | None) -> str:
    if guess is None:
        return "-"
    return "U V" if guess["omega"] is None else f"{'> ' if guess['saturated'] else ''}{guess['omega']:.3g}"


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)

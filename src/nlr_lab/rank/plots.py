"""Pictures of ranks: the sine paper's Figures 2 and 3, and the spectra of a checkpoint's matrices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from nlr_lab.runtime.canvas import COLOURS, GREYS, new_figure, save
from nlr_lab.runtime.tables import fold_numbers

from .figures import heat_maps
from .report import LayerRank


def plot_rank_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Draw Figure 2 above, as heat maps of one draw, and Figure 3 below, as mean spectra, into a PNG."""
    figure = Figure(figsize=(11.0, 6.8), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = np.ravel(figure.subfigures(2, 1, height_ratios=(1.0, 1.25)))  # type: ignore[arg-type]
    heats, measured = heat_maps(figures["init"]), figures["figure_2"]["matrices"]
    shades = colormaps["viridis"].resampled(16)  # noise in 256 colours makes a large file
    above.suptitle(f"Figure 2: |weights|, k = {figures['figure_2']['rank']}, one draw")
    for axes, (name, heat) in zip(np.ravel(above.subplots(1, len(heats))), heats.items(), strict=True):
        axes.imshow(heat.numpy(), cmap=shades, vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_title(
            f"{name}\nstable rank {measured[name]['stable_rank']['mean']:.1f} (n = {figures['seeds']})", fontsize=9
        )
    spectra = figures["figure_3"]["matrices"]
    count, omega = figures["seeds"], figures["left_omega"]
    below.suptitle(
        f"Figure 3: singular values over the largest, k = {figures['figure_3']['rank']}, mean of {count} draws"
    )
    left, right = below.subplots(1, 2)
    for axes in (left, right):
        for grey, name in zip(GREYS, ("dense", "U V"), strict=False):
            _line(axes, spectra[name]["spectrum"], name, color=grey, linestyle="--")
    shown = [name for name in spectra if name.endswith(f"omega={omega:g}")]
    for colour, name in zip(COLOURS, shown, strict=False):
        _line(left, spectra[name]["spectrum"], name, color=colour)
    sines = [name for name in spectra if name.startswith("sine")]
    for colour, name in zip(COLOURS, sines, strict=False):
        _line(right, spectra[name]["spectrum"], name, color=colour)
    left.set_ylabel("s_i / s_1")
    save(figure, path)


def plot_layer_spectra(path: Path, layers: Sequence[LayerRank], *, title: str = "") -> None:
    """Draw normalised spectra of a checkpoint's matrices into a PNG, coloured by the name without layer numbers."""
    figure, axes = new_figure(9.0, 5.4)
    groups: dict[str, int] = {}
    for layer in layers:
        group = fold_numbers(layer.name)
        label = "_" if group in groups else group
        index = groups.setdefault(group, len(groups))
        colour, style = COLOURS[index % len(COLOURS)], ("-", "--", ":", "-.")[index // len(COLOURS) % 4]
        axes.plot(
            *zip(*layer.spectrum, strict=True), color=colour, linestyle=style, linewidth=1.0, alpha=0.7, label=label
        )
    _style(axes)
    axes.set_xscale("log")
    axes.set_ylabel("s_i / s_1")
    axes.set_title(title, parse_math=False)
    axes.legend(frameon=False, fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def _line(axes: Axes, points: Sequence[tuple[int, float]], name: str, **style: Any) -> None:
    axes.plot(*zip(*points, strict=True), linewidth=1.5, label=name, **style)
    _style(axes)
    axes.legend(frameon=False, fontsize=8)


def _style(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 1.3)
    axes.set_xlabel("i")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.5)

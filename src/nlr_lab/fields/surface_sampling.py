"""The lattice points that a step sees: a share of them near the surface, weighted so that the loss stays the box's.

Most of a box is far from its shape's surface, is learned at once and then has next to no gradient. With a share s of
the points drawn from the band about the surface, which is a part f of the lattice, and the others from all of it, a
point is drawn with density

    q = s / f + 1 - s    in the band,    q = 1 - s    outside

times the even one, and weighs 1 / q in the mean: the expected loss is that of even drawing, with a smaller variance.
"""

import numpy as np
import torch
from scipy.ndimage import maximum_filter1d, minimum_filter1d
from torch import Tensor

from nlr_lab.runtime.resources import check_bytes

_PLANES = 64  # of the lattice, that the band is sought in at once
_AT_ONCE = 1 << 21  # of its points, that the band's places are listed of at once
_INSIDE, _NEAR = 1, 2  # bits of a point


class LatticePoints:
    """Draw points of an occupancy grid.

    Args:
        inside: (n, n, n) bool.
        share: of the points drawn from the band; at least 0, below 1.
        band: the band's points have one of the other kind at most so far away along each axis, in units of the box's
            half side.
        spare: bytes that are to stay free.

    Raises:
        UserError: the band does not fit memory.
    """

    def __init__(self, inside: np.ndarray, share: float, band: float, *, spare: int = 0) -> None:
        self.resolution = len(inside)
        codes, near = inside.view(np.uint8).reshape(-1), np.zeros(0, dtype=np.int64)
        if share > 0:
            codes = codes.copy()
            count = _mark(codes.reshape(inside.shape), inside, _cells(self.resolution, band))
            kind = np.int32 if inside.size < 2**31 else np.int64  # half the memory where the lattice allows it
            check_bytes(
                count * np.dtype(kind).itemsize + spare,
                f"surface_band {band:g}: the band about the surface, {count:,} points of the lattice,",
                "give a smaller surface_band or resolution",
            )
            near = _places(codes, count, kind)
        self._codes, self._near = torch.from_numpy(codes), torch.from_numpy(near)
        self.share = share if len(near) else 0.0
        self.part = len(near) / inside.size
        """f"""

    def draw(self, points: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates in [-1, 1] (points, 3), whether they are inside, as 0 and 1 (points,), and weights (points,)."""
        n, few = self.resolution, int(self.share * points)
        chosen = torch.randint(n**3, (points,), generator=generator)
        if few:
            chosen[:few] = self._near[torch.randint(len(self._near), (few,), generator=generator)].long()
        codes = self._codes[chosen]
        share = few / points
        density = torch.full((points,), 1 - share)
        if few:
            density[codes >= _NEAR] += share / self.part
        index = torch.stack([chosen // (n * n), chosen // n % n, chosen % n], dim=-1)
        return (index.float() + 0.5) * (2 / n) - 1, (codes & _INSIDE).float(), density.reciprocal()


def lattice_bytes(resolution: int, share: float, band: float) -> float:
    """Bytes a point that a lattice takes at most before its band is known; the band's places are asked for then."""
    if not share:
        return 1.0
    halo = min(_PLANES + 2 * _cells(resolution, band), resolution)
    return 2 + (halo + 3 * min(_PLANES, resolution)) / resolution


def _cells(resolution: int, band: float) -> int:
    return max(1, round(band * resolution / 2))


def _mark(codes: np.ndarray, inside: np.ndarray, cells: int) -> int:
    """Mark the points with one of the other kind at most so many cells away; return how many these are."""
    size, count = 2 * cells + 1, 0
    for start in range(0, len(inside), _PLANES):
        low = max(start - cells, 0)
        wide = inside[low : start + _PLANES + cells].view(np.uint8)
        ends = []
        for extreme in (maximum_filter1d, minimum_filter1d):
            some = extreme(wide, size, axis=0, mode="nearest")[start - low : start - low + _PLANES]
            for axis in (1, 2):
                some = extreme(some, size, axis=axis, mode="nearest")
            ends.append(some)
        near = ends[0] != ends[1]
        count += int(np.count_nonzero(near))
        codes[start : start + _PLANES] |= near.view(np.uint8) * np.uint8(_NEAR)
    return count


def _places(codes: np.ndarray, count: int, kind: type) -> np.ndarray:
    """Places (count,) at which the flat codes have the band's bit."""
    places: np.ndarray = np.empty(count, dtype=kind)
    filled = 0
    for start in range(0, len(codes), _AT_ONCE):
        found = np.flatnonzero(codes[start : start + _AT_ONCE] & _NEAR)
        places[filled : filled + len(found)] = found + start
        filled += len(found)
    return places

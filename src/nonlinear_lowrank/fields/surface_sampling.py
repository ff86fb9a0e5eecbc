"""Which points of a lattice a step sees: a share of them near the surface, weighted so that the loss stays the box's.

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

_PLANES = 64  # of the lattice, that the band is sought in at once
_INSIDE, _NEAR = 1, 2  # bits of a point


class LatticePoints:
    """Draws points of an occupancy grid.

    Args:
        inside: (n, n, n) bool.
        share: of the points drawn from the band; at least 0, below 1.
        band: the band's points have one of the other kind at most so far away along each axis, in units of the box's
            half side.
    """

    def __init__(self, inside: np.ndarray, share: float, band: float) -> None:
        self.resolution = len(inside)
        codes, near = inside.view(np.uint8).reshape(-1), np.zeros(0, dtype=np.int64)
        if share > 0:
            near = _band(inside, max(1, round(band * self.resolution / 2)))
            codes = codes.copy()
            codes[near] |= _NEAR
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


def _band(inside: np.ndarray, cells: int) -> np.ndarray:
    """Places, in the flat lattice, of the points with one of the other kind at most so many cells away."""
    n, places = len(inside), []
    for start in range(0, n, _PLANES):
        low = max(start - cells, 0)
        most = least = inside[low : start + _PLANES + cells].view(np.uint8)
        for axis in range(3):
            most = maximum_filter1d(most, 2 * cells + 1, axis=axis, mode="nearest")
            least = minimum_filter1d(least, 2 * cells + 1, axis=axis, mode="nearest")
        near = (most != least)[start - low : start - low + _PLANES]
        # Half the memory where the lattice allows it.
        places.append((np.flatnonzero(near) + start * n * n).astype(np.int32 if inside.size < 2**31 else np.int64))
    return np.concatenate(places)

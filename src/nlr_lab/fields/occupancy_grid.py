"""The points that a closed mesh has inside (one ray a column, all its hits, parity), and those that a step sees.

The mesh's tight box is the cube: each of its axes runs from -1 to 1 (sine_lowrank.txt, section 4.4, after Saragadam et
al., 2023). A lattice of n^3 points has them at the middles of n^3 equal cells, at (2 i + 1) / n - 1.

A point is inside where a ray from below it has crossed the surface an odd number of times. Rays run along z, one for
all n points of a column, n columns by n in slabs, moved by `_NUDGE` off edges and cast again where the hits are odd
in number.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.ndimage import maximum_filter, minimum_filter
from torch import Tensor

from nlr_lab.runtime.environment import check_bytes
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import check_integer

from .mesh_files import signed_volumes

if TYPE_CHECKING:
    from trimesh import Trimesh

_SLAB = 8_192
_NUDGE = 0.01  # of a cell, 1.6 times as far each time
_TRIES = 8


@dataclass(frozen=True)
class OccupancyGrid:
    """Occupancy at the n^3 points of a lattice, or near them."""

    inside: np.ndarray
    """(n, n, n) bool; axes x, y, z."""
    recast: int
    """Rays that were cast again."""
    volume: float
    """Share of the box that the mesh encloses, by its faces (divergence theorem): the mean of `inside` comes near."""
    jitter: np.ndarray | None = None
    """(n, n, 3) float32, of a grid off the lattice: in each column's cell x and y, and how far up each cell of the
    column its point is; all in [0, 1]. None: the points of the lattice."""

    @property
    def resolution(self) -> int:
        """n."""
        return len(self.inside)

    @property
    def hollow(self) -> float:
        """Share of the volume that the faces enclose but parity does not: 0 up to sampling, unless bodies overlap."""
        return 1 - float(self.inside.mean()) / self.volume

    def points(self, start: int, stop: int) -> np.ndarray:
        """Coordinates in [-1, 1] of planes start .. stop - 1 of the grid: (stop - start, n, n, 3) float32."""
        n = self.resolution
        within = np.float32(0.5) if self.jitter is None else self.jitter[start:stop, :, None, :]
        index = np.stack(np.meshgrid(np.arange(start, stop), np.arange(n), np.arange(n), indexing="ij"), axis=-1)
        return ((index + within) * (2 / n) - 1).astype(np.float32)


def occupancy_grid(mesh: "Trimesh", resolution: int, *, jitter: np.random.Generator | None = None) -> OccupancyGrid:
    """Find the occupancy of a watertight mesh at the n = `resolution` points along each axis of a lattice.

    With `jitter` column (i, j) is at a random place of its cell, and its points are as far up each cell as a random
    number of the column says: points off the lattice, evenly over the box. UserError where the grid does not fit
    memory, the faces enclose no volume, or rays find the mesh open.
    """
    from trimesh.ray.ray_pyembree import RayMeshIntersector

    check_grids(resolution=(resolution, 1))
    n = resolution
    unit = mesh.copy(include_cache=False, include_visual=False)
    low, high = np.asarray(mesh.bounds, dtype=np.float64)
    unit.vertices = (np.asarray(mesh.vertices, dtype=np.float64) - (low + high) / 2) / ((high - low) / 2)
    volume = abs(float(signed_volumes(unit.triangles).sum())) / 8
    if not volume > 1e-12:
        raise UserError("the faces enclose no volume, or their bodies' volumes cancel out; read_mesh turns them")
    caster, nudge = RayMeshIntersector(unit), np.random.default_rng(0)
    inside = np.empty((n * n, n), dtype=bool)
    places = None if jitter is None else jitter.random((n * n, 3), dtype=np.float32)
    recast = 0
    for start in range(0, n * n, _SLAB):
        cells = np.arange(start, min(start + _SLAB, n * n))
        low = np.stack(np.divmod(cells, n), axis=1)
        within = np.full((len(cells), 3), 0.5) if places is None else places[cells].astype(np.float64)
        column, height, todo = np.zeros(0, dtype=np.int64), np.zeros(0), np.arange(len(cells))
        for attempt in range(_TRIES + 1):
            # A random place is on no edge but by chance; moved, it might leave the mesh that it is in.
            span = _NUDGE * 1.6**attempt if places is None or attempt else 0.0
            aim = within[todo, :2] + nudge.uniform(-span, span, (len(todo), 2))
            hit, at = _hits(caster, (low[todo] + aim) * (2 / n) - 1)
            odd = np.bincount(hit, minlength=len(todo)) % 2 == 1
            good = ~odd[hit]
            column, height = np.append(column, todo[hit[good]]), np.append(height, at[good])
            todo = todo[odd]
            if not len(todo):
                break
            recast += len(todo)
        else:
            rays = f"{len(todo)} of {len(cells):,} rays"
            why = "it is open, or bodies touch face to face; close or unite them in a mesh editor"
            raise UserError(f"{rays} cross the mesh an odd number of times: {why}")
        # The first point above a hit, by cell and then by the place within it; each hit turns all points above it.
        first = np.clip(np.ceil((height + 1) * (n / 2) - within[column, 2]), 0, n).astype(np.int64)
        turns = np.zeros((len(cells), n + 1), dtype=bool)
        np.logical_xor.at(turns, (column, first), True)
        np.logical_xor.accumulate(turns[:, :n], axis=1, out=inside[start : start + len(cells)])
    return OccupancyGrid(inside.reshape(n, n, n), recast, volume, None if places is None else places.reshape(n, n, 3))


def _hits(caster, xy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rays up through (C, 2) places -> of all hits, in any order, the ray and the height."""
    origins = np.concatenate([xy, np.full((len(xy), 1), -1.01)], axis=1)
    upward = np.broadcast_to(np.array([0.0, 0.0, 1.0]), origins.shape)
    # A ray crosses a face once at most, and may need some more tries to leave one: trimesh stops after 100 of both.
    _, ray, where = caster.intersects_id(
        origins, upward, multiple_hits=True, max_hits=len(caster.mesh.faces) + 100, return_locations=True
    )
    return ray, where[:, 2]


def check_grids(**grids: tuple[int, float]) -> None:
    """Raise UserError unless grids, each of points along an axis and bytes a point, fit the free memory together."""
    for name, (resolution, _) in grids.items():
        check_integer(name, resolution, minimum=2)
    what = ", ".join(f"{name} {resolution}" for name, (resolution, _) in grids.items())
    needed = sum(resolution**3 * size for resolution, size in grids.values())
    check_bytes(int(needed), f"{what}: so many points along each axis", "choose smaller ones")


class LatticePoints:
    """Draw points of an occupancy grid (n, n, n), more of them near the surface, and weigh them so that the loss stays.

    Most of a box is far from its shape's surface, is learned at once and then has next to no gradient. With a share s
    in [0, 1) drawn from the band about the surface, a part f of the lattice, and the others from all of it, a point
    has q times the even density, q = s / f + 1 - s in the band and 1 - s outside, and weighs 1 / q in the mean: the
    expected loss is that of even drawing, with a smaller variance. The band's points have one of the other kind at
    most `band` away along each axis, in units of the box's half side; UserError where they do not fit memory.
    """

    def __init__(self, inside: np.ndarray, share: float, band: float) -> None:
        self.resolution = len(inside)
        self._inside = torch.from_numpy(inside.reshape(-1))
        self.share, self.part = 0.0, 0.0
        if share > 0:
            size = 2 * max(1, round(band * self.resolution / 2)) + 1
            near = maximum_filter(inside, size, mode="nearest") != minimum_filter(inside, size, mode="nearest")
            count = int(np.count_nonzero(near))
            what = f"surface_band {band:g}: the band about the surface, {count:,} points of the lattice,"
            check_bytes(8 * count, what, "give a smaller surface_band or resolution")
            self._near, self._places = torch.from_numpy(near.reshape(-1)), torch.from_numpy(np.flatnonzero(near))
            self.share, self.part = share if count else 0.0, count / inside.size

    def draw(self, points: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Coordinates in [-1, 1] (points, 3), whether they are inside, as 0 and 1 (points,), and weights (points,)."""
        n, few = self.resolution, int(self.share * points)
        share = few / points
        chosen = torch.randint(n**3, (points,), generator=generator)
        density = torch.full((points,), 1 - share)
        if few:
            chosen[:few] = self._places[torch.randint(len(self._places), (few,), generator=generator)]
            density[self._near[chosen]] += share / self.part
        index = torch.stack([chosen // (n * n), chosen // n % n, chosen % n], dim=-1)
        return (index.float() + 0.5) * (2 / n) - 1, self._inside[chosen].float(), density.reciprocal()

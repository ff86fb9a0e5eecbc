"""A shape as a function of position: which points of its box are inside (sine_lowrank.txt, sections 4.4 and A.2.5).

The network's output is the log-odds of being inside. It is fitted, by binary cross-entropy, to points drawn from a
lattice over the tight box of a mesh (`occupancy_grid.LatticePoints` has which), and judged off it:

| metric | what it is                                                                                            |
|--------|-------------------------------------------------------------------------------------------------------|
| iou    | percent: points inside both over points inside either, of random places of `held_out`^3 equal cells   |

The places are the same in every fit, and what is inside is asked of the mesh there, not of the lattice.

Pictures of meshes are by parallel rays: clay under a lamp from the upper left and an even sky, with shadows of both.
"""

import hashlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from nonlinear_lowrank.validation import require

from .mesh_files import import_trimesh, read_mesh, unit_of
from .model import Field, values
from .occupancy_grid import LatticePoints, check_grids, occupancy_grid
from .problem import FieldMethod
from .settings import Axis, OccupancySettings

if TYPE_CHECKING:
    from trimesh import Trimesh
    from trimesh.ray.ray_pyembree import RayMeshIntersector

_HOLLOW = 0.05  # above what sampling explains
_CHUNK = 1 << 15  # points of a grid that are made at once

# of pictures
_CLAY = np.array([0.80, 0.70, 0.60])
_PAPER = 1.0
_LAMP, _SKY = 0.62, 0.55
_FINE = 2  # samples along each side of a pixel
_WIDEST = 4  # pixels at most, in squares of the height: a rod's picture gets lower, not endlessly wide
_AT_ONCE = 1 << 18  # samples
_SKY_RAYS = 16  # of a sample
_CREASE = np.cos(np.radians(35))  # facets that turn further from their surroundings are edges, and stay flat


def prepare(settings: OccupancySettings) -> "OccupancyProblem":
    # All that the fit will hold at once, checked before allocating; log-odds are 4 bytes and copied once.
    check_grids(
        resolution=(settings.resolution, 5 if settings.surface_share else 1),
        held_out=(settings.held_out, 1),
        mesh_resolution=(settings.mesh_resolution, 8),
    )
    mesh = read_mesh(settings.source, repair=settings.repair)
    return OccupancyProblem(mesh, settings, name=Path(settings.source).stem)


class OccupancyProblem:
    """A shape to be fitted (see `problem.Problem`, and this file's table for the metric).

    Args:
        mesh: watertight; UserError where rays find it open.
        settings: all but `source` and `repair` count.
        name: of the shape.
    """

    score = "iou"

    def __init__(self, mesh: "Trimesh", settings: OccupancySettings, *, name: str = "shape") -> None:
        self.name, self.settings, self.mesh = name, settings, mesh
        self.grid = occupancy_grid(mesh, settings.resolution)
        self.held_out = occupancy_grid(mesh, settings.held_out, jitter=np.random.default_rng(0))
        if min(self.grid.hollow, self.held_out.hollow) > _HOLLOW:
            warnings.warn(
                f"{name}: bodies overlap, and of the volumes that they enclose {self.grid.hollow:.0%} is counted twice "
                "or taken for hollow; unite them in a mesh editor if that is not meant",
                stacklevel=2,
            )
        self.lattice = LatticePoints(self.grid.inside, settings.surface_share, settings.surface_band)
        drawn = settings.points, settings.surface_share, settings.surface_band, settings.loss
        digest = hashlib.sha256(f"{drawn} {settings.field}".encode())
        for grid in (self.grid, self.held_out):
            digest.update(np.packbits(grid.inside).tobytes())
        self.fingerprint = digest.hexdigest()

    def build(self, method: FieldMethod, generator: torch.Generator) -> nn.Module:
        """Build the network; an omega left open is the published one for this rank."""
        return Field(self.settings.field, method.resolved("occupancy"), generator)

    def batch(self, step: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Draw points of the lattice (points, 3), whether they are inside, 0 or 1 (points,), and weights (points,)."""
        return self.lattice.draw(self.settings.points, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Binary cross-entropy, nats, or the squared error: an estimate of its mean over the box."""
        points, inside, weight = batch
        found = model(points).squeeze(-1)
        if self.settings.loss == "squared":
            return (weight * (found - (inside - 0.5)).square()).mean()
        return F.binary_cross_entropy_with_logits(found, inside, weight)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """IoU off the lattice, percent."""
        n, both, either = self.held_out.resolution, 0, 0
        step = max(1, _CHUNK // n**2)
        for start in range(0, n, step):
            truth = self.held_out.inside[start : start + step]
            found = log_odds(model, self.held_out.points(start, min(start + step, n))) > 0
            both += int(np.count_nonzero(found & truth))
            either += int(np.count_nonzero(found | truth))
        return {"iou": 100 * both / either if either else 100.0}

    def picture(self, model: nn.Module | None) -> np.ndarray:
        """Draw the shape as the model has it, or as it is: one view, one size."""
        return self._render(self.mesh if model is None else self.surface(model))

    def _render(self, mesh: "Trimesh | None") -> np.ndarray:
        view = {name: getattr(self.settings, name) for name in ("up", "azimuth", "elevation")}
        return render(mesh, self.mesh.bounds, height=self.settings.picture_height, **view)

    def surface(self, model: nn.Module) -> "Trimesh | None":
        """Return the mesh where the log-odds are 0, in the shape's coordinates, or None where no point is inside.

        By marching cubes at a lattice of the box, which closes what reaches it; faces are turned outwards.
        """
        trimesh = import_trimesh()
        marching_cubes = require("fields", "skimage.measure").marching_cubes
        n, (low, high) = self.settings.mesh_resolution, self.mesh.bounds
        odds = np.zeros((n + 2, n + 2, n + 2), dtype=np.float32)
        axis = ((np.arange(n, dtype=np.float32) + 0.5) * (2 / n) - 1).astype(np.float32)
        step = max(1, _CHUNK // (n * n))
        for start in range(0, n, step):
            part = np.stack(np.meshgrid(axis[start : start + step], axis, axis, indexing="ij"), axis=-1)
            odds[1 + start : 1 + start + len(part), 1:-1, 1:-1] = log_odds(model, part)
        # Outside mirrors the nearest point with the sign of outside: a surface there lies on the side of the box.
        for side in range(3):
            rim = np.moveaxis(odds, side, 0)
            rim[0], rim[-1] = -abs(rim[1]) - 1e-6, -abs(rim[-2]) - 1e-6
        if not (odds > 0).any():
            return None
        points, faces, _, _ = marching_cubes(odds, 0.0, gradient_direction="ascent")
        places = (points.astype(np.float64) - 0.5) * (2 / n) - 1
        return trimesh.Trimesh(places * ((high - low) / 2) + (low + high) / 2, faces, process=False)

    def write(self, model: nn.Module, folder: Path) -> list[Path]:
        """Write picture.png, the true shape beside the field's, and mesh.ply, the field's."""
        found = self.surface(model)
        parameters = sum(each.numel() for each in model.parameters())
        labels = f"{self.name}: {len(self.mesh.faces):,} faces", f"field: {parameters:,} parameters"
        _beside([self._render(mesh) for mesh in (self.mesh, found)], labels).save(folder / "picture.png")
        if found is None:
            return [folder / "picture.png"]
        found.export(folder / "mesh.ply")
        return [folder / "picture.png", folder / "mesh.ply"]


def log_odds(model: nn.Module, points: np.ndarray) -> np.ndarray:
    """The field at points (..., 3) of [-1, 1]^3: (...) float32."""
    return values(model, torch.from_numpy(points.reshape(-1, 3))).numpy().reshape(points.shape[:-1])


def _beside(pictures: list[np.ndarray], labels: tuple[str, ...]) -> Image.Image:
    """Pictures of one size in a row, each with a line under it."""
    height, width = pictures[0].shape[:2]
    cell = max(width, 260)
    sheet = Image.new("RGB", (cell * len(pictures), height + 28), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=15)
    for place, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        sheet.paste(Image.fromarray(picture), (place * cell + (cell - width) // 2, 0))
        draw.text((place * cell + cell // 2, height + 14), label, "black", font, anchor="mm")
    return sheet


def render(
    mesh: "Trimesh | None",
    bounds: np.ndarray,
    *,
    up: Axis = "y",
    azimuth: float = 30.0,
    elevation: float = 15.0,
    height: int = 480,
) -> np.ndarray:
    """A picture (height, width, 3) uint8 of a mesh, which the box `bounds` (2, 3) fills; None: an empty one.

    At 0, 0 the eye looks against z with y up, against x with z up, and against y with x up; `azimuth` turns it about
    the axis `up`, `elevation` raises it, in degrees. The width follows from the box; where it is more than four times
    the height, the picture is lower.
    """
    from trimesh.ray.ray_pyembree import RayMeshIntersector

    right, above, eye = _axes(up, azimuth, elevation)
    # trimesh drops faces whose normals are too short, by a length that does not follow the mesh's.
    unit = unit_of(bounds)
    low, high = np.asarray(bounds, dtype=np.float64) / unit
    middle, half = (low + high) / 2, (high - low) / 2
    reach_x, reach_y, reach_z = (float(abs(axis) @ half) * 1.04 for axis in (right, above, eye))
    height, width = _size(height, reach_x / reach_y)
    rows, columns = height * _FINE, width * _FINE
    shade = np.full((rows * columns, 3), _PAPER)
    if mesh is not None:
        mesh = mesh.copy(include_visual=False)
        mesh.vertices = np.asarray(mesh.vertices, dtype=np.float64) / unit
        caster, draw = RayMeshIntersector(mesh), np.random.default_rng(0)
        for start in range(0, rows * columns, _AT_ONCE):
            y, x = np.divmod(np.arange(start, min(start + _AT_ONCE, rows * columns)), columns)
            across = ((x + 0.5) / columns * 2 - 1) * reach_x
            along = (1 - (y + 0.5) / rows * 2) * reach_y
            origins = middle + across[:, None] * right + along[:, None] * above + 1.5 * reach_z * eye
            hit, colour = _shade(caster, origins, (right, above, eye), float(np.linalg.norm(half)), draw)
            shade[start + hit] = colour
    picture = shade.reshape(rows // _FINE, _FINE, columns // _FINE, _FINE, 3).mean((1, 3))
    return (np.clip(picture, 0, 1) ** (1 / 2.2) * 255).round().astype(np.uint8)


def _axes(axis: Axis, azimuth: float, elevation: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit vectors right, up in the picture, and towards the eye."""
    up = np.eye(3)["xyz".index(axis)]
    front, side = np.roll(up, 1), np.roll(up, 2)  # y: z, x
    turn, rise = np.radians([azimuth, elevation])
    level = np.cos(turn) * front + np.sin(turn) * side
    eye = np.cos(rise) * level + np.sin(rise) * up
    right = np.cross(up, level)
    return right, np.cross(eye, right), eye


def _size(height: int, ratio: float) -> tuple[int, int]:
    """Height and width in pixels of a picture so many times as wide as high."""
    if ratio > _WIDEST:
        width = round(height * (_WIDEST * ratio) ** 0.5)
        return max(round(height * (_WIDEST / ratio) ** 0.5), 1), min(width, _WIDEST * height**2)
    return height, max(round(height * ratio), 1)


def _shade(
    caster: "RayMeshIntersector",
    origins: np.ndarray,
    axes: tuple[np.ndarray, np.ndarray, np.ndarray],
    size: float,
    draw: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Rays that hit, and the linear colours they see."""
    mesh, (right, up, eye) = caster.mesh, axes
    face = caster.intersects_first(origins, np.broadcast_to(-eye, origins.shape))
    hit = np.flatnonzero((face >= 0) & (abs(mesh.face_normals[face] @ eye) > 1e-9))
    face, origins = face[hit], origins[hit]
    flat, corners = mesh.face_normals[face], mesh.triangles[face]
    slope = flat @ eye
    far = np.einsum("ij,ij->i", origins - corners[:, 0], flat) / slope
    places = origins - far[:, None] * eye
    with np.errstate(all="ignore"):  # a sliver's area may come to 0
        weights = np.nan_to_num(import_trimesh().triangles.points_to_barycentric(corners, places)).clip(0, 1)
    normal = np.einsum("ij,ijk->ik", weights, mesh.vertex_normals[mesh.faces[face]])
    normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-12)
    crease = np.einsum("ij,ij->i", normal, flat) < _CREASE
    normal[crease] = flat[crease]
    normal[slope < 0] *= -1  # a surface that is wound inside out
    places = places + 2e-3 * size * np.where(slope[:, None] < 0, -flat, flat)
    lamp = 0.9 * eye + 0.8 * up - 0.7 * right
    lamp /= np.linalg.norm(lamp)
    lit = ~caster.intersects_any(places, np.broadcast_to(lamp, places.shape))
    sky = np.zeros(len(places))
    for _ in range(_SKY_RAYS):
        way = draw.standard_normal(places.shape)
        # A point of the unit sphere about the normal's tip: the cosine law.
        way = normal + way / np.linalg.norm(way, axis=1, keepdims=True)
        way /= np.maximum(np.linalg.norm(way, axis=1, keepdims=True), 1e-9)
        sky += ~caster.intersects_any(places, way)
    light = _LAMP * np.clip(normal @ lamp, 0, None) * lit + _SKY * (sky / _SKY_RAYS) * (0.75 + 0.25 * (normal @ up))
    return hit, light[:, None] * _CLAY

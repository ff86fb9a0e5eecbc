"""Pictures of meshes by rays: clay under a lamp from the upper left and an even sky, with shadows of both.

Parallel rays; the same view gives the same pixels for every mesh, so that pictures can be laid side by side.
"""

from typing import TYPE_CHECKING

import numpy as np

from .mesh_files import unit_of
from .settings import Axis

if TYPE_CHECKING:
    from trimesh import Trimesh
    from trimesh.ray.ray_pyembree import RayMeshIntersector

_CLAY = np.array([0.80, 0.70, 0.60])
_PAPER = 1.0
_LAMP, _SKY = 0.62, 0.55
_FINE = 2  # samples along each side of a pixel
_WIDEST = 4  # pixels at most, in squares of the height: a rod's picture gets lower, not endlessly wide
_AT_ONCE = 1 << 18  # samples
_SKY_RAYS = 16  # of a sample
_CREASE = np.cos(np.radians(35))  # facets that turn further from their surroundings are edges, and stay flat


def render(
    mesh: "Trimesh | None",
    bounds: np.ndarray,
    *,
    up: Axis = "y",
    azimuth: float = 30.0,
    elevation: float = 15.0,
    height: int = 480,
) -> np.ndarray:
    """A picture (height, width, 3) uint8 of a mesh; None or one without faces gives an empty one of the same size.

    The box `bounds` (2, 3) fills it. At 0, 0 the eye looks against z with y up, against x with z up, and against y with
    x up; `azimuth` turns it about the axis `up`, `elevation` raises it, in degrees. The width follows from the box: of
    one more than four times as wide as high the picture is lower, with as many pixels as one four times as wide has.
    """
    from trimesh.ray.ray_pyembree import RayMeshIntersector

    right, above, eye = _axes(up, azimuth, elevation)
    # trimesh drops faces whose normals are too short, by a length that does not follow the mesh's.
    unit = unit_of(bounds) or 1.0
    low, high = np.asarray(bounds, dtype=np.float64) / unit
    middle, half = (low + high) / 2, (high - low) / 2
    reach_x, reach_y, reach_z = (float(abs(axis) @ half) * 1.04 for axis in (right, above, eye))
    height, width = _size(height, reach_x / reach_y)
    rows, columns = height * _FINE, width * _FINE
    shade = np.full((rows * columns, 3), _PAPER)
    if mesh is not None and len(mesh.faces):
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
    normal = np.einsum("ij,ijk->ik", _barycentric(corners, places), mesh.vertex_normals[mesh.faces[face]])
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


def _barycentric(corners: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(P, 3) weights of the corners (P, 3, 3)."""
    a, b, p = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0], places - corners[:, 0]
    aa, ab, bb, pa, pb = (np.einsum("ij,ij->i", m, n) for m, n in ((a, a), (a, b), (b, b), (p, a), (p, b)))
    area = np.maximum(aa * bb - ab * ab, 1e-300)
    v, w = (bb * pa - ab * pb) / area, (aa * pb - ab * pa) / area
    return np.clip(np.stack([1 - v - w, v, w], axis=1), 0, 1)

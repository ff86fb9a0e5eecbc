"""Meshes out of files, checked and turned outwards (docs/fields.md): what bounds no volume has no inside."""

import io
import math
import re
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

from nlr_lab.runtime.bounds import read_arrays
from nonlinear_lowrank.errors import UserError
from nonlinear_lowrank.validation import one_line, require

if TYPE_CHECKING:
    from trimesh import Trimesh

SUFFIXES = (".obj", ".ply", ".stl", ".npz")

_FARTHEST = 1e150  # its square is finite
_WAYS = np.array([[0.36, 0.48, 0.8], [-0.6, 0.64, 0.48], [0.48, -0.8, -0.36]])  # no axis, on which edges often lie


def import_trimesh() -> Any:
    """Return the module trimesh; raise UserError where it, or embreex, is not installed."""
    require("fields", "embreex")  # without it trimesh casts rays a thousand times slower
    return require("fields", "trimesh")


def read_mesh(source: str | Path, *, repair: bool = False) -> "Trimesh":
    """Read the mesh of a source; with `repair` holes are closed, each by a fan of triangles to its middle.

    UserError for no such file, one that cannot be read, and what bounds no volume; the message says whether `repair`
    would close it.
    """
    trimesh = import_trimesh()
    if str(source) == "knot":
        return knot()
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"there is no mesh {str(source)!r}; give a file ({', '.join(SUFFIXES)}) or knot")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: meshes are read from {', '.join(SUFFIXES)}, not {path.suffix or 'a bare name'}")
    points, faces = _of_npz(path) if path.suffix.lower() == ".npz" else _of_file(path, trimesh)
    for name, array, kinds, what in (("points", points, "fiu", "numbers"), ("faces", faces, "iu", "integers")):
        if array.ndim != 2 or array.shape[1] != 3 or not array.size or array.dtype.kind not in kinds:
            found = f"{tuple(array.shape)} of {array.dtype}"
            raise UserError(f"{path}: {name} must be (N, 3) {what}, got {found}; give a surface of triangles")
    points = points.astype(np.float64)
    if bad := int((~(np.abs(points) < _FARTHEST)).any(1).sum()):
        raise UserError(f"{path}: {bad} of {len(points):,} points are NaN, infinite or beyond {_FARTHEST:g}; fix them")
    if faces.min() < 0 or faces.max() >= len(points):
        raise UserError(f"{path}: faces name point {faces.max()}, or one below 0, of {len(points):,} points")
    unit = unit_of(points)
    # trimesh's tolerances are lengths, not shares: of a mesh of another size they merge all points, or none.
    mesh = trimesh.Trimesh(points / unit, faces, process=False)
    mesh.merge_vertices(merge_tex=True, merge_norm=True)
    mesh.update_faces(mesh.nondegenerate_faces(height=0.0))  # a corner named twice: no area, and an edge too many
    mesh.remove_unreferenced_vertices()
    if not len(mesh.faces) or not (np.ptp(mesh.vertices, axis=0) > 0).all():
        raise UserError(f"{path} is flat: no volume; give a closed surface")
    if not mesh.is_watertight:
        mesh = _closed(mesh, path, repair)
    if not _turn_outwards(mesh):
        raise UserError(f"{path} has a surface with one side only: no volume; give one that has an inside")
    mesh.vertices = mesh.vertices * unit
    return mesh


def unit_of(points: np.ndarray) -> float:
    """The power of two below the extent of points (N, 3), by which numbers are divided exactly; 1 where that is 0."""
    extent = float(np.ptp(points, axis=0).max())
    return 2.0 ** math.floor(math.log2(extent)) if extent > 0 else 1.0


def signed_volumes(triangles: np.ndarray) -> np.ndarray:
    """Volumes (M,) of the tetrahedra over triangles (M, 3, 3) to the origin; trimesh's own sum cannot give 0."""
    return np.einsum("ij,ij->i", triangles[:, 0], np.cross(triangles[:, 1], triangles[:, 2])) / 6


def knot(around: int = 64, along: int = 640) -> "Trimesh":
    """A trefoil knot of a tube with seven flutes that wind once around it."""
    trimesh = import_trimesh()
    t = np.linspace(0, 2 * np.pi, along, endpoint=False)[:, None]
    centre = np.concatenate([np.sin(t) + 2 * np.sin(2 * t), np.cos(t) - 2 * np.cos(2 * t), -1.2 * np.sin(3 * t)], 1)
    step = np.roll(centre, -1, 0) - np.roll(centre, 1, 0)
    tangent = step / np.linalg.norm(step, axis=1, keepdims=True)
    # The vertical is nowhere along the tube, so a frame that leans on it closes on itself.
    side = np.cross(tangent, [0.0, 0.0, 1.0])
    side /= np.linalg.norm(side, axis=1, keepdims=True)
    up = np.cross(side, tangent)
    angle = np.linspace(0, 2 * np.pi, around, endpoint=False)[None]
    radius = (0.5 + 0.09 * np.cos(7 * angle + 6 * t))[..., None]
    ring = np.cos(angle)[..., None] * side[:, None] + np.sin(angle)[..., None] * up[:, None]
    points = (centre[:, None] + radius * ring).reshape(-1, 3)
    i, j = np.divmod(np.arange(along * around), around)
    corner = [((i + di) % along) * around + (j + dj) % around for di, dj in ((0, 0), (1, 0), (1, 1), (0, 1))]
    faces = np.concatenate([np.stack([corner[0], corner[k], corner[k + 1]], 1) for k in (1, 2)])
    mesh = trimesh.Trimesh(points, faces, process=False)
    if mesh.volume < 0:
        mesh.invert()
    return mesh


def _of_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = read_arrays(path)
    for points, faces in (("v", "f"), ("vertices", "faces")):
        if points in arrays and faces in arrays:
            return arrays[points], arrays[faces]
    raise UserError(f"{path} holds {', '.join(arrays) or 'nothing'}; a mesh needs v and f, or vertices and faces")


def _of_file(path: Path, trimesh: Any) -> tuple[np.ndarray, np.ndarray]:
    if path.suffix.lower() == ".ply":  # a parser would take the memory that the header claims first
        with path.open("rb") as file:
            head = file.read(1 << 16).partition(b"end_header")[0]
        for name, count in re.findall(rb"^element\s+(\w+)\s+(\d+)", head, re.MULTILINE):
            if int(count) > (there := path.stat().st_size):  # each is a byte at least
                claim = f"{int(count):,} of element {name.decode()!r}"
                raise UserError(f"{path} claims {claim} and has {there:,} bytes; copy or download it again")
    try:
        with redirect_stderr(io.StringIO()):
            mesh = trimesh.load_mesh(path, process=False, maintain_order=True)
    except Exception as error:  # whatever a parser meets in a broken file
        raise UserError(f"{path} is not a readable {path.suffix} file: {one_line(error)}") from None
    faces = getattr(mesh, "faces", np.zeros((0, 3), int))
    return np.asarray(getattr(mesh, "vertices", np.zeros((0, 3)))), np.asarray(faces)


def _closed(mesh: "Trimesh", path: Path, repair: bool) -> "Trimesh":
    """The mesh without faces that are there twice, each hole closed by a fan to the mean of its rim.

    trimesh's own fans are spanned between points of the rim, and may run along an edge that is there already.
    """
    kept = mesh.unique_faces()  # a number each, or a mask
    faces, area = mesh.faces[kept], float(mesh.area_faces[kept].sum())
    edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    _, places, shared = np.unique(np.sort(edges, axis=1), axis=0, return_index=True, return_counts=True)
    rim = edges[places[shared == 1]]
    hole = np.unique(_components(rim[:, 0], rim[:, 1], len(mesh.vertices))[rim[:, 0]], return_inverse=True)[1]
    middle = np.zeros((hole.max(initial=-1) + 1, 3))
    np.add.at(middle, hole, mesh.vertices[rim[:, 0]])
    middle /= np.bincount(hole)[:, None]
    fans = np.stack([rim[:, 1], rim[:, 0], len(mesh.vertices) + hole], axis=1)
    points = np.concatenate([mesh.vertices, middle])
    fixed = import_trimesh().Trimesh(points, np.concatenate([faces, fans]), process=False)
    closes = fixed.is_watertight and _turn_outwards(fixed)
    # A sheet, closed flat on itself, has no volume.
    closes = closes and signed_volumes(fixed.triangles - fixed.bounds.mean(0)).sum() > 1e-12
    if repair and closes:
        return fixed
    times = np.bincount(mesh.edges_unique_inverse)
    once, more = int((times == 1).sum()), int((times > 2).sum())
    hint = "closing its holes was tried and leaves some, or no volume; close them in a mesh editor"
    if closes:
        doubled, share = len(mesh.faces) - len(faces), 1 - area / fixed.area
        hint = f"--repair (repair=True) closes it with {len(fans)} triangles, {share:.1%} of its area"
        hint += f", and removes {doubled} faces that are there twice" if doubled else ""
    raise UserError(f"{path} is not watertight: {once} edges have one face, {more} three or more; {hint}")


def _turn_outwards(mesh: "Trimesh") -> bool:
    """Turn faces of a watertight mesh, in place, so that its signed volume is the volume of its bodies.

    Within a body the fewer faces follow the others. A body that is turned inwards stays as it is where it lies in
    another, outward one: that is a cavity. All others that are turned inwards are turned over, and what lies in them
    with them. False where that cannot be done: a body has one side only, as Klein's bottle.
    """
    body, over = _bodies(mesh.faces)
    if over is None:
        return False
    signed = signed_volumes(mesh.triangles - mesh.bounds.mean(0))
    volume = np.bincount(body, np.where(over, -signed, signed))
    if (volume < 0).any():
        inner, outer = _nested(mesh, body, len(volume))
        # What says how a body is meant is the largest that it lies in: of equal places the last assignment stays.
        order, outermost = np.argsort(abs(volume[outer])), np.arange(len(volume))
        outermost[inner[order]] = outer[order]
        over ^= (volume < 0)[outermost][body]
    if over.any():
        mesh.faces = np.where(over[:, None], mesh.faces[:, ::-1], mesh.faces)
    return True


def _bodies(faces: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The body of each face, and whether it is turned against most of that; None: they cannot be turned alike."""
    count = len(faces)
    edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).astype(np.int64)
    order = np.lexsort(np.sort(edges, axis=1).T)
    first, second = (order % count).reshape(-1, 2).T
    # Faces that are turned alike run along their common edge in opposite directions.
    against = (edges[order[::2]] == edges[order[1::2]]).all(1)
    body = _components(first, second, count)
    # Each face twice, as it is and turned over: the two are apart wherever a body has two sides.
    ends = np.concatenate([second + count * against, second + count * ~against])
    side = _components(np.concatenate([first, first + count]), ends, 2 * count).reshape(2, count)
    if (side[0] == side[1]).any():
        return body, None
    over = side[0] > side[1]
    most = 2 * np.bincount(body, over) > np.bincount(body)
    return body, over ^ most[body]


def _components(first: np.ndarray, second: np.ndarray, count: int) -> np.ndarray:
    graph = coo_matrix((np.ones(len(first)), (first, second)), shape=(count, count))
    return connected_components(graph, directed=False)[1]


def _nested(mesh: "Trimesh", body: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of bodies of which the first lies in the second, by the parity of at least two of three rays."""
    from trimesh.ray.ray_pyembree import RayMeshIntersector

    start = mesh.triangles[np.unique(body, return_index=True)[1]].mean(1)
    caster, odd = RayMeshIntersector(mesh), []
    for way in _WAYS:
        face, ray = caster.intersects_id(start, np.broadcast_to(way, start.shape), max_hits=len(mesh.faces) + 100)
        crossed, times = np.unique(ray.astype(np.int64) * count + body[face], return_counts=True)
        odd.append(crossed[times % 2 == 1])
    crossed, times = np.unique(np.concatenate(odd), return_counts=True)
    inner, outer = np.divmod(crossed[times >= 2], count)
    other = inner != outer
    return inner[other], outer[other]

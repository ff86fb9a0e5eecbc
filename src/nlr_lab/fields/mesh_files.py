"""Meshes out of files, checked: what bounds no volume has no inside.

| source                | form                                                                          |
|-----------------------|-------------------------------------------------------------------------------|
| "knot"                | a fluted trefoil knot, embedded                                               |
| .obj, .ply, .stl      | as trimesh reads them, all bodies of the file together                        |
| .npz                  | v or vertices (N, 3), f or faces (M, 3)                                       |

Points that coincide, to a 10^8th of the mesh's size, become one, so that the seams of textures and the loose triangles
of .stl are no holes. A mesh is taken if every edge is shared by exactly two faces; faces are turned so that its bodies'
volumes add up (`mesh_winding`).
"""

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

from .mesh_winding import signed_volumes, turned_outwards

if TYPE_CHECKING:
    from trimesh import Trimesh

SUFFIXES = (".obj", ".ply", ".stl", ".npz")
_KEYS = (("v", "f"), ("vertices", "faces"))


def import_trimesh() -> Any:
    """Return the module trimesh; raise UserError where it, or embreex, is not installed."""
    require("fields", "embreex")  # without it trimesh casts rays a thousand times slower
    return require("fields", "trimesh")


def read_mesh(source: str | Path, *, repair: bool = False) -> "Trimesh":
    """Read the mesh of a source; see the table of this file.

    Args:
        source: the name of an embedded shape, or a file.
        repair: whether holes are closed, each by a fan of triangles to its middle; refused where that leaves any open.

    Raises:
        UserError: there is no such file, it cannot be read, it has no faces, it has points that are not finite, it has
            one side only, or it is not watertight; the message says whether `repair` would close it.
    """
    trimesh = import_trimesh()
    if str(source) in SHAPES:
        return SHAPES[str(source)]()
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"there is no mesh {str(source)!r}; give a file ({', '.join(SUFFIXES)}) or {', '.join(SHAPES)}")
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{path}: meshes are read from {', '.join(SUFFIXES)}, not {path.suffix or 'a bare name'}")
    points, faces = _of_npz(path) if path.suffix.lower() == ".npz" else _of_file(path, trimesh)
    _check_arrays(path, points, faces)
    unit = unit_of(points)
    if not unit:
        raise UserError(f"{path} is flat, or larger than numbers go: no volume; give a closed surface")
    # trimesh's tolerances are lengths, not shares: of a mesh of another size they merge all points, or none.
    mesh = trimesh.Trimesh(np.asarray(points, dtype=np.float64) / unit, faces, process=False)
    mesh.merge_vertices(merge_tex=True, merge_norm=True)
    mesh.update_faces(mesh.nondegenerate_faces(height=0.0))  # a corner named twice: no area, and an edge too many
    mesh.remove_unreferenced_vertices()
    if not len(mesh.faces) or not (np.ptp(mesh.vertices, axis=0) > 0).all():
        raise UserError(f"{path} is flat: no volume; give a closed surface")
    mesh = _closed(mesh, path, repair)
    if not turned_outwards(mesh):
        raise UserError(f"{path} has a surface with one side only: no volume; give one that has an inside")
    mesh.vertices = mesh.vertices * unit
    return mesh


def unit_of(points: np.ndarray) -> float:
    """The power of two below the extent of points (N, 3), by which numbers are divided exactly; 0: there is none."""
    with np.errstate(over="ignore"):
        extent = float(np.ptp(np.asarray(points, dtype=np.float64), axis=0).max())
    return 2.0 ** math.floor(math.log2(extent)) if 0 < extent < math.inf else 0.0


def _of_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    arrays = read_arrays(path)
    for keys in _KEYS:
        if all(key in arrays for key in keys):
            return arrays[keys[0]], arrays[keys[1]]
    raise UserError(f"{path} holds {', '.join(arrays) or 'nothing'}; a mesh needs v and f, or vertices and faces")


def _of_file(path: Path, trimesh: Any) -> tuple[np.ndarray, np.ndarray]:
    if path.suffix.lower() == ".ply":
        _check_counts(path)
    try:
        with redirect_stderr(io.StringIO()):
            mesh = trimesh.load_mesh(path, process=False, maintain_order=True)
    except Exception as error:  # whatever a parser meets in a broken file
        raise UserError(f"{path} is no {path.suffix} file that can be read: {one_line(error)}") from None
    if not len(getattr(mesh, "faces", ())):
        raise UserError(f"{path} has no faces; give a surface, not points")
    return np.asarray(mesh.vertices), np.asarray(mesh.faces)


def _check_counts(path: Path) -> None:
    """Refuse a .ply file whose header claims more than the file can hold: a parser would take the memory first."""
    with path.open("rb") as file:
        head = file.read(1 << 16).partition(b"end_header")[0]
    for name, count in re.findall(rb"^element\s+(\w+)\s+(\d+)", head, re.MULTILINE):
        if int(count) > path.stat().st_size:  # each is a byte at least
            raise UserError(
                f"{path} claims {int(count):,} of element {name.decode()!r} and has {path.stat().st_size:,} bytes; "
                "copy or download it again"
            )


def _check_arrays(path: Path, points: np.ndarray, faces: np.ndarray) -> None:
    if not faces.size:
        raise UserError(f"{path} has no faces; give a surface, not points")
    for name, array, kinds, what in (("points", points, "fiu", "numbers"), ("faces", faces, "iu", "integers")):
        if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in kinds:
            found = f"{tuple(array.shape)} of {array.dtype}"
            raise UserError(f"{path}: {name} must be (N, 3) {what}, got {found}; triangulate the mesh")
    if bad := int((~np.isfinite(points)).any(1).sum()):
        raise UserError(f"{path}: {bad} of {len(points):,} points are NaN or infinite; fix them")
    if faces.min() < 0 or faces.max() >= len(points):
        raise UserError(f"{path}: faces name point {faces.max()}, or one below 0, of {len(points):,} points")


def _closed(mesh: "Trimesh", path: Path, repair: bool) -> "Trimesh":
    if mesh.is_watertight:
        return mesh
    fixed = _repaired(mesh)
    if repair and fixed is not None:
        return fixed
    if fixed is None:
        tail = "closing its holes was tried and leaves some, or no volume; close them in a mesh editor"
    else:
        tail = f"--repair (repair=True) {_mended(mesh, fixed)}"
    raise UserError(f"{path} is not watertight: {_open_edges(mesh)}; {tail}")


def _mended(mesh: "Trimesh", fixed: "Trimesh") -> str:
    """Say what `_repaired` did."""
    kept = mesh.unique_faces()  # a number each, or a mask
    area = float(mesh.area_faces[kept].sum())
    once = len(mesh.faces[kept])
    doubled, added = len(mesh.faces) - once, len(fixed.faces) - once
    words = []
    if doubled:
        words.append(f"removes {doubled} {'face that is' if doubled == 1 else 'faces that are'} there already")
    if added or not doubled:
        words.append(f"closes it with {added} triangles, {1 - area / fixed.area:.1%} of its area")
    return " and ".join(words)


def _open_edges(mesh: "Trimesh") -> str:
    """Say which edges are wrong."""
    shared = _shared(mesh.edges)[1]
    words = [
        f"{int(found):,} {'edge has' if found == 1 else 'edges have'} {faces}"
        for found, faces in ((np.sum(shared == 1), "one face alone"), (np.sum(shared > 2), "three faces or more"))
        if found
    ]
    return " and ".join(words)


def _shared(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A row of each edge, whichever way it runs, and the number of faces that have it."""
    ends = np.sort(edges.astype(np.int64), axis=1)
    _, places, shared = np.unique(ends[:, 0] << 32 | ends[:, 1], return_index=True, return_counts=True)
    return places, shared


def _repaired(mesh: "Trimesh") -> "Trimesh | None":
    """A watertight copy, or None where closing holes does not make one.

    Each hole gets a point at the mean of its rim: trimesh's own fans are spanned between points of the rim, and may
    run along an edge that is there already.
    """
    trimesh = import_trimesh()
    faces = mesh.faces[mesh.unique_faces()]
    edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]])
    places, shared = _shared(edges)
    rim = edges[places[shared == 1]]
    graph = coo_matrix((np.ones(len(rim)), (rim[:, 0], rim[:, 1])), shape=(len(mesh.vertices),) * 2)
    hole = np.unique(connected_components(graph)[1][rim[:, 0]], return_inverse=True)[1]
    middle = np.zeros((hole.max(initial=-1) + 1, 3))
    np.add.at(middle, hole, mesh.vertices[rim[:, 0]])
    middle /= np.bincount(hole)[:, None]
    fans = np.stack([rim[:, 1], rim[:, 0], len(mesh.vertices) + hole], axis=1)
    closed = trimesh.Trimesh(np.concatenate([mesh.vertices, middle]), np.concatenate([faces, fans]), process=False)
    if not closed.is_watertight or not turned_outwards(closed):
        return None
    volume = signed_volumes(closed.triangles - closed.bounds.mean(0)).sum()
    return closed if volume > 1e-12 else None  # a sheet, closed flat on itself, has none


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
    faces = np.concatenate(
        [np.stack([corner[0], corner[1], corner[2]], 1), np.stack([corner[0], corner[2], corner[3]], 1)]
    )
    mesh = trimesh.Trimesh(points, faces, process=False)
    if mesh.volume < 0:
        mesh.invert()
    return mesh


SHAPES = {"knot": knot}
"""Embedded shapes by name."""

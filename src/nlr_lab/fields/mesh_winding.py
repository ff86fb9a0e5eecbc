"""Turn the faces of a closed mesh: alike within each body, and outwards but for cavities.

Where a ray crosses the surface does not depend on it, but the volume that the faces enclose does: bodies turned
differently cancel each other. A body is what hangs together by edges.
"""

from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

if TYPE_CHECKING:
    from trimesh import Trimesh

_WAYS = np.array([[0.36, 0.48, 0.8], [-0.6, 0.64, 0.48], [0.48, -0.8, -0.36]])  # no axis, on which edges often lie


def turned_outwards(mesh: "Trimesh") -> bool:
    """Turn faces of a watertight mesh, in place, so that its signed volume is the volume of its bodies.

    Within a body the fewer faces follow the others. A body that is turned inwards stays as it is where it lies in
    another, outward one: that is a cavity. All others that are turned inwards are turned over, and what lies in them
    with them.

    Returns:
        False where that cannot be done: a body has one side only, as Klein's bottle.
    """
    body, over = _bodies(mesh.faces)
    if over is None:
        return False
    signed = signed_volumes(mesh.triangles - mesh.bounds.mean(0))
    volume = np.bincount(body, np.where(over, -signed, signed))
    if (volume < 0).any():
        over ^= _inverted(mesh, body, volume)[body]
    if over.any():
        mesh.faces = np.where(over[:, None], mesh.faces[:, ::-1], mesh.faces)
    return True


def signed_volumes(triangles: np.ndarray) -> np.ndarray:
    """Volumes (M,) of the tetrahedra over triangles (M, 3, 3) with their tips at the origin.

    trimesh's own sum divides by it for the centre of mass, and so cannot give a volume of 0.
    """
    return np.einsum("ij,ij->i", triangles[:, 0], np.cross(triangles[:, 1], triangles[:, 2])) / 6


def _bodies(faces: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The body of each face, and whether it is turned against most of that; None: they cannot be turned alike."""
    count = len(faces)
    edges = np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]).astype(np.int64)
    order = np.lexsort(np.sort(edges, axis=1).T)
    pairs = (order % count).reshape(-1, 2)
    # Faces that are turned alike run along their common edge in opposite directions.
    against = (edges[order[::2]] == edges[order[1::2]]).all(1)
    body = connected_components(coo_matrix((np.ones(len(pairs)), pairs.T), shape=(count, count)), directed=False)[1]
    if not against.any():
        return body, np.zeros(count, dtype=bool)
    # Each face twice, as it is and turned over: the two are apart wherever a body has two sides.
    first, second = pairs.T
    ends = np.concatenate([second + count * against, second + count * ~against])
    graph = coo_matrix(
        (np.ones(2 * len(pairs)), (np.concatenate([first, first + count]), ends)), shape=(2 * count,) * 2
    )
    side = connected_components(graph, directed=False)[1].reshape(2, count)
    if (side[0] == side[1]).any():
        return body, None
    over = side[0] > side[1]
    most = 2 * np.bincount(body, over) > np.bincount(body)
    return body, over ^ most[body]


def _inverted(mesh: "Trimesh", body: np.ndarray, volume: np.ndarray) -> np.ndarray:
    """Mask of bodies to be turned over: those turned inwards that lie in no other, and all that lie in these."""
    inner, outer = _inside(mesh, body, len(volume))
    # What says how a body is meant is the largest that it lies in: of equal places the last assignment stays.
    order = np.argsort(abs(volume[outer]))
    outermost = np.arange(len(volume))
    outermost[inner[order]] = outer[order]
    return (volume < 0)[outermost]


def _inside(mesh: "Trimesh", body: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
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

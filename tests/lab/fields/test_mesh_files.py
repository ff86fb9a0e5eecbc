"""Meshes: every format gives the same surface, holes are named, and what cannot be used is refused in one line."""

import sys

import numpy as np
import pytest
import torch
import trimesh
from scipy.spatial.transform import Rotation

from nlr_lab.fields.mesh_files import knot, read_mesh
from nlr_lab.fields.occupancy_grid import occupancy_grid
from refusals import assert_refused


def random_closed():
    mesh = trimesh.creation.torus(2.0, 0.7, major_sections=24, minor_sections=12)
    turn = np.eye(4)
    turn[:3, :3] = Rotation.random(random_state=int(torch.randint(2**31, ()))).as_matrix()
    return mesh.apply_scale(torch.rand(3).add(0.5).tolist()).apply_transform(turn)


def save_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("suffix", ["obj", "ply", "stl", "npz"])
def test_reads_the_same_closed_surface_from_all_formats(tmp_path, suffix):
    mesh, path = random_closed(), tmp_path / f"mesh.{suffix}"
    if suffix == "npz":
        save_npz(path, vertices=mesh.vertices, faces=mesh.faces)
    else:
        mesh.export(path)
    read = read_mesh(path)
    assert read.is_watertight
    assert len(read.faces) == len(mesh.faces)
    assert read.volume == pytest.approx(mesh.volume, rel=1e-5)
    np.testing.assert_allclose(read.bounds, mesh.bounds, atol=1e-5)


def test_seams_of_textures_are_no_holes(tmp_path):
    mesh = random_closed()
    corners = mesh.vertices[mesh.faces].reshape(-1, 3)
    lines = [f"v {x!r} {y!r} {z!r}" for x, y, z in corners.tolist()]
    lines += [f"vt {u} {v}" for u, v in torch.rand(len(corners), 2).tolist()]
    lines += [f"f {i}/{i} {i + 1}/{i + 1} {i + 2}/{i + 2}" for i in range(1, len(corners), 3)]
    (tmp_path / "seams.obj").write_text("\n".join(lines))
    assert read_mesh(tmp_path / "seams.obj").volume == pytest.approx(mesh.volume)


def test_embedded_knot_is_closed():
    mesh = knot(around=64, along=400)
    assert mesh.is_watertight
    assert mesh.is_winding_consistent
    assert mesh.euler_number == 0  # a torus
    t = np.linspace(0, 2 * np.pi, 20_001)
    curve = np.stack([np.sin(t) + 2 * np.sin(2 * t), np.cos(t) - 2 * np.cos(2 * t), -1.2 * np.sin(3 * t)], 1)
    length = np.linalg.norm(np.diff(curve, axis=0), axis=1).sum()
    # Pappus: the section's area (0.5^2 + 0.09^2 / 2) pi times the length of the centre line.
    assert mesh.volume == pytest.approx(np.pi * (0.25 + 0.09**2 / 2) * length, rel=0.03)


BOX = trimesh.creation.box()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"v": BOX.vertices, "f": np.zeros((0, 3), int)}, r"faces must be \(N, 3\) integers, got \(0, 3\)"),
        ({"v": np.where(BOX.vertices > 0, np.nan, 0), "f": BOX.faces}, "points are NaN, infinite or beyond 1e\\+150"),
        ({"v": BOX.vertices, "f": BOX.faces + 1}, "faces name point 8"),
        ({"v": BOX.vertices, "f": np.zeros((3, 4), int)}, r"faces must be \(N, 3\) integers"),
        ({"v": BOX.vertices, "f": BOX.faces.astype(float)}, r"faces must be \(N, 3\) integers"),
        ({"v": BOX.vertices[:, :2], "f": BOX.faces}, r"points must be \(N, 3\) numbers"),
        ({"points": BOX.vertices}, "holds points; a mesh needs v and f"),
        ({"v": BOX.vertices * [1, 1, 0], "f": BOX.faces}, "is flat"),
    ],
    ids=["no-faces", "nan", "index", "quads", "real-faces", "plane-points", "keys", "flat"],
)
def test_arrays_that_are_no_mesh_are_refused(tmp_path, arrays, message):
    assert_refused(message, read_mesh, save_npz(tmp_path / "bad.npz", **arrays))


def ball(radius, outwards=True, centre=(0, 0, 0)):
    mesh = trimesh.creation.icosphere(2, radius).apply_translation(centre)
    if not outwards:
        mesh.invert()
    return mesh


UNIT = ball(1.0).volume
BODIES = {
    "apart": ([ball(1), ball(1, False, (3, 0, 0))], 2),
    "inverted": ([ball(1, False)], 1),
    "shell": ([ball(1), ball(0.5, False)], 1 - 0.5**3),
    "inverted-shell": ([ball(1, False), ball(0.5)], 1 - 0.5**3),
    "shell-and-more": ([ball(1, False, (5, 0, 0)), ball(1), ball(0.5, False), ball(0.25)], 2 - 0.5**3 + 0.25**3),
    "overlap": ([ball(1), ball(0.5)], 1 + 0.5**3),
}


@pytest.mark.parametrize("flipped", [0.0, 0.2], ids=["alike", "some-flipped"])
@pytest.mark.parametrize("name", BODIES)
def test_faces_are_turned_so_that_volumes_add_up(tmp_path, name, flipped):
    bodies, volume = BODIES[name]
    mesh, faces = trimesh.util.concatenate(bodies), []
    for body in bodies:
        few = (torch.rand(len(body.faces)) < flipped).numpy()
        faces.append(np.where(few[:, None], body.faces[:, ::-1], body.faces))
    offsets = np.cumsum([0, *(len(body.vertices) for body in bodies[:-1])])
    moved = np.concatenate([some + offset for some, offset in zip(faces, offsets, strict=True)])
    mixed = (torch.randperm(len(moved))).numpy()
    read = read_mesh(save_npz(tmp_path / "bodies.npz", v=mesh.vertices, f=moved[mixed]))
    assert read.is_winding_consistent
    assert read.volume == pytest.approx(volume * UNIT)
    if name != "overlap":
        assert abs(occupancy_grid(read, 32).hollow) < 0.03, "rays find what the faces enclose"
    if not flipped and name in ("shell", "overlap"):
        assert np.array_equal(read.faces, moved[mixed])  # what is right stays


def test_refuses_a_surface_with_one_side(tmp_path):
    """Klein's bottle as a grid of 12 x 12 whose one seam is glued the other way round."""
    n = 12
    i, j = np.divmod(np.arange(n * n), n)

    def corner(i, j):
        return i % n * n + np.where(i >= n, -j, j) % n

    a, b, c, d = corner(i, j), corner(i + 1, j), corner(i + 1, j + 1), corner(i, j + 1)
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])
    path = save_npz(tmp_path / "klein.npz", v=torch.rand(n * n, 3).double().numpy(), f=faces)
    assert_refused("one side only: no volume", read_mesh, path)


@pytest.mark.parametrize("scale", [1e-100, 1e-9, 1e-7, 1e6, 1e12, 1e100])
def test_units_do_not_matter(tmp_path, scale):
    mesh = knot(16, 120)
    corners = mesh.vertices[mesh.faces].reshape(-1, 3)  # loose triangles, to be merged
    path = save_npz(tmp_path / "scaled.npz", v=corners * scale, f=np.arange(len(corners)).reshape(-1, 3))
    read = read_mesh(path)
    assert read.vertices.shape == mesh.vertices.shape
    np.testing.assert_allclose(read.extents / scale, mesh.extents)
    assert occupancy_grid(read, 8).volume == pytest.approx(mesh.volume / mesh.extents.prod())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((f"bad.{suffix}", f"bad.{suffix}.*(is not a readable|must be)") for suffix in ("obj", "ply", "stl")),
        ("bad.npz", "bad.npz is not a readable"),
        ("bad.txt", r"read from .obj, .ply, .stl, .npz, not .txt"),
        ("absent.obj", "there is no mesh .*; give a file .* or knot"),
    ],
)
def test_files_that_are_no_mesh_are_refused(tmp_path, name, message):
    for size in (0, 300):
        if name != "absent.obj":
            (tmp_path / name).write_bytes(bytes(torch.randint(128, 256, (size,)).tolist()))
        assert_refused(message, read_mesh, tmp_path / name)


@pytest.mark.parametrize("package", ["trimesh", "embreex"])
def test_names_what_is_not_installed(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert_refused(r"pip install '.*\[fields\]'", read_mesh, "knot")


def test_holes_are_named_and_closed_only_on_demand(tmp_path):
    mesh = random_closed()
    keep = ~(mesh.faces == int(torch.randint(len(mesh.vertices), ()))).any(1)
    holed, rim = save_npz(tmp_path / "holed.npz", v=mesh.vertices, f=mesh.faces[keep]), int((~keep).sum())
    twice = save_npz(tmp_path / "twice.npz", v=BOX.vertices, f=np.concatenate([BOX.faces[1:], BOX.faces[1:2]]))
    for path, volume, message in (
        (holed, mesh.volume, f"not watertight: {rim} edges have one face, 0 three or more; .*closes it with {rim} tri"),
        (twice, 1.0, r"closes it with 3 triangles, 8\.3% of its area, and removes 1 faces that are there twice$"),
    ):
        assert_refused(message, read_mesh, path)
        fixed = read_mesh(path, repair=True)
        assert fixed.is_watertight
        assert fixed.is_winding_consistent
        assert fixed.volume == pytest.approx(volume, rel=0.05)


def test_offers_no_repair_that_would_not_close(tmp_path):
    mesh, middle = random_closed(), np.zeros((1, 3))
    fin = [[*mesh.edges[int(torch.randint(len(mesh.edges), ()))], len(mesh.vertices)]]  # a third face at an edge
    sheet = np.array([[0.0, 0, 0], [1, 0, 0], [1, 1, 0.1], [0, 1, 0.1]])  # closed, it has no volume
    for points, faces, found in (
        (np.concatenate([mesh.vertices, middle]), np.concatenate([mesh.faces, fin]), "2 edges have one face, 1 three"),
        (sheet, np.array([[0, 1, 2], [0, 2, 3]]), "4 edges have one face, 0 three"),
    ):
        path = save_npz(tmp_path / "bad.npz", v=points, f=faces)
        for repair in (False, True):
            assert_refused(f"{found} or more; closing its holes was tried", read_mesh, path, repair=repair)

"""Meshes: every format gives the same surface, holes are named, and what cannot be used is refused in one line."""

import sys

import numpy as np
import pytest
import torch
import trimesh
from scipy.spatial.transform import Rotation

from nonlinear_lowrank import UserError
from nonlinear_lowrank.fields.mesh_files import knot, read_mesh


def random_closed():
    """A torus stretched, turned and moved at random."""
    mesh = trimesh.creation.torus(2.0, 0.7, major_sections=24, minor_sections=12)
    turn = np.eye(4)
    turn[:3, :3] = Rotation.random(random_state=int(torch.randint(2**31, ()))).as_matrix()
    return mesh.apply_scale(torch.rand(3).add(0.5).tolist()).apply_transform(turn)


def save_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("suffix", ["obj", "ply", "stl", "npz"])
def test_all_formats_give_the_same_closed_surface(tmp_path, suffix):
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


def test_holes_are_named_and_closed_only_on_demand(tmp_path):
    mesh = random_closed()
    corner = int(torch.randint(len(mesh.vertices), ()))
    keep = ~(mesh.faces == corner).any(1)
    path = save_npz(tmp_path / "holed.npz", v=mesh.vertices, f=mesh.faces[keep])
    rim = int((~keep).sum())
    with pytest.raises(
        UserError, match=rf"not watertight: {rim} edges have one face alone; --repair .repair=True. closes it"
    ):
        read_mesh(path)
    fixed = read_mesh(path, repair=True)
    assert fixed.is_watertight
    assert fixed.is_winding_consistent
    assert fixed.volume == pytest.approx(mesh.volume, rel=0.05)


def test_no_repair_is_offered_where_it_would_not_close(tmp_path):
    mesh = random_closed()
    a, b = mesh.edges[int(torch.randint(len(mesh.edges), ()))]
    fin = [[a, b, len(mesh.vertices)]]  # a third face at an edge
    path = save_npz(
        tmp_path / "fin.npz",
        v=np.concatenate([mesh.vertices, mesh.vertices.mean(0, keepdims=True)]),
        f=np.concatenate([mesh.faces, fin]),
    )
    for repair in (False, True):
        with pytest.raises(UserError, match="1 edge has three faces or more; closing its holes was tried"):
            read_mesh(path, repair=repair)


def test_the_embedded_knot_is_closed():
    mesh = knot(around=64, along=400)
    assert mesh.is_watertight
    assert mesh.is_winding_consistent
    assert mesh.volume > 0
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
        ({"v": BOX.vertices, "f": np.zeros((0, 3), int)}, "has no faces"),
        ({"v": np.where(BOX.vertices > 0, np.nan, 0), "f": BOX.faces}, "points are NaN or infinite"),
        ({"v": BOX.vertices, "f": BOX.faces + 1}, "faces name point 8"),
        ({"v": BOX.vertices, "f": np.zeros((3, 4), int)}, r"faces must be \(N, 3\) whole numbers"),
        ({"v": BOX.vertices, "f": BOX.faces.astype(float)}, r"faces must be \(N, 3\) whole numbers"),
        ({"v": BOX.vertices[:, :2], "f": BOX.faces}, r"points must be \(N, 3\) numbers"),
        ({"points": BOX.vertices}, "holds points; a mesh needs v and f"),
        ({"v": BOX.vertices * [1, 1, 0], "f": BOX.faces}, "is flat"),
    ],
    ids=["no-faces", "nan", "index", "quads", "real-faces", "plane-points", "keys", "flat"],
)
def test_arrays_that_are_no_mesh_are_refused(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message) as caught:
        read_mesh(save_npz(tmp_path / "bad.npz", **arrays))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["bad.obj", "bad.ply", "bad.stl", "bad.npz"])
@pytest.mark.parametrize("size", [0, 300])
def test_files_that_are_no_mesh_are_refused(tmp_path, name, size):
    path = tmp_path / name
    path.write_bytes(bytes(torch.randint(128, 256, (size,)).tolist()))
    with pytest.raises(UserError, match=r"bad\....( is no .* that can be read| has no faces)") as caught:
        read_mesh(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_of_another_kind_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"there is no mesh .*; give a file .* or knot"):
        read_mesh(tmp_path / "absent.obj")
    (tmp_path / "mesh.txt").write_text("v")
    with pytest.raises(UserError, match=r"read from .obj, .ply, .stl, .npz, not .txt"):
        read_mesh(tmp_path / "mesh.txt")


@pytest.mark.parametrize("package", ["trimesh", "embreex"])
def test_what_is_not_installed_is_named(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install 'nonlinear-lowrank\[fields\]'"):
        read_mesh("knot")


@pytest.mark.shared_data
def test_the_stanford_bunny_is_closed_by_repair(shared_data):
    path = shared_data / "meshes" / "stanford-bunny.obj"
    with pytest.raises(
        UserError, match=r"223 edges have one face alone; --repair .repair=True. closes it with 223 triangles"
    ):
        read_mesh(path)
    assert read_mesh(path, repair=True).is_watertight

"""Parity of rays against shapes whose inside is a formula, and against the volume that the faces enclose."""

import numpy as np
import pytest
import torch
import trimesh
from scipy.spatial.transform import Rotation

from nlr_lab.fields import occupancy_grid as module
from nlr_lab.fields.mesh_files import knot, read_mesh
from nlr_lab.fields.occupancy_grid import occupancy_grid
from nlr_lab.runtime import environment as resources
from nonlinear_lowrank import UserError


def generator():
    return np.random.default_rng(int(torch.randint(2**31, ())))


def sampled(mesh, resolution, off_lattice):
    """Places in the mesh's own coordinates, and what the grid says of them."""
    grid = occupancy_grid(mesh, resolution, jitter=generator() if off_lattice else None)
    low, high = mesh.bounds
    return grid.points(0, resolution).astype(np.float64) * (high - low) / 2 + (low + high) / 2, grid


def turned(mesh):
    """Turned, stretched and moved at random; with the map back."""
    moved = np.eye(4)
    moved[:3, :3] = Rotation.random(random_state=int(torch.randint(2**31, ()))).as_matrix()
    moved[:3, 3] = torch.randn(3).mul(100).tolist()
    moved[:3, :3] *= 10 ** float(torch.rand(()) * 4 - 2)
    back = np.linalg.inv(moved)
    return mesh.apply_transform(moved), lambda points: points @ back[:3, :3].T + back[:3, 3]


def box():
    sides = torch.rand(3).add(0.3).numpy()
    mesh, back = turned(trimesh.creation.box(extents=2 * sides))
    return mesh, lambda points: (sides - abs(back(points))).min(-1)


def torus():
    mesh, back = turned(trimesh.creation.torus(2.0, 0.7, major_sections=256, minor_sections=128))

    def depth(points):
        points = back(points)
        return 0.7 - np.hypot(np.hypot(points[..., 0], points[..., 1]) - 2, points[..., 2])

    return mesh, depth


def shell():
    outer, inner = (trimesh.creation.icosphere(5, radius) for radius in (1.0, 0.6))
    mesh, back = turned(trimesh.util.concatenate([outer, inner]))

    def depth(points):
        radius = np.linalg.norm(back(points), axis=-1)
        return np.minimum(1 - radius, radius - 0.6)

    return mesh, depth


@pytest.mark.parametrize("off_lattice", [False, True], ids=["lattice", "off-lattice"])
@pytest.mark.parametrize("shape", [box, torus, shell])
def test_inside_is_where_the_formula_says(shape, off_lattice):
    mesh, depth = shape()
    points, grid = sampled(mesh, 40, off_lattice)
    within = depth(points)
    clear = abs(within) > 3e-3  # facets lie that far below the smooth surface
    assert clear.mean() > 0.9
    assert np.array_equal(grid.inside[clear], within[clear] > 0)


@pytest.mark.parametrize("off_lattice", [False, True], ids=["lattice", "off-lattice"])
def test_share_of_points_inside_is_the_volume(off_lattice):
    mesh = knot(48, 400)
    _, grid = sampled(mesh, 80, off_lattice)
    assert grid.volume == pytest.approx(mesh.volume / np.prod(mesh.extents))
    assert abs(grid.hollow) < 0.01


def test_rays_along_another_axis_agree():
    mesh = knot(48, 400)
    grid = occupancy_grid(mesh, 48)
    mesh.vertices = mesh.vertices[:, [2, 0, 1]]
    again = occupancy_grid(mesh, 48)
    # The rays of the two are nudged in different directions: points within a hundredth of a cell may differ.
    assert (grid.inside != again.inside.transpose(1, 2, 0)).mean() < 1e-3


def test_points_of_a_lattice_are_the_middles_of_cells_and_off_it_within_them():
    mesh = trimesh.creation.box()
    lattice, moved = occupancy_grid(mesh, 5), occupancy_grid(mesh, 5, jitter=generator())
    axis = np.array([-0.8, -0.4, 0, 0.4, 0.8], dtype=np.float32)
    np.testing.assert_allclose(lattice.points(0, 5)[:, 2, 1, 0], axis, atol=1e-7)
    np.testing.assert_allclose(lattice.points(1, 3)[0, 3, :, 2], axis, atol=1e-7)
    apart = abs(moved.points(0, 5) - lattice.points(0, 5))
    assert apart.max() <= 0.2 + 1e-6
    assert apart.reshape(-1, 3).mean(0) == pytest.approx([0.1] * 3, abs=0.05)
    assert lattice.inside.all()  # the tight box of a box
    assert moved.inside.all()


def test_rays_with_odd_hits_are_cast_again_and_counted(monkeypatch):
    mesh = trimesh.creation.icosphere(4)
    right = occupancy_grid(mesh, 24)
    hits, lost = module._hits, []

    def lossy(caster, xy):
        ray, height = hits(caster, xy)
        keep = np.ones(len(ray), dtype=bool)
        if not lost:
            lost.extend(np.unique(ray)[::7])
            keep[np.unique(ray, return_index=True)[1][::7]] = False
        return ray[keep], height[keep]

    monkeypatch.setattr(module, "_hits", lossy)
    again = occupancy_grid(mesh, 24)
    assert again.recast - right.recast == len(lost) > 10
    # Cast again from a little further off, a column at the rim may gain or lose a point.
    assert (again.inside != right.inside).mean() < 2e-3


def test_refuses_a_hole_that_rays_find():
    mesh = trimesh.creation.icosphere(2)
    mesh.update_faces(np.arange(len(mesh.faces)) >= 20)
    with pytest.raises(UserError, match="odd number of times wherever they are cast: it is open"):
        occupancy_grid(mesh, 32)


def test_bodies_that_overlap_are_known_by_their_volume():
    mesh = trimesh.util.concatenate([trimesh.creation.icosphere(4), trimesh.creation.icosphere(4, 0.5)])
    grid = occupancy_grid(mesh, 48)
    assert grid.hollow == pytest.approx(2 * 0.5**3 / (1 + 0.5**3), abs=0.01)  # counted twice by faces, hollow by parity


@pytest.mark.parametrize("plates", [51, 400])
def test_rays_count_as_many_crossings_as_there_are(plates):
    box = trimesh.creation.box().apply_translation([0, 0, 0.5])
    points = [box.vertices * [1, 1, 0.5] + [0, 0, number] for number in range(plates)]
    faces = [box.faces + number * len(box.vertices) for number in range(plates)]
    mesh = trimesh.Trimesh(np.concatenate(points), np.concatenate(faces), process=False)
    places, grid = sampled(mesh, 32, off_lattice=True)
    height = places[..., 2] % 1
    clear = (abs(height - 0.5) > 0.02) & (height > 0.02) & (height < 0.98)
    assert np.array_equal(grid.inside[clear], height[clear] < 0.5)
    assert 0.7 < clear.mean() < 1


def test_faces_that_enclose_nothing_are_refused():
    inverted = trimesh.creation.box().apply_translation([3, 0, 0])
    inverted.invert()
    with pytest.raises(UserError, match="enclose no volume, or their bodies' volumes cancel out; turn the faces"):
        occupancy_grid(trimesh.util.concatenate([trimesh.creation.box(), inverted]), 8)


def test_refuses_a_grid_before_memory_is_taken(monkeypatch):
    mesh = trimesh.creation.box()
    with pytest.raises(UserError, match=r"resolution 100000: so many points .* takes 1000000.1 GB and .* GB are free"):
        occupancy_grid(mesh, 100_000)


def test_free_memory_is_that_of_the_group_where_there_is_less(monkeypatch, tmp_path):
    most, now, stat = tmp_path / "max", tmp_path / "now", tmp_path / "memory.stat"
    most.write_text("5000\n")
    now.write_text("2000\n")
    stat.write_text("anon 1300\ninactive_file 300\nactive_file 100\ntotal_inactive_file 900\ntotal_active_file 0\n")
    (tmp_path / "open").write_text("max\n")
    monkeypatch.setattr(resources, "_CGROUPS", ((tmp_path / "open", now, ""), (tmp_path / "no", tmp_path / "no", "")))
    assert resources.free_memory() > 1e6
    for prefix, cached in (("", 400), ("total_", 900)):  # the disk's cache is given up on demand
        monkeypatch.setattr(resources, "_CGROUPS", ((most, now, prefix),))
        assert resources.free_memory() == 3000 + cached
    now.write_text("9000\n")
    assert resources.free_memory() == 0


@pytest.mark.parametrize("resolution", [0, 1, 2.5, True])
def test_resolutions_that_are_none_are_refused(resolution):
    with pytest.raises(UserError, match="resolution must be an integer of at least 2"):
        occupancy_grid(trimesh.creation.box(), resolution)


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["lucy", "armadillo", "bunny_watertight", "fandisk", "spot"])
def test_scans_enclose_the_volume_of_their_faces(shared_data, name):
    grid = occupancy_grid(read_mesh(shared_data / "meshes" / f"{name}.npz"), 128)
    assert abs(grid.hollow) < 1e-2
    assert grid.recast < 5

"""Shapes as fields: parity of rays, draws near the surface, IoU, meshes, pictures, a fit that learns."""

import numpy as np
import pytest
import torch
import trimesh
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.spatial.transform import Rotation
from torch import nn

from nlr_lab.fields import occupancy
from nlr_lab.fields import occupancy_grid as module
from nlr_lab.fields.fit import FitConfig, fit
from nlr_lab.fields.mesh_files import knot, read_mesh
from nlr_lab.fields.occupancy import OccupancyProblem, OccupancySettings, render
from nlr_lab.fields.occupancy_grid import LatticePoints, occupancy_grid
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.fields.settings import FieldConfig
from nlr_lab.runtime import bounds, environment
from refusals import assert_refused
from seeds import rng

SMALL = {"resolution": 24, "held_out": 24, "mesh_resolution": 24, "points": 256, "picture_height": 48}


class Ball(nn.Module):
    def __init__(self, radius, steep=10):
        super().__init__()
        self.radius, self.steep = nn.Parameter(torch.tensor(radius)), steep

    def forward(self, x):
        return self.steep * (self.radius - x.norm(dim=-1, keepdim=True))


def seeded(seed=None):
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())) if seed is None else seed)


def ball_problem(**settings):
    return OccupancyProblem(trimesh.creation.icosphere(4), OccupancySettings(**{**SMALL, **settings}))


@pytest.mark.parametrize(("rank", "count"), [(None, 132_865), (1, 2_817), (2, 3_841), (5, 6_913), (20, 22_273)])
@pytest.mark.parametrize("kind", ["low-rank", "sine"])
def test_network_has_the_published_size(rank, count, kind):
    """Table 13 prints 22.8K for rank 20; arithmetic gives 22,273."""
    method = FieldMethod() if rank is None else FieldMethod(kind=kind, rank=rank)
    model = ball_problem().build(method, seeded())
    assert sum(each.numel() for each in model.parameters()) == count


@pytest.mark.parametrize("share", [0.0, 0.7, 0.95])
def test_batches_are_points_of_the_lattice_with_their_labels(share):
    problem = ball_problem(points=200_000, surface_share=share)
    seed = int(torch.randint(2**31, ()))
    points, inside, weight = problem.batch(0, seeded(seed))
    radius = points.norm(dim=-1)
    clear = (radius - 1).abs() > 1e-2
    assert torch.equal(inside[clear] == 1, radius[clear] < 1)
    places = (points + 1) * 12 - 0.5
    torch.testing.assert_close(places, places.round(), atol=1e-5, rtol=0)
    assert [round(float(end)) for end in places.aminmax()] == [0, 23]
    # At a share of 0.95 the means' standard deviations are 0.004, 0.002 and 0.004.
    assert (weight * inside).mean() == pytest.approx(np.pi / 6, abs=0.03)
    assert (weight * (radius < 0.5)).mean() == pytest.approx(np.pi / 48, abs=0.02)
    assert weight.mean() == pytest.approx(1, abs=0.03)
    odds = Ball(0.7)(points)[:, 0].double()
    right = torch.where(inside == 1, torch.sigmoid(odds), torch.sigmoid(-odds))
    expected = -(weight * right.log()).mean()
    found = problem.loss(Ball(0.7), (points, inside, weight)).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    again = problem.batch(7, seeded(seed))
    assert torch.equal(again[0], points)


def test_band_holds_what_has_the_other_kind_so_near():
    generator = rng()
    n, cells = 17, 2
    inside = gaussian_filter(generator.standard_normal((n, n, n)), 2) > 0.05
    points, _, weight = LatticePoints(inside, 0.9, 2 * cells / n).draw(200_000, seeded())
    drawn = {tuple(each) for each in ((points + 1) * (n / 2) - 0.5).round().int()[weight == weight.min()].tolist()}
    padded = np.pad(inside, cells, mode="edge")
    views = np.lib.stride_tricks.sliding_window_view(padded, (2 * cells + 1,) * 3)
    near = views.any(axis=(3, 4, 5)) & ~views.all(axis=(3, 4, 5))
    assert drawn == {tuple(each) for each in np.argwhere(near).tolist()}
    assert LatticePoints(np.ones((4, 4, 4), dtype=bool), 0.9, 0.5).draw(10, seeded())[2].eq(1).all()


def test_iou_is_that_of_the_volumes_and_measured_off_the_lattice():
    problem = ball_problem(held_out=40)
    radius = 0.6 + 0.35 * float(torch.rand(()))
    assert problem.evaluate(Ball(radius))["iou"] == pytest.approx(100 * radius**3, abs=1.0)
    assert problem.evaluate(Ball(1.0))["iou"] > 99.5
    assert problem.evaluate(Ball(-1.0))["iou"] == 0
    places = problem.held_out.points(0, 40) * 20 - 0.5
    assert (abs(places - places.round()) > 0.01).all(-1).mean() > 0.9


@pytest.mark.parametrize("radius", [0.7, 1.2, 3.0], ids=["within", "cut-by-the-box", "the-whole-box"])
def test_marching_cubes_gives_a_closed_mesh_in_the_shapes_own_coordinates(radius):
    half, middle = torch.rand(3).add(0.5).numpy(), torch.randn(3).mul(10).numpy()
    shape = trimesh.creation.box(extents=2 * half).apply_translation(middle)
    mesh = OccupancyProblem(shape, OccupancySettings(**{**SMALL, "mesh_resolution": 40})).surface(Ball(radius))
    assert mesh.is_watertight
    grid = (np.stack(np.meshgrid(*[np.linspace(-0.9875, 0.9875, 80)] * 3), -1) ** 2).sum(-1) < radius**2
    assert mesh.volume == pytest.approx(8 * half.prod() * grid.mean(), rel=0.03)  # positive: faces turned outwards
    reach = min(radius, 1)
    np.testing.assert_allclose(mesh.bounds, [middle - reach * half, middle + reach * half], atol=0.02)


def test_writes_meshes_and_pictures_that_open(tmp_path):
    problem, model = OccupancyProblem(knot(24, 200), OccupancySettings(**SMALL), name="knot"), Ball(0.8)
    assert (problem.picture(Ball(-1.0)) == 255).all()
    assert [path.name for path in problem.write(Ball(-1.0), tmp_path)] == ["picture.png"]
    assert [path.name for path in problem.write(model, tmp_path)] == ["picture.png", "mesh.ply"]
    read = trimesh.load_mesh(tmp_path / "mesh.ply")
    assert read.is_watertight
    assert read.volume == pytest.approx(problem.surface(model).volume, rel=1e-4)
    height, width, _ = problem.picture(None).shape
    assert problem.picture(model).shape == (height, width, 3)
    with Image.open(tmp_path / "picture.png") as sheet:
        assert sheet.height > height
        assert sheet.width >= 2 * width


def test_pictures_show_the_silhouette_from_every_side():
    sides = torch.rand(3).add(0.5).numpy()
    box = trimesh.creation.box(extents=sides)
    for up in "xyz":
        for azimuth, turn in ((0, 1), (90, 2)):
            picture = render(box, box.bounds, up=up, azimuth=azimuth, elevation=0, height=60)
            tall = "xyz".index(up)
            wide = (tall + 3 - turn) % 3
            assert picture.shape[1] == pytest.approx(60 * sides[wide] / sides[tall], abs=1.0)
            assert (picture < 250).any(-1).mean() == pytest.approx(1 / 1.04**2, abs=0.05)
    for ratio in (3.9, 4.1, 1e6):  # rods stay small
        rod = trimesh.creation.box((ratio, 1, 1))
        height, width = render(rod, rod.bounds, azimuth=0, elevation=0, height=40).shape[:2]
        assert height * width <= 4 * 40**2 * 1.1
        assert ratio == 1e6 or width / height == pytest.approx(ratio, rel=0.15)
    ball = trimesh.creation.icosphere(4)
    picture = render(ball, ball.bounds, azimuth=float(torch.rand(()) * 360), height=80).astype(float).mean(-1)
    assert picture[20:32, 20:32].mean() > picture[48:60, 48:60].mean() + 30, "lit from the upper left"


def test_pictures_do_not_depend_on_units_or_on_how_many_rays_run_at_once(monkeypatch):
    mesh = trimesh.creation.torus(1.0, 0.3)
    wide = mesh.bounds * 2  # rows at the top and the bottom see nothing
    whole = render(mesh, wide, height=40)
    for scale in (2.0**-40, 2.0**40):
        small = mesh.copy()
        small.vertices = small.vertices * scale
        assert np.array_equal(render(small, wide * scale, height=40), whole)
    monkeypatch.setattr(occupancy, "_AT_ONCE", 500)
    parts = render(mesh, wide, height=40)
    assert np.array_equal((parts < 255).any(-1), (whole < 255).any(-1))
    assert abs(parts.astype(int) - whole).mean() < 3  # the sky is drawn in another order


def test_fingerprints_tell_shapes_and_settings_apart():
    same, again = ball_problem(), ball_problem()
    assert same.fingerprint == again.fingerprint
    others = [ball_problem(resolution=25), ball_problem(points=255), ball_problem(field=FieldConfig(width=255))]
    others += [ball_problem(loss="squared"), OccupancyProblem(trimesh.creation.box(), OccupancySettings(**SMALL))]
    assert len({each.fingerprint for each in [same, *others]}) == 6


def sampled(mesh, resolution, off_lattice):
    grid = occupancy_grid(mesh, resolution, jitter=rng() if off_lattice else None)
    low, high = mesh.bounds
    return grid.points(0, resolution).astype(np.float64) * (high - low) / 2 + (low + high) / 2, grid


@pytest.mark.parametrize("off_lattice", [False, True], ids=["lattice", "off-lattice"])
def test_inside_is_where_the_formula_says(off_lattice):
    turn, scale = Rotation.random(random_state=int(torch.randint(2**31, ()))), 10 ** float(torch.rand(()) * 4 - 2)
    mesh = trimesh.creation.torus(2.0, 0.7, major_sections=256, minor_sections=128)
    shift = torch.randn(3).mul(100).numpy()
    mesh.vertices = turn.apply(mesh.vertices) * scale + shift
    points, grid = sampled(mesh, 40, off_lattice)
    x, y, z = turn.inv().apply((points.reshape(-1, 3) - shift) / scale).T
    depth = (0.7 - np.hypot(np.hypot(x, y) - 2, z)).reshape(40, 40, 40)
    clear = abs(depth) > 3e-3  # facets lie that far below the smooth surface
    assert clear.mean() > 0.9
    assert np.array_equal(grid.inside[clear], depth[clear] > 0)
    assert grid.volume == pytest.approx(mesh.volume / np.prod(mesh.extents))
    assert abs(grid.hollow) < 0.01


def test_points_of_a_lattice_are_the_middles_of_cells_and_off_it_within_them():
    mesh = trimesh.creation.box()
    lattice, moved = occupancy_grid(mesh, 5), occupancy_grid(mesh, 5, jitter=rng())
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


def test_free_memory_is_that_of_the_group_where_there_is_less(monkeypatch, tmp_path):
    most, now, stat = tmp_path / "max", tmp_path / "now", tmp_path / "memory.stat"
    most.write_text("5000\n")
    now.write_text("2000\n")
    stat.write_text("anon 1300\ninactive_file 300\nactive_file 100\ntotal_inactive_file 900\ntotal_active_file 0\n")
    (tmp_path / "open").write_text("max\n")
    monkeypatch.setattr(bounds, "_CGROUPS", ((tmp_path / "open", now, ""), (tmp_path / "no", tmp_path / "no", "")))
    assert bounds.free_memory() > 1e6
    for prefix, cached in (("", 400), ("total_", 900)):  # the disk's cache is given up on demand
        monkeypatch.setattr(bounds, "_CGROUPS", ((most, now, prefix),))
        assert bounds.free_memory() == 3000 + cached
    now.write_text("9000\n")
    assert bounds.free_memory() == 0


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["lucy", "armadillo", "bunny_watertight", "fandisk", "spot"])
def test_scans_enclose_the_volume_of_their_faces(shared_data, name):
    grid = occupancy_grid(read_mesh(shared_data / "meshes" / f"{name}.npz"), 128)
    assert abs(grid.hollow) < 1e-2
    assert grid.recast < 5


def test_bodies_that_overlap_are_known_by_their_volume_and_warned_of():
    balls = trimesh.util.concatenate([trimesh.creation.icosphere(4), trimesh.creation.icosphere(4, 0.5)])
    hollow = occupancy_grid(balls, 48).hollow
    assert hollow == pytest.approx(2 * 0.5**3 / (1 + 0.5**3), abs=0.01)  # counted twice by faces, hollow by parity
    with pytest.warns(UserWarning, match=r"shape: bodies overlap, and of .* 2\d% is counted twice or taken for hollow"):
        OccupancyProblem(balls, OccupancySettings(**SMALL))


def test_refuses_grids_of_open_or_hollow_meshes_and_those_too_large(monkeypatch):
    holed, inverted = trimesh.creation.icosphere(2), trimesh.creation.box().apply_translation([3, 0, 0])
    holed.update_faces(np.arange(len(holed.faces)) >= 20)
    inverted.invert()
    box = trimesh.creation.box()
    for mesh, resolution, message in (
        (holed, 32, "odd number of times: it is open, or bodies touch face to face"),
        (trimesh.util.concatenate([box, inverted]), 8, "enclose no volume, or their bodies' volumes cancel out"),
        (box, 100_000, r"resolution 100000: so many points .* takes 1000000.1 GB and .* GB are free"),
        *((box, wrong, "resolution must be an integer of at least 2") for wrong in (1, 2.5, True)),
    ):
        assert_refused(message, occupancy_grid, mesh, resolution)
    inside = np.zeros((64, 64, 64), dtype=bool)
    inside[:32] = True
    monkeypatch.setattr(environment, "free_memory", lambda: 100_000_000 + 4 * inside.size)
    assert LatticePoints(inside, 0.7, 0.2).part == pytest.approx(0.2, abs=0.02)
    assert_refused("surface_band 0.8: the band .* of the lattice, takes .* give", LatticePoints, inside, 0.7, 0.8)


def test_learns_a_shape(tmp_path):
    settings = OccupancySettings(**SMALL, field=FieldConfig(width=48, spread=0.2))
    problem = OccupancyProblem(trimesh.creation.torus(1, 0.4), settings)
    config = FitConfig(steps=120, lr=1e-2, save_every=0, eval_every=10, threads=1, device="cpu")
    found = fit(problem, FieldMethod(kind="sine", rank=2), config, tmp_path, quiet=True)
    assert found.metrics["iou"] > max(found.curve[0]["iou"], 60)
    assert found.files == ["pictures/picture.png", "pictures/mesh.ply"]


def test_squared_loss_is_to_half_inside_and_minus_half_outside():
    problem = ball_problem(loss="squared")
    points, inside, weight = problem.batch(0, seeded())
    wanted = torch.where(inside == 1, 0.5, -0.5)
    expected = (weight * (Ball(0.7)(points)[:, 0] - wanted) ** 2).mean()
    torch.testing.assert_close(problem.loss(Ball(0.7), (points, inside, weight)), expected)


def test_pictures_do_not_depend_on_the_winding():
    ball = trimesh.creation.icosphere(3)
    outwards = render(ball, ball.bounds, height=60).astype(int)
    ball.invert()
    assert abs(render(ball, ball.bounds, height=60) - outwards).mean() < 1

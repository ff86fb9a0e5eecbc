"""Shapes as fields: counts of the published network, IoU off the lattice, meshes, pictures, a fit that learns."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import trimesh
from PIL import Image
from scipy.ndimage import gaussian_filter
from torch import nn

from nlr_lab.fields import mesh_picture
from nlr_lab.fields.mesh_files import knot
from nlr_lab.fields.mesh_picture import render
from nlr_lab.fields.model import FieldConfig
from nlr_lab.fields.occupancy import OccupancyProblem, OccupancySettings, log_odds, surface
from nlr_lab.fields.occupancy_grid import LatticePoints
from nlr_lab.fields.problem import FieldMethod
from nlr_lab.runtime import environment as resources
from nonlinear_lowrank import UserError
from seeds import rng

SMALL = {"resolution": 24, "held_out": 24, "mesh_resolution": 24, "points": 256, "picture_height": 48}


class Ball(nn.Module):
    """Log-odds of a ball about the middle of the box."""

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
    again = problem.batch(7, seeded(seed))
    assert torch.equal(again[0], points)


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_expected_loss_is_the_whole_boxs(share):
    problem = ball_problem(points=40_000, surface_share=share)
    model = Ball(0.7 + 0.2 * float(torch.rand(())))
    n, grid = 24, problem.grid
    truth = torch.from_numpy(grid.inside.reshape(-1)).float()
    whole = F.binary_cross_entropy_with_logits(model(torch.from_numpy(grid.points(0, n)).reshape(-1, 3))[:, 0], truth)
    found = [float(problem.loss(model, problem.batch(0, seeded())).detach()) for _ in range(20)]
    assert np.mean(found) == pytest.approx(float(whole.detach()), abs=5 * np.std(found) / 20**0.5)


def test_points_near_the_surface_make_the_losss_gradient_steadier():
    """A ball that is nearly right: all that is left to learn is at its surface."""

    def spread(share):
        problem, found = ball_problem(points=500, surface_share=share, surface_band=0.06, resolution=96), []
        for _ in range(150):
            model = Ball(0.98, steep=150)
            problem.loss(model, problem.batch(0, seeded())).backward()
            found.append(float(model.radius.grad))
        return np.std(found)

    assert spread(0.8) < 0.85 * spread(0.0)


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


def test_loss_is_the_binary_cross_entropy_of_the_log_odds():
    problem = ball_problem()
    model = problem.build(FieldMethod(kind="sine", rank=2), seeded())
    points, inside, weight = problem.batch(0, seeded())
    odds = model(points)[:, 0].double()
    chance = torch.sigmoid(odds)
    right = torch.where(inside == 1, chance, 1 - chance)
    torch.testing.assert_close(
        problem.loss(model, (points, inside, weight)).double(), -(weight * right.log()).mean(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("radius", [0.7, 1.2, 3.0], ids=["within", "cut-by-the-box", "the-whole-box"])
def test_marching_cubes_gives_a_closed_mesh_in_the_shapes_own_coordinates(radius):
    half, middle = torch.rand(3).add(0.5).numpy(), torch.randn(3).mul(10).numpy()
    mesh = surface(Ball(radius), 40, np.stack([middle - half, middle + half]))
    assert mesh.is_watertight
    grid = (np.stack(np.meshgrid(*[np.linspace(-0.9875, 0.9875, 80)] * 3), -1) ** 2).sum(-1) < radius**2
    assert mesh.volume == pytest.approx(8 * half.prod() * grid.mean(), rel=0.03)  # positive: faces turned outwards
    reach = min(radius, 1)
    np.testing.assert_allclose(mesh.bounds, [middle - reach * half, middle + reach * half], atol=0.02)


def test_draws_nothing_of_a_field_with_nothing_inside(tmp_path):
    problem = ball_problem()
    assert problem.surface(Ball(-1.0)) is None
    assert (problem.picture(Ball(-1.0)) == 255).all()
    assert [path.name for path in problem.write(Ball(-1.0), tmp_path)] == ["picture.png"]


def test_writes_meshes_and_pictures_that_open(tmp_path):
    problem = OccupancyProblem(knot(24, 200), OccupancySettings(**SMALL), name="knot")
    model = Ball(0.8)
    written = problem.write(model, tmp_path)
    assert [path.name for path in written] == ["picture.png", "mesh.ply"]
    read = trimesh.load_mesh(tmp_path / "mesh.ply")
    assert read.is_watertight
    assert read.volume == pytest.approx(problem.surface(model).volume, rel=1e-4)
    truth, found = problem.picture(None), problem.picture(model)
    assert truth.shape == found.shape
    with Image.open(tmp_path / "picture.png") as sheet:
        pixels = np.asarray(sheet)
    assert pixels.shape[0] > truth.shape[0]
    assert pixels.shape[1] >= 2 * truth.shape[1]


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


def test_pictures_are_lit_from_the_upper_left():
    ball = trimesh.creation.icosphere(4)
    picture = render(ball, ball.bounds, azimuth=float(torch.rand(()) * 360), height=80).astype(float).mean(-1)
    assert picture[20:32, 20:32].mean() > picture[48:60, 48:60].mean() + 30


def test_refuses_a_band_that_does_not_fit_memory(monkeypatch):
    """The lattice alone fits: 64^3 points of 2 bytes, and most of them are in so wide a band, at 4 bytes more."""
    inside = np.zeros((64, 64, 64), dtype=bool)
    inside[:32] = True
    monkeypatch.setattr(resources, "free_memory", lambda: 100_000_000 + 2 * inside.size)
    assert LatticePoints(inside, 0.7, 0.2).part == pytest.approx(0.2, abs=0.02)
    with pytest.raises(
        UserError, match=r"surface_band 0.8: the band .* points of the lattice, takes .* give a smaller"
    ):
        LatticePoints(inside, 0.7, 0.8)


def test_pictures_of_rods_stay_small():
    view = {"azimuth": 0, "elevation": 0, "height": 40}
    for ratio in (3.9, 4.1, 100, 1e6):
        rod = trimesh.creation.box((ratio, 1, 1))
        height, width = render(rod, rod.bounds, **view).shape[:2]
        assert height * width <= 4 * 40**2 * 1.1
        if ratio <= 100:
            assert width / height == pytest.approx(ratio, rel=0.15)


def test_pictures_do_not_depend_on_units_or_on_how_many_rays_run_at_once(monkeypatch):
    mesh = trimesh.creation.torus(1.0, 0.3)
    wide = mesh.bounds * 2  # rows at the top and the bottom see nothing
    whole = render(mesh, wide, height=40)
    for scale in (2.0**-40, 2.0**40):
        small = mesh.copy()
        small.vertices = small.vertices * scale
        assert np.array_equal(render(small, wide * scale, height=40), whole)
    monkeypatch.setattr(mesh_picture, "_AT_ONCE", 500)
    parts = render(mesh, wide, height=40)
    assert np.array_equal((parts < 255).any(-1), (whole < 255).any(-1))
    assert abs(parts.astype(int) - whole).mean() < 3  # the sky is drawn in another order


def test_learns_a_shape():
    problem = OccupancyProblem(
        trimesh.creation.torus(1, 0.4), OccupancySettings(**SMALL, field=FieldConfig(width=48, spread=0.2))
    )
    model = problem.build(FieldMethod(kind="sine", rank=2), seeded())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before = problem.evaluate(model)["iou"]
    for step in range(120):
        optimizer.zero_grad()
        problem.loss(model, problem.batch(step, seeded())).backward()
        optimizer.step()
    after = problem.evaluate(model)["iou"]
    assert after > max(before, 60)


def test_bodies_that_overlap_are_warned_of():
    mesh = trimesh.util.concatenate([trimesh.creation.icosphere(3), trimesh.creation.icosphere(3, 0.6)])
    with pytest.warns(UserWarning, match=r"shape: bodies overlap, and 3\d% of the volume is hollow"):
        OccupancyProblem(mesh, OccupancySettings(**SMALL))


def test_fingerprints_tell_shapes_and_settings_apart():
    same, again = ball_problem(), ball_problem()
    assert same.fingerprint == again.fingerprint
    others = [ball_problem(resolution=25), ball_problem(points=255), ball_problem(field=FieldConfig(width=255))]
    others.append(OccupancyProblem(trimesh.creation.box(), OccupancySettings(**SMALL)))
    assert len({each.fingerprint for each in [same, *others]}) == 5


def test_log_odds_come_in_the_order_of_the_points():
    points = torch.rand(3, 5, 7, 3).numpy() * 2 - 1
    model = ball_problem().build(FieldMethod(), seeded())
    np.testing.assert_allclose(
        log_odds(model, points), model(torch.from_numpy(points)).detach().numpy()[..., 0], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"points": 0}, "points must be a positive integer"),
        ({"up": "w"}, "unknown up 'w'; choose one of x, y, z"),
        ({"azimuth": float("nan")}, "azimuth must be degrees"),
        ({"picture_height": 3}, "picture_height must be an integer of at least 16"),
        ({"field": FieldConfig(in_features=2)}, "in_features 3 and out_features 1"),
        ({"resolution": 1}, "resolution must be an integer of at least 2"),
        ({"held_out": 100_000}, "held_out 100000, mesh_resolution 128: so many points .* choose smaller"),
        ({"mesh_resolution": 20_000}, "mesh_resolution 20000: so many points .* choose smaller"),
        ({"source": "nothing.obj"}, "there is no mesh 'nothing.obj'"),
    ],
    ids=["points", "up", "azimuth", "height", "field", "resolution", "held-out", "mesh", "source"],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(UserError, match=message) as caught:
        OccupancySettings(**settings).prepare()
    assert "\n" not in str(caught.value)
